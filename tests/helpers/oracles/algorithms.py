"""The federated algorithms, one class each, written step by step like the listings.

"The paper" is "Preconditioned Federated Learning" (Tao, Wu, Li). In all classes w is the
server's weights, t the round (from 0), K the number of local steps and Delta the weighted mean
of the clients' w_K - w. Server rules descend along the pseudo-gradient -Delta.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from . import shapes

Array = npt.NDArray[np.float64]
Pair = tuple[npt.NDArray[Any], npt.NDArray[Any]]
Gradient = Callable[[Array, npt.NDArray[Any], npt.NDArray[Any]], tuple[float, Array]]
Batches = Callable[[int, int], Sequence[npt.NDArray[Any]]]
State = dict[str, Any]
Options = dict[str, Any]


@dataclass
class Trace:
    """What a run left behind: every list has one entry per round, all entries are copies."""

    weights: list[Array] = field(default_factory=list)
    train_loss: list[float] = field(default_factory=list)
    server: list[State] = field(default_factory=list)
    shared: list[State] = field(default_factory=list)
    kept: list[dict[int, State]] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------

COMMON: Options = {
    "client_lr": None,
    "server_lr": 1.0,
    "clip_norm": None,
    "weight_decay": 0.0,
    "decoupled_weight_decay": 0.0,
    "align": 0.0,
    "align_form": "added",
    "mean_of_rounds": None,
}

ADAPTIVE: Options = {
    "beta1": 0.9,
    "beta2": 0.99,
    "tau": 1e-3,
    "v0": None,
    "bias_correction": False,
    "tau_inside": False,
}

PREFED: Options = {
    "beta1": 0.9,
    "beta2": 0.9,
    "tau": 1e-3,
    "tau_relative": None,
    "momentum": "average",
    "accumulate": "ema",
    "shape": "diagonal",
    "refresh": 1,
    "blocks": "row",
    "tensors": None,
    "bias_correction": False,
    "P_every": 1,
    "aggregate": "mean",
    # Codecs have oracles of their own; here values travel as they are.
    "upload": "exact",
    "P_codec": "exact",
    "m_codec": "exact",
}

PREFEDM: Options = {
    "beta1": 0.9,
    "beta2": 0.999,
    "tau": 1e-3,
    "tau_relative": 0.1,
    "server_momentum": 0.7,
    "accumulate": "ema",
    "shape": "diagonal",
    "refresh": 1,
    "blocks": "row",
    "tensors": None,
    "bias_correction": True,
    "mean_of_rounds": 4.0,
    "upload": "exact",
    "P_codec": "exact",
}

DEFAULTS: dict[str, Options] = {
    "fedavg": {"client_momentum": 0.0, "server_momentum": 0.0},
    "fedavgm": {"client_momentum": 0.0, "server_momentum": 0.9},
    "fedadagrad": {**ADAPTIVE, "beta1": 0.0},
    "fedadam": ADAPTIVE,
    "fedyogi": ADAPTIVE,
    "adaalter": {"tau": 1e-3, "v0": 0.0, "frozen": False},
    "localadam": {**ADAPTIVE, "v0": 0.0, "bias_correction": True, "state": "reset"},
    "prefed": PREFED,
    "prefedlite": PREFED,
    "prefedopt": {
        "server_lr": 0.002,
        "beta1": 0.9,
        "beta2": 0.99,
        "tau": 1e-3,
        "tau_relative": None,
        "per_step": True,
        "step_with": "delta",
        "accumulate": "ema",
        "shape": "diagonal",
        "refresh": 1,
        "blocks": "row",
        "tensors": None,
        "bias_correction": False,
    },
    "prefedm": PREFEDM,
    "prefedmlite": PREFEDM,
    "prefedsync": {"beta2": 0.9, "tau": 1e-3, "accumulate": "sum"},
    "scaffold": {"client_momentum": 0.0},
    "fedprox": {"mu": 0.01, "client_momentum": 0.0},
    "fednova": {"client_momentum": 0.0, "server_momentum": 0.0},
    "pair": {"client": {"name": "sgd"}, "server": {"name": "sgd"}, "share": {}, "per_step": False},
}

CHOICES: dict[str, tuple[str, ...]] = {
    "momentum": ("average", "reset", "keep", "derived"),
    "aggregate": ("mean", "sqrtP"),
    "upload": ("exact",),
    "P_codec": ("exact",),
    "m_codec": ("exact",),
    "accumulate": ("ema", "sum"),
    "shape": ("diagonal", "full", "block", "kronecker"),
    "blocks": ("row", "tensor"),
    "step_with": ("delta", "m"),
    "state": ("reset", "average", "keep"),
    "align_form": ("added", "mixed"),
}


def complete(name: str, options: Mapping[str, Any]) -> Options:
    """Fill in the defaults; refuse options that the algorithm does not have."""
    if name not in DEFAULTS:
        raise ValueError(f"unknown algorithm {name!r}")
    known = {**COMMON, **DEFAULTS[name]}
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"{name} has no option {unknown}")
    if options.get("client_lr") is None:
        raise ValueError("client_lr is needed")
    full = {**known, **options}
    for key, allowed in CHOICES.items():
        if key in full and full[key] not in allowed:
            raise ValueError(f"{key} must be one of {allowed}, not {full[key]!r}")
    return full


def rate(lr: Any, t: int) -> float:
    """Give the rate of round t: lr is a number or a function of the round."""
    return float(lr(t)) if callable(lr) else float(lr)


# ---------------------------------------------------------------------------------------------
# What all algorithms share: the clients' data, their gradients and the weighted mean
# ---------------------------------------------------------------------------------------------


@dataclass
class Task:
    """The clients, their data and how their gradients and means are taken."""

    grad: Gradient
    clients: Sequence[Pair]
    steps: int | None
    batches: Batches | None
    weighting: str | Sequence[float]
    n_clients: int
    clip_norm: float | None
    weight_decay: float

    def local_data(self, t: int, i: int) -> list[Pair]:
        """Give the batches (x, y) of client i in round t; without batches all its samples."""
        x, y = self.clients[i]
        if self.batches is None:
            assert self.steps is not None
            return [(x, y) for _ in range(self.steps)]
        indices = self.batches(t, i)
        if self.steps is not None and len(indices) != self.steps:
            raise ValueError(f"there must be {self.steps} batches, not {len(indices)}")
        return [(x[numbers], y[numbers]) for numbers in indices]

    def count(self, t: int, i: int) -> int:
        """Give the number of local steps of client i in round t."""
        return len(self.local_data(t, i))

    def mean_count(self, t: int, cohort: Sequence[int]) -> float:
        """Give K: the weighted mean of the numbers of local steps."""
        return float(self.mean(cohort, [self.count(t, i) for i in cohort]))

    def gradient(self, w: Array, x: npt.NDArray[Any], y: npt.NDArray[Any]) -> tuple[float, Array]:
        """Give the batch loss and the gradient at w: clipped first, then with weight decay."""
        loss, g = self.grad(w, x, y)
        if self.clip_norm is not None:
            norm = float(np.sqrt(np.sum(g**2)))
            if norm > 0.0:
                g = g * min(1.0, self.clip_norm / norm)
        g = g + self.weight_decay * w
        return float(loss), g

    def mean(self, cohort: Sequence[int], values: Sequence[Any]) -> Any:
        """Take the weighted mean over the cohort of one value (array or number) per client."""
        if self.weighting == "uniform":
            p = [1.0 for _ in cohort]
        elif self.weighting == "samples":
            p = [float(len(self.clients[i][1])) for i in cohort]
        else:
            p = [float(self.weighting[i]) for i in cohort]
        total = sum(p)
        result: Any = 0.0
        for p_i, value in zip(p, values, strict=True):
            result = result + (p_i / total) * value
        return result


class Algorithm:
    """Base: the options, the task, and the three kinds of state that end up in the trace.

    server: the server's optimiser state; shared: state that the server averages and sends to
    the clients; kept: state that stays with a client between its rounds.
    """

    def __init__(self, options: Options, task: Task, d: int) -> None:
        self.options = options
        self.task = task
        self.d = d
        self.server: State = {}
        self.shared: State = {}
        self.kept: dict[int, State] = {}
        self.mean_change = np.zeros(d)
        self.start()

    def start(self) -> None:
        """Set the state before round 0."""

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """One round from the weights w: the new weights and the round's train loss."""
        raise NotImplementedError

    def client_lr(self, t: int) -> float:
        """Give the clients' rate in round t."""
        return rate(self.options["client_lr"], t)

    def server_lr(self, t: int) -> float:
        """Give the server's rate in round t."""
        return rate(self.options["server_lr"], t)

    def decayed(self, t: int, w_i: Array) -> Array:
        """Loshchilov and Hutter: the weights shrink by themselves, whatever the gradient."""
        decay = float(self.options["decoupled_weight_decay"])
        return w_i - self.client_lr(t) * decay * w_i

    def aligned(self, t: int, i: int, before: Array, after: Array) -> Array:
        """Give what one step of client i comes to, which took the rule from before to after.

        Added: the share of the last round's mean change comes on top. Mixed: it takes the place of
        as large a share of the step.
        """
        a = self.options["align"]
        along = self.mean_change / self.task.count(t, i)
        if self.options["align_form"] == "mixed":
            return np.asarray(before + (1.0 - a) * (after - before) + a * along)
        return np.asarray(after + a * along)

    def own(self, change: Array) -> Array:
        """Give the sum of a client's own steps, from its change in a whole round."""
        a = self.options["align"]
        whole = change - a * self.mean_change
        return np.asarray(whole / (1.0 - a)) if self.options["align_form"] == "mixed" else whole

    def sgd_clients(
        self, t: int, w: Array, cohort: Sequence[int], momentum: float = 0.0
    ) -> tuple[Array, float]:
        """All clients run K steps of SGD from w: Delta and the train loss."""
        lr = self.client_lr(t)
        deltas = []
        losses = []
        for i in cohort:
            w_i = w.copy()
            buffer = np.zeros(self.d)
            loss_i = 0.0
            for x, y in self.task.local_data(t, i):
                loss, g = self.task.gradient(w_i, x, y)
                loss_i += loss / self.task.count(t, i)
                buffer = momentum * buffer + g
                w_i = self.aligned(t, i, w_i, self.decayed(t, w_i) - lr * buffer)
            deltas.append(w_i - w)
            losses.append(loss_i)
        return self.task.mean(cohort, deltas), self.task.mean(cohort, losses)


# ---------------------------------------------------------------------------------------------
# FedAvg, FedProx, SCAFFOLD
# ---------------------------------------------------------------------------------------------


class FedAvg(Algorithm):
    """McMahan et al.; with server_momentum FedAvgM (Hsu et al.). Momentum as torch's SGD."""

    def start(self) -> None:
        """Start the momentum buffer at 0; it exists only with server_momentum."""
        if self.options["server_momentum"] != 0.0:
            self.server["momentum"] = np.zeros(self.d)

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """SGD on the clients, SGD along -Delta on the server."""
        delta, loss = self.sgd_clients(t, w, cohort, self.options["client_momentum"])
        self.mean_change = delta
        step = -delta
        if "momentum" in self.server:
            step = self.options["server_momentum"] * self.server["momentum"] + step
            self.server["momentum"] = step
        return w - self.server_lr(t) * step, loss


class FedNova(FedAvg):
    """Wang et al., "Tackling the Objective Inconsistency Problem", equation 7.

    a_i holds the coefficients of the gradients of client i in its change: with momentum rho the
    gradient of step k is in the steps k, ..., tau - 1, by rho^0 + ... + rho^(tau - 1 - k).
    """

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """tau_eff times the mean of the normalised changes, then FedAvg's server."""
        rho, lengths, normalised, losses = self.options["client_momentum"], [], [], []
        for i in cohort:
            tau = self.task.count(t, i)
            a_i = [sum(rho**j for j in range(tau - k)) for k in range(tau)]
            delta, loss = self.sgd_clients(t, w, [i], rho)
            lengths.append(sum(a_i))
            normalised.append(delta / sum(a_i))
            losses.append(loss)
        step = -self.task.mean(cohort, lengths) * self.task.mean(cohort, normalised)
        self.mean_change = -step
        if "momentum" in self.server:
            step = self.options["server_momentum"] * self.server["momentum"] + step
            self.server["momentum"] = step
        return w - self.server_lr(t) * step, self.task.mean(cohort, losses)


class FedProx(Algorithm):
    """Li et al., "Federated Optimization in Heterogeneous Networks": proximal local steps."""

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """Local steps with g + mu (w_i - w), then the mean."""
        lr = self.client_lr(t)
        mu = self.options["mu"]
        deltas = []
        losses = []
        for i in cohort:
            w_i = w.copy()
            buffer = np.zeros(self.d)
            loss_i = 0.0
            for x, y in self.task.local_data(t, i):
                loss, g = self.task.gradient(w_i, x, y)
                loss_i += loss / self.task.count(t, i)
                near = self.decayed(t, w_i)
                buffer = self.options["client_momentum"] * buffer + g + mu * (near - w)
                w_i = self.aligned(t, i, w_i, near - lr * buffer)
            deltas.append(w_i - w)
            losses.append(loss_i)
        self.mean_change = delta = self.task.mean(cohort, deltas)
        return w + self.server_lr(t) * delta, self.task.mean(cohort, losses)


class Scaffold(Algorithm):
    """Karimireddy et al., SCAFFOLD, option II for the client's control variate."""

    def start(self) -> None:
        """Start at c = 0; a client's c_i is 0 before its first round."""
        self.shared["c"] = np.zeros(self.d)

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """Corrected local steps; c moves by |S| / N times the mean change of the c_i."""
        lr = self.client_lr(t)
        c = self.shared["c"]
        deltas = []
        changes = []
        losses = []
        for i in cohort:
            c_i = self.kept[i]["c_i"] if i in self.kept else np.zeros(self.d)
            w_i = w.copy()
            buffer = np.zeros(self.d)
            loss_i = 0.0
            for x, y in self.task.local_data(t, i):
                loss, g = self.task.gradient(w_i, x, y)
                loss_i += loss / self.task.count(t, i)
                buffer = self.options["client_momentum"] * buffer + g
                own = self.decayed(t, w_i) - lr * buffer - lr * (c - c_i)
                w_i = self.aligned(t, i, w_i, own)
            c_i_new = c_i - c - self.own(w_i - w) / (self.task.count(t, i) * lr)
            self.kept[i] = {"c_i": c_i_new}
            deltas.append(w_i - w)
            changes.append(c_i_new - c_i)
            losses.append(loss_i)
        share = len(cohort) / self.task.n_clients
        self.shared["c"] = c + share * self.task.mean(cohort, changes)
        self.mean_change = delta = self.task.mean(cohort, deltas)
        return w + self.server_lr(t) * delta, self.task.mean(cohort, losses)


# ---------------------------------------------------------------------------------------------
# FedAdaGrad, FedAdam, FedYogi
# ---------------------------------------------------------------------------------------------


class AdaptiveServer(Algorithm):
    """Reddi et al., "Adaptive Federated Optimization", algorithm 2; the paper's listing 1."""

    def start(self) -> None:
        """Start at m = 0, v = v0 (tau^2 if v0 is None)."""
        v0 = self.options["v0"]
        if v0 is None:
            v0 = self.options["tau"] ** 2
        self.server["m"] = np.zeros(self.d)
        self.server["v"] = np.full(self.d, float(v0))

    def second_moment(self, v: Array, g: Array) -> Array:
        """Update v."""
        raise NotImplementedError

    def correction(self, t: int) -> float:
        """Give what v is divided by under bias correction in round t."""
        return float(1.0 - self.options["beta2"] ** (t + 1))

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """SGD on the clients, the adaptive rule along -Delta on the server."""
        beta1 = self.options["beta1"]
        tau = self.options["tau"]
        delta, loss = self.sgd_clients(t, w, cohort)
        self.mean_change = delta
        g = -delta
        m = beta1 * self.server["m"] + (1.0 - beta1) * g
        v = self.second_moment(self.server["v"], g)
        self.server["m"] = m
        self.server["v"] = v
        if self.options["bias_correction"]:
            m = m / (1.0 - beta1 ** (t + 1))
            v = v / self.correction(t)
        root = np.sqrt(v + tau**2) if self.options["tau_inside"] else np.sqrt(v) + tau
        return w - self.server_lr(t) * m / root, loss


class FedAdaGrad(AdaptiveServer):
    """The sum of squares; it has no bias to correct."""

    def second_moment(self, v: Array, g: Array) -> Array:
        """Update v to v + g^2."""
        return v + g**2

    def correction(self, t: int) -> float:
        """Correct nothing."""
        return 1.0


class FedAdam(AdaptiveServer):
    """The moving average of squares."""

    def second_moment(self, v: Array, g: Array) -> Array:
        """Update v to beta2 v + (1 - beta2) g^2."""
        beta2 = float(self.options["beta2"])
        return beta2 * v + (1.0 - beta2) * g**2


class FedYogi(AdaptiveServer):
    """Yogi: v moves by (1 - beta2) g^2 towards g^2."""

    def second_moment(self, v: Array, g: Array) -> Array:
        """Update v to v - (1 - beta2) g^2 sign(v - g^2)."""
        beta2 = float(self.options["beta2"])
        return v - (1.0 - beta2) * g**2 * np.sign(v - g**2)


# ---------------------------------------------------------------------------------------------
# AdaAlter
# ---------------------------------------------------------------------------------------------


class AdaAlter(Algorithm):
    """AdaGrad on the clients with averaged v, as the paper describes it.

    frozen: Local AdaAlter of Xie et al., where the denominator stays at the last synchronised
    v, plus tau^2 for each local step.
    """

    def start(self) -> None:
        """Start at v = v0."""
        self.shared["v"] = np.full(self.d, float(self.options["v0"]))

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """Local AdaGrad from the server's v; the means of w and v."""
        lr = self.client_lr(t)
        tau = self.options["tau"]
        v_sync = self.shared["v"]
        deltas = []
        vs = []
        losses = []
        for i in cohort:
            w_i = w.copy()
            v_i = v_sync.copy()
            loss_i = 0.0
            for k, (x, y) in enumerate(self.task.local_data(t, i), start=1):
                loss, g = self.task.gradient(w_i, x, y)
                loss_i += loss / self.task.count(t, i)
                v_i = v_i + g**2
                frozen = self.options["frozen"]
                root = np.sqrt(v_sync + k * tau**2) if frozen else np.sqrt(v_i) + tau
                w_i = self.aligned(t, i, w_i, self.decayed(t, w_i) - lr * g / root)
            deltas.append(w_i - w)
            vs.append(v_i)
            losses.append(loss_i)
        self.shared["v"] = self.task.mean(cohort, vs)
        self.mean_change = delta = self.task.mean(cohort, deltas)
        return w + self.server_lr(t) * delta, self.task.mean(cohort, losses)


# ---------------------------------------------------------------------------------------------
# Adam on the clients
# ---------------------------------------------------------------------------------------------


class LocalAdam(Algorithm):
    """Adam (Kingma and Ba, algorithm 1) in the clients' steps.

    With n steps behind them the masses of m and v are 1 - beta1^n and 1 - beta2^n. They go the way
    of m and v: where clients take unequally many steps, the mean of m has the mean of the masses.
    """

    def first(self) -> State:
        """Give m, v and their masses before the first step."""
        v0 = float(self.options["v0"])
        return {"m": np.zeros(self.d), "v": np.full(self.d, v0), "m_mass": 0.0, "v_mass": 0.0}

    def start(self) -> None:
        """Start the averages."""
        if self.options["state"] == "average":
            self.shared.update(self.seen(self.first()))

    def seen(self, state: State) -> State:
        """Without the masses, if there is no bias correction."""
        names = ("m", "v", "m_mass", "v_mass") if self.options["bias_correction"] else ("m", "v")
        return {name: state[name] for name in names}

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """Local Adam, then the mean of w and (state "average") of m and v."""
        lr, tau, how = self.client_lr(t), self.options["tau"], self.options["state"]
        beta1, beta2 = self.options["beta1"], self.options["beta2"]
        deltas, ends, losses = [], [], []
        for i in cohort:
            begin = self.shared if how == "average" else self.kept.get(i, {})
            now = {**self.first(), **begin}
            w_i = w.copy()
            loss_i = 0.0
            for x, y in self.task.local_data(t, i):
                loss, g = self.task.gradient(w_i, x, y)
                loss_i += loss / self.task.count(t, i)
                now["m"] = beta1 * now["m"] + (1.0 - beta1) * g
                now["v"] = beta2 * now["v"] + (1.0 - beta2) * g**2
                now["m_mass"] = 1.0 - beta1 * (1.0 - now["m_mass"])
                now["v_mass"] = 1.0 - beta2 * (1.0 - now["v_mass"])
                m_hat, v_hat = now["m"], now["v"]
                if self.options["bias_correction"]:
                    m_hat, v_hat = m_hat / now["m_mass"], v_hat / now["v_mass"]
                inside = self.options["tau_inside"]
                root = np.sqrt(v_hat + tau**2) if inside else np.sqrt(v_hat) + tau
                w_i = self.aligned(t, i, w_i, self.decayed(t, w_i) - lr * m_hat / root)
            if how == "keep":
                self.kept[i] = self.seen(now)
            deltas.append(w_i - w)
            ends.append(self.seen(now))
            losses.append(loss_i)
        if how == "average":
            for name in self.shared:
                self.shared[name] = self.task.mean(cohort, [end[name] for end in ends])
        self.mean_change = delta = self.task.mean(cohort, deltas)
        return w + self.server_lr(t) * delta, self.task.mean(cohort, losses)


# ---------------------------------------------------------------------------------------------
# The covariance preconditioner: PreFed, PreFedOpt, the basic rule
# ---------------------------------------------------------------------------------------------


class Preconditioner:
    """P as an option names it, and the inverse root that is derived from it now and then.

    The diagonal is written as in the listings; the other shapes are built as the dense matrix they
    stand for (see shapes.py).
    """

    def __init__(self, options: Options, d: int) -> None:
        self.options = options
        self.d = d
        self.shape = options["shape"]
        self.tensors = options["tensors"] or [(d,)]
        self.left = 0
        self.root: Array = np.zeros((0, 0))

    def zero(self) -> Array:
        """P = 0."""
        return self.add(np.zeros(0), np.zeros(self.d), first=True)

    def add(self, p: Array, r: Array, first: bool = False) -> Array:
        """P after one more residual r: a running sum or a moving average."""
        if self.shape == "diagonal":
            square = r * r
        else:
            square = shapes.outer(r, self.shape, self.tensors, self.options["blocks"])
        if self.shape == "full":
            square = square.reshape(self.d, self.d)
        if first:
            return square
        if self.options["accumulate"] == "sum":
            return p + square
        beta2 = self.options["beta2"]
        return np.asarray(beta2 * p + (1.0 - beta2) * square)

    def apply(self, p: Array, u: Array) -> Array:
        """Give u / (sqrt(P) + tau), or (P^(1/2) + tau I)^-1 u with the newest root there is."""
        if self.shape == "diagonal":
            return np.asarray(u / (np.sqrt(p) + damping(self.options, np.sqrt(p))))
        if self.left == 0:
            self.derive(p)
        self.left -= 1
        return np.asarray(self.root @ u)

    def begin(self, p: Array) -> None:
        """A client's round begins with the root of the server's P, if it keeps one at all."""
        if self.shape != "diagonal" and self.options["refresh"] > 1 and p.any():
            self.derive(p)

    def derive(self, p: Array) -> None:
        """The root, good for the next `refresh` steps."""
        self.left = self.options["refresh"]
        root = shapes.dense_root(
            p.ravel(), self.d, self.shape, self.tensors, self.options["blocks"]
        )
        damped = root + damping(self.options, root) * np.eye(self.d)
        self.root = np.asarray(np.linalg.inv(damped), dtype=np.float64)


def damping(options: Options, root: Array) -> float:
    """Give tau, or its share of the root mean square of sqrt(P): d numbers, or a d x d matrix, in
    which the squares of the eigenvalues are summed up by those of the entries."""
    if options.get("tau_relative") is None:
        return float(options["tau"])
    rms = np.sqrt(np.sum(root**2) / len(root))
    return float(options["tau_relative"] * rms) if rms > 0 else float(options["tau"])


class PreFed(Algorithm):
    """The paper's listing 2 (PreFed): the covariance preconditioner on the clients.

    P is always averaged; m is averaged, reset in each round or kept by each client. With bias
    correction m_mass and P_mass are the total weight of the gradients in m and P; they go
    wherever m and P go. A summed P is not corrected.

    momentum "derived": nobody sends m; with the new P and w_{t+1} as the mean of the clients'
    weights the server takes m = (sqrt(P) + tau) (w_t - w_{t+1}) / (eta K). Its mass is 1.
    P_every H: P goes up in rounds 0, 1 and the multiples of H; otherwise the server's P stays.
    aggregate "sqrtP": every coordinate of w is averaged with the weights sqrt(P_i) + tau, in the
    rounds in which P goes up.
    """

    def start(self) -> None:
        """Start at m = 0, P = 0."""
        if self.options["momentum"] in ("average", "derived"):
            self.shared.update(self.zero_momentum())
        self.shared["P"] = Preconditioner(self.options, self.d).zero()
        if self.corrects_p():
            self.shared["P_mass"] = 0.0

    def corrects_p(self) -> bool:
        """Whether P is divided by its mass."""
        return bool(self.options["bias_correction"]) and self.options["accumulate"] == "ema"

    def zero_momentum(self) -> State:
        """Give m (and its mass) before the first gradient."""
        state: State = {"m": np.zeros(self.d)}
        if self.options["bias_correction"]:
            state["m_mass"] = 0.0
        return state

    def first_momentum(self, i: int) -> State:
        """Give the m (and its mass) that client i starts its round from."""
        if self.options["momentum"] in ("average", "derived"):
            return {key: self.shared[key] for key in self.zero_momentum()}
        if self.options["momentum"] == "keep" and i in self.kept:
            return self.kept[i]
        return self.zero_momentum()

    def root(self, state: State) -> Array:
        """Give sqrt(P) + tau of a diagonal P."""
        p = state["P"] / state["P_mass"] if self.corrects_p() else state["P"]
        return np.asarray(np.sqrt(p) + damping(self.options, np.sqrt(p)))

    def client(self, t: int, w: Array, i: int) -> tuple[Array, State, State, float]:
        """Run the K steps of client i: its weights, its m and P (with masses), its loss."""
        lr = self.client_lr(t)
        beta1 = self.options["beta1"]
        beta2 = self.options["beta2"]
        preconditioner = Preconditioner(self.options, self.d)
        begin = self.first_momentum(i)
        m = begin["m"]
        m_mass = begin.get("m_mass", 0.0)
        p = self.shared["P"]
        p_mass = self.shared.get("P_mass", 0.0)
        preconditioner.begin(p / p_mass if self.corrects_p() and p_mass else p)
        w_i = w.copy()
        loss_i = 0.0
        for x, y in self.task.local_data(t, i):
            loss, g = self.task.gradient(w_i, x, y)
            loss_i += loss / self.task.count(t, i)
            m = beta1 * m + (1.0 - beta1) * g
            p = preconditioner.add(p, g - m)
            m_mass = beta1 * m_mass + (1.0 - beta1)
            p_mass = beta2 * p_mass + (1.0 - beta2)
            m_hat = m / m_mass if self.options["bias_correction"] else m
            p_hat = p / p_mass if self.corrects_p() else p
            own = self.decayed(t, w_i) - lr * preconditioner.apply(p_hat, m_hat)
            w_i = self.aligned(t, i, w_i, own)
        m_state: State = {"m": m}
        p_state: State = {"P": p}
        if self.options["bias_correction"]:
            m_state["m_mass"] = m_mass
        if self.corrects_p():
            p_state["P_mass"] = p_mass
        return w_i, m_state, p_state, loss_i

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """All clients, then the means of w, P and (momentum "average") m."""
        deltas = []
        m_states = []
        p_states = []
        losses = []
        for i in cohort:
            w_i, m_state, p_state, loss_i = self.client(t, w, i)
            deltas.append(w_i - w)
            m_states.append(m_state)
            p_states.append(p_state)
            losses.append(loss_i)
        p_sent = t in (0, 1) or t % self.options["P_every"] == 0
        if p_sent:
            for key in p_states[0]:
                self.shared[key] = self.task.mean(cohort, [state[key] for state in p_states])
        if self.options["momentum"] == "average":
            for key in m_states[0]:
                self.shared[key] = self.task.mean(cohort, [state[key] for state in m_states])
        if self.options["momentum"] == "keep":
            for i, m_state in zip(cohort, m_states, strict=True):
                self.kept[i] = m_state
        delta = self.task.mean(cohort, deltas)
        if self.options["aggregate"] == "sqrtP" and p_sent:
            roots = [self.root(state) for state in p_states]
            products = [s_i * (w + delta_i) for s_i, delta_i in zip(roots, deltas, strict=True)]
            delta = self.task.mean(cohort, products) / self.task.mean(cohort, roots) - w
        if self.options["momentum"] == "derived":
            self.shared["m"] = (
                -self.root(self.shared)
                * self.own(delta)
                / (self.client_lr(t) * self.task.mean_count(t, cohort))
            )
            if self.options["bias_correction"]:
                self.shared["m_mass"] = 1.0
        self.mean_change = delta
        return w + self.server_lr(t) * delta, self.task.mean(cohort, losses)


class PreFedOpt(Algorithm):
    """The paper's listing 3 (PreFedOpt): the covariance preconditioner on the server.

    Read with m = beta1 m + (1 - beta1) g and descent along g = -Delta / K (per_step) or -Delta.
    """

    def start(self) -> None:
        """Start at m = 0, P = 0."""
        self.server["m"] = np.zeros(self.d)
        self.preconditioner = Preconditioner(self.options, self.d)
        self.server["P"] = self.preconditioner.zero()
        if self.options["bias_correction"]:
            self.server["m_mass"] = 0.0
            if self.options["accumulate"] == "ema":
                self.server["P_mass"] = 0.0

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """SGD on the clients, the covariance rule on the server."""
        beta1 = self.options["beta1"]
        beta2 = self.options["beta2"]
        state = self.server
        delta, loss = self.sgd_clients(t, w, cohort)
        self.mean_change = delta
        g = -delta / self.task.mean_count(t, cohort) if self.options["per_step"] else -delta
        state["m"] = beta1 * state["m"] + (1.0 - beta1) * g
        state["P"] = self.preconditioner.add(state["P"], g - state["m"])
        m_hat = state["m"]
        p_hat = state["P"]
        if "m_mass" in state:
            state["m_mass"] = beta1 * state["m_mass"] + (1.0 - beta1)
            m_hat = state["m"] / state["m_mass"]
        if "P_mass" in state:
            state["P_mass"] = beta2 * state["P_mass"] + (1.0 - beta2)
            p_hat = state["P"] / state["P_mass"]
        u = g if self.options["step_with"] == "delta" else m_hat
        direction = self.preconditioner.apply(p_hat, u)
        return w - self.server_lr(t) * direction, loss


class PreFedM(Algorithm):
    """Clients step with g over the root of a slow P, which is averaged; momentum on the server."""

    def start(self) -> None:
        """Start at P = 0 and v = 0."""
        self.shared["P"] = Preconditioner(self.options, self.d).zero()
        self.corrects = self.options["bias_correction"] and self.options["accumulate"] == "ema"
        if self.corrects:
            self.shared["P_mass"] = 0.0
        if self.options["server_momentum"] != 0.0:
            self.server["momentum"] = np.zeros(self.d)

    def client(self, t: int, w: Array, i: int) -> tuple[Array, Array, float, float]:
        """Run the K steps of client i: its weights, its P and the mass of it, its loss."""
        beta1, beta2 = self.options["beta1"], self.options["beta2"]
        preconditioner = Preconditioner(self.options, self.d)
        w_i, m, p = w.copy(), np.zeros(self.d), self.shared["P"]
        mass, loss_i = self.shared.get("P_mass", 0.0), 0.0
        preconditioner.begin(p / mass if mass else p)
        for x, y in self.task.local_data(t, i):
            loss, g = self.task.gradient(w_i, x, y)
            loss_i += loss / self.task.count(t, i)
            m = beta1 * m + (1.0 - beta1) * g
            p = preconditioner.add(p, g - m)
            mass = beta2 * mass + (1.0 - beta2)
            step = preconditioner.apply(p / mass if self.corrects else p, g)
            own = self.decayed(t, w_i) - self.client_lr(t) * step
            w_i = self.aligned(t, i, w_i, own)
        return w_i, p, mass, loss_i

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """All clients, the means of w and P, then v = mu v + (mean change of w)."""
        found = [self.client(t, w, i) for i in cohort]
        self.shared["P"] = self.task.mean(cohort, [p for _, p, _, _ in found])
        if self.corrects:
            self.shared["P_mass"] = self.task.mean(cohort, [mass for _, _, mass, _ in found])
        change = self.mean_change = self.task.mean(cohort, [w_i - w for w_i, _, _, _ in found])
        if "momentum" in self.server:  # minus v: the server descends along minus the change
            old = self.server["momentum"]
            self.server["momentum"] = self.options["server_momentum"] * old - change
            change = -self.server["momentum"]
        loss = self.task.mean(cohort, [loss for _, _, _, loss in found])
        return w + self.server_lr(t) * change, loss


class PreFedSync(Algorithm):
    """The paper's basic rule, before the listings: gradients are averaged in every local step."""

    def start(self) -> None:
        """Start at P = 0."""
        self.shared["P"] = np.zeros(self.d)

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """All clients in lockstep; the means of w and P at the end."""
        lr = self.client_lr(t)
        tau = self.options["tau"]
        how = self.options["accumulate"]
        beta2 = self.options["beta2"]
        data = {i: self.task.local_data(t, i) for i in cohort}
        w_of = {i: w.copy() for i in cohort}
        p_of = {i: self.shared["P"].copy() for i in cohort}
        loss_of = dict.fromkeys(cohort, 0.0)
        assert self.task.steps is not None
        for k in range(self.task.steps):
            g_of = {}
            for i in cohort:
                x, y = data[i][k]
                loss, g_of[i] = self.task.gradient(w_of[i], x, y)
                loss_of[i] += loss / self.task.steps
            g_bar = self.task.mean(cohort, [g_of[i] for i in cohort])
            for i in cohort:
                square = (g_of[i] - g_bar) ** 2
                if how == "sum":
                    p_of[i] = p_of[i] + square
                else:
                    p_of[i] = beta2 * p_of[i] + (1.0 - beta2) * square
                own = self.decayed(t, w_of[i]) - lr * g_of[i] / (np.sqrt(p_of[i]) + tau)
                w_of[i] = self.aligned(t, i, w_of[i], own)
        self.shared["P"] = self.task.mean(cohort, [p_of[i] for i in cohort])
        self.mean_change = delta = self.task.mean(cohort, [w_of[i] - w for i in cohort])
        loss = self.task.mean(cohort, [loss_of[i] for i in cohort])
        return w + self.server_lr(t) * delta, loss


# ---------------------------------------------------------------------------------------------
# Any client rule with any server rule
# ---------------------------------------------------------------------------------------------

RULES: dict[str, Options] = {
    "sgd": {"momentum": 0.0, "nesterov": False},
    "adagrad": {"tau": 1e-3, "v0": 0.0},
    "adam": {**ADAPTIVE, "v0": 0.0},
    "yogi": {**ADAPTIVE, "v0": 0.0},
    "covariance": {
        "beta1": 0.9,
        "beta2": 0.9,
        "tau": 1e-3,
        "tau_relative": None,
        "bias_correction": False,
    },
}


class NamedRule:
    """One step of an optimiser, as its paper (SGD: torch's documentation) writes it."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.name = table["name"]
        given = {key: value for key, value in table.items() if key != "name"}
        self.options = {**RULES[self.name], **given}
        assert self.options.keys() == RULES[self.name].keys()

    def first(self, d: int) -> State:
        """Give the state before the first step."""
        if self.name == "sgd":
            return {"momentum": np.zeros(d)} if self.options["momentum"] else {}
        second = "P" if self.name == "covariance" else "v"
        state: State = {second: np.full(d, float(self.options.get("v0", 0.0)))}
        if "beta1" in self.options:
            state["m"] = np.zeros(d)
        if self.options.get("bias_correction"):
            state |= {"m_mass": 0.0, f"{second}_mass": 0.0}
        return state

    def step(self, w: Array, g: Array, state: State, lr: float) -> Array:
        """Give the weights after a step; the state is replaced."""
        o = self.options
        if self.name == "sgd":
            if not o["momentum"]:
                return w - lr * g
            state["momentum"] = o["momentum"] * state["momentum"] + g
            ahead = g + o["momentum"] * state["momentum"]
            return np.asarray(w - lr * (ahead if o["nesterov"] else state["momentum"]))
        if self.name == "adagrad":
            state["v"] = state["v"] + g**2
            return np.asarray(w - lr * g / (np.sqrt(state["v"]) + o["tau"]))
        beta1, beta2 = o["beta1"], o["beta2"]
        state["m"] = beta1 * state["m"] + (1.0 - beta1) * g
        if self.name == "covariance":
            second = "P"
            state["P"] = beta2 * state["P"] + (1.0 - beta2) * (g - state["m"]) ** 2
        else:
            second, v = "v", state["v"]
            if self.name == "adam":
                state["v"] = beta2 * v + (1.0 - beta2) * g**2
            else:
                state["v"] = v - (1.0 - beta2) * g**2 * np.sign(v - g**2)
        m_hat, v_hat = state["m"], state[second]
        if o["bias_correction"]:
            state["m_mass"] = beta1 * state["m_mass"] + (1.0 - beta1)
            state[f"{second}_mass"] = beta2 * state[f"{second}_mass"] + (1.0 - beta2)
            m_hat, v_hat = m_hat / state["m_mass"], v_hat / state[f"{second}_mass"]
        tau = damping(o, np.sqrt(v_hat))
        root = np.sqrt(v_hat + tau**2) if o.get("tau_inside") else np.sqrt(v_hat) + tau
        return np.asarray(w - lr * m_hat / root)


class AnyPair(Algorithm):
    """A rule on the clients, a rule on the server, and what becomes of the clients' state."""

    def start(self) -> None:
        """The state of the server's rule, and of what it averages."""
        self.client, self.of_server = (NamedRule(self.options[k]) for k in ("client", "server"))
        self.server.update(self.of_server.first(self.d))
        first = self.client.first(self.d)
        self.shared.update({n: v for n, v in first.items() if self.policy(n) == "average"})

    def policy(self, name: str) -> str:
        """A mass goes the way of what it is the mass of."""
        return str(self.options["share"].get(name.removesuffix("_mass"), "reset"))

    def round(self, t: int, w: Array, cohort: Sequence[int]) -> tuple[Array, float]:
        """The clients' rule, the means, the server's rule."""
        lr, deltas, ends, losses = self.client_lr(t), [], [], []
        for i in cohort:
            state = {**self.client.first(self.d), **self.shared, **self.kept.get(i, {})}
            w_i, loss_i = w.copy(), 0.0
            for x, y in self.task.local_data(t, i):
                loss, g = self.task.gradient(w_i, x, y)
                loss_i += loss / self.task.count(t, i)
                after = self.client.step(self.decayed(t, w_i), g, state, lr)
                w_i = self.aligned(t, i, w_i, after)
            deltas.append(w_i - w)
            ends.append(state)
            losses.append(loss_i)
            if stays := {n: v for n, v in state.items() if self.policy(n) == "keep"}:
                self.kept[i] = stays
        for name in self.shared:
            self.shared[name] = self.task.mean(cohort, [end[name] for end in ends])
        self.mean_change = delta = self.task.mean(cohort, deltas)
        g = -delta / self.task.mean_count(t, cohort) if self.options["per_step"] else -delta
        w = self.of_server.step(w, g, self.server, self.server_lr(t))
        return w, self.task.mean(cohort, losses)


# ---------------------------------------------------------------------------------------------
# The entry point
# ---------------------------------------------------------------------------------------------

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvg,
    "fedadagrad": FedAdaGrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "adaalter": AdaAlter,
    "localadam": LocalAdam,
    "prefed": PreFed,
    "prefedlite": PreFed,
    "prefedopt": PreFedOpt,
    "prefedm": PreFedM,
    "prefedmlite": PreFedM,
    "prefedsync": PreFedSync,
    "scaffold": Scaffold,
    "fedprox": FedProx,
    "fednova": FedNova,
    "pair": AnyPair,
}


def mean_of_rounds(weights: Sequence[Array], r: float) -> Array:
    """Give the mean in which, with c_t = (1 + r) / (t + r), round s of T counts as
    c_s (1 - c_(s+1)) ... (1 - c_T)."""
    share = [(1.0 + r) / (t + r) for t in range(1, len(weights) + 1)]
    counts: list[float] = []
    for s, c in enumerate(share):
        counts.append(c * float(np.prod([1.0 - later for later in share[s + 1 :]])))
    assert abs(sum(counts) - 1.0) < 1e-12
    return np.asarray(np.sum([n * w for n, w in zip(counts, weights, strict=True)], axis=0))


def run(
    name: str,
    options: Mapping[str, Any],
    grad: Gradient,
    w0: Array,
    clients: Sequence[Pair],
    cohorts: Sequence[Sequence[int]],
    steps: int | None,
    *,
    batches: Batches | None = None,
    weighting: str | Sequence[float] = "uniform",
    n_clients: int,
) -> Trace:
    """Run one algorithm for len(cohorts) rounds of `steps` local steps; None: of unequally many.

    grad(w, x, y) gives (loss, gradient); cohorts holds the client ids of each round;
    batches(round, client) gives the sample indices of each step; without it every step uses all
    samples of the client. client_lr and
    server_lr are numbers or functions of the round, counted from 0.
    """
    full = complete(name, options)
    task = Task(
        grad=grad,
        clients=clients,
        steps=steps,
        batches=batches,
        weighting=weighting,
        n_clients=n_clients,
        clip_norm=full["clip_norm"],
        weight_decay=full["weight_decay"],
    )
    w = np.array(w0, dtype=np.float64)
    algorithm = ALGORITHMS[name](full, task, len(w))
    trace = Trace()
    for t, cohort in enumerate(cohorts):
        if len(cohort) == 0 or len(set(cohort)) != len(cohort):
            raise ValueError(f"round {t} needs distinct clients, got {list(cohort)}")
        w, loss = algorithm.round(t, w, cohort)
        trace.weights.append(w.copy())
        trace.train_loss.append(float(loss))
        means = {}
        if full["mean_of_rounds"] is not None:
            means["mean_of_rounds"] = mean_of_rounds(trace.weights, full["mean_of_rounds"])
        trace.server.append(copy.deepcopy(algorithm.server | means))
        shared = {"mean_change": algorithm.mean_change} if full["align"] else {}
        trace.shared.append(copy.deepcopy(algorithm.shared | shared))
        trace.kept.append(copy.deepcopy(algorithm.kept))
    return trace
