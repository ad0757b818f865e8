"""State that clients keep, in memory and on disk: the same bits, whatever happens in between."""

from __future__ import annotations

import logging
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import prefed
from prefed.core.errors import CannotWrite, PrefedError, RunFailed
from prefed.experiments import checkpoints, run_directory, same_config
from prefed.experiments.checkpoints import CheckpointWarning
from prefed.rules import State
from prefed.training.kept import InMemory, OnDisk, disk, estimate
from prefed.training.kept.disk import FILE
from prefed.training.ranks import RankTrainer
from tests.helpers.engine_runs import batchnorm
from tests.helpers.problems import CLIENT_SIZES, local, tiny_data, tiny_model
from tests.helpers.run_folders import fingerprint

HELD: dict[str, Any] = {"kind": "average", "every": 3, "between": "keep"}
ALGORITHMS: dict[str, tuple[prefed.Algorithm, Any]] = {
    "control variates": (prefed.SCAFFOLD(client_lr=0.3), tiny_model),
    "momentum": (prefed.PreFed(client_lr=0.01, momentum="keep"), tiny_model),
    "matrices": (prefed.PreFed(client_lr=0.01, momentum="keep", shape="kronecker"), tiny_model),
    "error feedback": (prefed.FedAvg(client_lr=0.3, upload="topk(0.2)"), tiny_model),
    "between averages": (prefed.Pair(client="adam", client_lr=0.01, share={"v": HELD}), tiny_model),
    "statistics": (prefed.FedAvg(client_lr=0.3, statistics="keep"), batchnorm),
    "personal parts": (prefed.FedBN(client_lr=0.3, upload="topk(0.5)"), batchnorm),
    "personal and kept": (prefed.PreFed(client_lr=0.01, personal=("@last",)), batchnorm),
}
SETTINGS: dict[str, Any] = {"rounds": 7, "local_steps": 2, "batch_size": 3, "clients_per_round": 3}
SETTINGS |= {"device": "cpu", "engine": "sequential"}


RECORD = 320
"""Bytes that a client of SCAFFOLD keeps here: 39 numbers of eight bytes, and what fills it up."""


@pytest.fixture
def every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after each."""
    monkeypatch.setattr(run_directory, "SECONDS_BETWEEN", 0.0)


class StopAt(prefed.Callback):
    def __init__(self, round: int) -> None:
        self.round = round

    def on_round(self, record: dict[str, Any]) -> None:
        if record["round"] == self.round:
            self.run.stop()


def simulate(name: str, out: Path | None = None, stop: int = 0, **more: Any) -> prefed.Result:
    algorithm, model = ALGORITHMS[name]
    given = SETTINGS | {"out": out, "callbacks": [StopAt(stop)]} | more
    return prefed.simulate(algorithm, model(), tiny_data(), **given)


def same(a: prefed.Result, b: prefed.Result) -> None:
    assert torch.equal(a.weights, b.weights)
    assert torch.equal(a.server.buffers, b.server.buffers)
    assert {*a.kept} == {*b.kept} != set()
    for client, state in a.kept.items():
        assert state.keys() == b.kept[client].keys()
        for name, value in state.items():
            assert value.dtype == b.kept[client][name].dtype
            assert torch.equal(value, b.kept[client][name])
        parts = (r.client_model(client).state_dict().values() for r in (a, b))
        assert all(map(torch.equal, *parts))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_the_same_bits(name: str, engine: str, tmp_path: Path) -> None:
    """On disk, in a temporary file, by two workers, resumed from either checkpoint."""
    memory = simulate(name, tmp_path / "memory", engine=engine)
    assert isinstance(memory.kept, InMemory)
    assert not (tmp_path / "memory" / FILE).exists()
    for folder in (None, tmp_path / "disk"):
        for workers in (1, 2):
            out = folder and folder / str(workers)
            found = simulate(name, out, engine=engine, workers=workers, kept_state="disk")
            assert isinstance(found.kept, OnDisk)
            same(found, memory)
    for older in (False, True):
        out = tmp_path / "cut" / str(older)
        for stop in (3, 4, 5):
            resumed: dict[str, Any] = {"resume": True, "kept_state": "disk", "engine": engine}
            with pytest.raises(prefed.Interrupted):
                simulate(name, out, stop, **resumed)
        newest = sorted((out / "checkpoints").iterdir())[-1]
        assert newest.name == "000005"
        if older:
            (newest / "rounds.jsonl").unlink()
            with pytest.warns(CheckpointWarning, match="going on from round 4"):
                same(simulate(name, out, **resumed), memory)
        else:
            same(simulate(name, out, **resumed), memory)
        assert fingerprint(out) == fingerprint(tmp_path / "disk" / "1")


@pytest.mark.parametrize("skipped", [{}, {"quorum": 3, "client_dropout": 0.5}])
def test_a_run_may_be_stopped_again_and_again(skipped: dict[str, Any], tmp_path: Path) -> None:
    """Also if rounds were left out, after which a checkpoint names what the last one does."""
    whole = simulate("control variates", tmp_path / "whole", **skipped)
    for stop in range(1, 7):
        with pytest.raises(prefed.Interrupted):
            simulate("control variates", tmp_path / "parts", stop, resume=True, kept_state="disk",
                     **skipped)  # fmt: skip
    again = simulate("control variates", tmp_path / "parts", resume=True, kept_state="disk",
                     **skipped)  # fmt: skip
    same(again, whole)


@pytest.mark.usefixtures("every_round")
def test_the_file_stays_as_large_as_what_is_in_use(tmp_path: Path) -> None:
    """Each place is used again when no checkpoint needs it: what clients keep, and at most three
    cohorts more."""
    simulate("control variates", tmp_path, rounds=40, kept_state="disk")
    records = (tmp_path / FILE).stat().st_size // RECORD
    assert len(CLIENT_SIZES) < records <= len(CLIENT_SIZES) + 3 * 3


def test_a_checkpoint_does_not_hold_it(tmp_path: Path) -> None:
    def size(kept_state: str) -> int:
        simulate("matrices", tmp_path / kept_state, kept_state=kept_state)
        return (tmp_path / kept_state / "checkpoints/000007/state.safetensors").stat().st_size

    assert size("disk") < size("memory") - 6 * 8 * tiny_model()[0].weight.numel()  # type: ignore


def test_where_it_is_held_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    """From memory to disk, as one must who had too little; what is on disk stays there."""
    whole = simulate("momentum", tmp_path / "whole")
    folder = tmp_path / "run"
    with pytest.raises(prefed.Interrupted):
        simulate("momentum", folder, 3)
    with pytest.raises(prefed.Interrupted):
        simulate("momentum", folder, 5, resume=True, kept_state="disk")
    assert (folder / FILE).exists()
    again = simulate("momentum", folder, resume=True, kept_state="memory")
    assert isinstance(again.kept, OnDisk)
    same(again, whole)
    assert fingerprint(folder) == fingerprint(tmp_path / "whole")


def test_it_is_taken_as_a_whole_from_a_run_without_a_directory() -> None:
    """A snapshot that goes elsewhere has what clients keep."""
    algorithm, model = ALGORITHMS["control variates"]

    def make(kept_state: Any) -> prefed.Run:
        settings = prefed.Settings(**SETTINGS | {"kept_state": kept_state})
        return prefed.Run(algorithm, model(), tiny_data(), settings)

    first = make("disk")
    list(first.rounds(3))
    assert isinstance(local(first).kept, OnDisk)
    for where in ("memory", "disk"):
        second = make(where)
        second.restore(first.snapshot(), first.history)
        same(second.run(), make("memory").run())


def test_an_asynchronous_run_has_the_same_bits(tmp_path: Path) -> None:
    """Clients that began before a stop have read what they kept then."""
    late: dict[str, Any] = {"devices": "phone", "asynchronous": {"buffer": 2, "concurrency": 4}}
    late |= {"rounds": 12, "clients_per_round": None}
    whole = simulate("control variates", **late)
    same(simulate("control variates", kept_state="disk", workers=2, **late), whole)
    with pytest.raises(prefed.Interrupted):
        simulate("control variates", tmp_path, 5, kept_state="disk", **late)
    same(simulate("control variates", tmp_path, resume=True, **late), whole)


def test_ranks_have_it_in_memory() -> None:
    algorithm, model = ALGORITHMS["control variates"]
    run = prefed.Run(algorithm, model(), tiny_data(), prefed.Settings(**SETTINGS))
    trainer = RankTrainer(algorithm, run.task, run.data, run.settings)
    with pytest.raises(PrefedError, match='kept_state: "disk" is for runs in one process'):
        trainer._settled(1, "disk")
    assert isinstance(trainer._settled(1, "auto"), InMemory)
    with pytest.raises(PrefedError, match="on disk, which is for runs in one process"):
        trainer.load_state({"kept.store.places": torch.tensor([0])}, "")
    with pytest.raises(PrefedError, match="in a file of the run's directory; resume the run there"):
        run.trainer.load_state({"kept.store.places": torch.tensor([0])}, "")


# What is damaged, missing or full


def interrupted(folder: Path) -> None:
    """After round 5, with checkpoints of rounds 0 and 5."""
    with pytest.raises(prefed.Interrupted):
        simulate("control variates", folder, 5, kept_state="disk")


def test_damage_is_told_with_the_name_of_the_file(tmp_path: Path) -> None:
    interrupted(tmp_path)
    content = bytearray((tmp_path / FILE).read_bytes())
    for place in range(0, len(content), 64):
        content[place] ^= 1
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(RunFailed, match=r"kept.records: is damaged: what client \d keeps is not"):
        simulate("control variates", tmp_path, resume=True)


@pytest.mark.parametrize(
    ("how", "text"), [("cut", "kept.records: is damaged or of another run: it has 1 records"),
                      ("removed", "kept.records: is not there, and what clients keep is in it")]
)  # fmt: skip
def test_a_file_that_is_not_whole_is_refused(how: str, text: str, tmp_path: Path) -> None:
    interrupted(tmp_path)
    path = tmp_path / FILE
    content = path.read_bytes()
    path.write_bytes(content[:RECORD]) if how == "cut" else path.unlink()
    with pytest.raises(PrefedError, match=text):
        simulate("control variates", tmp_path, resume=True)
    assert not path.exists() or path.read_bytes() == content[:RECORD]
    path.write_bytes(content)
    simulate("control variates", tmp_path, resume=True)


def test_a_checkpoint_that_names_what_is_not_there(tmp_path: Path) -> None:
    """Only a forged one can: it has fitting checksums."""
    store = OnDisk(None, {"m": torch.zeros(3)}, 4, torch.device("cpu"))
    store.put(1, {2: {"m": torch.ones(3)}})
    store.path = tmp_path / FILE
    good = store.state()
    (tmp_path / FILE).write_bytes(bytes(16))
    bad: dict[str, list[int]] = {
        "kept.clients": [4], "kept.store.places": [1], "kept.store.older": [-1],
        "kept.store.sums": [1, 2], "kept.store.round": [1],
    }  # fmt: skip
    OnDisk(tmp_path, {"m": torch.zeros(3)}, 4, torch.device("cpu"), good)
    for name, numbers in bad.items():
        with pytest.raises(PrefedError, match=r"not those that|does not fit this run"):
            saved = good | {name: torch.tensor(numbers)}
            OnDisk(tmp_path, {"m": torch.zeros(3)}, 4, torch.device("cpu"), saved)


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a round; the run goes on when there is room."""
    whole = simulate("control variates", tmp_path / "whole")
    real, calls = disk._write, 0

    def write(file: int, record: Any, at: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 8:
            real(file, record[:7], at)
            raise OSError(28, "No space left on device")
        real(file, record, at)

    monkeypatch.setattr(disk, "_write", write)
    with pytest.raises(CannotWrite, match=r"kept.records: cannot be written: No space left"):
        simulate("control variates", tmp_path / "run", kept_state="disk")
    monkeypatch.setattr(disk, "_write", real)
    same(simulate("control variates", tmp_path / "run", resume=True), whole)


@pytest.mark.usefixtures("every_round")
def test_what_was_not_flushed_is_in_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is asked again, at the end, the system has forgotten what it could not write."""
    whole = simulate("control variates", tmp_path / "whole")
    real, failed = os.fsync, list[int]()

    def fsync(file: int) -> None:
        is_ours = os.readlink(f"/proc/self/fd/{file}").endswith(FILE)
        if is_ours and os.fstat(file).st_size > 3 * RECORD and not failed:
            failed.append(file)
            raise OSError(5, "Input/output error")
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CannotWrite, match=r"kept.records: cannot be written: Input/output error"):
        simulate("control variates", tmp_path / "run", kept_state="disk")
    assert failed
    there = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert there == ["000000", "000001"]
    same(simulate("control variates", tmp_path / "run", resume=True), whole)


# Which


Usage = namedtuple("Usage", "total used free")


def settled(where: Any, folder: Path | None, clients: int = 1000) -> Any:
    like: State = {"m": torch.zeros(10_000)}
    device = torch.device("cpu")
    return estimate.settle(InMemory(), where, like, clients, clients, folder, device)


def test_it_is_chosen_by_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "prefed")
    monkeypatch.setattr(estimate, "free_memory", lambda device: 100 << 20)
    assert isinstance(settled("auto", None), InMemory)  # 41 of 50 MB
    assert not caplog.records
    assert isinstance(settled("auto", tmp_path), OnDisk)  # checkpoints copy it
    text = "kept state: up to 1,000 clients x 40 kB = 40 MB, on disk: "
    assert text + f"{tmp_path / FILE}" in caplog.text
    assert "in memory it would be 184 MB with checkpoints, 105 MB are free" in caplog.text
    caplog.clear()
    assert isinstance(settled("auto", None, 2000), OnDisk)
    assert "a temporary file in" in caplog.text
    caplog.clear()
    assert isinstance(settled("memory", tmp_path), InMemory)
    assert "in memory, where it may not fit" in caplog.text
    assert caplog.records[0].levelname == "WARNING"
    monkeypatch.setattr(estimate, "free_memory", lambda device: 1 << 40)
    assert isinstance(settled("auto", tmp_path, 10_000), InMemory)  # 400 MB
    caplog.clear()
    assert isinstance(settled("auto", tmp_path, 20_000), OnDisk)
    assert "; checkpoints would copy it from memory" in caplog.text
    assert isinstance(settled("auto", None, 20_000), InMemory)
    monkeypatch.setattr(estimate, "free_memory", lambda device: 100 << 20)
    monkeypatch.setattr(estimate, "LARGE", 1000)
    caplog.clear()
    settled("auto", None)
    assert "= 40 MB, in memory (41 MB, 105 MB are free)" in caplog.text


def test_a_disk_that_is_too_small_is_told_before_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 1000))
    text = r"kept_state: up to 6 clients x 320 bytes = 1.92 kB would not fit on the disk: .* has"
    with pytest.raises(PrefedError, match=text):
        simulate("control variates", tmp_path / "run", kept_state="disk")
    assert not (tmp_path / "run" / "config.toml").exists()
    with pytest.raises(PrefedError, match=r"directory \(out, or TMPDIR\) on a larger disk"):
        simulate("control variates", kept_state="disk")
    monkeypatch.undo()
    with pytest.raises(prefed.Interrupted):
        simulate("control variates", tmp_path / "run", 1, kept_state="disk")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 2 * RECORD))
    with pytest.raises(PrefedError, match="would not fit on the disk"):
        simulate("control variates", tmp_path / "run", resume=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 3 * RECORD))
    simulate("control variates", tmp_path / "run", resume=True)


def test_few_rounds_reach_few_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is of those who can take part, in the rounds that are left."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 3 * RECORD))
    simulate("control variates", tmp_path / "run", kept_state="disk", rounds=1)
    with pytest.raises(PrefedError, match="up to 6 clients"):
        simulate("control variates", tmp_path / "more", kept_state="disk", rounds=2)


def test_old_checkpoints_are_as_they_were(tmp_path: Path) -> None:
    """In memory, and of algorithms whose clients keep nothing: the tensors have the old names."""
    for where in ("auto", "memory"):
        simulate("control variates", tmp_path / where, kept_state=where)
        saved = checkpoints._read(tmp_path / where / "checkpoints/000007", _run(tmp_path / where),
                                  tuple)  # fmt: skip
        assert {n for n in saved.tensors if n.startswith("kept")} == {"kept.clients", "kept.c_i"}
    assert "kept_state" not in (tmp_path / "auto" / "config.toml").read_text()
    result = prefed.simulate(prefed.FedAvg(client_lr=0.1), nn.Linear(5, 3).double(), tiny_data(),
                             out=tmp_path / "none", **SETTINGS, kept_state="disk")  # fmt: skip
    assert not result.kept
    assert not (tmp_path / "none" / FILE).exists()


def _run(folder: Path) -> str:
    return same_config.fingerprint((folder / "config.toml").read_text())


@pytest.mark.usefixtures("every_round")
@pytest.mark.parametrize("dies", [6, 14])
def test_either_checkpoint_of_a_long_run_will_do(
    dies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kill leaves them before the next is written: places have been used again since the
    older one."""
    real = checkpoints.save

    def save(folder: Path, run: str, checkpoint: checkpoints.Checkpoint) -> None:
        if checkpoint.round == dies:
            for name in ("newest", "older"):
                shutil.copytree(tmp_path / "run", tmp_path / name)
        real(folder, run, checkpoint)

    monkeypatch.setattr(checkpoints, "save", save)
    whole = simulate("momentum", tmp_path / "run", rounds=16, kept_state="disk")
    monkeypatch.undo()
    same(whole, simulate("momentum", rounds=16))
    shutil.rmtree(tmp_path / "older" / "checkpoints" / f"{dies - 1:06d}")
    for name in ("newest", "older"):
        same(simulate("momentum", tmp_path / name, rounds=16, resume=True), whole)
