"""prefed.simulate with a directory, a bar, and what comes back; prefed.load."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
import safetensors.torch
import torch
from rich.console import Console

import prefed
from prefed.experiments import run_directory
from prefed.experiments.config import load as load_config
from prefed.experiments.ranking import group
from prefed.experiments.run_directory import execute
from prefed.report import write_report
from tests.helpers import ROOT
from tests.helpers.commands import prefed_here
from tests.helpers.problems import tiny_data, tiny_model
from tests.helpers.run_folders import StopAfter, fingerprint, small

GOALS: dict[str, Any] = {"metrics": ["f1"], "keep": "best", "stop_when": {"patience": 6}}


def run(out: Path | None = None, algorithm: str = "scaffold", **more: Any) -> prefed.Result:
    make = prefed.ALGORITHMS.get(algorithm)
    settings = {"rounds": 12, "local_steps": 3, "batch_size": 3, "device": "cpu"}
    given = {"model": tiny_model(), "data": tiny_data(), **settings, **more}
    return prefed.simulate(
        make(client_lr=0.3), given.pop("model"), given.pop("data"), out=out, **given
    )


class StopAt(prefed.Callback):
    def __init__(self, round: int) -> None:
        self.round = round

    def on_round(self, record: dict[str, Any]) -> None:
        if record["round"] == self.round:
            self.run.stop()


@pytest.mark.parametrize("algorithm", ["scaffold", "prefed", "fedadam"])
def test_a_run_on_disk_is_the_run_in_memory_and_resumes_to_its_bits(
    algorithm: str, tmp_path: Path
) -> None:
    memory = run(None, algorithm, **GOALS)
    whole = run(tmp_path / "whole", algorithm, **GOALS)
    for stop in (1, 4, 5):
        with pytest.raises(prefed.Interrupted):
            run(tmp_path / "parts" / str(stop), algorithm, **GOALS, callbacks=[StopAt(stop)])
        again = run(tmp_path / "parts" / str(stop), algorithm, resume=True, **GOALS)
        assert fingerprint(tmp_path / "parts" / str(stop)) == fingerprint(tmp_path / "whole")
        for result in (again, whole):
            assert torch.equal(result.weights, memory.weights)
            assert torch.equal(result.server.weights, memory.server.weights)
            assert result.best_round == memory.best_round
            assert result.ended == memory.ended
        best = (tmp_path / "whole" / "best.safetensors").read_bytes()
        assert (tmp_path / "parts" / str(stop) / "best.safetensors").read_bytes() == best
    kept = safetensors.torch.load(best)
    assert all(torch.equal(kept[name], v) for name, v in memory.model.state_dict().items())


def test_patience_outlives_a_stop_and_an_end_is_an_end(tmp_path: Path) -> None:
    """Stopped in the middle of its patience, the run ends where it would have; then it has ended,
    and its callbacks hear that."""
    goals = {**GOALS, "stop_when": {"patience": 4}}
    whole = run(None, **goals)
    assert whole.ended
    last = len(whole.history)
    for stop in range(last - 3, last):
        folder = tmp_path / str(stop)
        with pytest.raises(prefed.Interrupted):
            run(folder, **goals, callbacks=[StopAt(stop)])
        assert run(folder, resume=True, **goals).ended == whole.ended
        stored = prefed.load_runs(folder)[0]
        assert (stored.status, stored.ended, stored.has_ended) == ("finished", whole.ended, True)
        before = fingerprint(folder)
        assert len(run(folder, resume=True, **goals).history) == last
        assert fingerprint(folder) == before


def test_the_best_of_before_a_kill_is_known_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed long after the best round: nothing but the files is left."""
    monkeypatch.setattr(run_directory, "SECONDS_BETWEEN", 0.0)
    goals = {"keep": "lowest test_accuracy"}
    whole = run(None, **goals)
    assert whole.best_round is not None
    assert whole.best_round < 8

    class Killed(BaseException):
        pass

    class Kill(prefed.Callback):
        def on_round(self, record: dict[str, Any]) -> None:
            if record["round"] == 9:
                raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(run_directory.RunDirectory, "on_stop", lambda self, reason: None)
        with pytest.raises(Killed):
            run(tmp_path / "run", **goals, callbacks=[Kill()])
    (tmp_path / "run" / "best.safetensors").unlink()
    again = run(tmp_path / "run", **goals, resume=True)
    assert again.best_round == whole.best_round
    assert torch.equal(again.weights, whole.weights)
    assert (tmp_path / "run" / "best.safetensors").exists()


def test_rounds_without_a_loss_count_for_patience_also_after_a_stop(tmp_path: Path) -> None:
    """Files have no NaN."""
    options: dict[str, Any] = {
        "rounds": 40, "clients_per_round": 2, "client_dropout": 0.6, "keep": "best train_loss",
        "stop_when": {"metric": "train_loss", "patience": 6}, "algorithm": "fedavg",
    }  # fmt: skip
    whole = run(tmp_path / "whole", **options)
    skipped = [r["round"] for r in whole.history if r.get("skipped")]
    assert whole.ended
    assert whole.best_round is not None
    stop = max(skipped)
    assert whole.best_round < stop < len(whole.history)
    with pytest.raises(prefed.Interrupted):
        run(tmp_path / "parts", **options, callbacks=[StopAt(stop)])
    again = run(tmp_path / "parts", resume=True, **options)
    assert fingerprint(tmp_path / "parts") == fingerprint(tmp_path / "whole")
    losses = [[str(r["train_loss"]) for r in result.history] for result in (again, whole)]
    assert losses[0] == losses[1]


def test_a_model_may_save_more_than_tensors(tmp_path: Path) -> None:
    class More(torch.nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    result = run(tmp_path / "run", "fedavg", model=More(5, 3).double(), rounds=1)
    saved = safetensors.torch.load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(saved["weight"], result.model.get_parameter("weight"))


def test_another_run_is_refused_with_the_difference(tmp_path: Path) -> None:
    run(tmp_path / "run")
    with pytest.raises(prefed.PrefedError, match=r"holds this run already; .*resume=True"):
        run(tmp_path / "run")
    clients = list(tiny_data().clients)  # type: ignore[call-overload]
    fewer = prefed.FederatedData(clients[:5], test=clients[0])
    swapped = prefed.FederatedData([clients[1], clients[0], *clients[2:]], test=clients[0])
    for change, words in (
        ({"seed": 3}, "seed: 0 there, 3 asked for"),
        ({"algorithm": "fedavg"}, "algorithm.name: scaffold there, fedavg asked for"),
        ({"model": tiny_model(seed=1)}, "model.sha256: "),
        ({"model": torch.nn.Linear(5, 3).double()}, "model.weights: 39 there, 18 asked for"),
        ({"data": fewer}, "data.clients: 6 there, 5 asked for"),
        ({"data": swapped}, "data.sha256: "),
        ({"loss": torch.nn.functional.cross_entropy}, "loss: (not set) there, "),
    ):
        with pytest.raises(prefed.PrefedError, match="another config") as caught:
            run(tmp_path / "run", resume=True, **change)
        assert words in str(caught.value)


def test_what_reads_runs_reads_these(tmp_path: Path) -> None:
    result = run(tmp_path / "a", **GOALS)
    run(tmp_path / "b", "fedavg", client_dropout=0.1, stop_when=lambda r: r["round"] == 3)
    runs = prefed.load_runs(tmp_path)
    assert [r.algorithm for r in runs] == ["scaffold", "fedavg"]
    assert len(prefed.to_pandas(tmp_path)) == len(result.history) + 3
    write_report(runs, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Ended early:" in page
    assert "test_simulate:" in page
    assert f"prefed run {tmp_path}" not in page
    listed = prefed_here("runs", str(tmp_path), cwd=tmp_path).stdout
    assert "early" in listed
    with pytest.raises(prefed.PrefedError, match=r"made in Python.*resume=True"):
        load_config(str(tmp_path / "a" / "config.toml"))


def test_loading_what_simulate_wrote(tmp_path: Path) -> None:
    result = run(tmp_path / "run", **GOALS)
    given = tiny_model(seed=4)
    loaded = prefed.load(tmp_path / "run", model=given)
    x = tiny_data().client(2).x
    assert torch.equal(loaded.model(x), result.model(x))
    assert not torch.equal(given(x), result.model(x)), "the model that is handed in stays"
    assert [r["train_loss"] for r in loaded.history] == [r["train_loss"] for r in result.history]
    assert loaded.config == result.config
    with pytest.raises(prefed.PrefedError, match="its Sequential was made in Python; give load"):
        prefed.load(tmp_path / "run")
    with pytest.raises(prefed.PrefedError, match="does not fit the model"):
        prefed.load(tmp_path / "run", model=torch.nn.Linear(3, 3))
    with pytest.raises(prefed.PrefedError, match="holds no run"):
        prefed.load(tmp_path)


def test_loading_the_run_of_a_config(tmp_path: Path) -> None:
    config = small("prefed", "keep=best test_f1", 'metrics=["f1"]')
    result = execute(config, tmp_path / "run")
    loaded = prefed.load(tmp_path / "run")
    wanted = result.model.state_dict()
    assert all(torch.equal(wanted[name], v) for name, v in loaded.model.state_dict().items())
    assert loaded.config == config.to_dict()
    with pytest.raises(prefed.Interrupted):
        execute(config, tmp_path / "half", stop=StopAfter(2))
    with pytest.raises(prefed.PrefedError, match="the run is interrupted, and has no model yet"):
        prefed.load(tmp_path / "half")


def test_a_result_is_short_and_can_be_saved(tmp_path: Path) -> None:
    result = run(None, **GOALS, local_steps=2)
    text = repr(result)
    assert len(text) < 300
    assert text.startswith("<scaffold: ")
    assert f"model of round {result.best_round}, the best" in text
    assert "tensor" not in text
    table = result.to_pandas()
    assert list(table["round"]) == list(range(1, len(result.history) + 1))
    assert list(table["test_f1"]) == [r["test_f1"] for r in result.history]
    result.save(tmp_path / "saved")
    loaded = prefed.load(tmp_path / "saved", model=tiny_model())
    x = tiny_data().client(1).x
    assert torch.equal(loaded.model(x), result.model(x))
    assert loaded.status == "finished"
    assert loaded.history == json.loads(json.dumps(result.history))
    with pytest.raises(prefed.PrefedError, match="holds a run already"):
        result.save(tmp_path / "saved")


def test_configs_and_the_command_line(tmp_path: Path) -> None:
    """The same three forms: a table, a string, --set; the end is an end, and says so."""
    words = ["run", "digits-noniid", "--out", str(tmp_path / "run"), "--set", "rounds=9"]
    changes = ["model.hidden=[8]", 'metrics=["f1", "top_3"]', "keep=best test_f1", "local_steps=2"]
    for change in (*changes, "stop_when.patience=1", "stop_when.metric=train_loss"):
        words += ["--set", change]
    done = prefed_here(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ended early, after round " in done.stdout
    assert "train_loss has not become better since round" in done.stdout
    assert "best in round " in done.stdout
    loaded = prefed.load(tmp_path / "run")
    assert loaded.config["stop_when"] == {"metric": "train_loss", "patience": 1, "min_delta": 0.0}
    assert load_config(loaded.config).to_dict() == loaded.config
    again = prefed_here(*words, "--resume", cwd=tmp_path)
    assert "ended early, after round" in again.stdout
    bad = prefed_here("validate", "digits-noniid", "--set", "metrics=f3", "--set",
                      "stop_when=soon", "--set", "keep=best of all", cwd=tmp_path)  # fmt: skip
    assert bad.returncode == 2
    assert [line.split(":")[1] for line in bad.stderr.splitlines()] == [
        " metrics",
        " stop_when",
        " keep",
    ]


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for progress, lines in ((None, 0), (False, 0), (True, 3)):
        run(rounds=3, progress=progress)
        out, err = capsys.readouterr()
        assert len(out.splitlines()) == lines
        assert err == ""
    run(rounds=1, progress=True)
    assert capsys.readouterr().out.startswith("round 1/1  loss ")


@pytest.mark.parametrize("progress", [None, True, False])
def test_progress_on_a_terminal(progress: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr("prefed.experiments.bars.Console", lambda stderr: terminal)
    run(rounds=3, progress=progress)
    assert ("3/3" in screen.getvalue()) == (progress is not False)


@pytest.mark.process
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_bar_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """One output that is drawn over again, and is in the notebook when it is saved."""
    monkeypatch.chdir(ROOT)
    code = (
        "import prefed\nfrom tests.helpers.problems import tiny_data, tiny_model\n"
        "prefed.simulate(prefed.FedAvg(client_lr=0.1), tiny_model(), tiny_data(), rounds=4,\n"
        "    local_steps=1, stop_when=lambda record: record['round'] == 3)"
    )
    cell = {"cell_type": "code", "source": code, "metadata": {}, "outputs": []}
    notebook = nbformat.from_dict({"cells": [{**cell, "execution_count": None}], "metadata": {},
                                   "nbformat": 4, "nbformat_minor": 4})  # fmt: skip
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    assert [o.output_type for o in outputs] == ["display_data", "execute_result"]
    assert "3/4" in outputs[0].data["text/html"]
    assert outputs[1].data["text/plain"].startswith("<fedavg: 3 rounds, ended early: ")


def test_seeds_of_runs_from_python_belong_together(tmp_path: Path) -> None:
    """Whatever their first weights and samples are."""
    for seed in (0, 1):
        torch.manual_seed(seed)
        x, y = torch.randn(3, 8, 4), torch.arange(8).expand(3, -1) % 2
        data = prefed.FederatedData(list(zip(x, y, strict=True)), test=(x[0], y[0]))
        prefed.simulate(
            prefed.FedAvg(client_lr=0.1), torch.nn.Linear(4, 2), data,
            rounds=2, local_steps=1, seed=seed, out=tmp_path / str(seed), device="cpu",
        )  # fmt: skip
    groups = group(prefed.load_runs(tmp_path))
    assert [len(g.runs) for g in groups] == [2]


def test_a_run_goes_on_with_the_same_function_alone(tmp_path: Path) -> None:
    """A config names a schedule of one's own, and another one may have that name by now."""

    def go_on(rounds: int, first: float) -> prefed.Result:
        algorithm = prefed.FedAvg(client_lr=lambda round: first / (1 + round))
        asked: dict[str, Any] = {"rounds": rounds, "local_steps": 1, "device": "cpu"}
        asked |= {"out": tmp_path / "run", "resume": True, "progress": False}
        return prefed.simulate(algorithm, tiny_model(), tiny_data(), **asked)

    go_on(2, 0.1)
    assert len(go_on(3, 0.1).history) == 3
    with pytest.raises(
        prefed.PrefedError, match=r"client_lr: the function gives 0\.2 in round 1, where"
    ):
        go_on(4, 0.2)
