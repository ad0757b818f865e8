"""What callbacks hear, however a run ends: the start, each round, then one of end and stop."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import prefed
from prefed.core.errors import CannotWrite
from prefed.experiments import run_directory
from prefed.experiments.config import load
from prefed.experiments.run_directory import execute
from prefed.training.local_trainer import LocalTrainer
from tests.helpers.problems import tiny_data, tiny_model
from tests.helpers.run_folders import fingerprint, small

ROUNDS = 5
"""Of both kinds of run; what goes wrong goes wrong in the third."""


class Recorder(prefed.Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.reason = ""

    def on_start(self, config: dict[str, Any]) -> None:
        assert config["rounds"] == self.run.settings.rounds
        self.seen.append("start")

    def on_round(self, record: dict[str, Any]) -> None:
        assert record is self.run.history[-1]
        self.seen.append(f"round {record['round']}")

    def on_end(self, result: prefed.Result) -> None:
        self.seen.append("end")

    def on_stop(self, reason: str) -> None:
        self.reason = reason
        self.seen.append("stop")


class InRoundThree(prefed.Callback):
    """Does something in its on_round, when the third round is over."""

    def __init__(self, action: Callable[[prefed.Run], object]) -> None:
        self.action = action

    def on_round(self, record: dict[str, Any]) -> None:
        if record["round"] == 3:
            self.action(self.run)


Start = Callable[..., prefed.Result]


@pytest.fixture(params=["simulate", "execute"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Five rounds in memory, or written into tmp_path / "run"."""

    def simulate(callbacks: Sequence[prefed.Callback], client_lr: Any = 0.05) -> prefed.Result:
        return prefed.simulate(
            prefed.FedAvg(client_lr=client_lr), tiny_model(), tiny_data(), rounds=ROUNDS,
            local_steps=2, callbacks=callbacks, device="cpu", loss=squares,
        )  # fmt: skip

    def on_disk(callbacks: Sequence[prefed.Callback], client_lr: Any = 0.05) -> prefed.Result:
        rate = client_lr.model_dump() if hasattr(client_lr, "model_dump") else client_lr
        table = small("fedavg").to_dict()
        table["algorithm"]["client_lr"] = rate
        return execute(load(table), tmp_path / "run", callbacks=callbacks)

    return simulate if request.param == "simulate" else on_disk


def squares(out: Any, y: Any) -> Any:
    return (out**2).mean()


def told(rounds: int, last: str) -> list[str]:
    return ["start", *(f"round {r}" for r in range(1, rounds + 1)), last]


def test_a_run_that_comes_to_its_end(start: Start) -> None:
    first, second = Recorder(), Recorder()
    result = start([first, second])
    assert first.seen == second.seen == told(ROUNDS, "end")
    assert len(result.history) == ROUNDS


def test_divergence(start: Start) -> None:
    """In the third round, which no callback hears of; the reason is what is raised."""
    first, second = Recorder(), Recorder()
    rate = prefed.schedule.step(1e-30, decay=1e250, every=2)
    with pytest.raises(prefed.Diverged, match="round 3: ") as caught:
        start([first, second], client_lr=rate)
    assert first.seen == second.seen == told(2, "stop")
    assert first.reason == second.reason == str(caught.value)


def test_a_stop_that_a_callback_asks_for(start: Start) -> None:
    first, second = Recorder(), Recorder()
    with pytest.raises(prefed.Interrupted, match=r"^stopped after round 3$"):
        start([first, InRoundThree(lambda run: run.stop()), second])
    assert first.seen == second.seen == told(3, "stop")
    assert first.reason == "stopped after round 3"


def test_a_stop_in_the_last_round_is_the_end(start: Start) -> None:
    class Late(prefed.Callback):
        def on_round(self, record: dict[str, Any]) -> None:
            if record["round"] == ROUNDS:
                self.run.stop()

    recorder = Recorder()
    start([Late(), recorder])
    assert recorder.seen == told(ROUNDS, "end")


@pytest.mark.parametrize("error", [ZeroDivisionError("own mistake"), KeyboardInterrupt()])
def test_an_exception_in_a_callback(start: Start, error: BaseException) -> None:
    """Those before it have heard of the round, those behind it have not; all hear the stop."""

    def fail(run: prefed.Run) -> None:
        raise error

    before, behind = Recorder(), Recorder()
    with pytest.raises(type(error)) as caught:
        start([before, InRoundThree(fail), behind])
    assert caught.value is error
    assert before.seen == told(3, "stop")
    assert behind.seen == told(2, "stop")
    assert before.reason == behind.reason == (str(error) or "KeyboardInterrupt")


def test_an_exception_when_a_callback_hears_the_end(start: Start) -> None:
    class Bad(prefed.Callback):
        def __init__(self) -> None:
            self.stops = 0

        def on_end(self, result: prefed.Result) -> None:
            raise ZeroDivisionError("own mistake")

        def on_stop(self, reason: str) -> None:
            self.stops += 1

    before, bad, behind = Recorder(), Bad(), Recorder()
    with pytest.raises(ZeroDivisionError, match="own mistake"):
        start([before, bad, behind])
    assert before.seen == told(ROUNDS, "end")
    assert behind.seen == told(ROUNDS, "stop")
    assert bad.stops == 0


def test_an_exception_when_a_callback_hears_the_stop(start: Start) -> None:
    """It is raised, from the one that stopped the run, and the others hear of the stop all the
    same."""

    class Bad(prefed.Callback):
        def on_stop(self, reason: str) -> None:
            raise ZeroDivisionError("own mistake")

    before, behind = Recorder(), Recorder()
    stop = InRoundThree(lambda run: run.stop())
    with pytest.raises(ZeroDivisionError) as caught:
        start([before, stop, Bad(), behind])
    assert isinstance(caught.value.__cause__, prefed.Interrupted)
    assert before.seen == behind.seen == told(3, "stop")


def test_ctrl_c_in_the_middle_of_a_round(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = LocalTrainer.train

    def train(self: LocalTrainer, server: Any, clients: list[int]) -> Any:
        arrived = real(self, server, clients)
        if server.round == 2:
            raise KeyboardInterrupt
        return arrived

    monkeypatch.setattr(LocalTrainer, "train", train)
    first, second = Recorder(), Recorder()
    with pytest.raises(KeyboardInterrupt):
        start([first, second])
    assert first.seen == second.seen == told(2, "stop")
    assert first.reason == "KeyboardInterrupt"
    if (tmp_path / "run").exists():  # what is on disk goes on to the same bits
        monkeypatch.undo()
        table = small("fedavg").to_dict()
        table["algorithm"]["client_lr"] = 0.05
        execute(load(table), tmp_path / "run", resume=True)
        execute(load(table), tmp_path / "whole")
        assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory comes first: those behind it do not hear of the round it could not write."""
    monkeypatch.setattr(run_directory, "SECONDS_BETWEEN", 0.0)
    first, second, full = Recorder(), Recorder(), False
    real = os.fsync

    def fsync(handle: int) -> None:
        if full:
            raise OSError(28, "No space left on device")
        real(handle)

    def fill(run: prefed.Run) -> None:
        nonlocal full
        full = True

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CannotWrite, match="No space left on device"):
        execute(small("fedavg"), tmp_path / "run", callbacks=[first, InRoundThree(fill), second])
    assert first.seen == second.seen == told(3, "stop")
    assert "No space left on device" in first.reason
    full = False
    execute(small("fedavg"), tmp_path / "run", resume=True)
    execute(small("fedavg"), tmp_path / "whole")
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


def test_a_disk_that_is_full_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has not heard of the start hears of no end either."""

    def fsync(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    recorder = Recorder()
    with pytest.raises(CannotWrite):
        execute(small("fedavg"), tmp_path / "run", callbacks=[recorder])
    assert recorder.seen == []


def test_the_same_callback_in_two_runs(start: Start, tmp_path: Path) -> None:
    """A resumed run tells those that listen to it of its own rounds alone."""
    recorder = Recorder()
    with pytest.raises(prefed.Interrupted):
        start([recorder, InRoundThree(lambda run: run.stop())])
    assert recorder.seen == told(3, "stop")
    if (tmp_path / "run").exists():
        again = Recorder()
        table = small("fedavg").to_dict()
        table["algorithm"]["client_lr"] = 0.05
        execute(load(table), tmp_path / "run", resume=True, callbacks=[again])
        assert again.seen == ["start", "round 4", "round 5", "end"]
