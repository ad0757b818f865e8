"""The command line as a user meets it: real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import safetensors.torch
import torch

from prefed.experiments.config import load
from tests.helpers.commands import prefed_command, prefed_here

SHORT = ("--set", "rounds=2", "--set", "local_steps=2")


@pytest.mark.process
def test_help_does_not_import_torch() -> None:
    code = "import sys; sys.argv = ['prefed', '--help']\nfrom prefed.cli import main\n"
    code += "try: main()\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "compare" in done.stdout


@pytest.mark.process
def test_run_writes_the_run_directory(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = prefed_command("run", "digits-noniid", *SHORT, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()[:2]] == ["1/2", "2/2"]
    records = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [r["round"] for r in records] == [1, 2]
    assert json.loads((out / "environment.json").read_text())["torch"] == torch.__version__
    config = load(tomllib.loads((out / "config.toml").read_text()))
    simulation = config.make_run()
    for record in records:
        again = simulation.run_round()
        assert {**again, "seconds": 0} == {**record, "seconds": 0}
    model = safetensors.torch.load_file(out / "model.safetensors")
    simulation.result()
    for name, value in simulation.task.flat.module.state_dict().items():
        assert torch.equal(model[name], value)

    refused = prefed_here("run", "digits-noniid", *SHORT, "--out", str(out), cwd=tmp_path)
    assert refused.returncode == 2
    assert "add --resume" in refused.stderr


def test_json_and_quiet(tmp_path: Path) -> None:
    done = prefed_here("run", "digits-iid", *SHORT, "--json", "--out", "a", cwd=tmp_path)
    assert [json.loads(line)["round"] for line in done.stdout.splitlines()] == [1, 2]
    done = prefed_here("run", "digits-iid", *SHORT, "--quiet", "--out", "b", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")


def test_all_config_errors_at_once(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(
        'rounds = 0\nlocal_stepz = 3\nlocal_steps = 5\n[algorithm]\nname = "fedadam"\n'
        'client_lr = -1\nbetta2 = 0.9\n[model]\nname = "mlpp"\n[data]\nname = "digits"\n'
        'split = {name = "dirichlet", alpha = 0.1, client = 3}\n'
    )
    done = prefed_here("validate", "bad.toml", cwd=tmp_path)
    assert done.returncode == 2
    for part in (
        "rounds: should be greater than 0",
        'local_stepz: unknown option; did you mean "local_steps"?',
        "algorithm.client_lr: should be greater than 0, not -1",
        'algorithm.betta2: unknown option; did you mean "beta2"?',
        "model.name: unknown model 'mlpp'; did you mean \"mlp\"?",
        "data.split.clients: is required",
        'data.split.client: unknown option; did you mean "clients"?',
    ):
        assert part in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "digits-nonid"], 'did you mean "digits-noniid"?'),
        (["run", "digits-iid", "--set", "rounds"], "key=value"),
        (["run", "digits-iid", "--set", "client_lrr=1"], 'did you mean "client_lr"?'),
        (["run", "digits-iid", "--set", "algorithm=fedadm"], 'did you mean "fedadam"?'),
        (["run", "digits-iid", "--set", "device=cuda:99"], "device: 'cuda:99' cannot be used here"),
        (["run", "digits-iid", "--set", "data.split.clients=5000"], "1437 samples"),
        (["cat", "prefedd"], 'did you mean "prefed" or'),
        (["run", "digits-iid", "--set", "algorithm=nowhere:Thing"], "cannot import"),
    ],
)
def test_mistakes_get_an_answer(words: list[str], message: str, tmp_path: Path) -> None:
    done = prefed_here(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_divergence_is_exit_1_and_says_what_to_lower(tmp_path: Path) -> None:
    done = prefed_here(
        "run", "digits-iid", "--set", "algorithm=fedavg", "--set", "client_lr=1e30",
        "--out", "out", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Lower client_lr (now 1e+30)" in done.stderr
    last = json.loads((tmp_path / "out" / "rounds.jsonl").read_text().splitlines()[-1])
    assert last["train_loss"] is None


def test_ls_and_cat(tmp_path: Path) -> None:
    listed = prefed_here("ls", cwd=tmp_path).stdout
    for name in ("digits-noniid", "prefedopt", "mlp", "dirichlet", "sequential"):
        assert name in listed
    about = prefed_here("cat", "prefed", cwd=tmp_path).stdout
    assert "beta1 = 0.9" in about
    assert "client_lr = 0.001\n        The step size of the clients" in about, "said by a base"
    assert "clients = (required)" in prefed_here("cat", "iid", cwd=tmp_path).stdout
    assert "[tuned.prefed]" in prefed_here("cat", "digits-iid", cwd=tmp_path).stdout


@pytest.mark.process
def test_compare_prints_a_table(tmp_path: Path) -> None:
    start = time.monotonic()
    done = prefed_here(
        "compare", "digits-iid", "--algorithms", "fedavg,prefed", "--seeds", "2", *SHORT,
        "--target", "0.05", "--out", "good", "--workers", "1", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "to 5%" in done.stdout
    histories = {
        p.parent.name: [json.loads(line) for line in p.read_text().splitlines()]
        for p in (tmp_path / "good").glob("*/rounds.jsonl")
    }
    assert len(histories) == 4
    for seed in (0, 1):  # paired: the same cohorts for both algorithms
        cohorts = {
            str([r["cohort"] for r in histories[f"{name}-seed{seed}"]])
            for name in ("fedavg", "prefed")
        }
        assert len(cohorts) == 1
    assert time.monotonic() - start < 110
