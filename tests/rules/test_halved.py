"""State in bfloat16: rounding at random, against NumPy; the same in every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import prefed
from prefed.core import draws
from prefed.core.errors import PrefedError
from prefed.rules import Adam
from prefed.rules.halved import Halved, give, rounded

ROUNDS, STEPS, SEED = 3, 4, 7
LR, BETA1, BETA2, TAU = 0.05, 0.9, 0.99, 1e-3
Array = np.ndarray[Any, Any]
SETTINGS: dict[str, Any] = {"rounds": ROUNDS, "local_steps": STEPS, "batch_size": None}
SETTINGS |= {"seed": SEED}
OPTIONS: dict[str, Any] = {"client_lr": LR, "beta1": BETA1, "beta2": BETA2, "tau": TAU}
OPTIONS |= {"momentum": "average", "state_dtype": "bfloat16"}


@given(st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda x: x == 0 or abs(x) > 2.0**-100))
def test_the_mean_over_all_noise_is_the_number(x: float) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32)
    found = rounded(torch.full((1 << 16,), x), every)
    assert found.dtype == torch.bfloat16
    assert found.double().mean().item() == pytest.approx(x, rel=1e-12)
    assert len(found.unique()) <= 2


def test_what_is_not_finite_stays_so() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan])
    found = rounded(x, torch.full((3,), (1 << 16) - 1, dtype=torch.int32))
    assert found[:2].tolist() == [torch.inf, -torch.inf]
    assert found[2].isnan()


def clients() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    x = [torch.randn(4 + c, 5, generator=draw, dtype=torch.float64) for c in range(5)]
    return [(part, (part.sum(1) > 0).long()) for part in x]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 2).double()


def halved(x: Array, bits: Array) -> Array:
    """Through float32, up or down."""
    pattern = x.astype(np.float32).view(np.uint32).astype(np.uint64) + bits[: len(x)]
    return (pattern & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def gradient(w: Array, x: Array, y: Array) -> Array:
    """Of softmax regression; w is the matrix (2, 5) and the bias (2)."""
    scores = x @ w[:10].reshape(2, 5).T + w[10:]
    share = np.exp(scores - scores.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    share[np.arange(len(y)), y] -= 1
    return np.concatenate([(share.T @ x / len(y)).reshape(-1), share.mean(0)])


def by_hand() -> Array:
    w = torch.cat([p.detach().reshape(-1) for p in model().parameters()]).numpy().copy()
    m, P = np.zeros(12), np.zeros(12)
    for round in range(ROUNDS):
        ended = []
        for client, (x, y) in enumerate(clients()):
            own_w, (own_m, own_P) = w.copy(), (
                halved(s, draws.generator(SEED, f"state {name}", round, client)
                       .bit_generator.random_raw(3).view(np.uint16))
                for name, s in (("m", m), ("P", P))
            )  # fmt: skip
            for k in range(STEPS):
                source = draws.generator(SEED, "state", round, client, k).bit_generator
                g = gradient(own_w, x.numpy(), y.numpy())
                own_m = BETA1 * own_m + (1 - BETA1) * g
                own_P = BETA2 * own_P + (1 - BETA2) * (g - own_m) ** 2
                own_w = own_w - LR * own_m / (np.sqrt(own_P) + TAU)
                own_m, own_P = (
                    halved(s, source.random_raw(3).view(np.uint16)) for s in (own_m, own_P)
                )
            ended.append((own_w, own_m, own_P))
        w, m, P = (np.mean([e[i] for e in ended], axis=0) for i in range(3))
    return w


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("workers", [1, 2])
def test_it_equals_numpy(engine: str, workers: int) -> None:
    data = prefed.FederatedData(clients())
    found = prefed.simulate(
        prefed.PreFed(**OPTIONS), model(), data, engine=engine, workers=workers, **SETTINGS
    )
    np.testing.assert_allclose(found.weights.numpy(), by_hand(), rtol=0, atol=1e-10)


def test_after_a_resume_and_where_clients_take_unequally_many_steps(tmp_path: Path) -> None:
    data = prefed.FederatedData(clients())
    settings: dict[str, Any] = {"local_epochs": 2, "batch_size": 2, "rounds": 3}
    algorithm = prefed.LocalAdam(client_lr=0.01, state="keep", state_dtype="bfloat16")
    one, block = (
        prefed.simulate(algorithm, model(), data, engine=e, **settings)
        for e in ("sequential", "vectorised")
    )
    torch.testing.assert_close(one.weights, block.weights, rtol=0, atol=1e-10)
    out: dict[str, Any] = {"out": tmp_path / "run", "engine": "sequential"}
    prefed.simulate(algorithm, model(), data, **settings | {"rounds": 1}, **out)
    resumed = prefed.simulate(algorithm, model(), data, **settings, **out, resume=True)
    assert torch.equal(one.weights, resumed.weights)


def test_what_is_given_block_by_block_has_noise_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(block: int) -> Tensor:
        monkeypatch.setattr("prefed.rules.halved.BLOCK", block)  # a word is noise for four numbers
        rows = torch.empty(2, 16, dtype=torch.bfloat16)
        give(
            rows, torch.full((16,), 1.001), lambda: [draws.generator(0, "x", 0, c) for c in (1, 2)]
        )
        return rows

    assert torch.equal(given(4), given(1000))
    first, second = given(1000).float()
    assert not torch.equal(first, second)
    assert len(first.unique()) == 2


def test_a_slow_moving_average_goes_on() -> None:
    """v of Adam with beta2 = .999 and gradients of 1: rounded to the nearest it stops early."""
    rule = Adam(beta2=0.999, bias_correction=False)
    w, steps = torch.zeros(1, 1000), 2000
    wrapped = Halved(rule, lambda row, k: draws.generator(0, "state", 0, row, k))
    state = {name: torch.zeros(1, 1000, dtype=torch.bfloat16) for name in ("m", "v")}
    to_nearest = torch.zeros((), dtype=torch.bfloat16)
    for k in range(steps):
        wrapped.apply(w, torch.ones_like(w), state, 0.0, k)
        to_nearest = (0.999 * to_nearest.float() + 0.001).to(torch.bfloat16)
    exact = 1 - 0.999**steps
    assert float(state["v"].float().mean()) == pytest.approx(exact, rel=0.01)
    assert float(to_nearest) < 0.6 * exact


@pytest.mark.parametrize(
    "algorithm",
    [
        prefed.SCAFFOLD(client_lr=0.1, state_dtype="bfloat16"),
        prefed.PreFed(client_lr=0.1, shape="full", state_dtype="bfloat16"),
        prefed.PreFed(client_lr=0.1, tau_relative=0.1, state_dtype="bfloat16"),
    ],
)
def test_rules_that_it_is_not_for(algorithm: prefed.Algorithm) -> None:
    with pytest.raises(PrefedError, match="state_dtype: the client rule, "):
        prefed.simulate(algorithm, model(), prefed.FederatedData(clients()), **SETTINGS)
