"""What Assumptions 1 to 3 assume, measured: L, G, both variances, and the distance to the optimum.

The assumptions speak of all w. No measurement can: the figures are the largest over a few points
(the start, points on the way of a run, the best weights found) and therefore lower estimates of
the true suprema. An interval is about the value at those points.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from prefed.core import draws
from prefed.experiments.stats import student
from prefed.theory.objective import Objective, Tick, silent

LEVEL = 0.95
CLIENTS = 50
"""The largest number of clients that are looked at."""
BATCHES = 8
"""Stochastic gradients of each client at each point."""
PRODUCTS = 40
"""Hessian-vector products of a power iteration."""
DESCENT = 60
"""Iterations of L-BFGS towards F*."""


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float
    """Infinity if nothing bounds it from above."""
    how: str

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclass(frozen=True)
class Constants:
    L: Estimate
    """The largest curvature of any client."""
    G: Estimate
    """The largest coordinate of any client's gradient."""
    local: Estimate
    """The variance of a stochastic gradient, summed over coordinates, mean over clients."""
    local_largest: Estimate
    """The same for the client with the largest."""
    spread: Estimate
    """The variance of the clients' gradients around their mean, summed over coordinates."""
    gap: Estimate
    """F(w0) - F*."""
    local_coordinates: Tensor
    spread_coordinates: Tensor
    clients: int
    points: int

    def to_dict(self) -> dict[str, Any]:
        estimates = {n: asdict(v) for n, v in vars(self).items() if isinstance(v, Estimate)}
        return {**estimates, "clients": self.clients, "points": self.points, "level": LEVEL}


def measure(
    objective: Objective, path: Sequence[Tensor] = (), tick: Tick = silent
) -> tuple[Constants, Tensor]:
    """The constants at the start, on `path` and at the best weights found, which come with them."""
    clients = objective.some_clients(CLIENTS)
    gap, best = measure_gap(objective, clients, tick)
    points = [objective.start, *path, best]
    curvatures, largest, variances, spreads = [], 0.0, [], []
    for number, w in enumerate(points):
        gradients = objective.gradients(w, clients)
        largest = max(largest, float(gradients.abs().max()))
        spreads.append(variance_between(objective, clients, gradients))
        variances.append(variance_within(objective, clients, w, gradients, number))
        tick(f"variances at point {number + 1} of {len(points)}")
        chance = (1 - LEVEL) / (len(points) * len(clients))
        curvatures += [measure_curvature(objective, w, c, number, chance) for c in clients]
        tick(f"curvature at point {number + 1} of {len(points)}")
    widest = max(variances, key=lambda found: found[0].value)
    spread = max(spreads, key=lambda found: found[0].value)
    worst = max((found[1] for found in variances), key=lambda estimate: estimate.value)
    L = max(curvatures, key=lambda estimate: estimate.value)
    high = max(estimate.high for estimate in curvatures)
    seen = "all clients" if len(clients) == objective.clients else f"{len(clients)} clients"
    return Constants(
        L=Estimate(L.value, L.low, high, L.how),
        G=Estimate(largest, largest, largest, f"exact for {seen} at {len(points)} points"),
        local=widest[0],
        local_largest=worst,
        spread=spread[0],
        gap=gap,
        local_coordinates=widest[2],
        spread_coordinates=spread[1],
        clients=len(clients),
        points=len(points),
    ), best


def measure_curvature(
    objective: Objective, w: Tensor, client: int, draw: int, chance: float
) -> Estimate:
    """The spectral norm of a client's Hessian by power iteration.

    The estimate is from below. From above: after k products with H^2 from a random start the
    norm is at most estimate / sqrt(1 - e), but for a chance of .824 sqrt(d) (1 - e)^(k - 1/2)
    (Kuczynski and Wozniakowski 1992).
    """
    generator = draws.generator(objective.settings.seed, "power iteration", draw, client)
    v = torch.from_numpy(generator.normal(size=objective.d)).to(w)
    v /= v.norm()
    norm = 0.0
    with objective.hessian(w, client) as product:
        for _ in range(PRODUCTS):
            v = product(v)
            norm = float(v.norm())
            if norm == 0 or not math.isfinite(norm):
                break
            v /= norm
    k = PRODUCTS / 2
    kept = math.exp(-math.log(0.824 * math.sqrt(objective.d) / chance) / (k - 0.5))
    how = f"power iteration, {PRODUCTS} Hessian-vector products"
    return Estimate(norm, norm, norm / math.sqrt(kept), how)


def variance_within(
    objective: Objective, clients: Sequence[int], w: Tensor, gradients: Tensor, draw: int
) -> tuple[Estimate, Estimate, Tensor]:
    """The variance of stochastic gradients around the client's gradient: the mean over clients, the
    largest client, and per coordinate."""
    shares = objective.shares(clients).double()
    coordinates, squares = torch.zeros_like(w), []
    for row, client in enumerate(clients):
        drawn = objective.batch_gradients(w, client, BATCHES, draw)
        off = (drawn - gradients[row]).square_()
        coordinates.add_(off.mean(0), alpha=float(shares[row]))
        squares.append(off.double().sum(1))
    table = torch.stack(squares)
    means, errors = table.mean(1), table.std(1) / math.sqrt(BATCHES)
    mean = float(shares @ means)
    half = student(len(clients) * (BATCHES - 1)) * float((shares * errors).norm())
    how = f"{BATCHES} batches of each of {len(clients)} clients, t interval"
    top = int(means.argmax())
    # The largest of many: the interval is for all clients at once (Bonferroni).
    wide = student(BATCHES - 1, 1 - (1 - LEVEL) / len(clients))
    low = max(float((means - wide * errors).max()), 0.0)
    high = float((means + wide * errors).max())
    return (
        Estimate(mean, max(mean - half, 0.0), mean + half, how),
        Estimate(float(means[top]), low, high, f"{BATCHES} batches of each, for all clients"),
        coordinates,
    )


def variance_between(
    objective: Objective, clients: Sequence[int], gradients: Tensor
) -> tuple[Estimate, Tensor]:
    """The variance of the clients' gradients: exact, or a t interval over drawn clients."""
    shares = objective.shares(clients).to(gradients)
    off = (gradients - shares @ gradients).square_()
    coordinates = shares @ off
    sums = off.double().sum(1)
    n, value = len(clients), float(shares.double() @ sums)
    if n == objective.clients:
        return Estimate(value, value, value, "exact: all clients"), coordinates
    correction = n / (n - 1)  # the mean was taken from the same clients
    # In logarithms: few clients lie far out, so the error is a factor rather than a difference.
    factor = math.exp(student(n - 1) * float(sums.std()) / math.sqrt(n) / max(value, 1e-300))
    value *= correction
    how = f"{n} of {objective.clients} clients, t interval of the logarithm"
    return Estimate(value, value / factor, value * factor, how), coordinates * correction


def measure_gap(
    objective: Objective, clients: Sequence[int], tick: Tick = silent
) -> tuple[Estimate, Tensor]:
    """F(w0) - F*, and the best weights found.

    L-BFGS comes down from w0; where it arrives bounds F* from above. From below there is only
    that losses are not negative: the truth lies in between.
    """
    w = objective.start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [w], max_iter=DESCENT, max_eval=2 * DESCENT, line_search_fn="strong_wolfe",
        tolerance_grad=1e-12, tolerance_change=1e-16,
    )  # fmt: skip
    best, lowest = objective.start, math.inf

    def closure() -> float:
        nonlocal best, lowest
        value, gradient = objective.value_and_gradient(w.detach(), clients)
        w.grad = gradient
        if value < lowest:
            best, lowest = w.detach().clone(), value
        return value

    first, _ = objective.value_and_gradient(objective.start, clients)
    optimiser.step(closure)
    tick("descent towards F*")
    gap = first - lowest
    high = first if lowest >= 0 else math.inf
    return Estimate(gap, gap, high, f"{DESCENT} steps of L-BFGS; above: F* >= 0"), best
