"""Records of large cohorts take little memory, and look like any other."""

from __future__ import annotations

import copy
import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import prefed
from prefed.core.safe_files import to_json
from prefed.training.records import LARGE, Compact, compact
from prefed.training.result import frame

PLAIN: dict[str, Any] = {"round": 1, "cohort": [*range(1000, 1000 + LARGE)], "train_loss": 0.5}


def test_it_looks_like_a_dict_with_a_list() -> None:
    record = compact(PLAIN)
    assert isinstance(record, Compact)
    assert type(dict.__getitem__(record, "cohort")) is not list
    cohort = PLAIN["cohort"]
    assert type(record["cohort"]) is list
    for seen in (
        record["cohort"], record.get("cohort"), dict(record)["cohort"], {**record}["cohort"],
        (record | {"more": 1})["cohort"], ({"less": 1} | record)["cohort"], record.copy()["cohort"],
        [*record.values()][1], dict(record.items())["cohort"], copy.deepcopy(record)["cohort"],
        copy.copy(record)["cohort"], pickle.loads(pickle.dumps(record))["cohort"],  # noqa: S301
        json.loads(json.dumps(record))["cohort"], compact(PLAIN).pop("cohort"),
    ):  # fmt: skip
        assert seen == cohort
    assert record == PLAIN
    assert PLAIN == record  # noqa: SIM300
    assert record != PLAIN | {"cohort": []}
    assert [*record] == [*PLAIN]
    assert repr(record) == repr(PLAIN)
    assert json.dumps(record) == json.dumps(PLAIN)
    assert to_json([record]) == to_json([PLAIN])
    assert record.get("none", 3) == 3
    record |= {"seconds": 1.0}
    assert record["seconds"] == 1.0
    with pytest.raises(KeyError):
        record["none"]
    assert "cohort" in record


def test_pandas_has_the_same_table() -> None:
    pytest.importorskip("pandas")
    assert frame([compact(PLAIN)]).equals(frame([PLAIN]))


@pytest.mark.parametrize("cohort", [[1, 2], None, ["a"] * LARGE, [1.5] * LARGE, [1 << 40] * LARGE])
def test_what_stays_as_it_is(cohort: Any) -> None:
    """Small cohorts, and what files of others may hold."""
    record = {"cohort": cohort}
    assert compact(record) is record


def test_a_tenth_of_the_memory() -> None:
    def size(make: Any) -> int:
        tracemalloc.start()
        held = [make({"cohort": [1000 + n for n in range(10_000)]}) for _ in range(10)]
        found, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return found // len(held)

    assert size(compact) < 45_000 < 380_000 < size(dict)


def test_a_run_of_large_cohorts(tmp_path: Path) -> None:
    """Callbacks, history and rounds.jsonl have the list; a resumed run has them from the file."""
    data = prefed.FederatedData([(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(120)])
    model, seen = nn.Linear(3, 2), list[Any]()

    class See(prefed.Callback):
        def on_round(self, record: dict[str, Any]) -> None:
            assert record is self.run.history[-1]
            seen.append(record["cohort"])

    def run(rounds: int, resume: bool) -> prefed.Result:
        return prefed.simulate(
            prefed.FedAvg(client_lr=0.1), model, data, rounds=rounds, local_steps=1,
            batch_size=2, clients_per_round=110, device="cpu", out=tmp_path / "run", resume=resume,
            callbacks=[See()],
        )  # fmt: skip

    run(2, False)
    result = run(4, True)
    lines = (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["cohort"] for line in lines] == seen
    assert [record["cohort"] for record in result.history] == seen
    assert all(isinstance(record, Compact) for record in result.history)
    assert [to_json(record) for record in result.history] == lines
