"""FedBuff and FedAsync in plain NumPy, event by event.

Written from the papers and from docs/asynchronous.md, not from the library, and in another way: a
client is trained at once when it is invited, its result lies in a list until its time has come, and
there is no heap, no block and no mean over rows.

    FedBuff    Nguyen et al. 2022, algorithm 1: w += server_lr / M * sum of weight(s_i) * change_i
    FedAsync   Xie et al. 2019: w = (1 - a) * w + a * w_i with a = alpha * weight(s)
    weights    Xie et al. 2019, section 5.2: polynomial (1 + s)^-a; hinge 1 if s <= b, else
               1 / (a * (s - b) + 1); constant 1

State that comes back: P and m are mixed as FedAsync mixes models, with a weight of their own; c of
SCAFFOLD moves by 1/N of what each client's c_i moved by, whatever its age, so that it stays their
mean.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass
class Arrival:
    time: float
    number: int
    client: int
    version: int
    w_begin: Array
    state_begin: dict[str, Array]
    w_end: Array
    state_end: dict[str, Array]


@dataclass
class EventLoop:
    """All that is asked for and given.

    gradient   (w, client, version, k) -> the gradient of its step k
    seconds    (client) -> from the invitation to the arrival
    order      (version) -> clients in the order in which they are to be asked
    anyone     (version, job, busy) -> the client to ask when all of those have been
    p          how much each client counts in means; None: all the same
    """

    name: str
    w: Array
    n_clients: int
    steps: int
    lr: float
    gradient: Callable[[Array, int, int, int], Array]
    seconds: Callable[[int], float]
    order: Callable[[int], Sequence[int]]
    anyone: Callable[[int, int, set[int]], int]
    buffer: int
    concurrency: int
    weight: Callable[[int], float]
    state_weight: Callable[[int], float]
    models: bool = False
    p: Sequence[float] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        d = len(self.w)
        names = {"fedavg": (), "prefed": ("m", "P"), "scaffold": ("c",)}[self.name]
        self.state = {name: np.zeros(d) for name in names}
        self.c_of = {i: np.zeros(d) for i in range(self.n_clients)}
        self.now, self.jobs, self.version = 0.0, 0, 0
        self.under_way: list[Arrival] = []
        self.log: list[dict[str, Any]] = []

    # The clients

    def local(self, i: int) -> tuple[Array, dict[str, Array]]:
        w = self.w.copy()
        state = {name: value.copy() for name, value in self.state.items()}
        for k in range(self.steps):
            g = self.gradient(w, i, self.version, k)
            if self.name == "fedavg":
                w = w - self.lr * g
            elif self.name == "prefed":
                beta1, beta2 = self.options["beta1"], self.options["beta2"]
                state["m"] = beta1 * state["m"] + (1 - beta1) * g
                state["P"] = beta2 * state["P"] + (1 - beta2) * (g - state["m"]) ** 2
                w = w - self.lr * state["m"] / (np.sqrt(state["P"]) + self.options["tau"])
            else:
                w = w - self.lr * (g - self.c_of[i] + self.state["c"])
        if self.name == "scaffold":  # option II; what is sent is the new c_i
            state["c"] = self.c_of[i] - self.state["c"] + (self.w - w) / (self.steps * self.lr)
        return w, state

    # The server

    def step(self, buffer: list[Arrival]) -> None:
        weights = [self.weight(self.version - a.version) for a in buffer]
        total = np.zeros_like(self.w)
        moved = {name: np.zeros_like(value) for name, value in self.state.items()}
        p = [1.0 if self.p is None else self.p[a.client] for a in buffer]
        for a, s, p_i in zip(buffer, weights, p, strict=True):
            total += p_i * s * (a.w_end - (self.w if self.models else a.w_begin))
            share = self.state_weight(self.version - a.version)
            for name in moved:
                if name == "c":
                    moved[name] += p_i * (a.state_end["c"] - self.c_of[a.client])
                    self.c_of[a.client] = a.state_end["c"]
                else:
                    moved[name] += p_i * share * (a.state_end[name] - self.state[name])
        self.w = self.w + total / sum(p)
        for name, by in moved.items():
            speaks_for = len(buffer) / self.n_clients if name == "c" else 1.0
            self.state[name] = self.state[name] + speaks_for * by / sum(p)
        ages = [self.version - a.version for a in buffer]
        self.log.append(
            {
                "seconds_virtual": self.now,
                "clients": sorted(a.client for a in buffer),
                "staleness_mean": float(np.mean(ages)),
                "staleness_max": max(ages),
                "weights": self.w.copy(),
            }
        )
        self.version += 1

    # The clock

    def invite(self, buffer: list[Arrival], asked: list[int]) -> None:
        chosen: list[int] = []
        while True:
            busy = {a.client for a in [*self.under_way, *buffer]} | {*chosen}
            if len(self.under_way) + len(chosen) == self.concurrency or len(busy) == self.n_clients:
                break
            if asked:
                if (client := asked.pop(0)) not in busy:
                    chosen.append(client)
            else:
                chosen.append(self.anyone(self.version, self.jobs + len(chosen), busy))
        for i in sorted(chosen):
            w, state = self.local(i)
            begin = {name: value.copy() for name, value in self.state.items()}
            arrival = self.now + self.seconds(i)
            where = arrival, self.jobs, i, self.version
            self.under_way.append(Arrival(*where, self.w.copy(), begin, w, state))
            self.jobs += 1

    def run(self, events: int) -> None:
        """So many arrivals, up to the last step of the server that they make."""
        asked, buffer = [*self.order(0)], list[Arrival]()
        for _ in range(events):
            if not any(a.time == self.now for a in self.under_way):
                self.invite(buffer, asked)
            first = min(self.under_way, key=lambda a: (a.time, a.number))
            self.under_way.remove(first)
            self.now = first.time
            buffer.append(first)
            if len(buffer) == self.buffer:
                self.step(buffer)
                asked, buffer = [*self.order(self.version)], []
