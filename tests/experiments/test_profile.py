"""A profile tells where the time goes, and changes nothing."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from prefed.core.parts import timed, watched_by
from prefed.experiments.profile import Profile, since_start
from tests.helpers.commands import prefed_here
from tests.helpers.run_folders import fingerprint

SMALL = ("rounds=4", "local_steps=3", "model.hidden=[16]", "clients_per_round=4", "device=cpu")
PARTS = ("imports", "data", "checks", "engine choice", "forward and backward", "rule", "mean",
         "server step", "evaluation", "checkpoints", "records", "the rest")  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [("engine=sequential", "algorithm=prefed"), ("engine=vectorised", "algorithm=scaffold"),
     ("engine=sequential", "workers=2", "algorithm=fedadam")],
    ids=["sequential", "vectorised", "workers"],
)  # fmt: skip
def test_the_same_bits_and_every_part(tmp_path: Path, changes: tuple[str, ...]) -> None:
    words = [w for change in (*SMALL, *changes) for w in ("--set", change)]
    plain = prefed_here("run", "digits-noniid", *words, "--out", "plain", cwd=tmp_path)
    done = prefed_here("run", "digits-noniid", *words, "--profile", "--out", "told", cwd=tmp_path)
    assert (plain.returncode, done.returncode) == (0, 0), done.stderr
    assert fingerprint(tmp_path / "plain") == fingerprint(tmp_path / "told")
    table = (tmp_path / "told" / "profile.txt").read_text()
    assert table in done.stdout
    for part in PARTS:
        assert f"\n{part}  " in table, table
    assert "\naddmm  " in table or "\nbmm  " in table or "\nbaddbmm  " in table, table
    assert ("in workers" in table) == ("workers=2" in changes)
    trace = json.loads((tmp_path / "told" / "trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"forward and backward", "rule", "evaluation"} <= names
    again = prefed_here("run", "digits-noniid", *words, "--resume", "--out", "told", cwd=tmp_path)
    assert again.returncode == 0, again.stderr


def test_parts_are_told_without_those_inside_them() -> None:
    @timed("inner")
    def inner() -> None:
        time.sleep(0.02)

    @timed("outer")
    def outer() -> str:
        inner()
        time.sleep(0.01)
        return "found"

    profile = Profile()
    with watched_by(profile):
        assert outer() == "found"
        thread = threading.Thread(target=inner)
        thread.start()
        thread.join()
    outer()  # nobody watches
    assert profile.calls == {"inner": 2, "outer": 1}
    assert profile.seconds["outer", True] < profile.seconds["inner", True]
    assert profile.seconds["inner", False] >= 0.02


def test_what_is_measured_to_choose_an_engine_is_no_training() -> None:
    @timed("rule")
    def rule() -> None: ...

    @timed("engine choice")
    def choose() -> None:
        rule()

    profile = Profile()
    with watched_by(profile):
        choose()
        rule()
    assert profile.calls == {"engine choice": 1, "rule": 1}


def test_an_error_ends_a_part() -> None:
    @timed("broken")
    def broken() -> None:
        raise ValueError("so")

    profile = Profile()
    with watched_by(profile):
        with pytest.raises(ValueError, match="so"):
            broken()
        assert profile.local.stack == []


def test_the_process_knows_how_old_it_is() -> None:
    first = since_start()
    time.sleep(0.05)
    assert 0 < first < since_start() < 3600
