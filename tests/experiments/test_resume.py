"""Runs on disk: resumed exactly, refused clearly, damaged safely."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import prefed
from prefed.core import safe_files
from prefed.core.errors import CannotWrite
from prefed.experiments import checkpoints, run_directory
from prefed.experiments.checkpoints import CheckpointWarning
from prefed.experiments.config import load
from prefed.experiments.plans import Planned
from prefed.experiments.run_directory import execute
from prefed.experiments.stored_runs import load_run
from tests.helpers.commands import prefed_here
from tests.helpers.problems import WITHOUT_NORMS
from tests.helpers.run_folders import StopAfter, fingerprint, small

VARIANTS = [
    *((name, []) for name in WITHOUT_NORMS),
    ("prefed", ["momentum=keep"]),
    ("prefed", ["momentum=reset", "bias_correction=true"]),
    ("fedadam", ["bias_correction=true"]),
    ("prefed", ["shape=kronecker", "refresh=3", "momentum=keep"]),
    ("prefedopt", ["shape=kronecker", "refresh=3"]),
    ("prefedopt", ["shape=block", "refresh=3", "bias_correction=true"]),
    ("prefedopt", ["shape=full", "refresh=4"]),
    ("prefed", ["align=0.3", "momentum=derived"]),
    ("pair", ["client=adam", "share={v={kind='average', every=3, between='keep'}}"]),
    ("prefedopt", ["tau_relative=0.1"]),
    ("fedpac", ["rule=sophia"]),
    ("pair", ["client.name=soap", "client.refresh=2", "client_lr=0.01", "share={P='keep'}"]),
    ("pair", ["server.name=soap", "server.refresh=2", "server_lr=0.01"]),
    ("mimelite", ["optimiser=adam", "tau=0.1"]),
    ("pair", ["client=adam", "server=yogi", "server_lr=0.01", "share={m='keep', v='average'}"]),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_a_resumed_run_has_the_same_bits(name: str, options: list[str], tmp_path: Path) -> None:
    config = small(name, *options)
    whole = execute(config, tmp_path / "whole")
    with pytest.raises(prefed.Interrupted, match="stopped after round 2"):
        execute(config, tmp_path / "parts", stop=StopAfter(2))
    resumed = execute(config, tmp_path / "parts", resume=True)
    assert fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "whole")
    assert len(resumed.history) == len(whole.history) == 5
    assert resumed.kept.keys() == whole.kept.keys()
    kept = sorted(p.name for p in (tmp_path / "parts" / "checkpoints").iterdir())
    assert kept == ["000002", "000005"]


def test_a_run_may_go_on_with_another_number_of_workers(tmp_path: Path) -> None:
    whole, _ = small("prefed"), interrupted(tmp_path / "run")
    expected = execute(whole, tmp_path / "whole")
    other = small("prefed", "workers=2")
    seen = []

    class Watch(prefed.Callback):
        def on_round(self, record: dict[str, Any]) -> None:
            seen.append(self.run.trainer.engine)

    found = execute(other, tmp_path / "run", resume=True, callbacks=[Watch()])
    assert torch.equal(found.weights, expected.weights)
    assert {*seen} == {"sequential x 2"}


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    config = small("prefed")
    execute(config, tmp_path / "run")
    before = fingerprint(tmp_path / "run")
    execute(config, tmp_path / "run", resume=True)
    assert fingerprint(tmp_path / "run") == before


def test_lines_after_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    """Killed between a line and the checkpoint, or in the middle of a line."""
    config = small("fedadam")
    execute(config, tmp_path / "whole")
    with pytest.raises(prefed.Interrupted):
        execute(config, tmp_path / "run", stop=StopAfter(2))
    with open(tmp_path / "run" / "rounds.jsonl", "a") as file:
        file.write('{"round": 3, "train_loss": 7}\n{"round": 4, "tr')
    execute(config, tmp_path / "run", resume=True)
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


def interrupted(folder: Path, rounds: int = 3) -> Any:
    config = small("prefed")
    seconds, run_directory.SECONDS_BETWEEN = run_directory.SECONDS_BETWEEN, 0.0
    try:
        with pytest.raises(prefed.Interrupted):
            execute(config, folder, stop=StopAfter(rounds))
    finally:
        run_directory.SECONDS_BETWEEN = seconds
    return config


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flip":
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    else:
        path.unlink()


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json", "rounds.jsonl"])
@pytest.mark.parametrize("how", ["cut", "flip", "remove"])
def test_a_damaged_checkpoint_is_passed_over(name: str, how: str, tmp_path: Path) -> None:
    config = interrupted(tmp_path / "run")
    execute(config, tmp_path / "whole")
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    damage(newest / name, how)
    with pytest.warns(CheckpointWarning, match=r"000003: .*going on from round 2"):
        execute(config, tmp_path / "run", resume=True)
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


def test_with_no_sound_checkpoint_left_it_does_not_begin_anew(tmp_path: Path) -> None:
    config = interrupted(tmp_path / "run")
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        damage(checkpoint / "state.safetensors", "flip")
    with pytest.raises(prefed.PrefedError, match=r"no checkpoint can be used .*cannot be resumed"):
        execute(config, tmp_path / "run", resume=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(prefed.PrefedError, match="no checkpoint can be used"):
        execute(config, tmp_path / "run", resume=True)


def test_a_checkpoint_of_another_run_is_not_taken(tmp_path: Path) -> None:
    config = interrupted(tmp_path / "run")
    with pytest.raises(prefed.Interrupted):
        execute(small("prefed", "seed=7"), tmp_path / "other", stop=StopAfter(4))
    foreign = tmp_path / "other" / "checkpoints" / "000004"
    shutil.copytree(foreign, tmp_path / "run" / "checkpoints" / "000004")
    with pytest.warns(CheckpointWarning, match="belongs to another run"):
        execute(config, tmp_path / "run", resume=True)


def test_what_is_refused(tmp_path: Path) -> None:
    execute(small("prefed"), tmp_path / "run")
    with pytest.raises(prefed.PrefedError, match="holds this run already; add --resume"):
        execute(small("prefed"), tmp_path / "run")
    with pytest.raises(prefed.PrefedError, match="another config") as caught:
        execute(small("prefed", "client_lr=0.5", "rounds=9"), tmp_path / "run", resume=True)
    assert "rounds: 5 there, 9 asked for" in str(caught.value)
    assert "algorithm.client_lr:" in str(caught.value)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(prefed.PrefedError, match="is not empty and holds no run"):
        execute(small("prefed"), tmp_path / "other")


def test_a_full_disk_ends_the_run_and_keeps_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails as on a full disk, in the middle of the third checkpoint."""
    config = small("prefed")
    execute(config, tmp_path / "whole")
    monkeypatch.setattr(run_directory, "SECONDS_BETWEEN", 0.0)
    real, calls = os.fsync, iter(range(10_000))

    def full(handle: int) -> None:
        if next(calls) > 24:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CannotWrite, match=r"No space left on device\. The files .* are complete"):
        execute(config, tmp_path / "run")
    monkeypatch.setattr(os, "fsync", real)
    execute(config, tmp_path / "run", resume=True)
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


LONG = ("run", "digits-noniid", "--set", "rounds=100000", "--set", "model.hidden=[8]")


def begin(folder: Path, *more: str) -> subprocess.Popen[str]:
    """A long run in a process of its own, returned when it has done two rounds."""
    process = subprocess.Popen(
        [sys.executable, "-m", "prefed", *LONG, "--out", str(folder), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (folder / "rounds.jsonl").exists() or not (folder / "rounds.jsonl").read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"the run did not begin: {process.communicate()}")
        time.sleep(0.05)
    return process


@pytest.mark.process
def test_one_ctrl_c_saves_and_a_second_run_is_refused(tmp_path: Path) -> None:
    process = begin(tmp_path / "run")
    second = prefed_here(*LONG, "--out", str(tmp_path / "run"), "--resume", cwd=tmp_path)
    assert second.returncode == 2
    assert "another process is running there" in second.stderr
    assert prefed.load_runs(tmp_path)[0].status == "running"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "continue with --resume" in err
    saved = json.loads(
        sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
        .joinpath("manifest.json")
        .read_text()
    )
    assert saved["round"] == len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines())
    assert prefed.load_runs(tmp_path)[0].status == "interrupted"


@pytest.mark.process
def test_two_ctrl_c_stop_at_once(tmp_path: Path) -> None:
    process = begin(tmp_path / "run", "--set", "local_steps=3000")
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_an_error_in_the_middle_of_a_round_leaves_a_state_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the server's step and before the record: that state belongs to no line."""
    config = load("digits-iid", ["rounds=4", "local_steps=2", "model.hidden=[4]", "device=cpu"])
    whole = run_directory.execute(config, tmp_path / "whole")
    evaluate = prefed.Run.evaluate

    def fail_once(self: prefed.Run) -> dict[str, object]:
        if self.server.round == 3:
            raise MemoryError("no room for the test set")
        return evaluate(self)

    with monkeypatch.context() as patch:
        patch.setattr(prefed.Run, "evaluate", fail_once)
        with pytest.raises(MemoryError):
            run_directory.execute(config, tmp_path / "parts")
    resumed = run_directory.execute(config, tmp_path / "parts", resume=True)
    assert torch.equal(resumed.weights, whole.weights)
    assert fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "whole")


@pytest.mark.parametrize(("name", "options"), [("prefed", ["momentum=keep"]), ("fedadam", [])])
@pytest.mark.parametrize("stopped", [None, 2])
def test_more_rounds_are_those_of_a_longer_run(
    name: str, options: list[str], stopped: int | None, tmp_path: Path
) -> None:
    """Of a run that was finished, and of one that was stopped before."""
    short, longer = small(name, *options), small(name, *options, "rounds=9")
    execute(longer, tmp_path / "whole")
    with contextlib.suppress(prefed.Interrupted):
        execute(short, tmp_path / "run", stop=StopAfter(stopped or 99))
    execute(longer, tmp_path / "run", resume=True)
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")
    texts = [(tmp_path / n / "config.toml").read_text() for n in ("run", "whole")]
    assert texts[0] == texts[1]
    with pytest.raises(prefed.PrefedError, match="it cannot be given fewer"):
        execute(short, tmp_path / "run", resume=True)


@pytest.mark.parametrize("moment", range(6))
def test_a_kill_while_more_rounds_are_given(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each of the first changes of files: the run goes on with the number of rounds that
    config.toml has, or with more, and ends in the same bits."""
    short, longer = small("prefed"), small("prefed", "rounds=7")
    execute(longer, tmp_path / "whole")
    execute(short, tmp_path / "run")
    changes, write, unlink = 0, safe_files.write_whole, Path.unlink

    def die_before(change: Any) -> Any:
        def instead(*given: Any, **more: Any) -> Any:
            nonlocal changes
            if changes == moment:
                raise KeyboardInterrupt
            changes += 1
            return change(*given, **more)

        return instead

    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "write_whole", die_before(write))
        patch.setattr(checkpoints, "write_whole", die_before(write))
        patch.setattr(Path, "unlink", die_before(unlink))
        with pytest.raises(KeyboardInterrupt):
            execute(longer, tmp_path / "run", resume=True, seconds_between=0)
    if "rounds = 5" in (tmp_path / "run" / "config.toml").read_text():
        execute(short, tmp_path / "run", resume=True)
    execute(longer, tmp_path / "run", resume=True)
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


def test_a_schedule_over_the_rounds_of_a_run_is_not_stretched(tmp_path: Path) -> None:
    cosine = 'client_lr={schedule="cosine", start=0.1}'
    execute(small("fedavg", cosine), tmp_path / "run")
    before = fingerprint(tmp_path / "run")
    with pytest.raises(prefed.PrefedError, match=r"add --set client_lr.rounds=5") as told:
        execute(small("fedavg", cosine, "rounds=7"), tmp_path / "run", resume=True)
    assert fingerprint(tmp_path / "run") == before
    kept = small("fedavg", cosine, "rounds=7", str(told.value).rpartition("--set ")[2])
    execute(kept, tmp_path / "run", resume=True)
    execute(kept, tmp_path / "whole")
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


def test_a_run_that_goes_on_is_not_finished(tmp_path: Path) -> None:
    execute(small("prefed"), tmp_path / "run")
    with pytest.raises(prefed.Interrupted):
        execute(small("prefed", "rounds=9"), tmp_path / "run", resume=True, stop=StopAfter(2))
    stored = load_run(tmp_path / "run")
    assert (stored.status, len(stored.history), stored.config["rounds"]) == ("interrupted", 7, 9)


def test_lines_that_somebody_removed_are_in_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "SECONDS_BETWEEN", 0.0)
    config, folder = small("prefed"), tmp_path / "run"
    expected = execute(config, tmp_path / "whole")

    class Removes(prefed.Callback):
        def on_round(self, record: dict[str, Any]) -> None:
            if record["round"] == 3:
                (folder / "rounds.jsonl").write_text("")

    with pytest.raises(CannotWrite, match="somebody has changed it"):
        execute(config, folder, callbacks=[Removes()])
    assert torch.equal(execute(config, folder, resume=True).weights, expected.weights)


def test_a_comparison_of_an_earlier_version_had_another_number_of_workers(tmp_path: Path) -> None:
    execute(small("prefed"), tmp_path / "run")
    again = Planned("", small("prefed", "workers=2"), tmp_path / "run")
    assert again.stored() is not None
    with pytest.raises(prefed.PrefedError, match="seed: 0 there, 1 asked for"):
        Planned("", small("prefed", "seed=1"), tmp_path / "run").stored()
