"""Noise on problems whose covariance is known."""

from __future__ import annotations

import math

import torch

import prefed
from prefed.core.layout import Layout
from prefed.experiments.config import load
from prefed.theory import noise
from prefed.theory.objective import Objective
from prefed.theory.quadratic import Quadratic

D = 12


def layout(*shape: int) -> Layout:
    return Layout.of([("w", torch.empty(shape))])


def known(rotated: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    problem = Quadratic.make(d=D, condition=1e3, rotated=rotated, samples=500)
    return problem.covariances(5).mean(0), problem.H @ (problem.start - problem.optimum)


def test_only_the_full_matrix_makes_rotated_noise_isotropic() -> None:
    S, mu = known()
    found = {n: noise.isotropy(W, S) for n, W in noise.perfect(S, mu, layout(3, 4)).items()}
    assert set(found) == set(noise.NAMES)
    values = torch.linalg.eigvalsh(S)
    assert math.isclose(found["none"].condition, float(values[-1] / values[0]), rel_tol=1e-6)
    assert found["full"].condition < 1.2  # what tau leaves
    assert found["full"].distance < 0.05
    for name in set(noise.NAMES) - {"full"}:
        assert found[name].condition > 5 * found["full"].condition
    assert found["block"].distance > found["full"].distance


def test_the_diagonal_is_enough_where_the_noise_is_diagonal() -> None:
    values = torch.logspace(-2, 0, D, dtype=torch.float64)
    S, mu = values.diag(), torch.zeros(D, dtype=torch.float64)
    for name, W in noise.perfect(S, mu, layout(D)).items():
        found = noise.isotropy(W, S)
        assert (found.condition < 1.05) == (name != "none")


def test_kronecker_is_enough_where_the_covariance_is_a_product() -> None:
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randn(n, n, generator=generator, dtype=torch.float64) for n in (3, 4))
    S, mu = torch.kron(A @ A.mT, B @ B.mT), torch.zeros(12, dtype=torch.float64)
    S += 1e-9 * torch.eye(12, dtype=torch.float64)
    found = {n: noise.isotropy(W, S) for n, W in noise.perfect(S, mu, layout(3, 4)).items()}
    assert found["kronecker"].distance < 0.1 < found["block"].distance
    assert found["kronecker"].condition < 3 < found["diagonal"].condition


def test_rules_come_near_what_perfect_statistics_give() -> None:
    S, mu = known()
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(4000, D, generator=generator, dtype=torch.float64)
    gradients = mu + z @ torch.linalg.cholesky(S).mT
    perfect = noise.perfect(S, mu, layout(3, 4))
    estimated = noise.estimated(gradients, layout(3, 4))
    for name in ("AdaGrad", "Adam", "diagonal", "block", "kronecker", "full"):
        ideal, rule = (noise.isotropy(found[name], S) for found in (perfect, estimated))
        assert math.isclose(rule.distance, ideal.distance, abs_tol=0.15), name


def test_equation_cov_is_right_and_its_right_side_is_not_the_identity() -> None:
    """Cov = I - P^-1 mu mu^T P^-1; along the gradient 1 / (1 + mu^T S^-1 mu) is left."""
    S, mu = known()
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(200_000, D, generator=generator, dtype=torch.float64)
    claim, left = noise.equation_cov(S, mu, z @ torch.linalg.cholesky(S).mT)
    a = float(mu @ torch.linalg.solve(S, mu))
    assert math.isclose(left, 1 / (1 + a), rel_tol=1e-6)
    assert math.isclose(claim.predicted, a / (1 + a), rel_tol=1e-6)
    assert claim.measured < 0.03  # sampling error of 200,000 draws
    assert claim.predicted > 0.3  # far from the identity at the start
    near, _ = noise.equation_cov(S, 0.01 * mu, z @ torch.linalg.cholesky(S).mT)
    assert near.predicted < 0.01


def test_the_sum_gives_one_over_m_squared_and_the_mean_one_over_m() -> None:
    """The square comes from P, which grows with m and shrinks the gradient as well: the signal
    over the noise grows with m in both."""
    problem = Quadratic.make(d=6, clients=16, samples=300, spread=0.0)
    means = (problem.start - problem.centres) @ problem.H
    sizes = (1, 2, 4, 8, 16)
    found = noise.reductions(problem.covariances(5), means, sizes, draws=20_000)
    for r in found:
        assert math.isclose(r.with_sum, 1 / r.m**2, rel_tol=0.03)
        assert math.isclose(r.with_mean, 1 / r.m, rel_tol=0.03)
        assert math.isclose(r.sum_signal, r.mean_signal, rel_tol=1e-6)
    assert 10 < found[-1].sum_signal / found[0].sum_signal < 22


def test_moments_of_a_quadratic() -> None:
    problem = Quadratic.make(d=5, clients=4, samples=30)
    settings = {"rounds": 1, "local_steps": 1, "batch_size": 3}
    objective = Objective.of(problem.simulation(prefed.FedAvg(), **settings))
    found = noise.moments(objective, problem.start)
    gradients = (problem.start - problem.centres) @ problem.H
    between = gradients - gradients.mean(0)
    expected = problem.covariances(3).mean(0) + between.mT @ between / 4
    torch.testing.assert_close(found.S, expected)
    torch.testing.assert_close(found.mu, gradients.mean(0))
    sample = found.drawn.T.cov()
    assert float((sample - expected).norm() / expected.norm()) < 0.3


def test_large_models_are_looked_at_from_the_end() -> None:
    simulation = load("digits-noniid").make_run()
    part, where = noise.last_tensors(simulation.task.flat.layout)
    assert [e.name for e in part.entries] == ["1.bias", "3.weight", "3.bias"]
    assert part.size == 1418
    assert (where.start, where.stop) == (8192, 9610)
