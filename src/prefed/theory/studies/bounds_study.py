"""Lemma 1, the theorems and corollaries beside runs of PreFed and PreFedOpt, and their rates."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from prefed.core.errors import PrefedError
from prefed.core.schedule import at
from prefed.experiments.config import Config, load
from prefed.report.figures import Line, draw_lines
from prefed.report.sections import Picture, Section, Table
from prefed.theory import bounds, constants
from prefed.theory.bounds import Known, Slope
from prefed.theory.constants import Constants
from prefed.theory.objective import Objective, Tick
from prefed.theory.studies.common import Found, constants_table

ROUNDS = 60
"""Rounds of PreFed and PreFedOpt beside the bounds, at most."""
BRIEF = 24
"""Rounds of each run of the rates in K and m."""
STEPS = (1, 2, 5, 10)
COHORTS = (1, 3, 10, 25)

LABELS = {"prefed": "PreFed", "prefedopt": "PreFedOpt"}
THEOREMS = {"prefed": "Theorem 1", "prefedopt": "Theorem 2"}


def pieces(config: Config) -> int:
    """L-BFGS, variances and curvature at two points, and the rounds of all runs."""
    return 1 + 2 * 2 + Plan.of(config, len(config.make_data()[1])).rounds


def study(source: str, changes: Sequence[str], tick: Tick) -> Found:
    config = load(source, changes)
    both = {name: load(source, [*changes, f"algorithm={name}"]) for name in LABELS}
    results = measure(config, both, tick)
    return Found(config, show(results), numbers(results))


# -- Measuring ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How many rounds, and which values of K and m the rates are fitted to."""

    T: int
    K: int
    m: int
    steps: list[int]
    cohorts: list[int]

    @classmethod
    def of(cls, config: Config, clients: int) -> "Plan":
        if (K := config.local_steps) is None:
            raise PrefedError("local_steps: is required; the bounds are for equally many steps")
        return cls(
            T=min(config.rounds, ROUNDS),
            K=K,
            m=min(config.clients_per_round or clients, clients),
            steps=[k for k in STEPS if k <= max(K, 2)],
            cohorts=[n for n in COHORTS if n <= clients],
        )

    @property
    def late(self) -> list[int]:
        """Values of T, from a quarter of the run on."""
        return list(range(max(1, self.T // 4), self.T + 1))

    @property
    def rounds(self) -> int:
        """Of all runs of both algorithms."""
        return 2 * (self.T + BRIEF * (len(self.steps) + len(self.cohorts)))


@dataclass(frozen=True)
class Terms:
    """What the statements speak of besides T, K and m."""

    known: Known
    server_lr: float
    tau: dict[str, float]

    @classmethod
    def of(cls, found: Constants, d: int, both: dict[str, Config]) -> "Terms":
        known = Known(found.L.value, found.G.value, found.local_largest.value, found.spread.value,
                      found.gap.value, d)  # fmt: skip
        options = {name: config.make_algorithm() for name, config in both.items()}
        tau = {name: getattr(algorithm, "tau", 0.0) for name, algorithm in options.items()}
        return cls(known, at(options["prefedopt"].server_lr, 0), tau)

    def client_lr(self, K: int) -> float:
        return bounds.admissible(self.known.L, K)

    def theorem(self, name: str, T: int, K: int, m: int) -> float:
        """That of the algorithm of this name."""
        if name == "prefed":
            return bounds.theorem1(self.known, T, K, m, self.client_lr(K))
        return bounds.theorem2(self.known, T, K, m, self.server_lr, self.tau[name])


@dataclass(frozen=True)
class Measured:
    """Of one algorithm, round by round."""

    gradients: list[float]
    """|grad F(w_t)|^2 for t = 0, 1, ..., T."""
    divergences: list[float]

    @property
    def smallest(self) -> list[float]:
        """Over t < T, for T = 1, 2, ..."""
        return list(accumulate(self.gradients[:-1], min))


@dataclass(frozen=True)
class Claim:
    """What a statement speaks of and what it says, round by round."""

    name: str
    measured: list[float]
    bound: list[float]


@dataclass(frozen=True)
class Sweep:
    """The smallest gradients of an algorithm for some values of T, K or m."""

    values: list[int]
    measured: list[float]
    claimed: list[float]
    """By its theorem."""
    first: float
    """The gradient of the first weights."""

    @property
    def rate(self) -> Slope | None:
        """The exponent over the points below the first gradient, if there are three."""
        kept = [(x, y) for x, y in zip(self.values, self.measured, strict=True) if y < self.first]
        return bounds.fit([x for x, _ in kept], [y for _, y in kept]) if len(kept) > 2 else None

    @property
    def claimed_rate(self) -> float:
        """Not a number for a single value."""
        return bounds.fit(self.values, self.claimed).value if len(self.values) > 1 else math.nan


@dataclass(frozen=True)
class Results:
    constants: Constants
    plan: Plan
    terms: Terms
    runs: dict[str, Measured]
    lemma: list[Claim]
    theorem: list[Claim]
    sweeps: dict[str, dict[str, Sweep]]
    """Of each algorithm, over T, K and m."""


def measure(config: Config, both: dict[str, Config], tick: Tick) -> Results:
    objective = Objective.of(config.make_run())
    found, _ = constants.measure(objective, (), tick)
    plan, terms = Plan.of(config, objective.clients), Terms.of(found, objective.d, both)
    step = terms.client_lr(plan.K)
    runs = {n: run(c, objective, plan.T, plan.K, plan.m, step, tick) for n, c in both.items()}
    return Results(
        constants=found,
        plan=plan,
        terms=terms,
        runs=runs,
        lemma=lemma_claims(plan, terms, runs["prefed"], runs["prefedopt"]),
        theorem=theorem_claims(plan, terms, runs["prefed"], runs["prefedopt"]),
        sweeps={n: sweep(c, objective, plan, terms, runs[n], tick) for n, c in both.items()},
    )


def run(
    config: Config, objective: Objective, T: int, K: int, m: int, eta: float, tick: Tick
) -> Measured:
    """T rounds with this client step, and the true gradient before each and after the last."""
    algorithm = config.algorithm
    changed = config.model_copy(
        update={
            "local_steps": K, "clients_per_round": m, "rounds": T, "evaluate_every": T,
            "algorithm": type(algorithm)(**{**algorithm.model_dump(), "client_lr": eta}),
            # One thread, and no trial of engines whose steps would be watched as well.
            "engine": "sequential", "workers": 1,
        }
    )  # fmt: skip
    watched, divergence = bounds.watch(changed.make_algorithm())
    run = changed.make_run(algorithm=watched)
    clients = objective.some_clients(50)

    def squared_gradient() -> float:
        _, gradient = objective.value_and_gradient(run.server.weights, clients)
        return float(gradient.double().square().sum())

    gradients, divergences = [squared_gradient()], []
    for _ in run.rounds():
        divergences.append(divergence.largest())
        tick(f"{algorithm.name}: K = {K}, m = {m}")
        gradients.append(squared_gradient())
    return Measured(gradients, divergences)


def lemma_claims(plan: Plan, terms: Terms, prefed: Measured, prefedopt: Measured) -> list[Claim]:
    known, K, step = terms.known, plan.K, terms.client_lr(plan.K)
    before, before_opt = prefed.gradients[:-1], prefedopt.gradients[:-1]
    case_1 = [bounds.lemma1_prefed(known, K, terms.tau["prefed"], g) for g in before]
    case_2 = [bounds.lemma1_prefedopt(known, K, g) for g in before_opt]
    corrected = [bounds.lemma1_corrected(known, K, step, g) for g in before_opt]
    return [
        Claim("Lemma 1, case I", prefed.divergences, case_1),
        Claim("Lemma 1, case II", prefedopt.divergences, case_2),
        Claim("corrected, PreFedOpt", prefedopt.divergences, corrected),
    ]


def theorem_claims(plan: Plan, terms: Terms, prefed: Measured, prefedopt: Measured) -> list[Claim]:
    known, K, m, tau = terms.known, plan.K, plan.m, terms.tau["prefedopt"]
    ends = range(1, plan.T + 1)
    theorem_1 = [terms.theorem("prefed", T, K, m) for T in ends]
    corollary_1 = [bounds.corollary1(known, T, K, m) for T in ends]
    theorem_2 = [terms.theorem("prefedopt", T, K, m) for T in ends]
    corollary_2 = [bounds.corollary2(known, T, K, m, tau) for T in ends]
    return [
        Claim("Theorem 1", prefed.smallest, theorem_1),
        Claim("Corollary 1", prefed.smallest, corollary_1),
        Claim("Theorem 2", prefedopt.smallest, theorem_2),
        Claim("Corollary 2", prefedopt.smallest, corollary_2),
    ]


def sweep(
    config: Config, objective: Objective, plan: Plan, terms: Terms, whole: Measured, tick: Tick
) -> dict[str, Sweep]:
    """Over T in the whole run, over K and m with brief runs."""
    K, m, first, smallest = plan.K, plan.m, whole.gradients[0], whole.smallest

    def brief(K: int, m: int) -> float:
        return min(run(config, objective, BRIEF, K, m, terms.client_lr(K), tick).gradients)

    def claimed(T: int, K: int, m: int) -> float:
        return terms.theorem(config.algorithm.name, T, K, m)

    return {
        "T": Sweep(plan.late, [smallest[T - 1] for T in plan.late],
                   [claimed(T, K, m) for T in plan.late], first),
        "K": Sweep(plan.steps, [brief(k, m) for k in plan.steps],
                   [claimed(BRIEF, k, m) for k in plan.steps], first),
        "m": Sweep(plan.cohorts, [brief(K, n) for n in plan.cohorts],
                   [claimed(BRIEF, K, n) for n in plan.cohorts], first),
    }  # fmt: skip


# -- Showing ------------------------------------------------------------------------------------


def show(results: Results) -> list[Section]:
    plan, step = results.plan, results.terms.client_lr(results.plan.K)
    return [
        Section(
            "Constants",
            [f"Client step 1/(√5 K L) = {step:.3g} with K = {plan.K}; m = {plan.m} clients a "
             f"round, T = {plan.T}."],
            [constants_table(results.constants)],
        ),
        Section(
            "Model divergence and Lemma 1",
            ["Means over the cohort, the largest over k. O(1) factors are read as one throughout."],
            [],
            [draw_divergence(results)],
        ),
        Section(
            "Gradient norm, theorems and corollaries",
            ["Measured over bound, the smallest and the largest in the run. A statement that holds "
             "here may still be wrong elsewhere: docs/theory.md has counterexamples."],
            [claims_table([*results.lemma, *results.theorem])],
            [draw_gradient(results)],
        ),
        Section(
            "Rates",
            [f"Exponents of a power law fitted to the smallest gradient norm: in T over rounds "
             f"{plan.late[0]} to {plan.T}, in K and m after {BRIEF} rounds, the step "
             f"admissible for each K. Intervals for 95 %. One seed: they are about the fit, not "
             f"about other seeds. Points at which no gradient has been smaller than that of the "
             f"first weights say nothing and are left out; a rate needs three others."],
            [rates_table(results.sweeps)],
            [draw_sweep(results.sweeps, letter) for letter in "Km"],
        ),
    ]  # fmt: skip


def claims_table(claims: list[Claim]) -> Table:
    rows = []
    for claim in claims:
        ratio = [a / b for a, b in zip(claim.measured, claim.bound, strict=True)]
        holds = "yes" if max(ratio) <= 1 else "no"
        rows.append((claim.name, f"{min(ratio):.2g}", f"{max(ratio):.2g}", holds))
    return Table(("statement", "smallest", "largest", "holds here"), rows)


def rates_table(sweeps: dict[str, dict[str, Sweep]]) -> Table:
    rows = []
    for name, by in sweeps.items():
        rows.append((name, *(str(by[x].rate or "-") for x in "TKm")))
        claimed = [by[x].claimed_rate for x in "TKm"]
        rows.append((THEOREMS[name], *("-" if math.isnan(r) else f"{r:+.2f}" for r in claimed)))
    return Table(("", "in T", "in K", "in m"), rows)


def draw_divergence(results: Results) -> Picture:
    measured = {n: r.divergences for n, r in results.runs.items()}
    figure = draw_lines(beside(measured, results.lemma), "round", "largest mean |w_ik - w_t|²")
    return Picture("divergence", "Divergence of client models", figure)


def draw_gradient(results: Results) -> Picture:
    lines = beside({n: r.smallest for n, r in results.runs.items()}, results.theorem)
    figure = draw_lines(lines, "T", "min |grad F|² over t < T", log_x=True)
    return Picture("gradient", "Smallest gradient norm", figure)


def beside(measured: dict[str, list[float]], claims: list[Claim]) -> list[Line]:
    """What was measured in each round, and the bounds dashed."""
    lines = [Line(LABELS[n], range(1, len(v) + 1), v) for n, v in measured.items()]
    return lines + [Line(c.name, range(1, len(c.bound) + 1), c.bound, "--") for c in claims]


def draw_sweep(sweeps: dict[str, dict[str, Sweep]], letter: str) -> Picture:
    swept = {name: by[letter] for name, by in sweeps.items()}
    lines = [Line(n, s.values, s.measured, "o-") for n, s in swept.items()]
    lines += [Line(THEOREMS[n], s.values, s.claimed, "--") for n, s in swept.items()]
    y_label = f"min |grad F|² after {BRIEF} rounds"
    figure = draw_lines(lines, letter, y_label, log_x=True, colours=2)
    return Picture(f"rate-{letter}", f"Rate in {letter}", figure)


def numbers(results: Results) -> dict[str, Any]:
    plan, terms, runs, sweeps = results.plan, results.terms, results.runs, results.sweeps
    return {
        "constants": results.constants.to_dict(), "T": plan.T, "K": plan.K, "m": plan.m,
        "client_lr": terms.client_lr(plan.K), "server_lr": terms.server_lr, "tau": terms.tau,
        "divergence": {n: r.divergences for n, r in runs.items()},
        "gradient": {n: r.gradients for n, r in runs.items()},
        "claims": {
            "lemma": {c.name: c.bound for c in results.lemma},
            "theorem": {c.name: c.bound for c in results.theorem},
        },
        "swept": {
            "K": plan.steps, "m": plan.cohorts,
            "gradient": {x: {n: by[x].measured for n, by in sweeps.items()} for x in "Km"},
            "claimed": {x: {n: by[x].claimed for n, by in sweeps.items()} for x in "Km"},
        },
        "rates": {
            n: {x: s.rate and asdict(s.rate) for x, s in by.items()} for n, by in sweeps.items()
        },
        "claimed_rates": {
            n: {x: s.claimed_rate for x, s in by.items()} for n, by in sweeps.items()
        },
    }  # fmt: skip
