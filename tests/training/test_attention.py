"""Attention: in plain lines where vmap wants it, and with dropout that has keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import prefed
from prefed.training.keyed_dropout import KeyedDropout, attention, keys
from tests.helpers.engine_runs import run, same
from tests.helpers.problems import SIZES


class Attends(nn.Module):
    """Each input number is a token."""

    def __init__(self, drop: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.drop, self.causal = drop, causal
        self.embed = nn.Linear(1, 3 * 8)
        self.head = nn.Linear(8 * SIZES[0], SIZES[2])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.embed(x[..., None]).view(*x.shape, 3, 2, 4).transpose(1, 3).unbind(2)
        p = self.drop if self.training else 0.0
        out = scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        mixed: Tensor = self.head(out.transpose(1, 2).flatten(1))
        return mixed


CASES: list[dict[str, Any]] = [
    {}, {"is_causal": True}, {"scale": 0.3},
    {"attn_mask": torch.tensor([[True, False, True], [True, True, True]])},
    {"attn_mask": torch.randn(2, 3, dtype=torch.float64)},
]  # fmt: skip


@pytest.mark.parametrize("options", CASES, ids=[str(n) for n in range(len(CASES))])
def test_plain_lines_are_those_of_torch(options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(2, 4, n, 5, dtype=torch.float64) for n in (2, 3, 3))
    found = attention(q, k, v, **options, drop=lambda x, p: x)
    torch.testing.assert_close(found, scaled_dot_product_attention(q, k, v, **options))


def test_fewer_heads_of_keys() -> None:
    q, k, v = (torch.randn(2, heads, 3, 5, dtype=torch.float64) for heads in (4, 2, 2))
    found = attention(q, k, v, enable_gqa=True, drop=lambda x, p: x)
    torch.testing.assert_close(found, scaled_dot_product_attention(q, k, v, enable_gqa=True))


def test_dropout_in_attention_has_a_key() -> None:
    q, k, v = (torch.randn(1, 2, 400, 5) for _ in range(3))
    ones = torch.ones_like(v)
    key = keys([7], torch.device("cpu"))[0]
    with KeyedDropout(key) as mode:
        kept = scaled_dot_product_attention(q, k, ones, dropout_p=0.25)
    assert mode.calls == 1
    assert kept.mean() == pytest.approx(1, abs=0.02)  # what is left is scaled up
    assert kept.std() > 0
    with KeyedDropout(key):
        assert torch.equal(kept, scaled_dot_product_attention(q, k, ones, dropout_p=0.25))


@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_vectorised_equals_sequential(drop: float, causal: bool) -> None:
    model = Attends(drop, causal).double()
    one, block = (run("prefed", model, engine, rounds=4) for engine in ("sequential", "vectorised"))
    same(one, block, 1e-9)


def test_workers_share_a_model_with_dropout_in_its_attention() -> None:
    model = Attends(0.3).double()
    settings = prefed.Settings(rounds=1, local_steps=1)
    made = prefed.Run(prefed.FedAvg(), model, small(), settings)
    assert made.task.randomness == "dropout"
    one, two = (run("fedavg", model, "sequential", rounds=3, workers=n) for n in (1, 2))
    same(one, two, 0.0)


def small() -> prefed.FederatedData:
    x = torch.randn(3, 4, SIZES[0], dtype=torch.float64)
    return prefed.FederatedData([(part, torch.arange(4) % SIZES[2]) for part in x])
