"""What a new user meets on the command line: mistakes that everybody makes, tables and bars in
terminals and pipes, losses and more rounds."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

import prefed
from prefed.cli.deploy_command import found_from_elsewhere
from prefed.experiments.config import load, tuned_options
from prefed.experiments.ranking import group
from prefed.report.curves import charts
from tests.helpers.commands import Done, prefed_here
from tests.helpers.terminal import in_terminal, screen

SHORT = ("--set", "rounds=2", "--set", "local_steps=2", "--set", "model.hidden=[8]")
OWN = """
rounds = 2
local_steps = 2
algorithm = "fedavg"
model = "mlp"
[data]
name = "npz"
path = "own.npz"
split = {name = "iid", clients = 4}
"""


STUDY = """
title = "Small"
config = "digits-iid"
reference = "FedAvg"
set = ["rounds=2", "local_steps=2", "model.hidden=[8]"]
seeds = 2
algorithms = ["fedavg", "fedadam"]
[variants."FedAvg, half as fast"]
like = "fedavg"
client_lr = 0.05
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with a config for arrays of the user's own."""
    (tmp_path / "own.toml").write_text(OWN)
    return tmp_path


def save(folder: Path, x: tuple[int, ...], y: Any) -> None:
    np.savez(folder / "own.npz", x=np.random.default_rng(0).normal(size=(len(y), *x)), y=y)


def refused(done: Done) -> str:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return re.sub(r"[\s│]+", " ", done.stderr)


def test_version(tmp_path: Path) -> None:
    done = prefed_here("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"prefed {prefed.__version__}\n")


def test_help_says_what_arguments_are_and_fills_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    lines = prefed_here("run", "--help", cwd=tmp_path).stdout.splitlines()
    assert any("a TOML file or a preset" in line for line in lines)
    assert not any(line.strip() == "torchrun" for line in lines)
    assert "directories with runs" in prefed_here("report", "--help", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "digits-iid", "--rounds", "5"], "write --set rounds=5"),
        (["run", "digits-iid", "--client-lr=0.1"], "write --set client_lr=0.1"),
        (["compare", "digits-iid", "--roundz", "5"], "write --set rounds=5"),
        (["run", "digits-iid", "--outt", "x"], "Did you mean '--out'?"),
        (["runs", ".", "--rounds", "5"], "No such option '--rounds'."),
    ],
)
def test_options_that_are_not_there(words: list[str], told: str, tmp_path: Path) -> None:
    text = refused(prefed_here(*words, cwd=tmp_path))
    assert told in text
    assert ("--out" in text) == ("--out" in told)


def test_cat_of_things_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import prefed, torch\n"
        "def model(inputs, classes, width: int = 7):\n    'A model of mine.'\n"
        "class Mine(prefed.FedAvg):\n    'An algorithm of mine.'\n    nu: float = 0.5\n"
        "def loss(output, target, power: float = 2.0, weight: torch.Tensor | None = None):\n"
        "    'A loss of mine.'\n    return ((output - target).abs() ** power).mean()\n"
    )
    for name, parts in (
        ("mine:model", ("A model of mine.", "width = 7")),
        ("mine:Mine", ("An algorithm of mine.", "nu = 0.5")),
        ("mine:loss", ("A loss of mine.", "power = 2.0")),
        ("vectorised", ("A block of clients at once",)),
        ("bce", ("Yes or no",)),
        ("cifar10-noniid", ("[grid.fedavg]",)),
    ):
        done = prefed_here("cat", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert all(part in done.stdout for part in parts), done.stdout
    assert "inputs" not in prefed_here("cat", "mine:model", cwd=tmp_path).stdout
    assert "has no 'modle'" in refused(prefed_here("cat", "mine:modle", cwd=tmp_path))


def test_everything_that_ls_lists_can_be_shown(tmp_path: Path) -> None:
    listed = prefed_here("ls", cwd=tmp_path).stdout
    assert "losses:     bce cross_entropy mse" in listed
    for line in listed.splitlines():
        for name in line.partition(":")[2].split():
            done = prefed_here("cat", name, cwd=tmp_path)
            assert done.returncode == 0, (name, done.stderr)
            assert len(done.stdout.strip().splitlines()) > 1, name


@pytest.mark.long
def test_a_report_is_one_file_unless_figures_are_wanted(tmp_path: Path) -> None:
    prefed_here("run", "digits-iid", *SHORT, "--out", "run", cwd=tmp_path)
    before = {*tmp_path.rglob("*")}
    done = prefed_here("report", "run", "-o", "run/x.html", cwd=tmp_path)
    assert done.stdout == "1 run: run/x.html\n"
    assert {*tmp_path.rglob("*")} - before == {tmp_path / "run" / "x.html"}
    done = prefed_here("report", "run", "-o", "y.html", "--figures", "drawn", cwd=tmp_path)
    names = {"split", *(chart.name for chart in charts(group(prefed.load_runs(tmp_path))))}
    assert done.stdout == f"1 run: y.html and {len(names)} figures in drawn\n"
    files = {f"{name}.{kind}" for name in names for kind in ("pdf", "png")}
    assert {path.name for path in (tmp_path / "drawn").iterdir()} == files
    assert all((tmp_path / "drawn" / name).stat().st_size > 5000 for name in files)


def test_tables_in_pipes_and_terminals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a-folder-with-quite-a-long-name" / "and-another-one-below-that-is-long"
    prefed_here("run", "digits-iid", *SHORT, "--out", str(folder), cwd=tmp_path)
    name = str(folder.relative_to(tmp_path))
    monkeypatch.setenv("COLUMNS", "60")
    piped = prefed_here("runs", ".", cwd=tmp_path).stdout
    row = next(line for line in piped.splitlines() if "finished" in line)
    assert name in row
    cells = row.split()[1:]
    assert cells[:4] == ["prefed", "0", "finished", "2/2"]
    assert "…" not in piped
    for columns in (80, 120):
        lines = in_terminal("runs", ".", columns=columns, cwd=tmp_path)
        assert max(map(len, lines)) <= columns
        assert all(cell in " ".join(lines).split() for cell in cells)  # numbers are whole
        folded = "".join(line.strip().split(" ")[0] for line in lines)
        assert name in folded


def test_lines_and_bars_do_not_run_into_each_other(tmp_path: Path) -> None:
    unlucky = ("--set", "client_dropout=0.7", "--set", "quorum=5", "--set", "rounds=4")
    lines = in_terminal("run", "digits-iid", *SHORT, *unlucky, columns=80, cwd=tmp_path)
    told = [line for line in lines if "fewer than the quorum" in line]
    assert told
    assert all(re.match(r"round \d: \d answers", line) for line in told)
    assert sum("rounds  " in line for line in lines) == 1  # one bar is left


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_narrow_terminal_cuts_no_numbers_of_a_round(columns: int, tmp_path: Path) -> None:
    more = ("--set", 'metrics=["f1", "top_3", "perplexity"]', "--set", "data.client_test=0.2")
    lines = in_terminal("run", "digits-iid", *SHORT, *more, columns=columns, cwd=tmp_path)
    first = next(n for n, line in enumerate(lines) if "2/2 rounds" in line)
    after = next(n for n, line in enumerate(lines) if line.startswith("prefed: loss"))
    assert all(len(line) <= columns for line in lines[first:after])
    seen = " ".join(" ".join(lines[first:after]).split())
    words = ("loss", "accuracy", "f1", "top_3", "perplexity", "clients", "worst tenth")
    assert all(re.search(rf"{word} \d+\.\d+%?( |,|$)", seen) for word in words), seen


@pytest.mark.process
def test_what_the_runs_of_a_comparison_say_is_said_once_above_its_table(tmp_path: Path) -> None:
    words = ("compare", "digits-iid", "--algorithms", "fedper", "--seeds", "2", "--workers", "2")
    lines = in_terminal(*words, *SHORT, columns=80, cwd=tmp_path)
    assert sum("the test set is evaluated with the global model" in line for line in lines) == 1
    assert lines[0].startswith("fedper: client_lr")  # FedAvg's, from the preset
    assert lines[1].startswith("the test set")
    assert not any("runs" in line and "done" in line for line in lines)  # no piece of the table


@pytest.mark.process
def test_a_comparison_leaves_its_ranking_and_nothing_empty(tmp_path: Path) -> None:
    words = ("compare", "digits-iid", "--algorithms", "fedavg", "--seeds", "1", "--workers", "1")
    lines = in_terminal(*words, *SHORT, "--out", "c", columns=80, cwd=tmp_path)
    assert not any("state" in line for line in lines)
    assert "report: c/report.html" in lines
    assert any(line.split()[:1] == ["fedavg"] and "%" not in line for line in lines)


def test_the_screen_of_a_terminal() -> None:
    assert screen("one\r\n\x1b[2Ktwo\r\x1b[1A\x1b[2Kthree\r\n") == ["three", "two"]


def test_tuned_options_are_shown_where_they_apply(tmp_path: Path) -> None:
    done = prefed_here("run", "digits-noniid", *SHORT, "--set", "algorithm=fedavg", cwd=tmp_path)
    assert "fedavg: client_lr 0.7, client_momentum 0.5, from the preset" in done.stderr.splitlines()
    config = load("digits-noniid", ["algorithm=fedavg", "client_lr=0.1"])
    assert tuned_options("digits-noniid", config) == {"client_momentum": 0.5}
    plain = load("digits-noniid", ["algorithm=prefedsync"])
    assert tuned_options("digits-noniid", plain) == {}
    quiet = prefed_here("run", "digits-noniid", *SHORT, "--quiet", cwd=tmp_path)
    assert quiet.stderr == ""


def test_images_with_the_channels_last(here: Path) -> None:
    save(here, (16, 16, 3), np.arange(60) % 3)
    for model in ("cnn", "simple-cnn", "resnet8"):
        done = prefed_here("run", "own.toml", "--set", f"model={model}", cwd=here)
        assert "channels last, (16, 16, 3)" in refused(done)


def test_a_label_of_a_billion(here: Path) -> None:
    save(here, (4,), np.where(np.arange(60) % 2, 10**9, 0))
    assert "the label 1000000000 is too large" in refused(prefed_here("run", "own.toml", cwd=here))
    done = prefed_here("data", "check", "own.npz", cwd=here)
    assert done.returncode == 1
    assert "own.npz: WRONG: y: the label 1000000000" in done.stdout


def test_data_check_of_a_file(here: Path) -> None:
    save(here, (4,), (np.arange(60) % 3).astype(np.uint8))
    done = prefed_here("data", "check", "own.npz", cwd=here)
    assert done.returncode == 0, done.stderr
    assert "x (60, 4), y (60,): 48 training and 12 test samples, 3 classes" in done.stdout
    text = refused(prefed_here("data", "check", "own.toml", cwd=here))
    assert "is neither a directory nor an .npz file" in text


def test_whole_numbers_of_an_npz_are_labels(here: Path) -> None:
    """As docs/data.md says; also uint8, which are pixels in Python."""
    save(here, (4,), (np.arange(60) % 3).astype(np.uint8))
    done = prefed_here("run", "own.toml", "--json", cwd=here)
    assert json.loads(done.stdout.splitlines()[-1])["test_accuracy"] is not None


def test_an_engine_that_is_a_device(tmp_path: Path) -> None:
    done = prefed_here("validate", "digits-iid", "--set", "engine=gpu", cwd=tmp_path)
    assert "engine: 'gpu' is no engine; a GPU is a device: set device=cuda" in refused(done)


def test_a_store_that_mlflow_does_not_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    done = prefed_here(
        "run", "digits-iid", *SHORT, "--track", "mlflow", "--out", "run", cwd=tmp_path
    )
    assert "MLFLOW_TRACKING_URI, such as sqlite:///mlflow.db" in refused(done)
    assert not (tmp_path / "run").exists()


def accuracies(done: Done) -> list[float]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["test_accuracy"] for line in done.stdout.splitlines()]


def test_a_loss_in_a_config(here: Path) -> None:
    rng = np.random.default_rng(0)
    save(here, (4,), rng.integers(0, 2, (60, 5)))
    run = ("run", "own.toml", "--json")
    assert 'the loss is "bce"' in refused(prefed_here(*run, cwd=here))
    assert accuracies(prefed_here(*run, "--set", "loss=bce", "--out", "several", cwd=here))
    stored = tomllib.loads((here / "several" / "config.toml").read_text())
    assert stored["loss"] == {"name": "bce"}
    saved = safetensors.torch.load_file(here / "several" / "model.safetensors")
    assert [*saved.values()][-1].shape[0] == 5  # an output for each label
    save(here, (4,), rng.integers(0, 2, 60))
    assert accuracies(prefed_here(*run, "--set", "loss=bce", "--out", "one", cwd=here))
    usual = prefed_here(*run, cwd=here).stdout
    named = prefed_here(*run, "--set", "loss=cross_entropy", cwd=here).stdout
    smooth = ("--set", "loss=cross_entropy", "--set", "loss.label_smoothing=0.1")
    theirs = ("--set", "loss=torch.nn.functional:cross_entropy", *smooth[2:])

    def losses(text: str) -> list[float]:
        return [json.loads(line)["train_loss"] for line in text.splitlines()]

    assert losses(named) == losses(usual)
    ours = losses(prefed_here(*run, *smooth, cwd=here).stdout)
    assert ours == pytest.approx(losses(prefed_here(*run, *theirs, cwd=here).stdout), rel=1e-6)
    assert ours != losses(usual)
    wrong = prefed_here("validate", "own.toml", "--set", "loss={name='bce', smooth=1}", cwd=here)
    assert "loss.smooth: unknown option" in refused(wrong)
    wrong = prefed_here("validate", "own.toml", "--set", "loss=bc", cwd=here)
    assert "unknown loss 'bc'; did you mean \"bce\"?" in refused(wrong)


def test_more_rounds_on_the_command_line(tmp_path: Path) -> None:
    run = ("run", "digits-iid", *SHORT, "--quiet")
    assert prefed_here(*run, "--out", "run", cwd=tmp_path).returncode == 0
    more = prefed_here(*run, "--out", "run", "--resume", "--set", "rounds=4", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert len((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()) == 4
    fewer = prefed_here(*run, "--out", "run", "--resume", "--set", "rounds=3", cwd=tmp_path)
    assert "it cannot be given fewer" in refused(fewer)


@pytest.mark.process
@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "words", [["ls"], ["data", "ls"], ["cat", "prefedopt"], ["data", "show", "digits-noniid"]]
)
def test_lines_are_folded_between_words(words: list[str], columns: int, tmp_path: Path) -> None:
    lines = in_terminal(*words, columns=columns, cwd=tmp_path)
    assert max(map(len, lines)) <= columns
    piped = prefed_here(*words, cwd=tmp_path).stdout
    assert " ".join(lines).split() == piped.split()  # nothing is cut
    assert max(map(len, piped.splitlines())) > 80  # nor folded


@pytest.mark.process
def test_errors_and_the_log_are_folded_between_words(tmp_path: Path) -> None:
    words = ("run", "digits-iid", "--set", "nosuch=1")
    lines = in_terminal(*words, columns=80, cwd=tmp_path, code=2)
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()) == prefed_here(*words, cwd=tmp_path).stderr.strip()
    lines = in_terminal("run", "digits-noniid", "--set", "rounds=25", columns=80, cwd=tmp_path)
    assert max(map(len, lines)) <= 80


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    text = refused(prefed_here("cat", "zzzz", cwd=tmp_path))
    assert text.strip() == "error: nothing is called 'zzzz'; `prefed ls` lists what there is"
    near = refused(prefed_here("cat", "fedagv", cwd=tmp_path))
    assert 'did you mean "fedavg" or "fedavgm"' in near
    assert "`prefed ls` lists" in near
    wrong = refused(prefed_here("rn", cwd=tmp_path))
    assert wrong.count("'runs'") == 1


def test_studies_are_validated_as_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(STUDY)
    done = prefed_here("validate", "s.toml", cwd=tmp_path)
    assert done.stdout == "s.toml: ok, a study of 6 runs\n", done.stderr
    assert "a study of" in prefed_here("validate", "cifar10-noniid", cwd=tmp_path).stdout
    assert prefed_here("validate", "digits-noniid", cwd=tmp_path).stdout == "digits-noniid: ok\n"
    wrong = STUDY.replace("client_lr = 0.05", "client_lrr = 0.05")
    (tmp_path / "wrong.toml").write_text(
        wrong + "[grid.prefed]\ntau = [-1]\n[grid.fedyogi]\ntauu = [1]\n"
    )
    for command in ("validate", "study"):  # before anything is tuned
        text = refused(prefed_here(command, "wrong.toml", cwd=tmp_path))
        for key in ("client_lrr: unknown option", "tau: should be greater", "tauu: unknown option"):
            assert f"wrong: algorithm.{key}" in text
        assert "(in fedavg)" in text
    assert "its `set`" in refused(
        prefed_here("validate", "s.toml", "--set", "seed=1", cwd=tmp_path)
    )


@pytest.mark.parametrize("command", ["run", "compare", "sweep", "data show"])
def test_a_study_is_no_config(command: str, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(STUDY)
    more = ("--grid", "client_lr=1,2") if command == "sweep" else ()
    text = refused(prefed_here(*command.split(), "s.toml", *more, cwd=tmp_path))
    assert "s.toml: is a study, not a config; `prefed study s.toml` runs it" in text


def test_what_is_no_config_says_what_it_is(here: Path) -> None:
    assert "is a directory" in refused(prefed_here("run", ".", cwd=here))
    text = refused(prefed_here("study", "own.toml", cwd=here))
    assert "own.toml: is a config, not a study; `prefed run own.toml` runs it" in text
    (here / "none.toml").write_text("rounds = 2\n")
    text = refused(prefed_here("compare", "none.toml", cwd=here))
    assert "none.toml: names no algorithm; give --algorithms" in text


@pytest.mark.parametrize("command", ["run", "compare", "study"])
def test_a_file_where_a_directory_should_be(command: str, here: Path) -> None:
    (here / "s.toml").write_text(STUDY)
    source = "s.toml" if command == "study" else "digits-iid"
    text = refused(prefed_here(command, source, "--out", "own.toml", cwd=here))
    assert "Directory 'own.toml' is a file" in text


def test_every_error_of_the_command_line_at_once(tmp_path: Path) -> None:
    changes = ("modle=x", "rounds=-1", "client_lr=a")
    words = [word for change in changes for word in ("--set", change)]
    text = refused(prefed_here("validate", "digits-iid", *words, cwd=tmp_path))
    for told in ("modle: unknown option", "rounds: should be", "algorithm.client_lr: should be"):
        assert told in text
    (tmp_path / "x.toml").write_text("qqqq = 1\nzzzz = 1\n")
    text = refused(prefed_here("validate", "x.toml", cwd=tmp_path))
    assert "zzzz: unknown option" in text
    assert text.count("known: algorithm,") == 1


def test_data_mistakes(tmp_path: Path) -> None:
    text = refused(prefed_here("data", "show", "digits-iid", "-o", "x.xyz", cwd=tmp_path))
    assert "-o x.xyz: should end in .png, .svg or .pdf" in text
    text = refused(prefed_here("data", "get", "digits", cwd=tmp_path))
    assert "digits: nothing to download" in text
    (tmp_path / "x.npz").write_text("hello")
    told = prefed_here("data", "check", "x.npz", cwd=tmp_path).stdout
    assert told.count("x.npz") == 1


@pytest.mark.process
def test_the_table_of_a_study_fits_and_its_intervals_hold_what_can_be(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(STUDY)
    none = prefed_here("study", "s.toml", "--out", "o", "--draw", cwd=tmp_path)
    assert none.stdout == "o: no run of the comparison has ended yet\n"
    done = prefed_here("study", "s.toml", "--out", "o", "--workers", "1", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for columns in (80, 120):
        words = ("study", "s.toml", "--out", "o", "--draw")
        lines = in_terminal(*words, columns=columns, cwd=tmp_path)
        assert max(map(len, lines)) <= columns
        ends = re.findall(r"\[([-+.\d]+), ([-+.\d]+)\]", " ".join(lines))
        assert len(ends) == 5
        assert all(-100 <= float(low) <= float(high) <= 100 for low, high in ends)
    stored = json.loads((tmp_path / "o" / "s.json").read_text())["lines"]
    assert all(0 <= row["interval"][0] <= row["interval"][1] <= 100 for row in stored)


@pytest.mark.process
def test_watching_what_is_not_there_says_nothing_of_runs(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "prefed", "watch", "nothing"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline().startswith("watching nothing on")
        watching.send_signal(signal.SIGINT)
        assert watching.stdout.read() == "stopped\n"


def test_a_deployment_finds_data_from_elsewhere(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFED_DATA", "files")
    monkeypatch.chdir(here)
    save(here, (4,), np.arange(60) % 3)
    config = found_from_elsewhere(load("own.toml"))
    assert config.data.options["path"] == str(here / "own.npz")
    assert os.environ["PREFED_DATA"] == str(here / "files")
    assert found_from_elsewhere(load("digits-iid")) == load("digits-iid")
