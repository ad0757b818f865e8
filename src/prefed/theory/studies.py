"""The three studies of `prefed theory`: what they run, and what their reports say."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import tomli_w
import torch
from torch import Tensor

from prefed.config import Config, load
from prefed.errors import PrefedError
from prefed.files import write_whole
from prefed.layout import Layout
from prefed.report.figures import Line, draw_lines
from prefed.report.sections import Picture, Section, Table, write_sections
from prefed.runs import environment
from prefed.schedule import at
from prefed.theory import bounds, noise
from prefed.theory.bounds import Known
from prefed.theory.constants import Constants, Estimate, as_array, measure
from prefed.theory.objective import Objective, Tick
from prefed.theory.quadratic import Quadratic

WARM_UP = 10
"""Rounds of the config's own run, to have points on its way."""
ROUNDS = 60
"""Rounds of PreFed and PreFedOpt beside the bounds, at most."""
BRIEF = 24
"""Rounds of each run of the rates in K and m."""
STEPS = (1, 2, 5, 10)
COHORTS = (1, 3, 10, 25)


@dataclass
class Found:
    config: Config
    sections: list[Section]
    numbers: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    title: str
    pieces: Callable[[Config], int]
    """How often `run` will tick."""
    run: Callable[[str, Sequence[str], Tick], Found]


def prepare(folder: Path) -> Path:
    """An empty directory of that name."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise PrefedError(f"{folder}: is not empty; choose another directory")
    except OSError as error:
        raise PrefedError(f"{folder}: cannot be written: {error}") from None
    return folder


def save(folder: Path, title: str, found: Found) -> Path:
    """numbers.json, coordinates.safetensors if there are any, and the report."""
    about = environment()
    text = json.dumps(plain({**found.numbers, "environment": about}), indent=2, allow_nan=False)
    write_whole(folder / "numbers.json", text + "\n")
    if found.tensors:
        contents = {name: value.contiguous() for name, value in found.tensors.items()}
        write_whole(folder / "coordinates.safetensors", safetensors.torch.save(contents))
    config = tomli_w.dumps(found.config.to_dict())
    write_whole(folder / "theory.toml", config)
    write_sections(folder / "report.html", title, found.sections, config, about)
    return folder / "report.html"


def plain(value: Any) -> Any:
    """For JSON, which has no infinity: null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- constants ----------------------------------------------------------------------------------


def study_constants(source: str, changes: Sequence[str], tick: Tick) -> Found:
    config = load(source, changes)
    simulation = config.make_simulation()
    objective = Objective.of(simulation)
    path = []
    for number in range(WARM_UP):
        simulation.run_round()
        if number + 1 in (WARM_UP // 2, WARM_UP):
            path.append(simulation.server.weights.clone())
        tick("the config's own run")
    found, _ = measure(objective, path, tick)
    lines = []
    for label, variances in (("local, σ_l²", found.local_coordinates),
                             ("global, σ_g²", found.spread_coordinates)):  # fmt: skip
        ranked = as_array(variances.sort(descending=True).values)
        shown = ranked[ranked > 1e-9 * ranked[0]]
        lines.append(Line(label, list(range(1, len(shown) + 1)), list(shown)))
    picture = draw_lines(
        lines,
        "coordinate, by rank",
        "variance of the gradient",
        log_x=True,
    )
    text = [
        f"Measured on {found.clients} clients at {found.points} points: the first weights, two on "
        f"the way of the config's own algorithm, and the best that L-BFGS found. The assumptions "
        f"speak of all weights, so L, G and the variances are lower estimates of what they name.",
        "Intervals are for 95 %.",
    ]
    section = Section(
        "Constants",
        text,
        [Table(("constant", "estimate", "interval", "how"), constants_rows(found))],
        [Picture("coordinates", "Variance of each coordinate", picture)],
    )
    tensors = {"local": found.local_coordinates, "global": found.spread_coordinates}
    return Found(config, [section], {"constants": found.to_dict(), "d": objective.d}, tensors)


def constants_rows(found: Constants) -> list[tuple[str, str, str, str]]:
    names: list[tuple[str, Estimate]] = [
        ("L, smoothness of every F_i", found.L),
        ("G, largest coordinate of a gradient", found.G),
        ("σ_l², mean over clients", found.local),
        ("σ_l², largest client", found.local_largest),
        ("σ_g²", found.spread),
        ("F(w0) - F*", found.gap),
    ]
    return [(n, f"{e.value:.4g}", f"{e.low:.4g} to {e.high:.4g}", e.how) for n, e in names]


# -- bounds -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How many rounds, and which values of K and m the rates are fitted to."""

    T: int
    K: int
    m: int
    steps: list[int]
    cohorts: list[int]

    @classmethod
    def of(cls, config: Config, clients: int) -> Plan:
        K = config.local_steps
        return cls(
            T=min(config.rounds, ROUNDS),
            K=K,
            m=min(config.clients_per_round or clients, clients),
            steps=[k for k in STEPS if k <= max(K, 2)],
            cohorts=[n for n in COHORTS if n <= clients],
        )

    def rounds(self) -> int:
        """Of all runs of both algorithms."""
        return 2 * (self.T + BRIEF * (len(self.steps) + len(self.cohorts)))


@dataclass
class Run:
    """Of one algorithm, round by round."""

    gradients: list[float]
    """|grad F(w_t)|^2 for t = 0, 1, ..."""
    divergences: list[float]


def study_bounds(source: str, changes: Sequence[str], tick: Tick) -> Found:
    config = load(source, changes)
    objective = Objective.of(config.make_simulation())
    found, _ = measure(objective, (), tick)
    c = Known(found.L.value, found.G.value, found.local_largest.value, found.spread.value,
              found.gap.value, objective.d)  # fmt: skip
    plan = Plan.of(config, objective.clients)
    T, K, m, steps, cohorts = plan.T, plan.K, plan.m, plan.steps, plan.cohorts
    eta = bounds.admissible(c.L, K)
    both = {name: load(source, [*changes, f"algorithm={name}"]) for name in ("prefed", "prefedopt")}
    runs = {n: run(b, objective, T, K, m, eta, tick) for n, b in both.items()}
    options = {name: both[name].make_algorithm() for name in both}
    tau1, tau2 = (getattr(options[name], "tau", 0.0) for name in ("prefed", "prefedopt"))
    server = at(options["prefedopt"].server_lr, 0)

    before = {name: r.gradients[:-1] for name, r in runs.items()}

    claims: dict[str, dict[str, list[float]]] = {
        "lemma": {
            "Lemma 1, case I": [bounds.lemma1_prefed(c, K, tau1, g) for g in before["prefed"]],
            "Lemma 1, case II": [bounds.lemma1_prefedopt(c, K, g) for g in before["prefedopt"]],
            "mended, PreFedOpt": [bounds.lemma1_mended(c, K, eta, g) for g in before["prefedopt"]],
        },
        "theorem": {
            "Theorem 1": [bounds.theorem1(c, t, K, m, eta) for t in range(1, T + 1)],
            "Corollary 1": [bounds.corollary1(c, t, K, m) for t in range(1, T + 1)],
            "Theorem 2": [bounds.theorem2(c, t, K, m, server, tau2) for t in range(1, T + 1)],
            "Corollary 2": [bounds.corollary2(c, t, K, m, tau2) for t in range(1, T + 1)],
        },
    }  # fmt: skip
    minima = {name: bounds.running_min(gradients) for name, gradients in before.items()}

    swept: dict[str, dict[str, list[float]]] = {"K": {}, "m": {}}
    for name, b in both.items():
        swept["K"][name] = [
            min(run(b, objective, BRIEF, k, m, bounds.admissible(c.L, k), tick).gradients)
            for k in steps
        ]
        swept["m"][name] = [
            min(run(b, objective, BRIEF, K, n, eta, tick).gradients) for n in cohorts
        ]
    claimed = {
        "K": {
            "prefed": [bounds.theorem1(c, BRIEF, k, m, bounds.admissible(c.L, k)) for k in steps],
            "prefedopt": [bounds.theorem2(c, BRIEF, k, m, server, tau2) for k in steps],
        },
        "m": {
            "prefed": [bounds.theorem1(c, BRIEF, K, n, eta) for n in cohorts],
            "prefedopt": [bounds.theorem2(c, BRIEF, K, n, server, tau2) for n in cohorts],
        },
    }
    late = list(range(max(1, T // 4), T + 1))
    rates = {
        name: {
            "T": below(before[name][0], late, [minima[name][t - 1] for t in late]),
            "K": below(before[name][0], steps, swept["K"][name]),
            "m": below(before[name][0], cohorts, swept["m"][name]),
        }
        for name in both
    }
    theorem = {"prefed": "Theorem 1", "prefedopt": "Theorem 2"}
    claimed_rates = {
        name: {
            "T": bounds.fit(late, [claims["theorem"][theorem[name]][t - 1] for t in late]),
            "K": bounds.fit(steps, claimed["K"][name]),
            "m": bounds.fit(cohorts, claimed["m"][name]),
        }
        for name in both
    }
    measured = {
        "Lemma 1, case I": runs["prefed"].divergences,
        "Lemma 1, case II": runs["prefedopt"].divergences,
        "mended, PreFedOpt": runs["prefedopt"].divergences,
        "Theorem 1": minima["prefed"],
        "Corollary 1": minima["prefed"],
        "Theorem 2": minima["prefedopt"],
        "Corollary 2": minima["prefedopt"],
    }
    checks = []
    for claim, values in {**claims["lemma"], **claims["theorem"]}.items():
        ratio = [a / b for a, b in zip(measured[claim], values, strict=True)]
        checks.append((claim, f"{min(ratio):.2g}", f"{max(ratio):.2g}",
                       "yes" if max(ratio) <= 1 else "no"))  # fmt: skip

    rounds = list(range(1, T + 1))
    divergence = draw_lines(
        [
            Line("PreFed", rounds, runs["prefed"].divergences),
            Line("PreFedOpt", rounds, runs["prefedopt"].divergences),
            *(Line(n, rounds, v, "--") for n, v in claims["lemma"].items()),
        ],
        "round",
        "largest mean |w_ik - w_t|²",
    )
    gradient = draw_lines(
        [
            Line("PreFed", rounds, minima["prefed"]),
            Line("PreFedOpt", rounds, minima["prefedopt"]),
            *(Line(n, rounds, v, "--") for n, v in claims["theorem"].items()),
        ],
        "T",
        "min |grad F|² over t < T",
        log_x=True,
    )
    sweeps = []
    for letter, where in (("K", steps), ("m", cohorts)):
        figure = draw_lines(
            [
                *(Line(n, where, swept[letter][n], "o-") for n in both),
                *(Line(theorem[n], where, claimed[letter][n], "--") for n in both),
            ],
            letter,
            f"min |grad F|² after {BRIEF} rounds",
            log_x=True,
            colours=2,
        )
        sweeps.append(Picture(f"rate-{letter}", f"Rate in {letter}", figure))
    sections = [
        Section(
            "Constants",
            [f"Client step 1/(√5 K L) = {eta:.3g} with K = {K}; m = {m} clients a round, T = {T}."],
            [Table(("constant", "estimate", "interval", "how"), constants_rows(found))],
        ),
        Section(
            "Model divergence and Lemma 1",
            ["Means over the cohort, the largest over k. O(1) factors are read as one throughout."],
            [],
            [Picture("divergence", "Divergence of client models", divergence)],
        ),
        Section(
            "Gradient norm, theorems and corollaries",
            ["Measured over bound, the smallest and the largest in the run. A statement that holds "
             "here may still be wrong elsewhere: docs/theory.md has counterexamples."],
            [Table(("statement", "smallest", "largest", "holds here"), checks)],
            [Picture("gradient", "Smallest gradient norm", gradient)],
        ),
        Section(
            "Rates",
            [f"Exponents of a power law fitted to the smallest gradient norm: in T over rounds "
             f"{late[0]} to {T}, in K and m after {BRIEF} rounds, the step admissible for each "
             f"K. Intervals for 95 %. One seed: they are about the fit, not about other seeds. "
             f"Points at which no gradient has been smaller than that of the first weights say "
             f"nothing and are left out; a rate needs three others."],
            [Table(
                ("", "in T", "in K", "in m"),
                [row for n in both for row in (
                    (n, *(str(rates[n][x] or "-") for x in "TKm")),
                    (theorem[n], *(f"{claimed_rates[n][x].value:+.2f}" for x in "TKm")),
                )],
            )],
            sweeps,
        ),
    ]  # fmt: skip
    numbers = {
        "constants": found.to_dict(), "T": T, "K": K, "m": m, "client_lr": eta,
        "server_lr": server, "tau": {"prefed": tau1, "prefedopt": tau2},
        "divergence": {n: r.divergences for n, r in runs.items()},
        "gradient": {n: r.gradients for n, r in runs.items()},
        "claims": claims,
        "swept": {"K": steps, "m": cohorts, "gradient": swept, "claimed": claimed},
        "rates": {n: {x: s and asdict(s) for x, s in r.items()} for n, r in rates.items()},
        "claimed_rates": {n: {x: s.value for x, s in r.items()} for n, r in claimed_rates.items()},
    }  # fmt: skip
    return Found(config, sections, numbers)


def below(first: float, x: Sequence[int], y: Sequence[float]) -> bounds.Slope | None:
    """The exponent over the points that have come below the first gradient, if there are three."""
    kept = [(a, b) for a, b in zip(x, y, strict=True) if b < first]
    return bounds.fit([a for a, _ in kept], [b for _, b in kept]) if len(kept) > 2 else None


def run(
    config: Config, objective: Objective, T: int, K: int, m: int, eta: float, tick: Tick
) -> Run:
    """T rounds with this client step, and the true gradient before each and after the last."""
    changed = config.model_copy(
        update={
            "local_steps": K, "clients_per_round": m, "rounds": T, "evaluate_every": T,
            "algorithm": _with(config, client_lr=eta),
            # One thread, and no trial of engines whose steps would be watched as well.
            "engine": "sequential", "workers": 1,
        }
    )  # fmt: skip
    simulation = changed.make_simulation()
    watched, divergence = bounds.watch(simulation.algorithm)
    simulation.algorithm = watched
    clients = objective.some_clients(50)
    found = Run([], [])
    for number in range(T + 1):
        _, gradient = objective.value_and_gradient(simulation.server.weights, clients)
        found.gradients.append(float(gradient.double().square().sum()))
        if number < T:
            simulation.run_round()
            found.divergences.append(divergence.largest())
            tick(f"{config.algorithm.name}: K = {K}, m = {m}")
    return found


def _with(config: Config, **options: Any) -> Any:
    return type(config.algorithm)(**{**config.algorithm.model_dump(), **options})


# -- noise --------------------------------------------------------------------------------------

SIZES = (1, 2, 4, 8, 16)


def study_noise(source: str, changes: Sequence[str], tick: Tick) -> Found:
    config = load(source, changes)
    problem = Quadratic.make(d=24, clients=max(SIZES), samples=400, condition=1e3, spread=0.0)
    known = known_noise(problem)
    tick("a quadratic with known noise")
    reduced = noise.reductions(
        problem.covariances(8), (problem.start - problem.centres) @ problem.H, SIZES, draws=4000
    )
    tick("mean gradients")

    simulation = config.make_simulation()
    objective = Objective.of(simulation)
    tables, numbers = [], {}
    for where in ("the first weights", f"after {WARM_UP} rounds"):
        if where != "the first weights":
            for _ in range(WARM_UP):
                simulation.run_round()
                tick("the config's own run")
        moments = noise.moments(objective, simulation.server.weights, lambda _: None)
        tick(f"gradients at {where}")
        S = moments.S
        matrices = noise.perfect(S, moments.mu, moments.layout)
        perfect = {n: noise.isotropy(W, S) for n, W in matrices.items()}
        tick(f"covariances at {where}")
        matrices = noise.estimated(moments.drawn, moments.layout)
        estimated = {n: noise.isotropy(W, S) for n, W in matrices.items()}
        tick(f"rules at {where}")
        off = moments.drawn - moments.mu
        claim, left = noise.equation_cov(S, moments.mu, off)
        tables.append((where, moments, perfect, estimated, left))
        numbers[where] = {
            "directions": perfect["none"].directions,
            "perfect": {n: asdict(v) for n, v in perfect.items()},
            "estimated": {n: asdict(v) for n, v in estimated.items()},
            "left along the gradient": left,
            "cov": asdict(claim),
        }
    ms = [float(r.m) for r in reduced]
    picture = draw_lines(
        [
            Line("P from the sum of covariances", ms, [r.with_sum for r in reduced], "o-"),
            Line("P from their mean, as averaged", ms, [r.with_mean for r in reduced], "o-"),
            Line("1/m²", ms, [1 / v**2 for v in ms], "--"),
            Line("1/m", ms, [1 / v for v in ms], "--"),
        ],
        "clients m",
        "noise of the preconditioned mean, tr Cov / d",
        log_x=True,
        colours=2,
    )
    signal = draw_lines(
        [
            Line("P from the sum", ms, [r.sum_signal for r in reduced], "o-"),
            Line("P from the mean", ms, [r.mean_signal for r in reduced], "x:"),
        ],
        "clients m",
        "signal / noise",
        log_x=True,
    )
    headings = ("preconditioner", "condition", "distance", "condition, by the rule", "distance")
    sections = [
        Section(
            "A quadratic with known noise",
            [f"24 coordinates, curvatures and noise rotated, condition 1000. Condition is largest "
             f"over smallest variance, distance |C / (tr C / r) - I| / √r. Left: with perfect "
             f"statistics; right: the rules themselves after {noise.DRAWS} gradients.",
             f"Eq. (cov) at the first weights: along the gradient {known.left:.3g} of the identity "
             f"is left, in place of 1; drawn noise differs from the equation by "
             f"{known.claim.measured:.2g} (sampling error)."],
            [Table(headings, isotropy_rows(known.perfect, known.estimated))],
        ),
        Section(
            "Eq. (covreduced): the mean gradient of m clients",
            ["With P from the sum of the clients' covariances the noise falls like 1/m², because P "
             "itself grows with m and shrinks the gradient just as much; with P from their mean, "
             "which is what the server averages, like 1/m. Signal over noise, which no scaling can "
             "change, grows like m with either."],
            [Table(("m", "sum", "1/m²", "mean", "1/m", "signal/noise"),
                   [(str(r.m), f"{r.with_sum:.3g}", f"{1 / r.m**2:.3g}", f"{r.with_mean:.3g}",
                     f"{1 / r.m:.3g}", f"{r.sum_signal:.3g}") for r in reduced])],
            [Picture("reduction", "Noise of the preconditioned mean gradient", picture),
             Picture("signal", "Signal over noise", signal)],
        ),
    ]  # fmt: skip
    for where, moments, perfect, estimated, left in tables:
        names = ", ".join(e.name for e in moments.layout.entries)
        sections.append(
            Section(
                f"{config.data.name}, {where}",
                [f"A stochastic gradient of a client drawn at random, on {names} "
                 f"({moments.layout.size} coordinates, {perfect['none'].directions} directions "
                 f"with more than {noise.CUT:g} of the largest variance).",
                 f"Eq. (cov): along the gradient {left:.3g} of the identity is left."],
                [Table(headings, isotropy_rows(perfect, estimated))],
            )
        )  # fmt: skip
    numbers["quadratic"] = {
        "perfect": {n: asdict(v) for n, v in known.perfect.items()},
        "estimated": {n: asdict(v) for n, v in known.estimated.items()},
        "cov": asdict(known.claim), "left along the gradient": known.left,
        "reductions": [asdict(r) for r in reduced],
    }  # fmt: skip
    return Found(config, sections, {"noise": numbers})


@dataclass(frozen=True)
class KnownNoise:
    perfect: dict[str, noise.Isotropy]
    estimated: dict[str, noise.Isotropy]
    claim: noise.Claim
    left: float


def known_noise(problem: Quadratic, shape: tuple[int, int] = (4, 6)) -> KnownNoise:
    """The first client of a quadratic, its weights taken for a matrix of this shape."""
    S = problem.covariances(8)[0]
    mu = problem.H @ (problem.start - problem.centres[0])
    layout = Layout.of([("w", torch.empty(shape))])
    generator = torch.Generator().manual_seed(0)
    root = torch.linalg.cholesky(S)
    z = torch.randn(20_000, len(S), generator=generator, dtype=S.dtype) @ root.mT
    claim, left = noise.equation_cov(S, mu, z)
    perfect = {n: noise.isotropy(W, S) for n, W in noise.perfect(S, mu, layout).items()}
    rules = noise.estimated(mu + z[: noise.DRAWS], layout)
    return KnownNoise(perfect, {n: noise.isotropy(W, S) for n, W in rules.items()}, claim, left)


def isotropy_rows(
    perfect: dict[str, noise.Isotropy], estimated: dict[str, noise.Isotropy]
) -> list[tuple[str, ...]]:
    return [
        (n, f"{perfect[n].condition:.3g}", f"{perfect[n].distance:.2f}",
         f"{estimated[n].condition:.3g}", f"{estimated[n].distance:.2f}")
        for n in noise.NAMES
    ]  # fmt: skip


def pieces_of_bounds(config: Config) -> int:
    return 1 + 2 * 2 + Plan.of(config, len(config.make_data()[1])).rounds()


STUDIES = {
    "constants": Study("measured constants", lambda _: WARM_UP + 1 + 2 * 4, study_constants),
    "bounds": Study("bounds and rates", pieces_of_bounds, study_bounds),
    "noise": Study("noise and preconditioners", lambda _: 2 + 2 * 3 + WARM_UP, study_noise),
}
