"""Shapes of the covariance: against each other, in both engines, on real layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor, nn

import prefed
from prefed.core.layout import Layout
from prefed.rules import SHAPES, Covariance
from prefed.rules import covariance_full as full_rule
from prefed.training.diagnostics import diagnose
from prefed.training.engines.vectorised import Vectorised
from tests.helpers.engine_runs import Net, chain, same
from tests.helpers.problems import tiny_data, tiny_model

MATRIX_SHAPES = [name for name in SHAPES.names() if name != "diagonal"]


def follow(
    shape: str, tensors: Sequence[tuple[int, ...]], grads: list[Tensor], **options: Any
) -> tuple[Tensor, dict[str, Tensor], Any]:
    """Weights and state after a round of these gradients (d) or (C, d), from zero."""
    layout = Layout.of((str(i), torch.empty(s)) for i, s in enumerate(tensors))
    rule = SHAPES.get(shape)(**options).fit(layout)
    w = torch.zeros_like(grads[0])
    clients = len(w) if w.dim() > 1 else None
    state = {n: f.new(w, clients) for n, f in rule.fields(layout).items()}
    rule.begin(w, state)
    for k, g in enumerate(grads):
        rule.apply(w, g.clone(), state, 0.01, k)
    rule.finish(w, state, 0.01, len(grads))
    return w, state, rule


def noise(steps: int, d: int, clients: int | None = None, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (d,) if clients is None else (clients, d)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def test_full_is_the_root_of_the_sum_of_outer_products() -> None:
    """Written down once more, with SciPy's root of a matrix of full rank."""
    d, tau, grads = 6, 1e-2, noise(40, 6)
    w, state, _ = follow("full", [(d,)], grads, beta1=0.7, tau=tau, accumulate="sum")
    m, P, expected = np.zeros(d), np.zeros((d, d)), np.zeros(d)
    for k, g in enumerate(x.numpy() for x in grads):
        m = 0.7 * m + 0.3 * g
        P = P + np.outer(g - m, g - m)
        if k < d:  # SciPy's root does not like singular matrices
            values, V = scipy.linalg.eigh(P)
            root = V @ np.diag(np.sqrt(np.where(values > 1e-13, values, 0))) @ V.T
        else:
            root = np.real(scipy.linalg.sqrtm(P))
        expected = expected - 0.01 * np.linalg.solve(root + tau * np.eye(d), m)
    np.testing.assert_allclose(state["P"].numpy(), P, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("refresh", [1, 4])
@pytest.mark.parametrize("clients", [None, 3])
def test_one_block_is_the_full_matrix(clients: int | None, refresh: int) -> None:
    grads = noise(12, 10, clients)
    whole, state, _ = follow("full", [(10,)], grads, refresh=refresh)
    block, block_state, _ = follow("block", [(10,)], grads, refresh=refresh, blocks="tensor")
    torch.testing.assert_close(block, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(block_state["P"], state["P"].flatten(-2), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", MATRIX_SHAPES)
@pytest.mark.parametrize("options", [{}, {"accumulate": "sum"}, {"bias_correction": True}], ids=str)
def test_diagonal_is_every_shape_where_the_covariance_is_diagonal(
    shape: str, options: dict[str, Any]
) -> None:
    """Gradients along one axis after another, without momentum that would mix them. beta1 = 0
    makes g - m zero, so m is held at zero by a step with g: PreFedOpt's rule."""
    d = 8
    grads = [torch.eye(d, dtype=torch.float64)[k % d] * (1 + k) for k in range(3 * d)]
    rule = {"beta1": 1.0, "step_with": "g", "tau": 0.1, **options}
    if options.get("bias_correction"):
        rule["beta1"] = 0.999999999999
    diagonal, _, _ = follow("diagonal", [(d, 1)], grads, **rule)
    other, _, _ = follow(shape, [(d, 1)], grads, **rule)
    torch.testing.assert_close(other, diagonal, rtol=1e-8, atol=1e-8)


def test_kronecker_is_the_full_matrix_where_the_covariance_is_a_kronecker_product() -> None:
    """Residuals e_i e_j^T a_i b_j: the sum of their outer products is a Kronecker product."""
    a, b = torch.tensor([3.0, 1.0, 0.2]).double(), torch.tensor([2.0, 0.5]).double()
    U = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).double())[0]
    V = torch.linalg.qr(torch.randn(2, 2, generator=torch.Generator().manual_seed(1)).double())[0]
    grads = [
        torch.outer(U[:, i] * a[i], V[:, j] * b[j]).flatten() for i in range(3) for j in range(2)
    ]
    options: dict[str, Any] = {"beta1": 1.0, "accumulate": "sum", "step_with": "g", "tau": 0.01}
    u, steps = noise(1, 6), []
    for shape in ("kronecker", "full"):
        _, state, rule = follow(shape, [(3, 2)], grads, **options)
        w = torch.zeros(1, 6).double()
        rule.move(w, rule.derive(state["P"][None]), torch.stack(u), 1.0)
        steps.append(w)
    torch.testing.assert_close(steps[0], steps[1], rtol=1e-10, atol=1e-10)
    P = torch.kron(U @ torch.diag(a**2) @ U.mT, V @ torch.diag(b**2) @ V.mT)
    torch.testing.assert_close(state["P"], P)


@pytest.mark.parametrize("shape", MATRIX_SHAPES)
@pytest.mark.parametrize("refresh", [1, 3])
def test_a_block_of_clients_is_each_of_them(shape: str, refresh: int) -> None:
    tensors, grads = [(3, 4), (3,), (2, 3, 2, 2), (2,), ()], noise(7, 42, clients=3)
    together, state, _ = follow(shape, tensors, grads, refresh=refresh)
    for row in range(3):
        alone, own, _ = follow(shape, tensors, [g[row] for g in grads], refresh=refresh)
        torch.testing.assert_close(together[row], alone, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(state["P"][row], own["P"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", MATRIX_SHAPES)
@pytest.mark.parametrize("model", [chain(), Net().double()], ids=["chain", "vmap"])
def test_engines_agree(shape: str, model: nn.Module) -> None:
    """With tau large enough that a rounding error is not blown up ten rounds long."""
    algorithm = prefed.PreFed(client_lr=0.005, shape=shape, refresh=2, tau=0.1)
    results = [
        prefed.simulate(
            algorithm, model, tiny_data(), rounds=10, local_steps=3, batch_size=4,
            clients_per_round=4, seed=5, device="cpu", engine=engine,
        )
        for engine in ("sequential", "vectorised")
    ]  # fmt: skip
    same(results[0], results[1], 1e-9)


@pytest.mark.parametrize("shape", MATRIX_SHAPES)
def test_memory_format_does_not_matter(shape: str) -> None:
    """A channels_last convolution inside the vector is the same matrix (out, in * kernel)."""
    torch.manual_seed(0)
    plain = torch.randn(4, 3, 3, 3).double()
    last = plain.contiguous(memory_format=torch.channels_last)
    results = []
    for weight in (plain, last):
        layout = Layout.of([("weight", weight)])
        rule = SHAPES.get(shape)(tau=0.1).fit(layout)
        w, g = torch.zeros(108).double(), torch.zeros(108).double()
        state = {n: f.new(w) for n, f in rule.fields(layout).items()}
        for k in range(3):
            torch.manual_seed(k)
            layout.views(g)["weight"].copy_(torch.randn(4, 3, 3, 3).double())
            rule.apply(w, g, state, 0.1, k)
        results.append(layout.views(w)["weight"].clone())
    torch.testing.assert_close(results[0].contiguous(), results[1].contiguous())


def test_a_long_side_of_a_matrix_has_a_diagonal_factor() -> None:
    grads = noise(5, 12)
    whole, whole_state, _ = follow("kronecker", [(3, 4)], grads)
    cut, state, _ = follow("kronecker", [(3, 4)], grads, largest_side=3)
    assert state["P"].shape == (9 + 4,)
    assert whole_state["P"].shape == (9 + 16,)
    torch.testing.assert_close(state["P"][9:], whole_state["P"][9:].view(4, 4).diagonal())
    assert not torch.allclose(cut, whole)
    # With one column there is nothing off the diagonal to leave out.
    column, _, _ = follow("kronecker", [(12, 1)], grads, largest_side=1)
    diagonal, _, _ = follow("diagonal", [(12, 1)], grads)
    torch.testing.assert_close(column, diagonal, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES.names())
@pytest.mark.parametrize("name", ["prefed", "prefedopt"])
def test_loss_falls_and_diagnostics_are_numbers(name: str, shape: str) -> None:
    rates = {"prefed": {"client_lr": 0.02}, "prefedopt": {"client_lr": 0.1, "server_lr": 0.5}}
    algorithm = prefed.ALGORITHMS.get(name)(shape=shape, tau=0.1, refresh=2, **rates[name])
    result = prefed.simulate(
        algorithm, tiny_model(), tiny_data(), rounds=20, local_steps=4, batch_size=None
    )
    assert result.history[-1]["train_loss"] < 0.9 * result.history[0]["train_loss"]
    found = diagnose(algorithm, result.server, 0)
    assert 0 <= found["adaptive_share"] <= 1
    assert math.isfinite(found["median_step"])


@pytest.mark.parametrize("shape", SHAPES.names())
def test_the_diagonal_that_diagnostics_see(shape: str) -> None:
    """On the variance of one coordinate at a time all shapes agree."""
    d = 6
    grads = [torch.eye(d, dtype=torch.float64)[1] * 2] * 3
    options: dict[str, Any] = {"beta1": 1.0, "accumulate": "sum", "step_with": "g"}
    _, state, rule = follow(shape, [(2, 2), (2,)], grads, **options)
    expected = torch.zeros(d).double()
    expected[1] = 12
    torch.testing.assert_close(rule.diagonal(state["P"]), expected)


def test_refresh_on_the_server_counts_rounds() -> None:
    algorithm = prefed.PreFedOpt(shape="full", refresh=3, client_lr=0.1, tau=0.1)
    settings = prefed.Settings(rounds=7, local_steps=2, batch_size=None, device="cpu")
    simulation = prefed.Simulation(algorithm, tiny_model(), tiny_data(), settings)
    roots = []
    for _ in range(7):
        simulation.run_round()
        roots.append(simulation.server.optimiser["root"].clone())
    changed = [not torch.equal(a, b) for a, b in pairwise(roots)]
    assert changed == [False, False, True, False, False, True]


def test_what_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = nn.Sequential(nn.Linear(5, 900), nn.Linear(900, 3)).double()

    def start(**options: Any) -> prefed.Result:
        return prefed.simulate(
            prefed.PreFed(**options), wide, tiny_data(), rounds=1, local_steps=1, batch_size=None
        )

    with pytest.raises(prefed.PrefedError, match=r"shape: .block. would factorise .*4500 x 4500"):
        start(shape="block", blocks="tensor")
    monkeypatch.setattr("os.sysconf", lambda _: 20_000)
    assert full_rule.largest() == math.isqrt(20_000**2 // 160)
    with pytest.raises(prefed.PrefedError, match=r"8103 x 8103 .* 5\.3 GB.*at most 1581 param"):
        start(shape="full")


def test_unknown_shape_names_the_nearest() -> None:
    with pytest.raises(prefed.PrefedError, match="unknown shape 'kroneker'; did you mean"):
        prefed.PreFed(shape="kroneker")


def test_blocks_of_clients_hold_their_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vectorised engine counts what the state takes, not the weights alone."""
    settings = prefed.Settings(rounds=1, local_steps=1, device="cpu")
    diagonal, full = prefed.PreFed(), prefed.PreFed(shape="full")
    simulation = prefed.Simulation(diagonal, tiny_model(), tiny_data(), settings)
    engine = Vectorised(simulation.task, simulation.data, settings)
    d = simulation.server.weights.numel()
    monkeypatch.setattr(
        "prefed.training.engines.vectorised.total_memory", lambda _: 32 * 8 * 10 * d * (d + 1)
    )
    assert engine.block_size(full, 30) == 8  # ten fit: an even number of blocks, to be shared
    assert engine.block_size(full, 15) == 8
    assert engine.block_size(full, 10) == 10
    assert engine.block_size(diagonal, 30) == 15  # all would fit


def test_a_shape_is_one_new_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SHAPES, "_things", dict(SHAPES._things))

    @SHAPES.register("identity")
    class Identity(Covariance):
        """The step of SGD with momentum."""

        def step(self, w: Tensor, g: Tensor, state: Any, lr: float, k: int) -> None:
            state["m"].lerp_(g, 1 - self.beta1)
            w.sub_(state["m"], alpha=lr)

        def fast(self, w: Tensor) -> Any:
            return self

    algorithm = prefed.PreFed(shape="identity", client_lr=0.1)
    result = prefed.simulate(
        algorithm, tiny_model(), tiny_data(), rounds=5, local_steps=2, batch_size=None
    )
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]
