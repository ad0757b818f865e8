"""The paper's claims about noise, measured: Eq. (cov), Eq. (covreduced), and how isotropic the
noise is behind each preconditioner.

Here S is the covariance of a stochastic gradient and mu its mean; a preconditioner is the matrix W
that a step multiplies the gradient with, so that the noise of the step has the covariance W S W^T.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefed.core import draws
from prefed.core.layout import Entry, Layout
from prefed.rules import SHAPES, AdaGrad, Adam, Rule
from prefed.theory.objective import Objective, Tick, silent

LARGEST = 1500
"""Coordinates whose covariance is looked at: of a larger model the last tensors that fit."""
SAMPLES = 40
"""Samples of each client whose gradients are taken one by one."""
CLIENTS = 50
DRAWS = 400
"""Stochastic gradients that the rules are fed with."""
CUT = 1e-4
"""Directions in which the noise has less than this share of its largest variance are left out."""
DAMPING = 1e-3
"""tau, as a share of the root of the mean variance."""

NAMES = ("none", "AdaGrad", "Adam", "diagonal", "block", "kronecker", "full")


@dataclass(frozen=True)
class Isotropy:
    condition: float
    """Largest over smallest variance."""
    distance: float
    """|C / (tr C / r) - I|_F / sqrt(r) over the r directions that have noise: 0 is isotropic."""
    directions: int


def isotropy(W: Tensor, S: Tensor) -> Isotropy:
    """Of the noise behind a preconditioner, in the directions that S has."""
    values, V = torch.linalg.eigh(S)
    kept = values > CUT * values[-1]
    root = V[:, kept] * values[kept].sqrt()
    spectrum = torch.linalg.svdvals(W @ root).square()
    even = spectrum / spectrum.mean()
    distance = float((even - 1).norm()) / len(even) ** 0.5
    return Isotropy(float(spectrum[0] / spectrum[-1]), distance, len(even))


def perfect(S: Tensor, mu: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The preconditioners W that perfect statistics lead to. AdaGrad and Adam know the second
    moment about zero, the others the covariance."""
    second = (S + torch.outer(mu, mu)).diagonal()
    found = {"none": torch.eye(len(S), dtype=S.dtype)}
    found["AdaGrad"] = found["Adam"] = _diagonal(second)
    return found | {name: _of_shape(name, S, layout) for name in NAMES[3:]}


def _diagonal(variances: Tensor) -> Tensor:
    tau = DAMPING * variances.mean().sqrt()
    return (1 / (variances.sqrt() + tau)).diag()


def _of_shape(name: str, S: Tensor, layout: Layout) -> Tensor:
    """What the rule of that shape keeps of S, and the W it derives from it.

    What it keeps is quadratic in the residual, so the eigenvectors of S, scaled by the roots of
    the eigenvalues, put S into it one residual after another.
    """
    values, V = torch.linalg.eigh(S)
    residuals = (V * values.clamp(min=0).sqrt()).mT
    tau = float(DAMPING * S.diagonal().mean().sqrt())
    rule = SHAPES.get(name)(beta1=1.0, tau=tau, accumulate="sum", step_with="g")
    return matrix_of(rule, list(residuals), layout)


def estimated(gradients: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The preconditioners W of the rules themselves after these stochastic gradients (n, d)."""
    tau = float(DAMPING * gradients.var(0).mean().sqrt())
    found = {"none": torch.eye(gradients.shape[1], dtype=gradients.dtype)}
    n = len(gradients) ** 0.5  # of sums: their root grows so
    rules: dict[str, Rule] = {"AdaGrad": AdaGrad(n * tau), "Adam": Adam(beta2=0.99, tau=tau)}
    rules |= {name: SHAPES.get(name)(tau=n * tau, accumulate="sum") for name in NAMES[3:]}
    return found | {n: matrix_of(rule, list(gradients), layout) for n, rule in rules.items()}


def matrix_of(rule: Rule, gradients: Sequence[Tensor], layout: Layout) -> Tensor:
    """The matrix that a rule multiplies with, after it has seen the gradients."""
    rule = rule.fit(layout)
    w = torch.zeros_like(gradients[0])
    state = {name: field.new(w) for name, field in rule.fields(layout).items()}
    if (derive := getattr(rule, "derive", None)) is None:
        for k, g in enumerate(gradients):
            rule.step(w, g, state, 0.0, k)
        found = rule.preconditioner()
        assert found is not None
        return (1 / (state[found[0]].sqrt() + found[1])).diag()
    m, P = state["m"][None], state["P"][None]
    for g in gradients:  # the step itself would factorise the matrix each time
        m.lerp_(g[None], 1 - rule.beta1)  # type: ignore[attr-defined]
        rule.add_outer(P, g[None] - m, 1.0, 1.0)  # type: ignore[attr-defined]
    columns, root = torch.zeros(len(w), len(w), dtype=w.dtype), derive(P)
    for column, axis in zip(columns, torch.eye(len(w), dtype=w.dtype), strict=True):
        rule.move(column[None], root, axis[None], -1.0)  # type: ignore[attr-defined]
    return columns.mT


@dataclass(frozen=True)
class Claim:
    """A covariance that was measured, and what it was claimed to be."""

    predicted: float
    measured: float


def equation_cov(S: Tensor, mu: Tensor, noise: Tensor) -> tuple[Claim, float]:
    """Eq. (cov) for P = E[g g^T]^(1/2): |Cov(zeta) - I|, as the equation has it and from draws of
    the noise (n, d); and the share of the identity that is left along the gradient.

    The equation is right. That its right side is about I is so only if a = mu^T S^(-1) mu is
    small: along P^(-1) mu the variance is 1 / (1 + a).
    """
    values, V = torch.linalg.eigh(S + torch.outer(mu, mu))
    kept = values > CUT * values[-1]
    W = (V[:, kept] / values[kept].sqrt()).mT  # P^(-1) in its eigenvectors
    x = W @ mu
    predicted = torch.eye(len(W), dtype=S.dtype) - torch.outer(x, x)
    zeta = noise @ W.mT
    measured = zeta.mT @ zeta / len(zeta)
    left = 1 - float(x @ x)
    return Claim(1 - left, float(torch.linalg.matrix_norm(measured - predicted, 2))), left


@dataclass(frozen=True)
class Reduction:
    """The preconditioned mean gradient of m clients."""

    m: int
    with_sum: float
    """tr Cov / d with P = (C_1 + ... + C_m)^(1/2), as Eq. (covreduced) has it: 1 / m^2."""
    with_mean: float
    """The same with P from the mean of the C_i, which is what the server averages: 1 / m."""
    sum_signal: float
    """|P^(-1) mean|^2 / tr Cov with the sum: what the noise has to be compared with."""
    mean_signal: float


def reductions(
    covariances: Tensor, means: Tensor, sizes: Sequence[int], draws: int, seed: int = 0
) -> list[Reduction]:
    """Draw mean gradients of the first m clients and look at their covariance."""
    generator = torch.Generator().manual_seed(seed)
    d, found = means.shape[1], []
    for m in sizes:
        C, mean = covariances[:m], means[:m].mean(0)
        roots = torch.linalg.cholesky(C + 1e-12 * torch.eye(d, dtype=C.dtype) * C.mean())
        z = torch.randn(draws, m, d, generator=generator, dtype=C.dtype)
        G = mean + torch.einsum("nmd,med->ne", z, roots) / m
        rows = []
        for P2 in (C.sum(0), C.mean(0)):
            values, V = torch.linalg.eigh(P2)
            W = (V / values.sqrt()) @ V.mT
            hat = G @ W.mT
            noise = float((hat - hat.mean(0)).square().sum(1).mean()) * draws / (draws - 1)
            rows.append((noise / d, float((W @ mean).square().sum()) / noise))
        (a, signal_a), (b, signal_b) = rows
        found.append(Reduction(m, a, b, signal_a, signal_b))
    return found


@dataclass(frozen=True)
class Moments:
    """Of the stochastic gradient of a client drawn at random, on some tensors of the model."""

    S: Tensor
    mu: Tensor
    layout: Layout
    """Of the tensors that were looked at."""
    drawn: Tensor
    """Stochastic gradients (n, d)."""


def moments(objective: Objective, w: Tensor, tick: Tick = silent) -> Moments:
    """Exact but for clients with very many samples: a client's data are all there is of it."""
    layout, part = last_tensors(objective.flat.layout)
    clients = objective.some_clients(CLIENTS)
    size, means = objective.settings.batch_size, []
    S = torch.zeros(layout.size, layout.size, dtype=torch.float64)
    for client, share in zip(clients, objective.shares(clients).tolist(), strict=True):
        n = len(objective.data.client(client))
        index = torch.arange(n)[:: max(1, -(-n // SAMPLES))]
        rows = [objective.gradient(w, client, index[i : i + 1])[1][part] for i in range(len(index))]
        each = torch.stack(rows).double()
        means.append(each.mean(0))
        if size is not None:
            off = each - means[-1]
            S.addmm_(off.mT, off, alpha=share / (size * len(each)))
        tick("gradients of single samples")
    shares = objective.shares(clients).double()
    mu = shares @ torch.stack(means)
    off = (torch.stack(means) - mu) * shares.sqrt()[:, None]
    S += off.mT @ off
    generator = draws.generator(objective.settings.seed, "theory noise")
    which = generator.choice(clients, DRAWS, p=shares.numpy() / float(shares.sum()))
    drawn = [
        objective.batch_gradients(w, int(client), 1, DRAWS + number)[0][part].double()
        for number, client in enumerate(which)
    ]
    tick("stochastic gradients")
    return Moments(S, mu, layout, torch.stack(drawn))


def last_tensors(layout: Layout) -> tuple[Layout, slice]:
    """The last tensors of a model with at most LARGEST coordinates in all, and where they lie."""
    chosen: list[Entry] = []
    for entry in reversed(layout.entries):
        if chosen and layout.size - entry.offset > LARGEST:
            break
        chosen.insert(0, entry)
    start = chosen[0].offset
    entries = tuple(Entry(e.name, e.shape, e.stride, e.offset - start) for e in chosen)
    return Layout(entries, layout.size - start), slice(start, layout.size)
