"""Sums over clients: those in C are torch's to the bit, and both are those of one client after
another."""

import itertools

import pytest
import torch

from prefed.core.c_programs import compiler
from prefed.training import subtrees
from prefed.training.mean import Mean

pytestmark = pytest.mark.process  # the compiler is one
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler")


@pytest.fixture
def in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subtrees, "_in_c", {})
    subtrees.compile_subtrees()
    assert set(subtrees._in_c) == set(subtrees.TYPES)


@needs_compiler
@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize("dtype", subtrees.TYPES)
@pytest.mark.parametrize("weights", [None, [0.1, 20.0, 3.0]])
def test_the_same_bits(dtype: torch.dtype, weights: list[float] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    for first, rows, size in itertools.product(range(6), [2, 3, 4, 7, 13, 32], [1, 255, 256, 700]):
        value = torch.randn(rows, size, generator=generator, dtype=dtype)
        value[0, 0], value[-1, -1] = torch.nan, torch.inf
        factors = weights and [weights[row % 3] for row in range(rows)]
        wanted = [*subtrees._summed(first, value, factors)]
        found = [*subtrees.subtrees(first, value, factors)]
        assert len(found) == len(wanted) == sum(len(x.alone) for x in subtrees.levels(first, rows))
        assert all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, wanted, strict=True)
        )
        assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(found, wanted, strict=True))


@needs_compiler
@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize("blocks", [[5, 8, 1, 6], [7, 7, 6], [20]])
def test_blocks_are_clients_one_after_another(blocks: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = (torch.rand(20, generator=generator) + 0.5).tolist()
    losses = torch.rand(20, generator=generator).tolist()
    values = {  # a part of a wider matrix, numbers of another type, and what is no vector
        "weights": torch.randn(20, 400, generator=generator)[:, :300],
        "steps": torch.rand(20, 1, generator=generator, dtype=torch.float64),
        "matrix": torch.randn(20, 3, 4, generator=generator),
        "whole": torch.arange(40).view(20, 2).to(torch.bfloat16),
    }
    together, apart, first = Mean(), Mean(), 0
    for rows in blocks:
        part = slice(first, first + rows)
        own = {name: value[part] for name, value in values.items()}
        together.add_block(first, own, weights[part], losses[part])
        first += rows
    for row in range(20):
        own = {name: value[row].clone() for name, value in values.items()}
        apart.add(row, own, weights[row], losses[row])
    (found, loss), (wanted, other) = together.result(), apart.result()
    assert loss == other
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefed.core.c_programs.compiler", lambda: None)
    monkeypatch.setattr(subtrees, "_in_c", {})
    monkeypatch.setattr("prefed.core.c_programs._made", {})
    subtrees.compile_subtrees()
    assert not subtrees._in_c
