"""Large vectors: whether all is finite, and means in memory that is used again."""

from __future__ import annotations

import math

import pytest
import torch

from prefed.core.memory import SMALL, Memory, all_finite
from prefed.training.mean import Mean


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_found(bad: float) -> None:
    values = torch.ones(1001)
    assert all_finite(values)
    values[500] = bad
    assert not all_finite(values)
    values[501] = -bad  # infinities of both signs
    assert not all_finite(values)


def test_finite_numbers_with_an_infinite_sum_are_finite() -> None:
    assert all_finite(torch.full((10,), 3e38))
    assert all_finite(torch.tensor([], dtype=torch.float64))
    assert all_finite(torch.tensor([1 << 62] * 4))


@pytest.mark.parametrize("weights", [[1.0] * 11, [float(1 + n % 3) for n in range(11)]])
def test_means_in_memory_that_is_used_again(weights: list[float]) -> None:
    """Of large vectors, round after round: those of fresh memory to the bit."""
    generator, memory, held = torch.Generator().manual_seed(0), Memory(), set[int]()
    for _ in range(3):
        rows = torch.randn(11, SMALL, generator=generator)
        before = rows.clone()
        kept, fresh = Mean(memory), Mean()
        for mean in (kept, fresh):
            for position in (0, 1, 2, 3, 7, 6, 5, 4, 10, 9, 8):
                row = {"w": rows[position : position + 1]}
                mean.add_block(position, row, [weights[position]], [0.0])
        (found, _), (wanted, _) = kept.result(), fresh.result()
        assert torch.equal(found["w"], wanted["w"])
        assert torch.equal(rows, before)
        held.add(found["w"].data_ptr())
        memory.give(found.values())
    assert sum(map(len, memory._free.values())) <= 6  # the logarithm of the cohort, once


def test_no_more_is_held_than_was_out() -> None:
    """A mean of one block is in memory that was never taken from here."""
    memory, value = Memory(), torch.ones(SMALL)
    for _ in range(3):
        memory.give([value.clone()])
    first = memory.copy(value)
    memory.give([first, value.clone()])
    assert memory.copy(value).data_ptr() == first.data_ptr()
    assert memory.copy(value).data_ptr() != first.data_ptr()
