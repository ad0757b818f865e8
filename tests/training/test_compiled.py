"""The compiled engine against the sequential one. Compiling takes seconds, so a few cases stand
for all: a rule without state, one with state that is kept, and one in lockstep."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prefed
from prefed.core.layout import Layout
from prefed.training.engines import compiled, compiled_steps
from prefed.training.engines.compiled_steps import Steps, TensorRates, cut, join
from tests.helpers.engine_runs import Net, batchnorm, chain, run, same
from tests.helpers.problems import SIZES
from tests.training.test_attention import Attends

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.skipif(
        not any(map(shutil.which, ("g++", "clang++"))), reason="there is no C++ compiler"
    ),
]


ENGINES = ("sequential", "compiled")


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Steps]:
    """What is compiled from now on."""
    made: list[Steps] = []

    class Counted(Steps):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(compiled, "Steps", Counted)
    return made


@pytest.mark.process
@pytest.mark.parametrize("name", ["fedavg", pytest.param("prefedsync", marks=pytest.mark.slow)])
def test_compiled_equals_sequential_in_float64(name: str) -> None:
    from torch._dynamo.utils import counters  # takes seconds

    counters.clear()
    same(run(name, chain(), "sequential"), run(name, chain(), "compiled"), 1e-9)
    assert not counters["graph_break"]


@pytest.mark.process
@pytest.mark.slow
def test_compiled_with_convolutions_threads_and_clipping() -> None:
    algorithm = prefed.PreFed(client_lr=0.05, momentum="keep", clip_norm=0.5, weight_decay=0.01)
    results = [
        prefed.simulate(
            algorithm, Net().double(), prefed.FederatedData(DATA, test=DATA[0]), rounds=4,
            local_steps=2, batch_size=4, engine=engine, workers=workers, device="cpu",
        )
        for engine, workers in [("sequential", 1), ("compiled", 2)]
    ]  # fmt: skip
    same(results[0], results[1], 1e-9)


def result(
    engine: str, algorithm: prefed.Algorithm, model: nn.Module, **options: Any
) -> prefed.Result:
    data = options.pop("data", None) or prefed.FederatedData(DATA, test=DATA[0])
    given = {"rounds": 4, "local_steps": 2, "batch_size": 4, "device": "cpu", **options}
    return prefed.simulate(algorithm, model, data, engine=engine, **given)


@pytest.mark.process
def test_a_schedule_compiles_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether clients are parts of one data set, or each has its own."""
    algorithm = prefed.PreFed(client_lr=prefed.schedule.cosine(0.05, rounds=4))
    x, y = (torch.cat([client[i] for client in DATA]) for i in (0, 1))
    ends = torch.tensor([len(client[1]) for client in DATA]).cumsum(0)
    parts = torch.arange(len(y)).tensor_split(ends[:-1])
    for data in (None, prefed.FederatedData((x, y), test=DATA[0], parts=parts)):
        made = counted(monkeypatch)
        one, block = (result(e, algorithm, chain(drop=0.0), data=data) for e in ENGINES)
        same(one, block, 1e-9)
        assert [steps.graphs for steps in made] == [1]
        monkeypatch.undo()


@pytest.mark.process
def test_tau_relative_is_not_compiled_and_a_line_says_so() -> None:
    algorithm = prefed.PreFed(client_lr=0.01, tau_relative=0.1)
    with pytest.warns(prefed.EngineWarning, match="not compiled: with tau_relative"):
        found = result("compiled", algorithm, chain(drop=0.0))
    same(result("vectorised", algorithm, chain(drop=0.0)), found, 0.0)


@pytest.mark.process
def test_what_is_not_compiled_runs_as_vectorised() -> None:
    same(
        run("fedavg", batchnorm(), "vectorised"), run("fedavg", batchnorm(), "compiled"), 0.0
    )  # fmt: skip


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for models that are too large for blocks."""
    monkeypatch.setattr(compiled, "SMALLEST_BLOCK", 1 << 62)


@pytest.mark.process
@pytest.mark.usefixtures("one_at_a_time")
def test_one_client_with_statistics_workers_and_a_resume(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The graph is compiled once for both workers, and again for the run that goes on."""
    made = counted(monkeypatch)
    algorithm, model = prefed.PreFed(client_lr=0.05, momentum="keep"), batchnorm()
    whole = result("compiled", algorithm, model, workers=2)
    assert [steps.graphs for steps in made if steps.graphs] == [1]
    same(result("sequential", algorithm, model), whole, 1e-9)
    folder = tmp_path / "run"
    result("compiled", algorithm, model, rounds=2, out=folder)
    more = result("compiled", algorithm, model, out=folder, resume=True)
    assert torch.equal(whole.weights, more.weights)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.usefixtures("one_at_a_time")
@pytest.mark.parametrize("kind", ["convolutions", "attention"])
def test_one_client_with_dropout(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted(monkeypatch)
    model = (Net() if kind == "convolutions" else Attends(0.3, causal=True)).double()
    plain, fast = (run("scaffold", model, engine, rounds=3) for engine in ENGINES)
    same(plain, fast, 1e-9)
    assert [steps.graphs for steps in made if steps.graphs] == [1]


@pytest.mark.process
@pytest.mark.usefixtures("one_at_a_time")
def test_what_would_take_minutes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_steps, "LARGEST", 5)
    with pytest.warns(prefed.EngineWarning, match=r"a graph of \d+ operations"):
        found = run("fedavg", batchnorm(), "compiled", rounds=3)
    same(run("fedavg", batchnorm(), "sequential", rounds=3), found, 0.0)


@pytest.mark.process
@pytest.mark.usefixtures("one_at_a_time")
def test_what_the_compiler_does_not_know_is_trained_without_it() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.lstm, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, SIZES[2])

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.lstm(x[..., None])[0][:, -1])
            return out

    model = Recurrent().double()
    with pytest.warns(prefed.EngineWarning, match="cannot be compiled"):
        found = run("fedavg", model, "compiled", rounds=3)
    same(run("fedavg", model, "sequential", rounds=3), found, 0.0)


def test_a_step_size_may_be_a_tensor() -> None:
    """In every form in which rules use it."""
    w, a, b = (torch.randn(4, dtype=torch.float64) for _ in range(3))
    index, rate = torch.tensor([0, 2]), 0.3
    forms: list[Callable[[Tensor, Any], object]] = [
        lambda w, lr: w.add_(a, alpha=-lr), lambda w, lr: w.sub_(a, alpha=lr * 2),
        lambda w, lr: w.addcdiv_(a, b, value=-lr), lambda w, lr: w.addcmul_(a, b, value=-lr),
        lambda w, lr: w.mul_(1 - lr * 0.1), lambda w, lr: w.index_add_(0, index, a[:2], alpha=-lr),
    ]  # fmt: skip
    for form in forms:
        found, expected = w.clone(), w.clone()
        form(expected, rate)
        with TensorRates():
            form(found, torch.tensor(rate, dtype=torch.float64))
        torch.testing.assert_close(found, expected)


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(prefed.PrefedError, match="needs a C\\+\\+ compiler"):
        run("fedavg", chain(), "compiled")


def test_cut_and_join_are_inverse_and_keep_channels_last() -> None:
    conv, single = (torch.randn(4, n, 2, 2).to(memory_format=torch.channels_last) for n in (3, 1))
    rest = [("bias", torch.randn(4)), ("scale", torch.randn(()))]
    layout = Layout.of([("conv", conv), ("single", single), *rest])
    rows = torch.randn(2, layout.size)
    named = cut(layout, rows)
    for row in range(2):
        for name, view in layout.views(rows[row].clone()).items():
            assert torch.equal(named[name][row], view)
            assert named[name][row].stride() == view.stride()
    assert torch.equal(join(layout, named), rows)


DATA = [
    (torch.randn(n, 5, generator=torch.Generator().manual_seed(n)).double(), torch.arange(n) % 3)
    for n in (6, 9, 12, 7)
]
