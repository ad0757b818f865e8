"""Targets that are not labels: the loss, data.target = "input", regression, and how such runs are
ranked and shown."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import prefed
from prefed.core.errors import PrefedError
from prefed.core.losses import are_labels, by_targets, squared_error
from prefed.data.dataset import Dataset
from prefed.experiments.config import load
from prefed.experiments.measures import ACCURACY, LOSS, measure, measures
from prefed.experiments.ranking import group
from prefed.experiments.stored_runs import StoredRun, load_runs
from prefed.experiments.sweep import Scored
from prefed.report.curves import charts
from prefed.training.engines import linear_chains
from tests.helpers import official
from tests.helpers.commands import prefed_here
from tests.helpers.engine_runs import same
from tests.helpers.problems import SIZES, arrays, tiny_model

TABLE: dict[str, Any] = {
    "rounds": 8,
    "local_steps": 10,
    "batch_size": 16,
    "clients_per_round": 5,
    "algorithm": {"name": "prefed", "client_lr": 0.01},
    "data": {
        "name": "digits",
        "target": "input",
        "split": {"name": "dirichlet", "clients": 20, "alpha": 0.2},
    },
    "model": {"name": "autoencoder", "widths": [32, 12]},
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.bool])
def test_whole_numbers_are_labels(dtype: torch.dtype) -> None:
    assert are_labels(torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.uint8])
def test_floating_numbers_and_pixels_are_not(dtype: torch.dtype) -> None:
    assert not are_labels(torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize(
    "loss", ["cross_entropy", nn.functional.cross_entropy, nn.CrossEntropyLoss()]
)
def test_pixels_are_no_labels(loss: Any) -> None:
    """They would train, without accuracy and unchecked."""
    x, y = torch.zeros(4, SIZES[0]), torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(PrefedError, match=r"^clients, loss: y is torch\.uint8.* y\.long\(\)"):
        prefed.simulate(
            prefed.FedAvg(client_lr=0.1), tiny_model(dtype=torch.float32),
            prefed.FederatedData([(x, y)]), rounds=1, local_steps=1, loss=loss,
        )  # fmt: skip


def test_the_loss_is_the_formula_for_every_kind_of_target() -> None:
    rng = np.random.default_rng(0)
    outputs = rng.normal(size=(6, 12))
    pixels = rng.integers(0, 256, (6, 3, 2, 2), dtype=np.uint8)
    wanted = np.mean([(o - p.ravel() / 255.0) ** 2 for o, p in zip(outputs, pixels, strict=True)])
    found = by_targets(torch.tensor(outputs), torch.tensor(pixels))
    assert float(found) == pytest.approx(wanted, abs=1e-14)
    numbers = rng.normal(size=6)
    column = torch.tensor(outputs[:, :1])
    for shape in ((6,), (6, 1)):  # an output of shape (6, 1) must not meet (6,) as (6, 6)
        found = by_targets(column, torch.tensor(numbers).view(shape))
        assert float(found) == pytest.approx(np.mean((outputs[:, 0] - numbers) ** 2), abs=1e-14)
    scores, labels = rng.normal(size=(4, 5, 7)), rng.integers(0, 5, (4, 7))
    shares = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    each = [-np.log(shares[i, labels[i, t], t]) for i in range(4) for t in range(7)]
    found = by_targets(torch.tensor(scores), torch.tensor(labels))
    assert float(found) == pytest.approx(np.mean(each), abs=1e-13)


def test_another_number_of_outputs_is_told_before_training() -> None:
    with pytest.raises(PrefedError, match=r"3 outputs each and 2 targets have 4 numbers each"):
        squared_error(torch.zeros(2, 3), torch.zeros(2, 2, 2))
    clients = [(torch.zeros(4, SIZES[0]), torch.zeros(4, 2))]
    with pytest.raises(PrefedError, match="as many outputs as targets"):
        prefed.simulate(
            prefed.FedAvg(client_lr=0.1), tiny_model(dtype=torch.float32),
            prefed.FederatedData(clients), rounds=1, local_steps=1,
        )  # fmt: skip


def test_one_step_is_the_gradient_of_the_mean_square() -> None:
    """One client, one step on all its samples: weights minus the gradient, written out."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(9, 4)), rng.normal(size=(9, 3))
    linear = nn.Linear(4, 3, bias=False).double()
    W = linear.weight.detach().numpy().copy()
    data = prefed.FederatedData([(x, y)], test=(x, y))
    result = prefed.simulate(
        prefed.FedAvg(client_lr=0.5), linear, data, rounds=1, local_steps=1, batch_size=None,
        device="cpu",
    )  # fmt: skip
    wanted = W - 0.5 * 2 * (x @ W.T - y).T @ x / y.size
    np.testing.assert_allclose(result.weights.view(3, 4).numpy(), wanted, atol=1e-13)
    last = result.history[-1]
    assert last["train_loss"] == pytest.approx(np.mean((x @ W.T - y) ** 2), abs=1e-13)
    assert last["test_loss"] == pytest.approx(np.mean((x @ wanted.T - y) ** 2), abs=1e-13)
    assert last["test_accuracy"] is None


def to_double(x: Tensor) -> Tensor:
    return x.double() / 255


def test_a_loss_that_is_given_is_taken() -> None:
    data = prefed.FederatedData([(torch.ones(4, SIZES[0]), torch.zeros(4, SIZES[2]))])
    result = prefed.simulate(
        prefed.FedAvg(client_lr=0.1), tiny_model(dtype=torch.float32), data, rounds=1,
        local_steps=1, loss=lambda output, y: (output - y).sum() * 0 + 7.0,
    )  # fmt: skip
    assert result.history[0]["train_loss"] == 7.0


@pytest.mark.parametrize("activation", ["relu", "sigmoid"])
@pytest.mark.parametrize("name", ["prefed", "fedadam"])
@pytest.mark.parametrize("kind", ["pixels", "numbers"])
def test_engines_agree_on_an_autoencoder(name: str, kind: str, activation: str) -> None:
    rng = np.random.default_rng(2)
    images = [rng.integers(0, 256, (n, 1, 4, 3), dtype=np.uint8) for n in (7, 12, 4, 9)]
    clients = [(torch.tensor(i), torch.tensor(i)) for i in images]
    transform = to_double
    if kind == "numbers":
        clients = [(to_double(x), to_double(y)) for x, y in clients]
        transform = None  # type: ignore[assignment]
    data = prefed.FederatedData(clients, test=clients[0], transform=transform)
    torch.manual_seed(0)
    model = prefed.MODELS.get("autoencoder")(inputs=(1, 4, 3), widths=[8, 3], activation=activation)
    assert linear_chains.plan(model) is not None
    algorithm = prefed.ALGORITHMS.get(name)(client_lr=0.01)
    results = [
        prefed.simulate(
            algorithm, model.double(), data, rounds=10, local_steps=4, batch_size=5,
            clients_per_round=3, engine=engine, device="cpu", seed=3,
        )
        for engine in ("sequential", "vectorised")
    ]  # fmt: skip
    same(results[0], results[1], 1e-9)
    assert results[0].history[-1]["test_loss"] < results[0].history[0]["test_loss"]


def test_the_autoencoder_is_symmetric_and_ends_in_the_unit_interval() -> None:
    model = prefed.MODELS.get("autoencoder")(
        inputs=(1, 28, 28), widths=[1000, 500, 250, 30], activation="sigmoid"
    )
    sizes = [tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear)]
    assert sizes[:4] == [(1000, 784), (500, 1000), (250, 500), (30, 250)]
    assert sizes[4:] == [(250, 30), (500, 250), (1000, 500), (784, 1000)]
    layers = [type(m) for m in model.children()]
    assert layers[-3:] == [nn.Sigmoid, nn.Linear, nn.Sigmoid]
    assert layers[7:9] == [nn.Linear, nn.Linear]  # the code is linear
    out = model(torch.randn(5, 1, 28, 28) * 100).detach()
    assert out.shape == (5, 784)
    assert 0 <= float(out.min()) <= float(out.max()) <= 1


def test_an_autoencoder_from_a_config() -> None:
    config = load(TABLE)
    dataset, data = config.make_data()
    labelled = load(TABLE, ["data.target=label"]).make_data()[1]
    for client in range(len(data)):  # the split is by the labels as before
        x, y = data.client(client).all()
        assert torch.equal(x, labelled.client(client).all()[0])
        assert torch.equal(y, x.float() / 16)
    assert (dataset.outputs, dataset.labels) == (64, 10)
    simulation = config.make_run()
    records = [simulation.run_round() for _ in range(config.rounds)]
    assert all(r["test_accuracy"] is None for r in records)
    # Better than the best constant image, so that something was learnt of the images.
    assert data.test is not None
    images = data.test.y.flatten(1)
    assert records[-1]["test_loss"] < float((images - images.mean(0)).square().mean())
    assert records[-1]["test_loss"] < 0.5 * records[0]["test_loss"]


def test_validation_and_any_model_with_as_many_outputs() -> None:
    config = load(TABLE, ["data.validation=0.25", "model=mlp", "rounds=1"])
    simulation = config.make_run()
    assert simulation.data.test is not None
    x, y = simulation.data.test.all()
    assert len(x) == round(0.25 * 1437)
    assert torch.equal(y, x.float() / 16)
    assert math.isfinite(simulation.run_round()["test_loss"])


def npz(path: Path, **arrays: Any) -> dict[str, Any]:
    np.savez(path, **arrays)
    data = {"name": "npz", "path": str(path), "split": {"name": "iid", "clients": 3}}
    algorithm = {"name": "prefed", "client_lr": 0.02}
    return {**TABLE, "clients_per_round": 3, "algorithm": algorithm, "data": data}


def test_pixels_are_not_copied(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (30, 1, 5, 5), dtype=np.uint8)
    table = npz(tmp_path / "i.npz", x=images, y=np.arange(30) % 3)
    data = load(table, ["data.target=input", "data.split.name=dirichlet", "data.split.alpha=1"])
    samples = data.make_data()[1].client(0)
    assert samples.x.data_ptr() == samples.y.data_ptr()
    record = data.make_run().run_round()
    assert record["test_loss"] == pytest.approx(1 / 12, abs=0.03)  # of uniform noise, about 1/2


@pytest.mark.parametrize("column", [False, True])
def test_regression_from_own_arrays(column: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 5))
    y = x @ rng.normal(size=5) + 0.1 * rng.normal(size=400)
    table = npz(tmp_path / "r.npz", x=x, y=y[:, None] if column else y)
    config = load(table, ["model={name='mlp', hidden=[]}", "rounds=30"])
    dataset, data = config.make_data()
    assert dataset.outputs == 1
    simulation = config.make_run()
    last = [simulation.run_round() for _ in range(config.rounds)][-1]
    assert last["test_accuracy"] is None
    # Against least squares on the same samples, which no linear model beats on them.
    assert data.test is not None
    train, test = (np.column_stack([s.x.numpy(), np.ones(len(s.x))]) for s in (dataset, data.test))
    best = np.linalg.lstsq(train, dataset.y.numpy().reshape(-1), rcond=None)[0]
    least = np.mean((test @ best - data.test.y.numpy().reshape(-1)) ** 2)
    assert 0.5 * least < last["test_loss"] < 2 * least
    with pytest.raises(PrefedError, match="dirichlet needs one label"):
        load(table, ["data.split.name=dirichlet", "data.split.alpha=1"]).make_data()


def test_what_cannot_be_its_own_target(tmp_path: Path) -> None:
    official.cifar10(tmp_path)
    cifar = {
        **TABLE,
        "data": {**TABLE["data"], "name": "cifar10", "path": str(tmp_path), "complete": False},
    }
    with pytest.raises(PrefedError, match=r"set data\.augment = false"):
        load(cifar).make_data()
    assert load(cifar, ["data.augment=false"]).make_data()[0].outputs == 3072
    counts = Dataset(torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4), None)
    with pytest.raises(PrefedError, match=r"uint8 or floating x, not torch\.int64"):
        counts.with_input_as_target()
    with pytest.raises(PrefedError, match="64 numbers each"):
        load(TABLE, ["model={name='tests.training.test_targets:short'}"]).make_run()
    with pytest.raises(PrefedError, match=r"data\.target"):
        load(TABLE, ["data.target=inputs"])
    with pytest.raises(PrefedError, match="at least the code"):
        load(TABLE, ["model.widths=[]"]).make_run()


def short(inputs: Any) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def test_changes_leave_a_table_as_it_was() -> None:
    before = json.dumps(TABLE)
    load(TABLE, ["data.target=label", "data.split.alpha=1"])
    assert json.dumps(TABLE) == before


def test_a_config_without_a_target_is_written_as_before() -> None:
    assert "target" not in load(TABLE, ["data.target=label"]).to_dict()["data"]
    kept = load(TABLE).to_dict()
    assert kept["data"]["target"] == "input"
    assert load(kept).to_dict() == kept


def test_deployed_it_has_the_same_bits(tmp_path: Path) -> None:
    from tests.helpers.federation import Federation, simulated, told_by_all

    config = load(TABLE, ["rounds=3", "engine=sequential"])
    here, there = simulated(config), Federation(config, tmp_path).run()
    assert torch.equal(here.server.weights, there.server.weights)
    for ours, theirs in zip(here.history, there.history, strict=True):
        assert told_by_all(ours) == told_by_all(theirs)


def test_local_train_takes_the_loss_by_the_targets(tmp_path: Path) -> None:
    from tests.helpers import flower_apps as flower

    rng = np.random.default_rng(4)
    pairs = [(x, rng.normal(size=(len(x), SIZES[2]))) for x, _ in arrays()]
    strategy = prefed.flower.PreFed(client_lr=0.01, **flower.OPTIONS)
    app = flower.tiny_app(pairs, "local_train")
    found = flower.run(strategy, flower.tiny_grid(app, tmp_path))
    wanted = prefed.simulate(
        prefed.PreFed(client_lr=0.01), tiny_model(), prefed.FederatedData(pairs), rounds=4,
        local_steps=flower.STEPS, batch_size=None, engine="sequential", weighting="samples",
    )  # fmt: skip
    torch.testing.assert_close(flower.flat(found.arrays), wanted.weights, rtol=0, atol=1e-12)


def test_a_node_with_other_targets_is_told() -> None:
    from prefed.flower.hosting import _own_data

    data = load(TABLE).make_data()[1]
    x = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)
    with pytest.raises(PrefedError, match=r"y of this node is torch\.int64"):
        _own_data(data, (x, torch.zeros(4, dtype=torch.int64)))
    assert len(_own_data(data, (x, x)).client(3)) == 4


def made_up(folder: Path, name: str, values: list[tuple[float | None, float | None]]) -> StoredRun:
    """A finished run with these (test loss, test accuracy)."""
    (folder / name).mkdir()
    (folder / name / "model.safetensors").touch()
    config = {"algorithm": {"name": name}, "rounds": len(values)}
    history = [
        {"round": i, "train_loss": 1.0, "test_loss": loss, "test_accuracy": accuracy,
         "bytes_up": 0, "bytes_down": 0, "seconds": 0.0}
        for i, (loss, accuracy) in enumerate(values, 1)
    ]  # fmt: skip
    return StoredRun(folder / name, config, history)


def score(run: StoredRun) -> float:
    return Scored({}, [run]).score


def test_scores_and_measures(tmp_path: Path) -> None:
    plain = made_up(tmp_path, "a", [(2.0 - 0.05 * i, None) for i in range(20)])
    assert score(plain) == pytest.approx(-(1.05 + 1.10) / 2)  # the last tenth of 20
    sparse = made_up(tmp_path, "b", [(3.0, None), (None, None), (4.0, None)])
    assert score(sparse) == -4.0  # not every round is evaluated
    assert score(made_up(tmp_path, "c", [(3.0, None), (None, None)])) == -math.inf
    labelled = made_up(tmp_path, "d", [(9.0, 0.25), (9.0, 0.75)])
    assert score(labelled) == 0.75
    (tmp_path / "d" / "model.safetensors").unlink()
    assert score(labelled) == -math.inf
    assert (measure([plain, sparse]), measure([plain, labelled])) == (LOSS, ACCURACY)
    assert measures([plain, labelled]) == [ACCURACY, LOSS]
    assert measures([]) == [ACCURACY]


@pytest.mark.process
def test_compare_runs_and_report_rank_by_the_loss(tmp_path: Path) -> None:
    done = prefed_here(
        "compare", "digits-noniid", "--set", "model=autoencoder", "--set", "data.target=input",
        "--set", "model.widths=[16,8]", "--set", "rounds=4", "--set", "local_steps=5",
        "--algorithms", "fedavg,prefed", "--seeds", "2", "--out", "c", "--workers", "1",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "test loss" in done.stdout
    assert "accuracy" not in done.stdout
    assert "90%" not in done.stdout  # no rounds to an accuracy that is not there
    finals: dict[str, list[float]] = {"fedavg": [], "prefed": []}
    for path in sorted((tmp_path / "c").glob("*/rounds.jsonl")):
        last = json.loads(path.read_text().splitlines()[-1])
        finals[path.parent.name.partition("-")[0]].append(last["test_loss"])
    means = {name: np.mean(values) for name, values in finals.items()}
    rows = [line for line in done.stdout.splitlines() if line.split()[:1] and
            line.split()[0] in means]  # fmt: skip
    assert [row.split()[0] for row in rows] == sorted(means, key=lambda name: means[name])
    for row in rows:
        assert f"{means[row.split()[0]]:.4g}" in row

    listed = prefed_here("runs", "c", cwd=tmp_path).stdout
    assert "test" in listed
    assert "accuracy" not in listed
    html = (tmp_path / "c" / "report.html").read_text()
    assert "test loss\n[95 % interval]" in html
    assert "Loss: the mean over the last tenth" in html
    assert html.index(f"<th>{rows[0].split()[0]}</th>") < html.index(
        f"<th>{rows[1].split()[0]}</th>"
    )
    runs = load_runs(tmp_path / "c")
    assert len(runs) == 4
    drawn = {chart.name for chart in charts(group(runs))}
    assert {"loss", "test-loss", "test-loss-megabytes", "test-loss-seconds"} <= drawn
    assert not any(name.startswith("accuracy") for name in drawn)


@pytest.mark.process
@pytest.mark.slow
def test_a_sweep_chooses_the_lowest_loss(tmp_path: Path) -> None:
    done = prefed_here(
        "sweep", "digits-iid", "--set", "model=autoencoder", "--set", "data.target=input",
        "--set", "model.widths=[16,8]", "--set", "rounds=3", "--set", "local_steps=5",
        "--set", "algorithm=fedadam", "--grid", "client_lr=0.001,0.1,1e30",
        "--grid", "server_lr=1e-6,0.03", "--out", "s", "--workers", "1", "--figures", "drawn",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "validation loss" in done.stdout
    assert "diverged" in done.stdout
    losses = {}
    for run in load_runs(tmp_path / "s" / "points"):
        if run.status == "finished":
            options = run.config["algorithm"]
            losses[options["client_lr"], options["server_lr"]] = run.history[-1]["test_loss"]
    best = min(losses, key=lambda point: losses[point])
    chosen = next(line for line in done.stdout.splitlines() if line.startswith("best on"))
    assert f"client_lr={best[0]:g}" in chosen
    assert f"server_lr={best[1]:g}" in chosen
    last = load_runs(tmp_path / "s" / "best")[0].history[-1]["test_loss"]
    assert f"its loss on the test set: {last:.4g}" in done.stdout
    assert (tmp_path / "drawn" / "heat-map.png").exists()


def test_the_line_of_a_run_says_the_test_loss(tmp_path: Path) -> None:
    done = prefed_here(
        "run", "digits-iid", "--set", "model=autoencoder", "--set", "data.target=input",
        "--set", "rounds=2", "--set", "local_steps=2", "--set", "evaluate_every=2", "--out", "r",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    last = json.loads((tmp_path / "r" / "rounds.jsonl").read_text().splitlines()[-1])
    assert "test loss" not in lines[0]
    assert f"test loss {last['test_loss']:.4g}, " in lines[-2]
    shown = prefed_here("data", "show", str(tmp_path / "r" / "config.toml"), cwd=tmp_path)
    assert "10 classes" in shown.stdout
    assert "heterogeneity" in shown.stdout
