"""Private runs on the disk: resumed, killed at every point, ended by their budget."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import prefed
from prefed.core.errors import PrefedError
from prefed.experiments import checkpoints, run_directory
from prefed.experiments.measures import describe
from prefed.experiments.ranking import group, headings
from prefed.report.curves import charts
from prefed.training.accounting import Accountant
from prefed.training.ledger import FILE, Ledger, Release
from prefed.training.mechanism import Mechanism
from prefed.training.run import Run
from tests.helpers import ROOT
from tests.helpers.problems import tiny_data, tiny_model

OPTIONS: dict[str, Any] = {"rounds": 6, "local_steps": 2, "batch_size": 4, "clients_per_round": 3}
OPTIONS |= {"engine": "sequential", "device": "cpu", "progress": False}


def simulate(folder: Path | None, algorithm: Any = None, **options: Any) -> prefed.Result:
    privacy = {"noise_multiplier": 1.0, "clip": {"start": 0.1}}
    given = OPTIONS | {"privacy": privacy} | options
    chosen = algorithm or prefed.FedAdam()
    return prefed.simulate(chosen, tiny_model(), tiny_data(), out=folder, **given)


class StopAfter(prefed.Callback):
    def __init__(self, round: int) -> None:
        self.last = round

    def on_round(self, record: dict[str, Any]) -> None:
        if record["round"] == self.last:
            raise KeyboardInterrupt


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_a_resumed_run_has_the_same_bits_and_the_same_epsilon(tmp_path: Path) -> None:
    whole = simulate(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        simulate(tmp_path / "cut", callbacks=[StopAfter(4)])
    again = simulate(tmp_path / "cut", resume=True)
    assert torch.equal(whole.weights, again.weights)
    for a, b in zip(whole.history, again.history, strict=True):
        assert (a["epsilon"], a["clip"]) == (b["epsilon"], b["clip"])
    # The rounds after the last checkpoint were released once more, as they had been before.
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    assert [line["round"] for line in lines(tmp_path / "whole")] == [*range(1, 7)]


def test_with_noise_from_the_system_every_release_counts(tmp_path: Path) -> None:
    privacy = {"noise_multiplier": 1.0, "secret_noise": True}
    with pytest.raises(KeyboardInterrupt):  # at once: no checkpoint but the first
        simulate(tmp_path, privacy=privacy, callbacks=[StopAfter(4)])
    result = simulate(tmp_path, privacy=privacy, resume=True)
    assert [line["round"] for line in lines(tmp_path)] == [1, 2, 3, 4, 1, 2, 3, 4, 5, 6]
    count = Accountant("rdp", "poisson", "add-remove", 1e-5, 6, 3)
    spent = [record["epsilon"] for record in result.history]
    assert spent == [count.epsilon(1.0, n) for n in range(5, 11)]


def test_a_budget_ends_a_run_before_the_round_that_would_pass_it(tmp_path: Path) -> None:
    privacy = {"noise_multiplier": 4.0, "epsilon": 2.0}
    result = simulate(tmp_path, privacy=privacy, rounds=50, evaluate_every=100)
    last = result.history[-1]
    count = Accountant("rdp", "poisson", "add-remove", 1e-5, 6, 3)
    assert last["epsilon"] == count.epsilon(4.0, len(result.history)) <= 2.0
    assert count.epsilon(4.0, len(result.history) + 1) > 2.0
    assert "budget of epsilon = 2" in last["ended"]
    assert last["test_accuracy"] is not None  # the last round is always evaluated
    stored = prefed.load_runs(tmp_path)[0]
    assert stored.status == "finished"
    assert stored.ended == last["ended"]
    (ranked,) = group([stored])
    column = headings(ranked, 0.5).index("epsilon")
    assert ranked.cells(0.5)[column] == f"{last['epsilon']:.4g}"
    assert "epsilon" in [chart.name for chart in charts([ranked])]
    assert describe(stored.history[-1]).startswith("epsilon ")
    again = simulate(tmp_path, privacy=privacy, rounds=50, evaluate_every=100, resume=True)
    assert len(again.history) == len(result.history) == len(lines(tmp_path))
    with pytest.raises(PrefedError, match="the first round alone costs"):
        simulate(None, privacy={"noise_multiplier": 0.3, "epsilon": 2.0})


def test_noise_made_for_a_number_of_rounds_is_not_for_more(tmp_path: Path) -> None:
    everyone = {"privacy": {"epsilon": 3.0}, "clients_per_round": None}
    result = simulate(tmp_path, **everyone)
    assert result.history[-1]["epsilon"] == pytest.approx(3.0, abs=1e-3)
    with pytest.raises(PrefedError, match="the ledger has rounds with noise_multiplier"):
        simulate(tmp_path, **everyone, rounds=9, resume=True)


def test_a_lost_ledger_is_made_up_for_by_the_records(tmp_path: Path) -> None:
    simulate(tmp_path)
    (tmp_path / FILE).unlink()
    more = simulate(tmp_path, rounds=7, resume=True)
    count = Accountant("rdp", "poisson", "add-remove", 1e-5, 6, 3)
    assert more.history[-1]["epsilon"] == count.epsilon(1.0, 7)


@pytest.mark.parametrize("text", ["", "{}", '{"round": 1}', '{"round": "1", "noise_multiplier": 1}',
                                  '{"round": -1, "noise_multiplier": 1}', "[" * 5000])  # fmt: skip
def test_a_damaged_ledger_stops_the_run(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(f'{{"round": 1, "noise_multiplier": 1.0}}\n{text}\n')
    with pytest.raises(PrefedError, match=rf"{FILE}:2: is no line"):
        Ledger().open(tmp_path / FILE)


def test_a_line_that_was_begun_counts(tmp_path: Path) -> None:
    for secret in (False, True):
        path = tmp_path / FILE
        path.write_text('{"round": 1, "noise_multiplier": 1.5}\n{"rou')
        ledger = Ledger(secret)
        ledger.open(path)
        assert ledger.count(9) == 2
        ledger.spend(Release(2, 1.5))
        assert ledger.count(9) == (3 if secret else 2)
        again = Ledger(secret)
        again.open(path)
        assert again.releases == ledger.releases
        path.unlink()


def test_each_client_has_a_budget_of_its_own_with_noise_of_its_own(tmp_path: Path) -> None:
    privacy = {"noise_multiplier": 20.0, "where": "client"}
    result = simulate(tmp_path, privacy=privacy)
    took_part = [line["clients"] for line in lines(tmp_path)]
    assert took_part == [record["cohort"] for record in result.history]
    most = max(sum(c in cohort for cohort in took_part) for c in range(6))
    count = Accountant("rdp", "none", "replace", 1e-5, 6, 3)
    assert result.history[-1]["epsilon"] == count.epsilon(20.0, most)
    assert most < 6


def test_a_config_can_be_private_and_is_written_as_before_without(tmp_path: Path) -> None:
    from prefed.experiments.config import load

    table = {
        "rounds": 2,
        "local_steps": 2,
        "clients_per_round": 10,
        "algorithm": "prefed",
        "model": "mlp",
        "data": {"name": "digits", "split": {"name": "iid", "clients": 40}},
    }
    assert "privacy" not in load(table).to_dict()
    assert "P" not in load(table).make_algorithm().model_dump()
    changes = ["privacy.noise_multiplier=1.0", "privacy.clip.quantile=0.4", "P=derived"]
    config = load(table, [*changes, "momentum=derived"])
    assert config.privacy == prefed.Privacy(noise_multiplier=1.0, clip={"quantile": 0.4})
    assert load(config.to_dict()) == config
    result = run_directory.execute(config, tmp_path)
    assert result.history[-1]["epsilon"] > 0
    with pytest.raises(PrefedError, match="privacy"):
        load(table, ["privacy.noise=1.0"])
    page = (ROOT / "docs" / "privacy.md").read_text()
    (written,) = re.findall(r"```toml\n(.*?)```", page, flags=re.S)
    assert load(table | tomllib.loads(written)).privacy is not None


# Kills. What has come into being is written down elsewhere, the moment it has, by the code of this
# file: the ledger must never know of fewer.

Point = Callable[[], None]


def witness(folder: Path, die: Callable[[str], None]) -> None:
    """In a process of its own: note every release, and die where `die` says so."""
    release, spend = Mechanism.release, Ledger.spend

    def noted(self: Mechanism, server: Any, *parts: Any) -> Any:
        die("before the noise")
        found = release(self, server, *parts)
        with open(folder / "witness", "a") as file:
            file.write(f"{server.round + 1}\n")
            file.flush()
            os.fsync(file.fileno())
        die("after the noise")
        return found

    def counted(self: Ledger, entry: Release) -> None:
        die("before the ledger")
        spend(self, entry)
        die("after the ledger")

    setattr(Mechanism, "release", noted)  # noqa: B010
    setattr(Ledger, "spend", counted)  # noqa: B010
    for place, name in ((Run, "_step"), (Run, "evaluate"), (run_directory.RunDirectory, "_append")):
        _around(place, name, die)
    save = checkpoints.save

    def saved(*parts: Any) -> None:
        die("before a checkpoint")
        save(*parts)
        die("after a checkpoint")

    setattr(checkpoints, "save", saved)  # noqa: B010


def _around(place: Any, name: str, die: Callable[[str], None]) -> None:
    method = getattr(place, name)

    def wrapped(*parts: Any) -> Any:
        die(f"before {name}")
        found = method(*parts)
        die(f"after {name}")
        return found

    setattr(place, name, wrapped)


PLACES = ("the noise", "the ledger", "_step", "evaluate", "_append", "a checkpoint")
POINTS = [f"{when} {what}" for what in PLACES for when in ("before", "after")]


def in_a_child(work: Callable[[], None]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def attempt(folder: Path, secret: bool, point: str, times: int) -> None:
    """Run, or go on, and die when the point is passed for that time."""
    passed = 0

    def die(here: str) -> None:
        nonlocal passed
        passed += here == point
        if here == point and passed == times:
            os.kill(os.getpid(), signal.SIGKILL)

    witness(folder, die)
    torch.set_num_threads(1)
    run_directory.SECONDS_BETWEEN = 0.005
    privacy = {"noise_multiplier": 3.0, "epsilon": 6.0, "secret_noise": secret}
    simulate(folder / "run", privacy=privacy, rounds=8, resume=True)


def check(folder: Path, secret: bool) -> tuple[int, int]:
    """How many releases there were, and how many the ledger has."""
    path, there = folder / "run" / FILE, folder / "witness"
    seen = there.read_text().split() if there.exists() else []
    ledger = Ledger(secret)
    if path.exists():
        ledger.open(path)
    were = len(seen) if secret else len({*seen})
    counted = ledger.count(100)
    assert counted >= were
    count = Accountant("rdp", "poisson", "add-remove", 1e-5, 6, 3)
    assert count.epsilon(3.0, counted) <= 6.0
    return were, counted


def survive(folder: Path, secret: bool, rng: random.Random, kills: int) -> None:
    """Killed again and again, then left alone."""
    folder.mkdir()
    for kill in range(kills):
        if kill % 2:
            point, times = rng.choice(POINTS), rng.randrange(1, 5)
            child = in_a_child(lambda p=point, t=times: attempt(folder, secret, p, t))  # type: ignore[misc]
        else:  # at any instant
            child = in_a_child(lambda: attempt(folder, secret, "", 0))
            time.sleep(rng.uniform(0.0, 0.15))
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        check(folder, secret)
    child = in_a_child(lambda: attempt(folder, secret, "", 0))
    assert os.waitpid(child, 0)[1] == 0
    were, counted = check(folder, secret)
    (run,) = prefed.load_runs(folder / "run")
    assert were > 0
    if secret:
        count = Accountant("rdp", "poisson", "add-remove", 1e-5, 6, 3)
        assert not run.history or run.history[-1]["epsilon"] <= count.epsilon(3.0, counted)
    else:
        assert len(run.history) == counted == 8


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("secret", [False, True])
def test_a_killed_run_has_counted_what_it_released(secret: bool, tmp_path: Path) -> None:
    for point in ("after the noise", "before the noise", "before the ledger"):
        folder = tmp_path / point.replace(" ", "-")
        folder.mkdir()
        child = in_a_child(lambda p=point, f=folder: attempt(f, secret, p, 3))  # type: ignore[misc]
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        were, counted = check(folder, secret)
        assert (were, counted) == {"after": (3, 3), "before the noise": (2, 3)}.get(
            point if point == "before the noise" else point.split()[0], (2, 2)
        )
    survive(tmp_path / "again", secret, random.Random(1), 6)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("secret", [False, True])
def test_two_hundred_kills(secret: bool, tmp_path: Path) -> None:
    for trial in range(10):
        survive(tmp_path / str(trial), secret, random.Random(trial), 10)
