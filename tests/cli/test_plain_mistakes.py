"""Mistakes that are refused before anything runs, with words that say what to change."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import prefed
from tests.helpers.commands import prefed_here

SHORT = ("--set", "rounds=1", "--set", "local_steps=1", "--set", "model.hidden=[4]")


def refused(*words: str, cwd: Path) -> str:
    done = prefed_here(*words, cwd=cwd)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return re.sub(r"[\s│]+", " ", done.stderr)


COMMANDS = {
    "the algorithm is another one's": (
        "compare digits-iid --algorithms fedavg --set algorithm=prefed",
        "--set algorithm=prefed: --algorithms says which",
    ),
    "no algorithm": ("compare digits-iid --algorithms ,", "--algorithms: names none"),
    "a seed of a comparison": ("compare digits-iid --set seed=5", "--seeds says how many"),
    "a seed of a sweep": (
        "sweep digits-iid --set seed=5 --grid client_lr=0.1,0.2",
        "--seeds says how many",
    ),
    "steps and epochs": (
        "run digits-iid --set local_epochs=1 --set local_steps=2",
        "local_steps: cannot stand beside local_epochs",
    ),
    "true for a number": ("validate digits-iid --set rounds=true", "rounds: should not be true"),
    "no stragglers": ("validate digits-iid --set straggler_work=drop", "straggler_work: is for"),
    "too many clients": (
        "validate digits-iid --set clients_per_round=1000",
        "clients_per_round: 1000 is more",
    ),
    "no clients": (
        "validate digits-iid --set data.split.clients=0",
        "data.split.clients: should be 1 or more, not 0",
    ),
    "a head that is not there": (
        'validate digits-iid --set personal=["head"]',
        "personal: 'head' names no parameter",
    ),
    "an embedding that is not there": (
        'validate digits-iid --set algorithm={name="prefeds",plain=["tokens"]} --set client_lr=1',
        "PreFedS.plain: 'tokens' names no parameter",
    ),
    "a matrix that is not there": (
        'validate digits-iid --set algorithm={name="fedmuon",adam=["tokens"]} --set client_lr=1',
        "FedMuon.adam: 'tokens' names no parameter",
    ),
    "two in a sum": (
        "deploy digits-iid --set clients_per_round=2 --local 3 --secure-aggregation",
        "a sum needs clients on three nodes or more",
    ),
    "true for a step size": ("validate digits-iid --set client_lr=true", "client_lr: should not"),
    "true for clients": (
        "validate digits-iid --set data.split.clients=true",
        "data.split: clients: should not be true or false",
    ),
    "a seed to tune": ("sweep digits-iid --grid seed=0,1", "a seed is nothing to tune"),
    "a list and a range": (
        "sweep digits-iid --random 2 --grid client_lr=0.1,0.2 --range client_lr=1e-3:1",
        "client_lr: is in --grid and in --range",
    ),
    "another one's option": (
        "compare digits-iid --algorithms fedavg,prefed --set tau=0.1",
        "tau: unknown option of fedavg; ",
    ),
    "turns that never come": (
        "validate digits-iid --set algorithm=fedrep --set client_lr=1 --set personal_steps=10 "
        "--set local_steps=10",
        "personal_steps: clients take 10 local steps a round, and the first 10 move the personal",
    ),
    "the only one's option": (
        "validate digits-iid --set algorithm=fedavg --set client=adam",
        "client: unknown option of fedavg; pair has one of that name",
    ),
    "no name": (
        "validate digits-iid --set algorithm=fedavg --set client_lr=1 --set personal=3",
        "algorithm.personal: should be a list of names, not 3",
    ),
    "a part of a table": ("table mcmahan-2nn --draw --only iid", "--only: chooses what is run"),
    "a mean without a name": (
        "validate digits-iid --set mean.share=0.2",
        "share = 0.2, bucket = 2}, not {'share': 0.2} ",
    ),
    "a module that is not there": (
        "validate digits-iid --set algorithm=nowhere:X --set client_lr=1",
        "error: algorithm.name: algorithm 'nowhere:X': cannot import it",
    ),
    "a thing that is not there": ("cat nowhere:X", "error: 'nowhere:X': cannot import it"),
    "nothing to write over": ("deploy digits-iid --write app --out x", "--write begins none"),
    "clients that meet": (
        "deploy digits-iid --set algorithm=prefedsync --write app",
        "it runs in simulation only",
    ),
    "clients out of step": (
        "deploy digits-iid --set devices=phone --set asynchronous.buffer=3 --write app",
        "asynchronous: is for simulations",
    ),
    "neighbours without sums": (
        "deploy digits-iid --write app --secure-neighbours 5",
        "secure_neighbours: is for secure_aggregation",
    ),
}


@pytest.mark.parametrize(("words", "text"), COMMANDS.values(), ids=COMMANDS)
def test_commands(words: str, text: str, tmp_path: Path) -> None:
    assert text in refused(*words.split(), cwd=tmp_path) + " "
    assert not (tmp_path / "app").exists()


OWN = {
    "algorithm=mine:function": "'mine:function' is a function, not a class of algorithms",
    "data=mine:pair": "mine:pair should return a prefed.data.Dataset, not tuple",
    "data.split=mine:nothing": "data.split: should return the sample numbers of each client",
    "data.split=mine:beyond": "data.split: sample 99999 is none of 0 to 1436",
    "data.split=mine:below": "data.split: sample -1 is none of 0 to 1436",
    "model=broken:net": "model.name: model 'broken:net': cannot import it: SyntaxError",
    "model=failing:net": "cannot import it: ZeroDivisionError: division by zero (",
}


@pytest.mark.parametrize(("change", "text"), OWN.items(), ids=OWN)
def test_pieces_of_the_users_own(change: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def function(): ...\n"
        "def pair(): return 1, 2\n"
        "def nothing(labels, generator): ...\n"
        "def beyond(labels, generator): return [[0, 1], [99999]]\n"
        "def below(labels, generator): return [[0, 1], [-1]]\n"
    )
    (tmp_path / "broken.py").write_text("def net(:\n")
    (tmp_path / "failing.py").write_text("1 / 0\n")
    assert text in refused("run", "digits-iid", *SHORT, "--set", change, cwd=tmp_path)


ARRAYS: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "no targets of the test set": ({"x_test": (3, 5)}, "there is x_test in it, but no y_test"),
    "no test set of the targets": ({"y_test": (3,)}, "there is y_test in it, but no x_test"),
    "a test set of another shape": (
        {"x_test": (3, 6), "y_test": (3,)},
        "x_test has samples of shape (6,) each, and x of (5,)",
    ),
    "nothing": ({"x": (0, 5), "y": (0,)}, "x and y hold no samples"),
}


@pytest.mark.parametrize(("shapes", "text"), ARRAYS.values(), ids=ARRAYS)
def test_arrays(shapes: dict[str, tuple[int, ...]], text: str, tmp_path: Path) -> None:
    arrays = {n: np.zeros(s, int) for n, s in ({"x": (30, 5), "y": (30,)} | shapes).items()}
    np.savez(tmp_path / "own.npz", **arrays)  # type: ignore[arg-type]
    done = prefed_here("data", "check", "own.npz", cwd=tmp_path)
    assert done.returncode == 1
    assert text in re.sub(r"\s+", " ", done.stdout)


def test_without_its_data_a_config_is_ok_as_far_as_can_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFED_DATA", str(tmp_path))
    told = prefed_here("validate", "paper-cifar100-iid", cwd=tmp_path).stdout
    assert "ok, as far as can be told without its data" in told


def test_a_run_that_is_there_twice_counts_once_and_a_damaged_one_hides_no_other(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        assert not prefed_here("run", "digits-iid", *SHORT, "--out", name, cwd=tmp_path).returncode
    everything = tmp_path, tmp_path / "a", tmp_path / "." / "a"
    assert [run.folder.name for run in prefed.load_runs(*everything)] == ["a", "b"]
    (tmp_path / "a" / "config.toml").write_text("")
    done = prefed_here("runs", ".", cwd=tmp_path)
    assert done.returncode == 0
    assert "left out: a/config.toml: names no algorithm" in done.stderr
    assert "b" in done.stdout
    shutil.rmtree(tmp_path / "a")
    text = (tmp_path / "b" / "rounds.jsonl").read_text()
    (tmp_path / "b" / "rounds.jsonl").write_text("garbage\n" + text)
    with pytest.warns(UserWarning, match=r"left out: .*rounds.jsonl:1: not a record"):
        assert not prefed.load_runs(tmp_path)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    assert not prefed_here("run", "digits-iid", *SHORT, "--out", "a", cwd=tmp_path).returncode
    done = prefed_here("report", "a", "-o", "a", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: a: Is a directory")


def data(*shapes: tuple[int, ...]) -> prefed.FederatedData:
    torch.manual_seed(0)
    return prefed.FederatedData([(torch.randn(s), torch.arange(s[0]) % 2) for s in shapes])


def simulate(**options: Any) -> prefed.Result:
    model = options.pop("model", None) or nn.Linear(5, 2)
    given = options.pop("data", None) or data((20, 5), (21, 5))
    algorithm = options.pop("algorithm", None) or prefed.FedAvg(client_lr=0.1)
    return prefed.simulate(
        algorithm, model, given, **{"rounds": 2, "local_steps": 2, "batch_size": 10} | options
    )


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


PYTHON: dict[str, tuple[Callable[[], Any], str]] = {
    "a list of clients": (
        lambda: simulate(data=[(torch.randn(4, 5), torch.zeros(4))]),
        "data: should be a prefed.FederatedData",
    ),
    "clients that differ": (
        lambda: simulate(data=data((20, 5), (20, 6))),
        r"clients\[1\]: its samples are of shape \(6,\)",
    ),
    "a function that listens": (
        lambda: simulate(callbacks=[lambda record: None]),
        "callbacks: should be objects",
    ),
    "a class that listens": (
        lambda: simulate(callbacks=[prefed.Callback]),
        "callbacks: should be objects .* not Callback",
    ),
    "a key that is not there": (
        lambda: simulate(stop_when=lambda record: record["nope"] > 3),
        "stop_when: the record of a round has no 'nope', only round",
    ),
    "nothing to resume": (lambda: simulate(resume=True), "resume: needs out"),
    "one sample at the end of a pass": (
        lambda: simulate(model=norm(), local_steps=None, local_epochs=1),
        r"clients\[1\]: it has batches of one sample.*drop_last",
    ),
    "batches of one sample": (
        lambda: simulate(model=norm(), batch_size=1),
        r"clients\[0\]: it has batches of one sample",
    ),
    "the rest of a batch": (
        lambda: simulate(model=norm(), micro_batch=3),
        r"clients\[0\]: it has batches of one sample",
    ),
}


@pytest.mark.parametrize(("run", "text"), PYTHON.values(), ids=PYTHON)
def test_in_python(run: Callable[[], Any], text: str) -> None:
    with pytest.raises(prefed.PrefedError, match=text):
        run()


def test_what_is_near_these_mistakes_and_none() -> None:
    simulate(model=norm(), local_steps=None, local_epochs=1, drop_last=True)
    conv = nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2))
    simulate(model=nn.Sequential(conv, nn.Flatten(), nn.Linear(6, 2)), batch_size=1)
    smooth = {"name": "cross_entropy", "label_smoothing": 0.1}
    assert simulate(loss=smooth).history[0]["train_loss"] != simulate().history[0]["train_loss"]


def test_scaffold_learns_nothing_in_a_round_without_a_step() -> None:
    falling = prefed.schedule.cosine(start=0.1, rounds=2)
    result = simulate(algorithm=prefed.SCAFFOLD(client_lr=falling), rounds=3)
    two = simulate(algorithm=prefed.SCAFFOLD(client_lr=falling), rounds=2)
    assert torch.equal(result.weights, two.weights)
    assert torch.equal(result.server.shared["c"], two.server.shared["c"])


def test_a_strategy_of_flower_finds_options_of_contrib() -> None:
    pytest.importorskip("flwr")
    assert prefed.flower.PreFed(P_every=2).algorithm == prefed.PreFed(P_every=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        (prefed.FedMuon(), "c of FedMuon does not hold one number for each weight"),
        (prefed.PreFed(shape="kronecker"), 'P of PreFed is a matrix.*shape="diagonal"'),
    ],
)
def test_what_cannot_be_private(algorithm: prefed.Algorithm, text: str) -> None:
    pytest.importorskip("dp_accounting")
    privacy = prefed.Privacy(clip=1.0, noise_multiplier=1.0, delta=1e-3)
    with pytest.raises(prefed.PrefedError, match=text):
        simulate(algorithm=algorithm, privacy=privacy)
