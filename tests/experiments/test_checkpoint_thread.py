"""Checkpoints are written by a thread while the run goes on: the same files, errors and bits."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import prefed
from prefed.core.errors import CannotWrite
from prefed.experiments import checkpoints, run_directory
from prefed.experiments.checkpoints import Checkpoint
from prefed.experiments.run_directory import execute
from prefed.training.observers import Callback
from tests.helpers.run_folders import fingerprint, leftovers, small

SAVE = checkpoints.save


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is due as soon as the last is written."""
    monkeypatch.setattr(run_directory, "RARE", 0)


class Slow:
    """checkpoints.save, held up until it is let go."""

    def __init__(self) -> None:
        self.go, self.inside, self.most = threading.Event(), 0, 0
        self.rounds: list[int] = []
        self.threads: set[int] = set()

    def __call__(self, folder: Path, run: str, checkpoint: Checkpoint) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.rounds.append(checkpoint.round)
        self.threads.add(threading.get_ident())
        if checkpoint.round:
            assert self.go.wait(30)
        SAVE(folder, run, checkpoint)
        self.inside -= 1


class LetGo(Callback):
    """Lets the writer go after so many rounds; notes the weights of each."""

    def __init__(self, slow: Slow, after: int) -> None:
        self.slow, self.after = slow, after
        self.weights: dict[int, torch.Tensor] = {}

    def on_round(self, record: dict[str, Any]) -> None:
        self.weights[record["round"]] = self.run.server.weights.clone()
        if record["round"] == self.after:
            self.slow.go.set()


def test_rounds_go_on_while_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, slow = small("prefed"), Slow()
    execute(config, tmp_path / "plain")
    monkeypatch.setattr(checkpoints, "save", slow)
    look = LetGo(slow, after=3)
    execute(config, tmp_path / "run", callbacks=[look], seconds_between=1e-9)
    assert slow.rounds[:2] == [0, 1]  # that of round 1 is begun, and two more rounds are over
    assert slow.rounds[2] >= 3
    assert slow.rounds[-1] == 5
    assert slow.most == 1
    assert threading.get_ident() not in slow.threads
    assert fingerprint(tmp_path / "plain") == fingerprint(tmp_path / "run")
    newest = sorted(int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert newest == slow.rounds[-2:]
    assert not leftovers(tmp_path / "run")


def test_what_is_written_is_the_state_when_it_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, seen = Slow(), {}

    def save(folder: Path, run: str, checkpoint: Checkpoint) -> None:
        slow(folder, run, checkpoint)
        seen[checkpoint.round] = checkpoint.tensors["weights"].clone()

    monkeypatch.setattr(checkpoints, "save", save)
    look = LetGo(slow, after=3)
    execute(small("prefed"), tmp_path / "run", callbacks=[look], seconds_between=1e-9)
    assert len(seen) >= 3
    for round, weights in look.weights.items():
        assert round not in seen or torch.equal(seen[round], weights)


def test_what_is_too_large_to_copy_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow()
    slow.go.set()
    monkeypatch.setattr(checkpoints, "save", slow)
    monkeypatch.setattr(run_directory, "SHARE", 0)
    config = small("scaffold")
    execute(config, tmp_path / "run", seconds_between=0)
    assert slow.rounds == [0, 1, 2, 3, 4, 5]
    monkeypatch.undo()
    execute(config, tmp_path / "plain", seconds_between=0)
    assert fingerprint(tmp_path / "plain") == fingerprint(tmp_path / "run")


@pytest.mark.parametrize("round", [1, 4, 5])
def test_an_error_of_the_thread_ends_the_run_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, round: int
) -> None:
    config = small("scaffold")
    execute(config, tmp_path / "plain")

    def save(folder: Path, run: str, checkpoint: Checkpoint) -> None:
        if checkpoint.round >= round:
            raise OSError(errno.ENOSPC, "No space left on device")
        SAVE(folder, run, checkpoint)

    monkeypatch.setattr(checkpoints, "save", save)
    with pytest.raises(CannotWrite, match=r"cannot be written: No space left on device.*--resume"):
        execute(config, tmp_path / "run", seconds_between=0)
    monkeypatch.undo()
    execute(config, tmp_path / "run", resume=True)
    assert fingerprint(tmp_path / "plain") == fingerprint(tmp_path / "run")


def test_a_run_that_is_stopped_waits_for_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, config = Slow(), small("prefed")
    monkeypatch.setattr(checkpoints, "save", slow)
    answers = iter([False, True])
    threading.Timer(0.3, slow.go.set).start()
    with pytest.raises(prefed.Interrupted):
        execute(config, tmp_path / "run", stop=answers.__next__, seconds_between=1e-9)
    found = sorted(int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert found[-1] == 2
