"""Unequal features: noise on the inputs of each client."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset

import prefed
from prefed.core.errors import PrefedError
from prefed.experiments.config import load


def test_from_none_for_the_first_to_all_for_the_last() -> None:
    zeros = [(torch.zeros(400, 25), torch.zeros(400).long()) for _ in range(5)]
    data = prefed.FederatedData(zeros, test=zeros[0]).add_noise(0.4, seed=3)
    found = [float(data.client(c).x.std()) for c in range(5)]
    assert found[0] == 0
    assert found[1:] == pytest.approx([0.1, 0.2, 0.3, 0.4], rel=0.03)
    assert data.test is not None
    assert not data.test.x.any()
    again = prefed.FederatedData(zeros).add_noise(0.4, seed=3)
    assert torch.equal(data.client(4).x, again.client(4).x)
    other = prefed.FederatedData(zeros).add_noise(0.4, seed=4)
    assert not torch.equal(data.client(4).x, other.client(4).x)


def test_in_a_config() -> None:
    plain, noisy = (load("digits-iid", [f"data.client_noise={n}"]) for n in (0, 0.2))
    assert "client_noise" not in plain.to_dict()["data"]
    a, b = (config.make_data()[1] for config in (plain, noisy))
    last = len(a) - 1
    assert a.transform is not None
    assert a.test is not None
    assert b.test is not None
    assert torch.equal(a.transform(a.client(0).all()[0]), b.client(0).x)
    assert torch.equal(a.transform(a.test.x), b.test.x)
    found = b.client(last).x - a.transform(a.client(last).all()[0])
    assert float(found.std()) == pytest.approx(0.2, rel=0.15)
    assert load(noisy.to_dict()) == noisy


def test_what_it_is_not_for() -> None:
    class Squares(Dataset[tuple[float, int]]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, number: int) -> tuple[float, int]:
            return float(number), number % 2

    with pytest.raises(PrefedError, match="noise is for arrays"):
        prefed.FederatedData([Squares()]).add_noise(0.1)
    tokens = (torch.zeros(2, 3).long(), torch.zeros(2).long())
    with pytest.raises(PrefedError, match=r"clients\[0\]: noise is for arrays of floating"):
        prefed.FederatedData([tokens]).add_noise(0.1)
    with pytest.raises(PrefedError, match="deviation: should be above 0"):
        prefed.FederatedData([(torch.zeros(2, 1), torch.zeros(2))]).add_noise(0.0)
