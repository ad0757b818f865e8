"""FedCM, FedLADA, FedAdamW, FedLion, FedPM and state that is kept between averages.

Written from the listings of the papers, with their letters in the comments.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .algorithms import (
    ALGORITHMS,
    CHOICES,
    DEFAULTS,
    PREFED,
    Algorithm,
    AnyPair,
    Array,
    Preconditioner,
    PreFed,
    State,
    damping,
)
from .shapes import dense_root, pieces

DEFAULTS |= {
    "fedcm": {"alpha": 0.1},
    "fedlada": {"alpha": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-8},
    "fedadamw": {"alpha": 0.5, "beta1": 0.9, "beta2": 0.999, "tau": 1e-8, "means": "tensor",
                 "tensors": None, "decoupled_weight_decay": 0.01},
    "fedlion": {"beta1": 0.9, "beta2": 0.99},
    "fedpm": PREFED,
}  # fmt: skip
CHOICES["means"] = ("tensor", "row", "whole")


class Directed(Algorithm):
    """Clients that know Delta, the mean direction of the last round: (x - mean x_i) / (eta K)."""

    def start(self) -> None:
        """Start at Delta = 0."""
        self.shared["direction"] = np.zeros(self.d)

    def local(self, t: int, w: Array, i: int) -> tuple[Array, State, float]:
        """Give the weights of client i, what it sends besides, and its loss."""
        raise NotImplementedError

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """The clients, and the means of all that they send."""
        found = [self.local(t, w, i) for i in cohort]
        for name in found[0][1]:
            self.shared[name] = self.task.mean(cohort, [sent[name] for _, sent, _ in found])
        change = self.task.mean(cohort, [w_i - w for w_i, _, _ in found])
        steps = self.task.mean_count(t, cohort)
        self.shared["direction"] = -self.own(change) / (self.client_lr(t) * steps)
        self.mean_change = change
        loss = self.task.mean(cohort, [loss for _, _, loss in found])
        return w + self.server_lr(t) * change, loss


class FedCM(Directed):
    """Xu et al. 2021, algorithm 2: v = alpha g + (1 - alpha) Delta, x = x - eta_l v."""

    def local(self, t: int, w: Array, i: int) -> tuple[Array, State, float]:
        """K steps along v."""
        alpha, x, losses = self.options["alpha"], w, []
        for batch in self.task.local_data(t, i):
            loss, g = self.task.gradient(x, *batch)
            v = alpha * g + (1.0 - alpha) * self.shared["direction"]
            x = self.aligned(t, i, x, self.decayed(t, x) - self.client_lr(t) * v)
            losses.append(loss)
        return x, {}, float(np.mean(losses))


class FedLADA(Directed):
    """Sun et al. 2023: AMSGrad from the server's v, amended by g_a, which is Delta."""

    def start(self) -> None:
        """Start at v = epsilon^2, so that the root is never zero."""
        super().start()
        self.shared["v_max"] = np.full(self.d, self.options["tau"] ** 2)

    def local(self, t: int, w: Array, i: int) -> tuple[Array, State, float]:
        """K steps from m = 0 and v = v_hat = the server's."""
        o, x, losses = self.options, w, []
        m, v, v_hat = np.zeros(self.d), self.shared["v_max"], self.shared["v_max"]
        for batch in self.task.local_data(t, i):
            loss, g = self.task.gradient(x, *batch)
            m = o["beta1"] * m + (1.0 - o["beta1"]) * g
            v = o["beta2"] * v + (1.0 - o["beta2"]) * g**2
            v_hat = np.where(v > v_hat, v, v_hat)
            step = o["alpha"] * m / np.sqrt(v_hat) + (1.0 - o["alpha"]) * self.shared["direction"]
            x = self.aligned(t, i, x, self.decayed(t, x) - self.client_lr(t) * step)
            losses.append(loss)
        return x, {"v_max": v_hat}, float(np.mean(losses))


class FedAdamW(Directed):
    """Liu et al. 2025, algorithm 2, with the decay of weights as AdamW has it.

    1 - beta2^t of the listing, t being the steps of all rounds, is the mass: what the squares in v
    weigh together. Where clients take unequally many steps it is averaged as v is.
    """

    def start(self) -> None:
        """Start at v = 0, in as many numbers as are sent."""
        super().start()
        self.shared |= {self.name: self.means(np.zeros(self.d)), "v_mass": 0.0}

    @property
    def name(self) -> str:
        """The name of what is sent of v."""
        return "v" if self.options["means"] == "whole" else "v_means"

    def blocks(self) -> list[int]:
        """Give the block that each weight belongs to."""
        if self.options["means"] == "whole":
            return [*range(self.d)]
        found: list[int] = []
        for piece in pieces(np.zeros(self.d), self.options["tensors"]):
            first = found[-1] + 1 if found else 0
            rows = len(piece) if self.options["means"] == "row" else 1
            found += [first + row for row in range(rows) for _ in range(piece.size // rows)]
        return found

    def means(self, v: Array) -> Array:
        """Give the mean over each block."""
        blocks = np.array(self.blocks())
        return np.array([v[blocks == b].mean() for b in range(blocks[-1] + 1)])

    def local(self, t: int, w: Array, i: int) -> tuple[Array, State, float]:
        """K steps of AdamW from m = 0 and v = the mean of its block, amended by Delta."""
        o, lr, x, losses = self.options, self.client_lr(t), w, []
        m, v, mass = np.zeros(self.d), self.shared[self.name][self.blocks()], self.shared["v_mass"]
        for k, batch in enumerate(self.task.local_data(t, i), start=1):
            loss, g = self.task.gradient(x, *batch)
            m = o["beta1"] * m + (1.0 - o["beta1"]) * g
            v = o["beta2"] * v + (1.0 - o["beta2"]) * g**2
            mass = 1.0 - (1.0 - mass) * o["beta2"]
            m_hat, v_hat = m / (1.0 - o["beta1"] ** k), v / mass
            step = m_hat / (np.sqrt(v_hat) + o["tau"]) + o["alpha"] * self.shared["direction"]
            x = self.aligned(t, i, x, self.decayed(t, x) - lr * step)
            losses.append(loss)
        return x, {self.name: self.means(v), "v_mass": mass}, float(np.mean(losses))


class FedLion(Algorithm):
    """Tang and Chang 2024: the clients send how often each sign came up, and m."""

    def start(self) -> None:
        """Start at m = 0."""
        self.shared["m"] = np.zeros(self.d)

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """E local steps of Lion from the server's m, and the means."""
        beta1, beta2, lr = self.options["beta1"], self.options["beta2"], self.client_lr(t)
        deltas, moments, losses = [], [], []
        for i in cohort:
            theta, m, own = w, self.shared["m"], []
            for batch in self.task.local_data(t, i):
                loss, g = self.task.gradient(theta, *batch)
                sign = np.sign(beta1 * m + (1.0 - beta1) * g)
                m = beta2 * m + (1.0 - beta2) * g
                theta = self.aligned(t, i, theta, self.decayed(t, theta) - lr * sign)
                own.append(loss)
            deltas.append((w - theta) / lr)
            moments.append(m)
            losses.append(float(np.mean(own)))
        self.shared["m"] = self.task.mean(cohort, moments)
        self.mean_change = -lr * self.task.mean(cohort, deltas)
        return w + self.server_lr(t) * self.mean_change, self.task.mean(cohort, losses)


class FedPM(PreFed):
    """Ishii et al. 2025, preconditioned mixing: theta = mean(P)^-1 mean(P_i theta_i), with the
    matrix sqrt(P_i) + tau of PreFed's clients for their P_i."""

    def matrix(self, state: State) -> Array:
        """Give sqrt(P) + tau as a d x d matrix."""
        p = state["P"] / state["P_mass"] if self.corrects_p() else state["P"]
        if self.options["shape"] == "diagonal":
            root = np.diag(np.sqrt(p))
        else:
            root = dense_root(p.ravel(), self.d, "full", self.options["tensors"], "row")
        return np.asarray(root + damping(self.options, root) * np.eye(self.d))

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """All clients of PreFed, mixed."""
        assert Preconditioner(self.options, self.d).shape in ("diagonal", "full")
        found = [self.client(t, w, i) for i in cohort]
        matrices = [self.matrix(p_state) for _, _, p_state, _ in found]
        products = [S @ x for S, (x, _, _, _) in zip(matrices, found, strict=True)]
        mixed = np.linalg.solve(self.task.mean(cohort, matrices), self.task.mean(cohort, products))
        for key in found[0][2]:
            self.shared[key] = self.task.mean(cohort, [state[key] for _, _, state, _ in found])
        momentum = self.options["momentum"]
        for i, (_, m_state, _, _) in zip(cohort, found, strict=True):
            if momentum == "keep":
                self.kept[i] = m_state
        if momentum == "average":
            for key in found[0][1]:
                self.shared[key] = self.task.mean(cohort, [state[key] for _, state, _, _ in found])
        change = mixed - w
        if momentum == "derived":
            each = self.own(change) / (self.client_lr(t) * self.task.mean_count(t, cohort))
            self.shared["m"] = -self.matrix(self.shared) @ each
        self.mean_change = change
        loss = self.task.mean(cohort, [loss for _, _, _, loss in found])
        return w + self.server_lr(t) * change, loss


class KeptBetween(AnyPair):
    """A pair whose share may say {"kind": "average", "every": H, "between": "keep"}.

    After each H-th round all that clients have of it is void, of those too that were not there:
    they begin with the mean of those that were, once. Then each goes on with its own.
    """

    def start(self) -> None:
        """Nobody has anything of its own yet."""
        self.mine: dict[str, dict[int, Any]] = {}
        super().start()
        first = self.client.first(self.d)
        for name in [n for n in first if self.pace(n)]:
            self.shared[name], self.mine[name] = first[name], {}

    def pace(self, name: str) -> int:
        """Give H, or 0 if it is not kept between averages."""
        table = self.options["share"].get(name.removesuffix("_mass"))
        return int(table["every"]) if isinstance(table, Mapping) else 0

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """As of any pair, and then what is kept, averaged and void."""
        lr, deltas, ends, losses = self.client_lr(t), [], [], []
        for i in cohort:
            state = {**self.client.first(self.d), **self.shared, **self.kept.get(i, {})}
            state.pop("last_round", None)
            state |= {n: self.mine[n].get(i, self.shared[n]) for n in self.mine}
            w_i, own = w, []
            for batch in self.task.local_data(t, i):
                loss, g = self.task.gradient(w_i, *batch)
                own.append(loss)
                after = self.client.step(self.decayed(t, w_i), g, state, lr)
                w_i = self.aligned(t, i, w_i, after)
            deltas.append(w_i - w)
            ends.append(state)
            losses.append(float(np.mean(own)))
            for name, held in self.mine.items():
                held[i] = state[name]
            if stays := {n: state[n] for n in state if self.policy(n) == "keep" or self.pace(n)}:
                self.kept[i] = {**stays, **({"last_round": t} if self.mine else {})}
        for name in self.shared:
            if name not in self.mine or (t + 1) % self.pace(name) == 0:
                self.shared[name] = self.task.mean(cohort, [end[name] for end in ends])
                self.mine.get(name, {}).clear()
        self.mean_change = delta = self.task.mean(cohort, deltas)
        g = -delta / self.task.mean_count(t, cohort) if self.options["per_step"] else -delta
        w = self.of_server.step(w, g, self.server, self.server_lr(t))
        return w, self.task.mean(cohort, losses)


ALGORITHMS |= {
    "fedcm": FedCM,
    "fedlada": FedLADA,
    "fedadamw": FedAdamW,
    "fedlion": FedLion,
    "fedpm": FedPM,
    "pair": KeptBetween,
}
