"""Private rounds in plain NumPy, from the papers: McMahan et al. 2018 (clip, noise on the sum, a
fixed divisor), Andrew et al. 2021 (a clip that follows a quantile). One client at a time, one value
at a time; noise is handed in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Values = dict[str, Array]
Client = Callable[[int, Array, Values], Values]
"""(client, weights, shared state) -> the client's weights and state after its local steps."""
Draw = Callable[[str, int, int], Array]
"""(name, round, size) -> standard normal numbers."""


@dataclass
class Setup:
    z: float
    """Of everything that a round releases."""
    clip: float
    clips: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    joint: bool = False
    through: str = "root"
    floor: float = 0.0
    quantile: float | None = None
    rate: float = 0.0
    count_noise: float = 0.0


def forward(values: Values, through: str, floor: float) -> Values:
    """Second moments in the form that is averaged."""
    made = dict(values)
    for name in ("P", "v"):
        if name in values:
            made[name] = np.sqrt(values[name])
            if through == "log":
                made[name] = np.log(values[name] + floor)
    return made


def backward(values: Values, through: str, floor: float) -> Values:
    made = dict(values)
    for name in ("P", "v"):
        if name in values:
            made[name] = np.maximum(values[name], 0.0) ** 2
            if through == "log":
                made[name] = np.maximum(np.exp(values[name]) - floor, 0.0)
    return made


def norm(x: Array) -> float:
    return float(np.sqrt(np.sum(x * x)))


def rounds(
    setup: Setup,
    client: Client,
    weights: Array,
    shared: Values,
    cohorts: Sequence[Sequence[int]],
    asked: int,
    draw: Draw,
) -> tuple[Array, Values, float]:
    """The weights, the shared state and the clip after a round with each cohort."""
    C = setup.clip
    z_sum = setup.z
    if setup.quantile is not None:
        z_sum = (setup.z**-2 - (2 * setup.count_noise) ** -2) ** -0.5
    for t, cohort in enumerate(cohorts):
        before = forward({"w": weights, **shared}, setup.through, setup.floor)
        bounds = {"w": C}
        for name in setup.clips:
            bounds[name] = setup.clips[name] * (C / setup.clip if setup.joint else 1.0)
        sums = {name: np.zeros_like(before[name]) for name in bounds}
        below = 0.0
        for i in cohort:
            after = forward(client(i, weights, shared), setup.through, setup.floor)
            change = {name: after[name] - before[name] for name in bounds}
            length = {name: norm(change[name]) / bounds[name] for name in bounds}
            if setup.joint:
                whole = np.sqrt(sum(one**2 for one in length.values()))
                length = dict.fromkeys(length, float(whole))
            for name in bounds:
                sums[name] = sums[name] + change[name] / max(1.0, length[name])
            below += 0.5 if length["w"] <= 1 else -0.5
        mean = {}
        for name in bounds:
            share = 1.0
            if not setup.joint and setup.shares:
                share = setup.shares.get(name, 1 - sum(setup.shares.values()))
            deviation = z_sum * bounds[name] / np.sqrt(share)
            noise = deviation * draw("weights" if name == "w" else name, t, len(sums[name]))
            mean[name] = (sums[name] + noise) / asked
        weights = weights + mean["w"]
        moved = {name: before[name] + mean[name] for name in setup.clips}
        shared = backward(moved, setup.through, setup.floor)
        if setup.quantile is not None:
            b = 0.5 + (below + setup.count_noise * float(draw("below", t, 1)[0])) / asked
            C = C * np.exp(-setup.rate * (b - setup.quantile))
    return weights, shared, C


Gradient = Callable[[int, int, Array], Array]
"""(client, step, weights) -> gradient."""


def sgd_client(gradient: Gradient, lr: float, K: int) -> Client:
    def train(i: int, w: Array, shared: Values) -> Values:
        for k in range(K):
            w = w - lr * gradient(i, k, w)
        return {"w": w}

    return train


def prefed_client(
    gradient: Gradient, lr: float, K: int, beta1: float, beta2: float, tau: float
) -> Client:
    """Algorithm 2: m, then P, then the step."""

    def train(i: int, w: Array, shared: Values) -> Values:
        m, P = shared["m"], shared["P"]
        for k in range(K):
            g = gradient(i, k, w)
            m = beta1 * m + (1 - beta1) * g
            P = beta2 * P + (1 - beta2) * (g - m) ** 2
            w = w - lr * m / (np.sqrt(P) + tau)
        return {"w": w, "m": m, "P": P}

    return train


def derived_rounds(
    gradient: Gradient,
    w: Array,
    cohorts: Sequence[Sequence[int]],
    lr: float,
    K: int,
    beta1: float,
    beta2: float,
    tau: float,
) -> tuple[Array, Array, Array]:
    """PreFed whose server derives m and P: clients hold P still and send the weights alone."""
    m = P = np.zeros_like(w)
    for cohort in cohorts:
        ends = []
        for i in cohort:
            v, u = w, m
            for k in range(K):
                u = beta1 * u + (1 - beta1) * gradient(i, k, v)
                v = v - lr * u / (np.sqrt(P) + tau)
            ends.append(v)
        new = np.mean(ends, axis=0)
        g = (np.sqrt(P) + tau) * (w - new) / (lr * K)
        m = beta1 * m + (1 - beta1) * g
        P = beta2 * P + (1 - beta2) * (g - m) ** 2
        w = new
    return w, m, P
