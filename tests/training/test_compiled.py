"""The compiled engine against the sequential one. Compiling takes seconds, so a few cases stand
for all: a rule without state, one with state that is kept, and one in lockstep."""

from __future__ import annotations

import shutil

import pytest
import torch

import prefed
from prefed.core.layout import Layout
from prefed.training.engines.compiled import cut, join
from tests.helpers.engine_runs import Net, batchnorm, chain, run, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.skipif(
        not any(map(shutil.which, ("g++", "clang++"))), reason="there is no C++ compiler"
    ),
]


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


@pytest.mark.process
def test_a_schedule_is_not_compiled_and_a_line_says_so() -> None:
    algorithm = prefed.FedAvg(client_lr=prefed.schedule.cosine(0.05, rounds=3))

    def result(engine: str) -> prefed.Result:
        data = prefed.FederatedData(DATA, test=DATA[0])
        return prefed.simulate(
            algorithm, Net().double(), data, rounds=3, local_steps=2, batch_size=4, engine=engine
        )

    with pytest.warns(prefed.EngineWarning, match="with a schedule for client_lr"):
        found = result("compiled")
    same(result("vectorised"), found, 0.0)


@pytest.mark.process
def test_what_is_not_compiled_runs_as_vectorised() -> None:
    same(
        run("fedavg", batchnorm(), "vectorised"), run("fedavg", batchnorm(), "compiled"), 0.0
    )  # fmt: skip


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(prefed.PrefedError, match="needs a C\\+\\+ compiler"):
        run("fedavg", chain(), "compiled")


def test_cut_and_join_are_inverse_and_keep_channels_last() -> None:
    conv = torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    layout = Layout.of([("conv", conv), ("bias", torch.randn(4)), ("scale", torch.randn(()))])
    rows = torch.randn(2, layout.size)
    named = cut(layout, rows)
    for row in range(2):
        for name, view in layout.views(rows[row].clone()).items():
            assert torch.equal(named[name][row], view)
    assert torch.equal(join(layout, named), rows)


DATA = [
    (torch.randn(n, 5, generator=torch.Generator().manual_seed(n)).double(), torch.arange(n) % 3)
    for n in (6, 9, 12, 7)
]
