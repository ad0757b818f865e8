"""How isotropic the noise is behind each preconditioner, Eq. (cov) and Eq. (covreduced): on a
quadratic with known noise and on a config."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from prefed.core.layout import Layout
from prefed.experiments.config import Config, load
from prefed.report.figures import Line, draw_lines
from prefed.report.sections import Picture, Section, Table
from prefed.theory import noise
from prefed.theory.noise import Claim, Isotropy, Moments, Reduction
from prefed.theory.objective import Objective, Tick, silent
from prefed.theory.quadratic import Quadratic
from prefed.theory.studies.common import WARM_UP, Found, own_rounds

SIZES = (1, 2, 4, 8, 16)


def pieces(config: Config) -> int:
    """Two of the quadratic, three at each of two points, and the config's own run."""
    return 2 + 2 * 3 + WARM_UP


def study(source: str, changes: Sequence[str], tick: Tick) -> Found:
    config = load(source, changes)
    results = measure(config, tick)
    return Found(config, show(results, config.data.name), {"noise": numbers(results)})


# -- Measuring ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preconditioned:
    """The noise behind each preconditioner, and Eq. (cov)."""

    layout: Layout
    perfect: dict[str, Isotropy]
    """With perfect statistics."""
    estimated: dict[str, Isotropy]
    """By the rules themselves."""
    claim: Claim
    left: float
    """Of the identity, along the gradient."""


@dataclass(frozen=True)
class Results:
    quadratic: Preconditioned
    reduced: list[Reduction]
    points: dict[str, Preconditioned]
    """On the way of the config's own run."""


def measure(config: Config, tick: Tick) -> Results:
    problem = Quadratic.make(d=24, clients=max(SIZES), samples=400, condition=1e3, spread=0.0)
    quadratic = on_quadratic(problem)
    tick("a quadratic with known noise")
    means = (problem.start - problem.centres) @ problem.H
    reduced = noise.reductions(problem.covariances(8), means, SIZES, draws=4000)
    tick("mean gradients")
    run = config.make_run()
    objective = Objective.of(run)
    points = {}
    for where, rounds in (("the first weights", 0), (f"after {WARM_UP} rounds", WARM_UP)):
        own_rounds(run, rounds, tick)
        points[where] = on_config(objective, run.server.weights, where, tick)
    return Results(quadratic, reduced, points)


def on_quadratic(problem: Quadratic, shape: tuple[int, int] = (4, 6)) -> Preconditioned:
    """The first client of a quadratic, its weights taken for a matrix of this shape."""
    S = problem.covariances(8)[0]
    mu = problem.H @ (problem.start - problem.centres[0])
    layout = Layout.of([("w", torch.empty(shape))])
    generator = torch.Generator().manual_seed(0)
    root = torch.linalg.cholesky(S)
    z = torch.randn(20_000, len(S), generator=generator, dtype=S.dtype) @ root.mT
    return precondition(Moments(S, mu, layout, mu + z[: noise.DRAWS]), z, "the quadratic", silent)


def on_config(objective: Objective, w: Tensor, where: str, tick: Tick) -> Preconditioned:
    moments = noise.moments(objective, w)
    tick(f"gradients at {where}")
    return precondition(moments, moments.drawn - moments.mu, where, tick)


def precondition(moments: Moments, off: Tensor, where: str, tick: Tick) -> Preconditioned:
    """`off` are draws of the noise (n, d), for Eq. (cov)."""
    S, mu, layout = moments.S, moments.mu, moments.layout
    perfect = {n: noise.isotropy(W, S) for n, W in noise.perfect(S, mu, layout).items()}
    tick(f"covariances at {where}")
    rules = noise.estimated(moments.drawn, layout)
    estimated = {n: noise.isotropy(W, S) for n, W in rules.items()}
    tick(f"rules at {where}")
    return Preconditioned(layout, perfect, estimated, *noise.equation_cov(S, mu, off))


# -- Showing ------------------------------------------------------------------------------------


def show(results: Results, data: str) -> list[Section]:
    points = [show_point(f"{data}, {where}", at) for where, at in results.points.items()]
    return [show_quadratic(results.quadratic), show_reduced(results.reduced), *points]


def show_quadratic(found: Preconditioned) -> Section:
    return Section(
        "A quadratic with known noise",
        [f"24 coordinates, curvatures and noise rotated, condition 1000. Condition is largest "
         f"over smallest variance, distance |C / (tr C / r) - I| / √r. Left: with perfect "
         f"statistics; right: the rules themselves after {noise.DRAWS} gradients.",
         f"Eq. (cov) at the first weights: along the gradient {found.left:.3g} of the identity "
         f"is left, in place of 1; drawn noise differs from the equation by "
         f"{found.claim.measured:.2g} (sampling error)."],
        [isotropy_table(found)],
    )  # fmt: skip


def show_reduced(reduced: list[Reduction]) -> Section:
    rows = [
        (str(r.m), f"{r.with_sum:.3g}", f"{1 / r.m**2:.3g}", f"{r.with_mean:.3g}",
         f"{1 / r.m:.3g}", f"{r.sum_signal:.3g}")
        for r in reduced
    ]  # fmt: skip
    return Section(
        "Eq. (covreduced): the mean gradient of m clients",
        ["With P from the sum of the clients' covariances the noise falls like 1/m², because P "
         "itself grows with m and shrinks the gradient just as much; with P from their mean, "
         "which is what the server averages, like 1/m. Signal over noise, which no scaling can "
         "change, grows like m with either."],
        [Table(("m", "sum", "1/m²", "mean", "1/m", "signal/noise"), rows)],
        [draw_reduction(reduced), draw_signal(reduced)],
    )  # fmt: skip


def show_point(title: str, found: Preconditioned) -> Section:
    names = ", ".join(e.name for e in found.layout.entries)
    return Section(
        title,
        [f"A stochastic gradient of a client drawn at random, on {names} "
         f"({found.layout.size} coordinates, {found.perfect['none'].directions} directions "
         f"with more than {noise.CUT:g} of the largest variance).",
         f"Eq. (cov): along the gradient {found.left:.3g} of the identity is left."],
        [isotropy_table(found)],
    )  # fmt: skip


def isotropy_table(found: Preconditioned) -> Table:
    headings = ("preconditioner", "condition", "distance", "condition, by the rule", "distance")
    both = [(n, found.perfect[n], found.estimated[n]) for n in noise.NAMES]
    return Table(headings, [
        (n, f"{p.condition:.3g}", f"{p.distance:.2f}", f"{e.condition:.3g}", f"{e.distance:.2f}")
        for n, p, e in both
    ])  # fmt: skip


def draw_reduction(reduced: list[Reduction]) -> Picture:
    m = [float(r.m) for r in reduced]
    lines = [
        Line("P from the sum of covariances", m, [r.with_sum for r in reduced], "o-"),
        Line("P from their mean, as averaged", m, [r.with_mean for r in reduced], "o-"),
        Line("1/m²", m, [1 / v**2 for v in m], "--"),
        Line("1/m", m, [1 / v for v in m], "--"),
    ]
    y_label = "noise of the preconditioned mean, tr Cov / d"
    figure = draw_lines(lines, "clients m", y_label, log_x=True, colours=2)
    return Picture("reduction", "Noise of the preconditioned mean gradient", figure)


def draw_signal(reduced: list[Reduction]) -> Picture:
    m = [float(r.m) for r in reduced]
    lines = [
        Line("P from the sum", m, [r.sum_signal for r in reduced], "o-"),
        Line("P from the mean", m, [r.mean_signal for r in reduced], "x:"),
    ]
    figure = draw_lines(lines, "clients m", "signal / noise", log_x=True)
    return Picture("signal", "Signal over noise", figure)


def numbers(results: Results) -> dict[str, Any]:
    reductions = {"reductions": [asdict(r) for r in results.reduced]}
    points = {where: point_numbers(at) for where, at in results.points.items()}
    return {**points, "quadratic": point_numbers(results.quadratic) | reductions}


def point_numbers(found: Preconditioned) -> dict[str, Any]:
    return {
        "directions": found.perfect["none"].directions,
        "perfect": {n: asdict(v) for n, v in found.perfect.items()},
        "estimated": {n: asdict(v) for n, v in found.estimated.items()},
        "left along the gradient": found.left,
        "cov": asdict(found.claim),
    }
