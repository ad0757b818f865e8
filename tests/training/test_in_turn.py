"""Sums of wide models in the order of the cohort, trees of all others, and the memory of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

import prefed
from prefed.core.layout import Layout
from prefed.core.memory import SMALL, Memory
from prefed.rules.rule import BLOCK
from prefed.training.mean import Mean
from prefed.training.means import in_turn
from prefed.training.means.in_turn import InTurn
from prefed.training.vectors import needed
from tests.helpers import ROOT
from tests.helpers.problems import local

Array = npt.NDArray[Any]
COHORTS = range(1, 18)
BUFFERED = {"asynchronous": {"buffer": 3}, "devices": {"steps_per_second": 9.0, "up": 1e3}}


def rows_of(clients: int, size: int = 5) -> Array:
    drawn = np.random.default_rng(clients).normal(size=(clients, size)) * 1e3
    return drawn.astype(np.float32)


def weights_of(clients: int, kind: str) -> list[float]:
    return [1.0 if kind == "uniform" else 1 + n % 3 + 0.1 for n in range(clients)]


def in_order(rows: dict[int, Array]) -> Array:
    """One after another, each sum rounded."""
    first, *rest = (rows[position] for position in sorted(rows))
    for row in rest:
        first = first + row
    return first


def in_tree(rows: dict[int, Array]) -> Array:
    """Halves of the least power of two that holds all positions, and halves of these."""

    def total(first: int, size: int) -> Array | None:
        if size == 1:
            return rows.get(first)
        halves = total(first, size // 2), total(first + size // 2, size // 2)
        found = [half for half in halves if half is not None]
        return found[0] + found[1] if len(found) == 2 else found[0] if found else None

    found = total(0, 1 << max(rows).bit_length())
    assert found is not None
    return found


def divided(total: Array, whole: float) -> Tensor:
    return torch.from_numpy(total.copy()).div_(whole)


SUMS = {Mean: in_tree, InTurn: in_order}


@pytest.mark.parametrize("kind", ["uniform", "own"])
@pytest.mark.parametrize("how", SUMS)
def test_sums_have_the_bits_of_their_definition_in_any_order(how: type[Mean], kind: str) -> None:
    """Whoever comes first; in turn, also if some do not come at all."""
    for clients in COHORTS:
        rows, weights = rows_of(clients), weights_of(clients, kind)
        for lost in {0, clients // 3 if how is InTurn else 0}:
            order = np.random.default_rng(lost).permutation(clients)[: clients - lost].tolist()
            mean = how()
            for n in order:
                mean.add(n, {"w": torch.from_numpy(rows[n])}, weights[n], float(n))
            times = {n: rows[n] * np.float32(weights[n]) for n in order}
            found, loss = mean.result()
            whole = sum(weights[n] for n in order)
            assert torch.equal(found["w"], divided(SUMS[how](times), whole))
            losses = np.average(order, weights=[weights[n] for n in order])
            assert loss == pytest.approx(losses, rel=1e-12)
            assert mean.clients == clients - lost


def test_blocks_and_large_vectors_have_the_same_bits() -> None:
    size, clients = BLOCK + 17, 5
    rows, weights = torch.from_numpy(rows_of(clients, size)), weights_of(clients, "own")
    single, block = InTurn(), InTurn()
    for n in (0, 1, 2, 3, 4):
        single.add(n, {"w": rows[n]}, weights[n], 0.0)
    block.add_block(3, {"w": rows[3:]}, weights[3:], [0.0] * 2)
    block.add_block(0, {"w": rows[:3]}, weights[:3], [0.0] * 3)
    assert torch.equal(single.result()[0]["w"], block.result()[0]["w"])


def test_in_turn_one_sum_is_held() -> None:
    memory, rows = Memory(), torch.randn(9, SMALL)
    for _ in range(3):
        mean = InTurn(memory)
        for n, row in enumerate(rows):
            mean.add(n, {"w": row}, 1.0 + n % 2, 0.0)
        memory.give(mean.result()[0].values())
    assert sum(map(len, memory._free.values())) == 1


def problem(clients: int) -> tuple[nn.Module, prefed.FederatedData]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        data = [(torch.randn(6, 5), torch.randint(3, (6,))) for _ in range(clients)]
    return model, prefed.FederatedData(data)


def run(algorithm: prefed.Algorithm, clients: int, workers: int, **more: Any) -> prefed.Run:
    settings = {"rounds": 2, "local_steps": 2, "batch_size": 3, "engine": "sequential"} | more
    options = prefed.Settings(workers=workers, device="cpu", **settings)
    return prefed.Run(algorithm, *problem(clients), options)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("clients", COHORTS)
def test_a_round_has_these_bits_on_any_number_of_workers(
    clients: int, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each client sends, added up by hand. Models as they were before sum along the tree."""
    if wide:
        monkeypatch.setattr(in_turn, "WIDE", 1)
    algorithm = prefed.PreFed(client_lr=0.01)
    alone = run(algorithm, clients, 1)
    (engine,) = local(alone).workers.engines  # type: ignore[union-attr]
    sent: dict[str, dict[int, Array]] = {"weights": {}, "m": {}, "P": {}}
    for client in range(clients):
        update = engine.update(algorithm, alone.server, [client], {})
        for name, rows in sent.items():
            rows[client] = update.values[name][0].numpy().copy()
    add = in_order if wide else in_tree
    expected = {name: divided(add(rows), float(clients)) for name, rows in sent.items()}
    expected["weights"] += alone.server.weights
    for workers in (1, 2, 3):
        found = run(algorithm, clients, workers)
        found.run_round()
        state = found.server.shared | {"weights": found.server.weights}
        assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("more", [{}, BUFFERED], ids=["rounds", "buffers"])
def test_wide_runs_do_not_depend_on_workers(
    engine: str, weighting: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_turn, "WIDE", 1)
    algorithm = prefed.PreFedLite(client_lr=0.01)
    how: dict[str, Any] = {"engine": engine, "weighting": weighting} | more
    first, *others = (run(algorithm, 11, workers, **how) for workers in (1, 2, 3))
    records = [record["train_loss"] for record in first.rounds()]
    for other in others:
        assert [record["train_loss"] for record in other.rounds()] == records
        assert torch.equal(other.server.weights, first.server.weights)


def test_what_algorithms_need_at_least() -> None:
    """Counted by hand: the given model; of the server, weights, state and copies; the sums; and
    of a client, weights, gradient and state."""
    layout = Layout.of([("w", torch.empty(1000, 10))])
    hands = {
        prefed.FedAvg(client_lr=0.1): 1 + 1 + 1 + 2,
        prefed.FedAvgM(client_lr=0.1): 1 + 2 + 1 + 2,
        prefed.FedAdam(client_lr=0.1, server_lr=0.1): 1 + 3 + 1 + 2,
        prefed.PreFed(): 1 + 3 + 3 + 4,
        prefed.PreFed(momentum="reset"): 1 + 2 + 2 + 4,
        prefed.PreFedM(): 1 + 4 + 2 + 4,
    }
    for algorithm, vectors in hands.items():
        assert needed(algorithm, layout).of() == pytest.approx(vectors, abs=1e-2), algorithm
    assert needed(prefed.PreFed(), layout).of(3) == pytest.approx(11 + 2 * 4, abs=1e-2)


SLOW = pytest.mark.slow
CASES = [("FedAvg", 1), ("PreFedLite", 1), *(
    pytest.param(name, workers, marks=SLOW)
    for name, workers in [("FedAdam", 1), ("PreFed", 1), ("FedAvg", 2), ("PreFed", 2)]
)]  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize(("name", "workers"), CASES)
def test_no_vector_too_many_is_held(name: str, workers: int) -> None:
    """The most that a process held, over what it held before the model was built. What is not the
    run's vectors is a part of one: temporary gradients, and what the allocator does not give
    back, of each thread."""
    code = f"import large; large.warm_up(); large.hold({name!r}, 11, {workers})"
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "bench")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = json.loads(done.stdout)
    assert found["needed"] <= found["vectors"] <= found["needed"] + 2 + (workers - 1)
