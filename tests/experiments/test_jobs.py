"""Worker processes stay for all the runs of an experiment, and do once what is the same for all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from prefed.experiments.config import load
from prefed.experiments.jobs import Job, NewestData, Processes, made_with
from prefed.experiments.measures import ACCURACY, LAST, first_scored
from prefed.experiments.run_directory import execute
from prefed.experiments.stored_runs import StoredRun
from prefed.experiments.study import Study, Tuning
from prefed.experiments.study_runs import StudyRuns
from prefed.training.engines.auto import Choice
from prefed.training.local_trainer import LocalTrainer
from tests.helpers.run_folders import small

ENGINE = "vectorised x 1 with 1 thread"


@pytest.mark.process
def test_processes_stay_and_take_over_the_engine(tmp_path: Path) -> None:
    """The second job of a kind is told what the first has chosen, and environment.json says so."""
    configs = [small("fedavg", "engine=auto", f"seed={seed}").to_dict() for seed in range(3)]
    with Processes(1) as processes:
        first = list(processes.run([Job(configs[0], tmp_path / "0")]))
        (worker,) = processes._workers
        assert processes.engines == {Job(configs[1]).kind: "sequential x 1 with 1 thread"}
        processes.engines[Job(configs[1]).kind] = ENGINE
        second = list(processes.run([Job(c, tmp_path / c_name(c)) for c in configs[1:]]))
        assert processes._workers == [worker]
    assert first[-1][1] == {"done": True, "engine": "sequential x 1 with 1 thread"}
    assert [event for _, event in second if "done" in event] == [
        {"done": True, "engine": ENGINE}
    ] * 2
    about = json.loads((tmp_path / "1" / "environment.json").read_text())
    assert about["engine"] == ENGINE


def c_name(config: dict[str, Any]) -> str:
    return str(config["seed"])


def test_a_kind_leaves_out_what_no_engine_is_faster_for() -> None:
    kind = Job(small("fedadam").to_dict()).kind
    same = ("client_lr=0.3", "server_lr=0.7", "seed=3", "beta1=0.5")
    for change in same:
        assert Job(small("fedadam", change).to_dict()).kind == kind, change
    for change in ("local_steps=3", "model.hidden=[9]", "batch_size=5", "upload=int8"):
        assert Job(small("fedadam", change).to_dict()).kind != kind, change
    assert Job(small("fedyogi").to_dict()).kind != kind
    pairs = [Job(small("pair", f"client.name={rule}").to_dict()).kind for rule in ("sgd", "muon")]
    assert pairs[0] != pairs[1]


def test_data_are_made_once_for_what_they_depend_on() -> None:
    """Not again for another algorithm or step size; anew for another seed or split."""
    newest = NewestData()
    first = newest.of(small("fedavg"))
    assert newest.of(small("prefed", "client_lr=0.3")) is first
    for change in ("seed=1", "data.validation=0.2", "data.split.clients=7"):
        assert newest.of(small("fedavg", change)) is not first, change
    again = newest.of(small("fedavg"))
    assert again is not first
    given = small("fedavg").make_run(data=again)
    assert torch.equal(given.data.client(0).all()[0], first[1].client(0).all()[0])


def test_an_engine_that_was_named_stays(tmp_path: Path) -> None:
    for engine, taken in (("auto", ENGINE), ("sequential", None)):
        run = small("fedavg", f"engine={engine}").make_run(made_with(ENGINE))
        assert isinstance(run.trainer, LocalTrainer)
        assert run.trainer.choice == (Choice.parse(taken) if taken else None)


@pytest.mark.parametrize(("rounds", "every"), [(5, 1), (30, 1), (24, 5), (60, 5), (3, 7), (1, 1)])
def test_a_score_is_the_same_without_the_evaluations_before_it(rounds: int, every: int) -> None:
    config = load(
        "digits-noniid",
        [f"rounds={rounds}", f"evaluate_every={every}", "local_steps=1", "model.hidden=[4]",
         "clients_per_round=2", "algorithm=fedavg", "engine=sequential", "data.validation=0.2"],
    )  # fmt: skip
    runs = [config.make_run() for _ in range(2)]
    runs[1].evaluate_from = first_scored(config)
    stored = [StoredRun(Path(), config.to_dict(), execute(run).history) for run in runs]
    counts = [len(ACCURACY.of(run)) for run in stored]
    assert counts[1] == max(1, round(LAST * counts[0]))
    assert ACCURACY.final(stored[0]) == ACCURACY.final(stored[1], 1.0)
    losses = [[record["train_loss"] for record in run.history] for run in stored]
    assert losses[0] == losses[1]


def test_a_run_that_may_end_early_is_evaluated_in_full() -> None:
    assert first_scored(small("fedavg", "stop_when.patience=2")) == 1
    assert first_scored(small("fedavg", "keep=best")) == 1


@pytest.mark.process
def test_scores_of_a_study_are_those_of_whole_runs(tmp_path: Path) -> None:
    study = Study(
        title="x", config="digits-noniid", seeds=1, tuning=Tuning(rounds=30),
        set=["local_steps=1", "model.hidden=[4]", "clients_per_round=2", "engine=sequential"],
        grid={"fedavg": {"client_lr": [0.1, 0.3]}},
    )  # fmt: skip
    runs = StudyRuns(study, tmp_path)
    evaluated: list[int] = []
    runs.tune(1, lambda plan, event: evaluated.extend(
        [event["record"]["round"]] if event.get("record", {}).get("test_accuracy") else []
    ))  # fmt: skip
    assert evaluated == [28, 29, 30, 28, 29, 30]
    for title, planned in runs.tuning():
        whole = StoredRun(Path(), planned.config.to_dict(), execute(planned.config).history)
        assert len(ACCURACY.of(whole)) == 30
        assert runs.scores[title] == ACCURACY.final(whole)
