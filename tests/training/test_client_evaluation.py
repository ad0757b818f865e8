"""Clients evaluated one by one, against plain PyTorch loops."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import prefed
from prefed.core import draws
from prefed.core.losses import make_loss
from prefed.experiments.config import load
from prefed.experiments.ranking import group, headings
from prefed.experiments.run_directory import execute
from prefed.training import task as task_module
from prefed.training.batches import Batches
from tests.helpers.problems import arrays, tiny_data, tiny_model
from tests.helpers.run_folders import small

SETTINGS: dict[str, Any] = {"rounds": 3, "local_steps": 2, "batch_size": 3, "device": "cpu"}


def pairs(seed: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.tensor(x), torch.tensor(y)) for x, y in arrays(seed)]


def given() -> prefed.FederatedData:
    """Test samples of other draws; client 2 has none."""
    tests = [(x[:0], y[:0]) if c == 2 else (x, y) for c, (x, y) in enumerate(pairs(1))]
    return prefed.FederatedData(tiny_data().clients, test=pairs(0)[0], client_tests=tests)


def absolute(output: Tensor, y: Tensor) -> Tensor:
    """A loss of one's own, which is no mean over samples."""
    return (output.gather(1, y[:, None]).mean() - 1).abs()


@torch.no_grad()
def plain(model: nn.Module, data: prefed.FederatedData, loss: Any = cross_entropy) -> Any:
    """Accuracy and loss of each client that has test samples, in a loop."""
    accuracies, losses = [], []
    model.eval()
    for client in range(len(data)):
        x, y = data.client_test(client).all()
        if len(x):
            output = model(x)
            accuracies.append(float((output.argmax(1) == y).double().mean()))
            losses.append(float(loss(output, y)))
    return accuracies, losses


def check_summary(record: dict[str, Any], accuracies: list[float], losses: list[float]) -> None:
    for name, lists, values in (
        ("accuracy", "accuracies", np.array(accuracies)),
        ("loss", "losses", np.array(losses)),
    ):
        np.testing.assert_allclose(record[f"client_{lists}"], values, rtol=1e-12)
        worst = np.sort(values)[:: 1 if name == "accuracy" else -1][: math.ceil(len(values) / 10)]
        wanted = {"mean": values.mean(), "std": values.std(), "worst_tenth": worst.mean()}
        for key, value in wanted.items():
            assert record[f"client_{name}_{key}"] == pytest.approx(value, rel=1e-12), key


@pytest.mark.parametrize(
    ("loss", "batch"),
    [(None, 5), (None, 20), (cross_entropy, 5), (cross_entropy, 1024), (absolute, 20)],
)
def test_the_global_model(loss: Any, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many clients in a batch or few; a loss of one's own sees the samples of a client at once."""
    monkeypatch.setattr(task_module, "EVALUATION_BATCH", batch)
    data = given()
    result = prefed.simulate(
        prefed.FedAvg(client_lr=0.1), tiny_model(), data, loss=loss, **SETTINGS
    )
    check_summary(result.history[-1], *plain(result.model, data, loss or cross_entropy))
    assert result.history[-1]["evaluated_clients"] == [0, 1, 3, 4, 5]
    without = prefed.simulate(
        prefed.FedAvg(client_lr=0.1), tiny_model(), tiny_data(), loss=loss, **SETTINGS
    )
    assert torch.equal(result.weights, without.weights), "looking changes nothing"


@pytest.mark.parametrize("batch", [5, 1024])
@pytest.mark.parametrize("named", [False, True])
def test_clients_of_whose_targets_none_counts(
    batch: int, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_module, "EVALUATION_BATCH", batch)
    data, tests = tiny_data(), pairs(1)
    tests[3][1].fill_(-100)
    tests[4][1][::2] = -100
    data = prefed.FederatedData(data.clients, client_tests=tests)
    loss = make_loss("cross_entropy", ignore_index=-100) if named else cross_entropy
    algorithm = prefed.FedAvg(client_lr=0.1)
    result = prefed.simulate(algorithm, tiny_model(), data, loss=loss, **SETTINGS)
    counted = [(x[y >= 0], y[y >= 0]) for x, y in tests]
    wanted = plain(result.model, prefed.FederatedData(data.clients, client_tests=counted))
    check_summary(result.history[-1], *wanted)
    assert result.history[-1]["evaluated_clients"] == [0, 1, 2, 4, 5]


def test_rounds_and_samples_of_clients() -> None:
    data = given()
    result = prefed.simulate(
        prefed.FedAvg(client_lr=0.1), tiny_model(), data, **{**SETTINGS, "rounds": 8},
        evaluate_clients=3, evaluate_clients_every=3, evaluate_every=4,
    )  # fmt: skip
    evaluated = [r["round"] for r in result.history if "client_accuracies" in r]
    assert evaluated == [3, 6, 8]
    assert [r["round"] for r in result.history if r["test_loss"] is not None] == [4, 8]
    samples = [r["evaluated_clients"] for r in result.history if "evaluated_clients" in r]
    assert len({tuple(s) for s in samples}) > 1, "another draw each time"
    accuracies, losses = plain(result.model, data)
    have = [0, 1, 3, 4, 5]
    chosen = [have.index(c) for c in samples[-1]]
    check_summary(result.history[-1], [accuracies[i] for i in chosen], [losses[i] for i in chosen])


def test_targets_that_are_numbers() -> None:
    clients = [(x, x[:, :3]) for x, _ in pairs(0)]
    data = prefed.FederatedData(clients, client_tests=clients)
    result = prefed.simulate(prefed.FedAvg(client_lr=0.01), tiny_model(), data, **SETTINGS)
    last = result.history[-1]
    with torch.no_grad():
        losses = [float(((result.model(x) - y) ** 2).mean()) for x, y in clients]
    assert last["client_losses"] == pytest.approx(losses, rel=1e-12)
    assert "client_accuracies" not in last


@pytest.mark.parametrize("kind", ["list", "partition", "lazy"])
def test_a_share_of_each_client(kind: str) -> None:
    clients = pairs(0)
    xs, ys = (torch.cat(parts) for parts in zip(*clients, strict=True))
    ends = np.cumsum([len(x) for x, _ in clients])
    parts = np.split(np.arange(ends[-1]), ends[:-1])

    class Lazy:
        def __len__(self) -> int:
            return len(clients)

        def __getitem__(self, client: int) -> tuple[Tensor, Tensor]:
            return clients[client]

    made: Any = {"list": clients, "partition": prefed.Partition(xs, ys, parts), "lazy": Lazy()}
    data = prefed.FederatedData(made[kind]).hold_out(0.25, seed=5)
    for number, (x, y) in enumerate(clients):
        rest, test = data.client(number).all(), data.client_test(number).all()
        assert len(test[0]) == max(1, round(0.25 * len(x)))
        for i, values in enumerate((x, y)):
            both = torch.cat([rest[i], test[i]]).reshape(len(x), -1)
            assert torch.equal(both.sort(0).values, values.reshape(len(x), -1).sort(0).values)
    same = prefed.FederatedData(clients).hold_out(0.25, seed=5)
    other = prefed.FederatedData(clients).hold_out(0.25, seed=6)
    first = [torch.cat([d.client_test(c).all()[0] for c in range(6)]) for d in (data, same, other)]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])
    result = prefed.simulate(prefed.FedAvg(client_lr=0.1), tiny_model(), data, **SETTINGS)
    check_summary(result.history[-1], *plain(result.model, data))


def test_a_client_with_one_sample_keeps_it() -> None:
    x, y = pairs(0)[0]
    data = prefed.FederatedData([(x, y), (x[:1], y[:1])]).hold_out(0.5)
    assert (len(data.client(1)), len(data.client_test(1))) == (1, 0)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("workers", [1, 2])
def test_fine_tuning(engine: str, workers: int) -> None:
    """Plain SGD steps on a copy, with the batches of the keys that are documented."""
    data, steps = given(), 3
    common = {**SETTINGS, "engine": engine, "workers": workers}
    model: nn.Module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    model = tiny_model() if engine == "vectorised" else model
    tuned = prefed.simulate(
        prefed.FedAvg(client_lr=0.1), model, data, **common, finetune_steps=steps
    )
    untouched = prefed.simulate(prefed.FedAvg(client_lr=0.1), model, data, **common)
    assert torch.equal(tuned.weights, untouched.weights), "the run does not notice"
    settings = prefed.Settings(
        **{**SETTINGS, "local_steps": steps, "seed": draws.torch_seed(0, "fine-tuning")}
    )
    accuracies, losses = [], []
    for client in (0, 1, 3, 4, 5):
        own = copy.deepcopy(untouched.model).train()
        batches = Batches(data.client(client), client, SETTINGS["rounds"] - 1, settings)
        for k in range(steps):
            x, y = batches[k]
            gradients = torch.autograd.grad(cross_entropy(own(x), y), list(own.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(own.parameters(), gradients, strict=True):
                    parameter.sub_(0.1 * gradient)
        x, y = data.client_test(client).all()
        with torch.no_grad():
            output = own.eval()(x)
        accuracies.append(float((output.argmax(1) == y).double().mean()))
        losses.append(float(cross_entropy(output, y)))
    last = tuned.history[-1]
    assert last["client_accuracies"] == pytest.approx(accuracies, abs=1e-12)
    assert last["client_losses"] == pytest.approx(losses, rel=1e-9)
    assert last["client_losses"] != untouched.history[-1]["client_losses"]


def test_it_is_the_same_after_a_resume_and_may_end_a_run(tmp_path: Path) -> None:
    def run(out: Path | None, **more: Any) -> prefed.Result:
        return prefed.simulate(
            prefed.FedAvg(client_lr=0.1), tiny_model(), given(), **{**SETTINGS, "rounds": 6},
            out=out, finetune_steps=2, evaluate_clients=4,
            keep="best client_accuracy_worst_tenth", **more,
        )  # fmt: skip

    class Stop(prefed.Callback):
        def on_round(self, record: dict[str, Any]) -> None:
            if record["round"] == 3:
                self.run.stop()

    whole = run(None)
    with pytest.raises(prefed.Interrupted):
        run(tmp_path / "run", callbacks=[Stop()])
    again = run(tmp_path / "run", resume=True)
    for a, b in zip(whole.history, again.history, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}
    assert again.best_round == whole.best_round
    ended = run(None, stop_when="client_loss_mean <= 100")
    assert len(ended.history) == 1


def test_in_a_config(tmp_path: Path) -> None:
    config = small("fedavg", "data.client_test=0.2", "evaluate_clients=7", "finetune_steps=1")
    assert load(config.to_dict()).to_dict() == config.to_dict()
    assert "client_test" not in small("fedavg").to_dict()["data"]
    execute(config, tmp_path / "a")
    runs = prefed.load_runs(tmp_path)
    groups = group(runs)
    shown = dict(zip(headings(groups[0], 0.9), groups[0].cells(0.9), strict=True))
    last = runs[0].history[-1]
    worst, std = (100 * last[f"client_accuracy_{key}"] for key in ("worst_tenth", "std"))
    assert shown["worst 10 %\n/ std"] == f"{worst:.1f}/{std:.1f}"


@pytest.mark.parametrize(
    ("data", "settings", "words"),
    [
        (tiny_data, {"evaluate_clients": 2}, "evaluate_clients: clients have no test samples"),
        (tiny_data, {"finetune_steps": 2}, "finetune_steps: clients have no test samples"),
        (given, {"evaluate_clients": 7}, "evaluate_clients: 7 is more than the 6 clients"),
        (given, {"finetune_steps": 0}, "finetune_steps: should be greater than 0"),
    ],
)
def test_what_is_refused(data: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(prefed.PrefedError, match=words):
        prefed.simulate(prefed.FedAvg(client_lr=0.1), tiny_model(), data(), **SETTINGS, **settings)


def test_more_that_is_refused() -> None:
    with pytest.raises(prefed.PrefedError, match="client_tests: 1 for 6 clients"):
        prefed.FederatedData(tiny_data().clients, client_tests=pairs(0)[:1])
    with pytest.raises(prefed.PrefedError, match="share: should lie between 0 and 1"):
        tiny_data().hold_out(1.0)
    none = [(x[:0], y[:0]) for x, y in pairs(0)]
    with pytest.raises(prefed.PrefedError, match="client_tests: no client has test samples"):
        data = prefed.FederatedData(tiny_data().clients, client_tests=none)
        prefed.simulate(prefed.FedAvg(client_lr=0.1), tiny_model(), data, **SETTINGS)
    with pytest.raises(prefed.PrefedError, match="finetune_steps: clients of this algorithm"):
        prefed.simulate(
            prefed.PreFedSync(client_lr=0.1), tiny_model(), given(), **SETTINGS, finetune_steps=1
        )


@pytest.mark.parametrize("finetune_steps", [None, 2])
@pytest.mark.parametrize("make", [prefed.FedPer, prefed.FedBN])
def test_personal_parts_are_evaluated_where_they_are(make: Any, finetune_steps: int | None) -> None:
    """A client is evaluated with its own parts; fine-tuning moves a copy of them."""
    torch.manual_seed(0)
    x = torch.randn(6, 30, 5)
    y = (x.sum(-1) > torch.linspace(-1, 1, 6)[:, None]).long()
    data = prefed.FederatedData(list(zip(x, y, strict=True)), test=(x[0], y[0])).hold_out(0.3)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    algorithm = make(client_lr=0.1)
    common: Any = {"rounds": 3, "local_steps": 3, "clients_per_round": 4, "device": "cpu"}
    plain = prefed.simulate(algorithm, model, data, **common)
    tuned = prefed.simulate(algorithm, model, data, finetune_steps=finetune_steps, **common)
    assert torch.equal(plain.weights, tuned.weights), "the run does not notice"
    for client in range(6):
        ours = plain.client_model(client)
        same = tuned.client_model(client).state_dict()
        assert all(torch.equal(v, same[n]) for n, v in ours.state_dict().items())
    found = []
    for client in range(6):
        inputs, labels = data.client_test(client).all()
        with torch.no_grad():
            output = plain.client_model(client).eval()(inputs)
        found.append(float((output.argmax(1) == labels).float().mean()))
    assert plain.history[-1]["client_accuracies"] == pytest.approx(found)
    if finetune_steps:
        assert tuned.history[-1]["client_losses"] != plain.history[-1]["client_losses"]


def test_a_run_with_personal_parts_says_what_its_test_set_is_worth(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, y = torch.randn(2, 10, 5), torch.arange(10).expand(2, -1) % 2
    data = prefed.FederatedData(list(zip(x, y, strict=True)), test=(x[0], y[0]))
    settings = prefed.Settings(rounds=1, local_steps=1, device="cpu")
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    prefed.Run(prefed.FedPer(client_lr=0.1), model, data, settings)
    assert "whose personal parts nobody trains" in caplog.text
