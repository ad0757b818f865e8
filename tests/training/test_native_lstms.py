"""LSTMs in C, against autograd and the sequential engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import prefed
from prefed.core.layout import Layout
from prefed.models.chars import CharLSTM
from prefed.training.engines.native_program import Program
from prefed.training.engines.native_writing import NotNative
from tests.helpers.engine_runs import run, same
from tests.helpers.native_gradients import LENGTH, SYMBOLS, compare, text

pytestmark = pytest.mark.process


def lstm() -> CharLSTM:
    return CharLSTM(SYMBOLS, embedding=3, hidden=10, layers=2)


SIZES = {
    "one symbol": (1, SYMBOLS, 3, 5, 1),
    "several layers, no whole vectors": (21, SYMBOLS, 5, 13, 3),
    "a wide embedding, whole vectors": (6, SYMBOLS, 17, 16, 1),
    "more classes than features": (9, 40, 8, 6, 2),
}
"""The length of a sequence, symbols, embedding, hidden, layers."""


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_and_outputs_are_those_of_the_module(
    sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Of three clients, in batches that one pass holds, that need several, and whose last is short;
    infinite weights end in NaN."""
    times, symbols, *shape = sizes
    torch.manual_seed(0)
    model = CharLSTM(symbols, *shape).to(dtype)
    layout = Layout.of(model.named_parameters())
    program = Program(model, layout, (times,), dtype, 20)
    generator = torch.Generator().manual_seed(1)
    w = 0.5 * torch.randn(3, layout.size, dtype=dtype, generator=generator)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for batch in (1, 3, 13, 20, 45):
        x, y = (torch.randint(symbols, (3, batch, times), generator=generator) for _ in range(2))
        compare(program, model, layout, w, (x.to(dtype), y), tolerance)
        found = program.outputs(w[1], x[1].to(dtype), program.scratch())
        wanted = torch.func.functional_call(model, layout.views(w[1]), (x[1],))
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_large_sums_saturate_the_gates() -> None:
    """Neither 0 over 0 nor an overflow, and small numbers keep their digits."""
    torch.manual_seed(0)
    model = CharLSTM(SYMBOLS, 4, 8, 1)
    layout = Layout.of(model.named_parameters())
    program = Program(model, layout, (5,), torch.float32, 4)
    w = torch.cat([value.detach().flatten() for value in model.parameters()])[None]
    x = torch.arange(5).expand(1, 4, 5).float().contiguous()
    y = torch.zeros(1, 4, 5, dtype=torch.int64)
    for scale in (1e-6, 1e-3, 30.0, 3e4):
        found = program.outputs(scale * w[0], x[0], program.scratch())
        wanted = torch.func.functional_call(model, layout.views(scale * w[0]), (x[0],))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7 * scale)
        g, losses = torch.empty_like(w), w.new_zeros(1)
        program.gradients(scale * w, g, x, y, losses, program.scratch())
        assert g.isfinite().all()


@pytest.mark.parametrize("name", ["fedavg", "prefed", "prefeds", "scaffold", "fedadam", "mimelite"])
def test_runs_equal_those_of_the_sequential_engine(name: str) -> None:
    torch.manual_seed(0)
    model = lstm().double()
    one, other = (
        run(name, model, engine, data=text(), rounds=2) for engine in ("sequential", "native")
    )
    same(one, other, 1e-9)


def test_labels_that_the_model_draws_go_through_autograd() -> None:
    """vmap, which other models take for it, does not know an LSTM."""
    torch.manual_seed(0)
    model = lstm().double()
    algorithm = prefed.FedPAC(rule="sophia", client_lr=0.01)
    settings: dict[str, Any] = {"rounds": 2, "local_steps": 2, "batch_size": 4}
    one, other = (
        prefed.simulate(algorithm, model, text(), engine=engine, **settings)
        for engine in ("sequential", "native")
    )
    same(one, other, 1e-9)


CHANGES: dict[str, Callable[[Any], object]] = {
    "both directions": lambda m: setattr(m, "lstm", nn.LSTM(3, 5, bidirectional=True)),
    "no bias": lambda m: setattr(m, "lstm", nn.LSTM(3, 10, 2, bias=False, batch_first=True)),
    "a projection": lambda m: setattr(m, "lstm", nn.LSTM(3, 12, 2, proj_size=10, batch_first=True)),
    "dropout": lambda m: setattr(m.lstm, "dropout", 0.5),
    "a GRU": lambda m: setattr(m, "lstm", nn.GRU(3, 10, 2, batch_first=True)),
    "time first": lambda m: setattr(m.lstm, "batch_first", False),
    "another head": lambda m: setattr(m, "head", nn.Linear(10, SYMBOLS, bias=False)),
    "a symbol that does not count": lambda m: setattr(m.embed, "padding_idx", 0),
    "one layer more": lambda m: m.add_module("more", nn.Linear(2, 2)),
    "another width": lambda m: setattr(m, "lstm", nn.LSTM(3, 12, 2, batch_first=True)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_models_that_were_changed_are_not_written(change: Callable[[Any], object]) -> None:
    model = lstm()
    change(model)
    with pytest.raises(NotNative):
        Program(model, Layout.of(model.named_parameters()), (LENGTH,), torch.float32, 4)


def test_a_symbol_that_the_model_does_not_have_is_an_error() -> None:
    x, y = text().client(0).all()
    for bad in (SYMBOLS, -1):
        wrong = x.long()
        wrong[-1, 3] = bad
        one = prefed.FederatedData([(wrong, y)])
        with pytest.raises((IndexError, prefed.PrefedError), match="symbol"):
            run("fedavg", lstm(), "native", data=one, rounds=1, clients_per_round=None)
