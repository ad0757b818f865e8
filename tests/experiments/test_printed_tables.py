"""Tables that others printed: run, resumed, and written from records."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefed.core.errors import PrefedError
from prefed.experiments.config import load
from prefed.experiments.printed_tables import TableRuns, read, rounds_to, to_markdown
from prefed.experiments.stored_runs import StoredRun, write_archive
from prefed.experiments.toml_files import find, tables
from tests.helpers import ROOT
from tests.helpers.commands import prefed_here

TABLE = """
title = "Digits"
source = "Nobody 2020, table 1"
config = "digits-iid"
target = 0.5
notes = ['''It is
  small.''']
[[cells]]
row = "E = 1"
column = "iid"
printed = 7
set = ["rounds=12", "local_epochs=1", "model.hidden=[8]", "data.split.clients=10",
  "clients_per_round=5", "algorithm=fedavg"]
grid = { client_lr = [0.001, 0.1, 0.5] }
[[cells]]
row = "E = 2"
column = "iid"
set = ["rounds=2", "local_epochs=2", "model.hidden=[8]", "data.split.clients=10",
  "clients_per_round=5", "algorithm=fedavg", "client_lr=0.001"]
"""


def history(*accuracies: float | None) -> StoredRun:
    records = [{"round": n, "test_accuracy": a} for n, a in enumerate(accuracies, 1)]
    return StoredRun(Path(), {}, records)


@pytest.mark.parametrize(("accuracies", "rounds"), [
    ((0.2, 0.4, 0.6), 2.5),
    ((0.5,), 1.0),
    ((0.4, 0.2, 0.6), 2.5),  # from the best so far
    ((0.3, None, None, 0.7), 2.5),
    ((0.3, 0.4), None),
    ((), None),
])  # fmt: skip
def test_rounds_to_a_target_are_counted_as_in_the_paper(
    accuracies: tuple[float | None, ...], rounds: float | None
) -> None:
    found = rounds_to(0.5, history(*accuracies))
    assert found == (None if rounds is None else pytest.approx(rounds))


def test_some_cells_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TABLE)
    runs = TableRuns(*read(str(path)), tmp_path)
    assert len(runs.chosen(None)) == 4
    assert [p.title for p in runs.chosen("IID 2")] == ["E = 2 iid seed=0"]
    assert len(runs.chosen("client_lr=0.1")) == 1
    with pytest.raises(PrefedError, match="no cell has these words; there are: E = 1 iid"):
        runs.chosen("noniid")


@pytest.mark.process
def test_a_table_is_run_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TABLE)
    name, table = read(str(path))
    runs = TableRuns(name, table, tmp_path)
    assert "not run yet" in to_markdown(runs)

    def stop(planned: object, event: dict[str, object]) -> None:
        if "end" in event:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        runs.run(1, stop)
    assert to_markdown(runs).count("not run yet") == 4  # two points, and two cells
    ended: list[object] = []
    runs.run(1, lambda planned, event: ended.append(event["end"]) if "end" in event else None)
    assert ended.count("known") == 1
    assert [p.name for p in runs.folder.iterdir() if p.is_dir()] == []
    text = to_markdown(runs)
    (point, number, points), (_, other, _) = runs.results()
    assert points[0][1] == "not reached"
    assert point.changes[-1] in ("client_lr=0.1", "client_lr=0.5")
    assert number is not None
    assert other is None
    assert (
        f"| E = 1 | iid | 7 | {number:.3g} | client_lr=0.001: not reached; client_lr=0.1: " in text
    )
    assert "| E = 2 | iid |  | not reached |" in text
    assert text.endswith("\nIt is small.\n")
    assert f"--set {point.changes[-1]}`" in text


def test_a_table_of_another_number(tmp_path: Path) -> None:
    """The smallest of a grid counts, and what is shown behind it is from the same runs."""
    path = tmp_path / "mine.toml"
    more = 'measure = "objective"\nalso = ["test_accuracy", "highest objective"]\nseeds = 2'
    path.write_text(TABLE.replace("target = 0.5", more))
    runs = TableRuns(*read(str(path)), tmp_path)
    stored = []
    for planned, last in zip(runs.planned, (0.3, 0.5, 0.1, 0.2, 0.7, 0.9, 8.0, 9.0), strict=True):
        numbers = [9.0, 5.0, 1.0 + last, last]
        records = [
            {"round": n, "objective": number, "test_accuracy": last / 10, "train_loss": 1.0,
             "bytes_up": 1, "bytes_down": 1, "seconds": 1.0}
            for n, number in enumerate(numbers, 1)
        ]  # fmt: skip
        records[-1]["round"] = planned.config.rounds
        config = planned.config.to_dict()
        stored.append(StoredRun(planned.folder, config, records))
    write_archive(runs.folder, stored)
    (point, number, points), (_, other, _) = runs.results()
    assert point.changes[-1] == "client_lr=0.1"
    assert number == pytest.approx(0.15)
    assert other == pytest.approx(8.5)
    shown = "0.15 (test_accuracy 1.5, highest objective 1.15)"
    assert points[1][1] == shown
    assert f"| E = 1 | iid | 7 | {shown} |" in to_markdown(runs)


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TABLE)
    said = prefed_here("table", str(path), "--draw", "--out", "out", cwd=tmp_path).stdout
    assert "Nobody 2020, table 1\n" in said
    assert said.count("not run yet") == 5  # three points, and two cells
    assert "| E = 1 | iid | 7 | not run yet |" in (tmp_path / "out" / "mine.md").read_text()
    assert prefed_here("validate", str(path), cwd=tmp_path).stdout.endswith("a table of 4 runs\n")
    assert "is a table, not a config" in prefed_here("run", "mine.toml", cwd=tmp_path).stderr
    with pytest.raises(PrefedError, match='no such file or table; did you mean "mcmahan-2nn"'):
        find("tables", "mcmahan-2n")


@pytest.mark.parametrize("name", tables())
def test_every_table_can_be_run(name: str) -> None:
    """The config of each run is right."""
    _, table = read(name)
    assert table.cells
    for cell in table.cells:
        for changes in cell.points():
            load(table.config, changes)


RESULTS = ROOT / "docs" / "results" / "tables"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.md")), ids=lambda path: path.stem)
def test_written_tables_are_those_of_their_records(path: Path) -> None:
    name, table = read(path.stem)
    assert to_markdown(TableRuns(name, table, RESULTS)) == path.read_text()
