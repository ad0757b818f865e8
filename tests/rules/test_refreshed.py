"""What rules work out every few steps: clients of a block go by counts of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import prefed
from prefed.rules.refreshed import due
from prefed.rules.soap import SOAP, eigenvectors
from prefed.rules.spectral import Spectral
from tests.helpers.engine_runs import chain, same
from tests.helpers.problems import tiny_data

COVARIANCE = {"name": "covariance", "refresh": 3, "tau": 0.1}
STEPS: list[dict[str, int]] = [{"local_steps": 4}, {"local_epochs": 2}]
CASES: dict[str, tuple[Any, list[str]]] = {
    **{shape: (COVARIANCE | {"shape": shape}, ["P"]) for shape in ("kronecker", "full", "block")},
    "corrected": (COVARIANCE | {"shape": "kronecker", "bias_correction": True}, ["P"]),
    "all of it": (COVARIANCE | {"shape": "block"}, ["m", "P", "root", "steps_left"]),
    "soap": (SOAP(refresh=3, tau=1e-3), ["m", "v", "P", "basis", "steps_left"]),
    "spectral": (Spectral(refresh=3), ["m", "P", "u", "steps_left"]),
}


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_kept_state_is_the_same_in_every_engine(case: str, steps: dict[str, int]) -> None:
    """Three of six clients in a round: some are there for the first time, others have other counts
    behind them."""
    client, kept = CASES[case]
    pair = prefed.Pair(client=client, client_lr=0.01, share=dict.fromkeys(kept, prefed.keep()))
    one, other = (
        prefed.simulate(
            pair, chain(drop=0), tiny_data(), rounds=6, clients_per_round=3, batch_size=4,
            engine=engine, device="cpu", **steps,  # type: ignore[arg-type]
        )
        for engine in ("sequential", "vectorised")
    )  # fmt: skip
    for state in (*one.kept.values(), *other.kept.values()):
        state.pop("basis", None)  # eigenvectors, which are known up to their sign
    same(one, other, 1e-9)


def test_each_client_goes_by_its_own_count() -> None:
    left = torch.tensor([[0.0], [2.0], [1.0], [-0.5]])  # a count that was no whole number ends too
    rows = due(left, 3)
    assert isinstance(rows, torch.Tensor)
    assert rows.tolist() == [0, 3]
    assert left.flatten().tolist() == [2.0, 1.0, 0.0, 2.0]
    assert due(torch.ones(2, 1), 3) is None
    assert due(torch.zeros(2, 1), 3) == slice(None)
    assert due(torch.zeros(1), 3) == slice(None)


def test_factors_that_are_not_finite_are_those_of_one_client() -> None:
    factors = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    factors = factors @ factors.mT
    alone = eigenvectors(factors[:1])
    factors[1, 0, 0] = torch.nan
    torch.testing.assert_close(eigenvectors(factors)[:1], alone)
