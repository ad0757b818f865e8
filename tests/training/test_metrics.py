"""Metrics against scikit-learn, whatever the batches; metrics of the user's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as oracle
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics.classification import MulticlassF1Score

import prefed
from prefed.training import metrics
from tests.helpers.problems import tiny_data, tiny_model

Pair = tuple[Tensor, Tensor]


def problem(classes: int = 6, samples: int = 157, ties: bool = False) -> Pair:
    """Class 4 is in no target, and class 5 is never given."""
    generator = torch.Generator().manual_seed(classes)
    y = torch.randint(4, (samples,), generator=generator)
    outputs = torch.randn(samples, classes, generator=generator, dtype=torch.float64)
    outputs[torch.arange(samples), y] += 0.7
    outputs[:, 5:] -= 20
    return (outputs.round() if ties else outputs), y


def computed(given: Any, outputs: Tensor, y: Tensor, size: int = 50) -> dict[str, Any]:
    found = metrics.Metrics(given, torch.device("cpu"))
    found.reset()
    for batch in zip(outputs.split(size), y.split(size), strict=True):
        found.update(*batch)
    return found.compute()


@pytest.mark.parametrize("size", [1, 50, 1000])
def test_named_metrics(size: int) -> None:
    outputs, y = problem()
    names = ["accuracy", "top_3", "f1", "perplexity", "class_accuracy"]
    found = computed(names, outputs, y, size)
    given, p = outputs.argmax(1).numpy(), outputs.softmax(1).numpy()
    wanted = {
        "test_accuracy": oracle.accuracy_score(y, given),
        "test_top_3": oracle.top_k_accuracy_score(y, outputs.numpy(), k=3, labels=range(6)),
        "test_f1": oracle.f1_score(y, given, average="macro"),
        "test_perplexity": np.exp(oracle.log_loss(y, p, labels=range(6))),
    }
    recall = oracle.recall_score(y, given, labels=range(4), average=None)
    assert found.pop("test_class_accuracy") == pytest.approx([*recall, None, None], abs=1e-12)
    assert found == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("ties", [False, True])
def test_area_under_the_curve(ties: bool) -> None:
    outputs, y = problem(ties=ties)
    p = outputs.softmax(1)
    areas = [oracle.roc_auc_score(y == c, p[:, c]) for c in range(4)]
    assert computed("auroc", outputs, y) == pytest.approx({"test_auroc": np.mean(areas)}, abs=1e-12)
    if ties:  # another softmax would round some of them apart
        return
    four = p[:, :4] / p[:, :4].sum(1, keepdim=True)
    ovr = oracle.roc_auc_score(y, four, multi_class="ovr", average="macro")
    assert computed("auroc", four.log(), y)["test_auroc"] == pytest.approx(ovr, abs=1e-12)


@pytest.mark.parametrize("shape", ["two", "one", "column", "column of labels"])
def test_two_classes(shape: str) -> None:
    """As two outputs, or as one logit with targets that are labels or floats."""
    outputs, y = problem()
    z, y = outputs[:, 0].round(decimals=1), (y == 0).long()
    given = {"two": torch.stack([-z / 2, z / 2], 1), "one": z}.get(shape, z[:, None])
    target = y if shape in ("two", "column of labels") else y.double().reshape(given.shape)
    found = computed(["accuracy", "f1", "auroc", "perplexity"], given, target)
    p = torch.sigmoid(z)
    wanted = {
        "test_accuracy": oracle.accuracy_score(y, z > 0),
        "test_f1": oracle.f1_score(y, z > 0, average="macro"),
        "test_auroc": oracle.roc_auc_score(y, z),
        "test_perplexity": np.exp(oracle.log_loss(y, p)),
    }
    assert found == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("size", [1, 50, 1000])
@pytest.mark.parametrize("kind", [torch.int64, torch.float32, torch.bool])
@pytest.mark.parametrize("ties", [False, True])
def test_several_labels(ties: bool, kind: torch.dtype, size: int) -> None:
    """Label 3 is in no target but given, label 4 neither, label 5 in all targets."""
    outputs, _ = problem(ties=ties)
    y = outputs + torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1)) > 0.5
    y[:, 3:5], y[:, 5], outputs[:, 4] = False, True, -1.0
    given = (outputs > 0).numpy()
    found = computed(["accuracy", "f1", "auroc", "class_accuracy"], outputs, y.to(kind), size)
    mine: Any = [0, 1, 2]
    wanted = {
        "test_accuracy": np.mean(y.numpy() == given),
        "test_f1": oracle.f1_score(y, given, average="macro", zero_division=np.nan),
        "test_auroc": oracle.roc_auc_score(y[:, mine], outputs[:, mine], average="macro"),
    }
    recall = oracle.recall_score(y, given, average=None, zero_division=np.nan)
    classes = [None if np.isnan(value) else value for value in recall]
    assert found.pop("test_class_accuracy") == pytest.approx(classes, abs=1e-12)
    assert classes.count(None) == 2
    assert found == pytest.approx(wanted, abs=1e-12)
    theirs = torchmetrics.classification.MultilabelAccuracy(6, average="micro")
    assert found["test_accuracy"] == pytest.approx(
        float(theirs(outputs.sigmoid(), y.long())), abs=1e-6
    )


def test_several_labels_in_a_run() -> None:
    """Accuracy is that of the run's own; a squared error makes no logits."""
    x = torch.randn(40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = (x[:, :3] > 0).double()
    data = prefed.FederatedData([(x, y)] * 2, test=(x, y))
    common: Any = {"rounds": 3, "local_steps": 3, "device": "cpu"}
    algorithm = prefed.FedAvg(client_lr=0.5)
    plain = prefed.simulate(algorithm, tiny_model(), data, loss="bce", **common)
    result = prefed.simulate(
        algorithm, tiny_model(), data, loss="bce", **common,
        metrics={"f1": "f1", "auroc": "auroc", "right": "accuracy"},
    )  # fmt: skip
    assert torch.equal(plain.weights, result.weights)
    last = result.history[-1]
    with torch.no_grad():
        given = result.model(x)
    assert last["test_f1"] == pytest.approx(oracle.f1_score(y, given > 0, average="macro"))
    assert last["test_auroc"] == pytest.approx(oracle.roc_auc_score(y, given))
    assert last["test_right"] == last["test_accuracy"]
    for loss, name in ((None, "f1"), ("mse", "f1"), ("bce", "top_2"), ("bce", "perplexity")):
        with pytest.raises(prefed.PrefedError, match=r"^metrics: .* for one label a target"):
            prefed.simulate(algorithm, tiny_model(), data, loss=loss, **common, metrics=[name])


ONE_HOT: dict[str, Any] = {
    "module": nn.CrossEntropyLoss(),
    "function": nn.functional.cross_entropy,
    "name": "cross_entropy",
    "smooth": partial(nn.functional.cross_entropy, label_smoothing=0.1),
}


@pytest.mark.parametrize("loss", ONE_HOT.values(), ids=ONE_HOT)
def test_probabilities_of_classes_stand_for_the_likeliest(loss: Any) -> None:
    """One-hot targets of a cross-entropy are one label, not several."""
    x = torch.randn(40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = x[:, :3].argmax(1)
    hot = nn.functional.one_hot(labels, 3).double()
    names = ["accuracy", "f1", "auroc", "class_accuracy", "top_2"]
    found = []
    for y in (labels, hot, 0.7 * hot + 0.1):
        data = prefed.FederatedData([(x, labels)] * 2, test=(x, y))
        if y is not labels:
            data = prefed.FederatedData([(x, hot)] * 2, test=(x, y))
        result = prefed.simulate(
            prefed.FedAvg(client_lr=0.5), tiny_model(), data, rounds=3, local_steps=3,
            device="cpu", engine="sequential", loss=loss, metrics=names,
        )  # fmt: skip
        last = result.history[-1]
        found.append({key: last[key] for key in last if key.removeprefix("test_") in names})
    assert len(found[0]) == len(names)
    assert found[0] == found[1] == found[2]


def test_of_a_loss_of_ones_own_it_is_not_known_what_several_numbers_mean() -> None:
    x = torch.randn(12, 5, dtype=torch.float64)
    y = (x[:, :3] > 0).double()
    data = prefed.FederatedData([(x, y)], test=(x, y))
    common: Any = {"rounds": 1, "local_steps": 1, "metrics": ["f1"]}
    bce = nn.functional.binary_cross_entropy_with_logits
    for loss in (bce, nn.BCEWithLogitsLoss(), "bce"):
        prefed.simulate(prefed.FedAvg(client_lr=0.1), tiny_model(), data, loss=loss, **common)
    doubtful = (x, torch.eye(3, dtype=torch.float64).repeat(4, 1))
    data = prefed.FederatedData([doubtful], test=doubtful)
    with pytest.raises(prefed.PrefedError, match=r'^metrics: .* set loss="bce"'):
        prefed.simulate(
            prefed.FedAvg(client_lr=0.1), tiny_model(), data, loss=lambda o, t: bce(o, t), **common
        )


def test_sequences_with_targets_that_do_not_count() -> None:
    outputs, y = problem(samples=120)
    flat = computed(["accuracy", "f1", "auroc", "top_2", "perplexity"], outputs, y)
    longer = torch.cat([outputs, outputs.flip(0)]).view(40, 6, 6).movedim(-1, 1)  # (N, C, T)
    targets = torch.cat([y, torch.full_like(y, -100)]).view(40, 6)
    assert computed(["accuracy", "f1", "auroc", "top_2", "perplexity"], longer, targets) == (
        pytest.approx(flat, abs=1e-12)
    )


@pytest.mark.parametrize("ignored", [-1, 2])
def test_what_does_not_count_in_the_loss_counts_in_no_metric(ignored: int) -> None:
    outputs, y = problem()
    names = ["accuracy", "f1", "auroc", "top_2", "perplexity", "class_accuracy"]
    counted = y != 2
    wanted = computed(names, outputs[counted], y[counted], 1000)
    y[~counted] = ignored
    seen = []

    def own(outputs: Tensor, targets: Tensor) -> float:
        seen.append(targets)
        return 0.0

    found = metrics.Metrics([*names, own], torch.device("cpu"), ignored)
    found.reset()
    found.update(outputs, y)
    assert found.compute() == {**wanted, "test_own": 0.0}
    assert torch.equal(seen[0], y)  # as they are


def test_metrics_of_ones_own() -> None:
    outputs, y = problem()

    def spread(given: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        assert len(given) == len(wanted) == 157
        return {"low": given.min(), "high": given.max()}

    f1 = MulticlassF1Score(num_classes=6, average=None)
    found = computed([spread, f1], outputs, y)
    assert found["test_spread_low"] == float(outputs.min())
    assert found["test_spread_high"] == float(outputs.max())
    given = oracle.f1_score(y, outputs.argmax(1), average=None, labels=range(6), zero_division=0)
    assert found["test_MulticlassF1Score"] == pytest.approx(given, abs=1e-6)
    assert int(f1._update_count) == 0, "the user's object is not used up"
    named = computed(
        {"mine": f1, "error": lambda o, t: (o.argmax(1) != t).double().mean()}, *problem()
    )
    assert named.keys() == {"test_mine", "test_error"}
    both = torchmetrics.MetricCollection([MulticlassF1Score(num_classes=6)])
    assert set(computed({"all": both}, *problem())) == {"test_all_MulticlassF1Score"}


def test_metrics_by_module(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, y = problem()
    found = computed(["prefed.training.metrics:auroc"], outputs, y)
    assert found == computed("auroc", outputs, y)


def test_the_records_of_a_run_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In evaluated rounds; loss, accuracy and weights keep their bits."""
    monkeypatch.setattr("prefed.training.task.EVALUATION_BATCH", 3)

    def run(**more: Any) -> prefed.Result:
        return prefed.simulate(
            prefed.FedAvg(client_lr=0.1), tiny_model(), tiny_data(), rounds=5, local_steps=2,
            device="cpu", evaluate_every=2, **more,
        )  # fmt: skip

    plain, measured = run(), run(metrics=["f1", "auroc", "class_accuracy"])
    assert torch.equal(plain.weights, measured.weights)
    for a, b in zip(plain.history, measured.history, strict=True):
        evaluated = b["test_loss"] is not None
        assert evaluated == (b["round"] in (2, 4, 5)) == ("test_f1" in b)
        assert (a["test_loss"], a["test_accuracy"]) == (b["test_loss"], b["test_accuracy"])
    test = tiny_data().test
    assert test is not None
    outputs = measured.model(test.x).argmax(1)
    wanted = oracle.f1_score(test.y, outputs, average="macro")
    assert measured.history[-1]["test_f1"] == pytest.approx(wanted, abs=1e-12)


def broken(outputs: Tensor, y: Tensor) -> float:
    raise ZeroDivisionError("own mistake")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("f2", "unknown metric 'f2'; did you mean \"f1\"?"),
        (["f1", "f1"], "f1 is there twice"),
        ("f1,top_3", 'several names are a list: \\["f1", "top_3"\\]'),
        ([lambda o, y: 1.0], "'<lambda>' cannot be a key of records"),
        ({"loss": "f1"}, "'loss' cannot be a key of records"),
        (3, "should be a list of names or functions"),
        ([3], "cannot be a key|neither a name nor a function"),
        (["nowhere:f"], "cannot import it"),
        (["top_9"], "top_9 needs at least 9 classes"),
        ([broken], "broken failed: ZeroDivisionError: own mistake"),
        ({"word": lambda o, y: "good"}, "word should give a number"),
        ({"table": lambda o, y: torch.zeros(2, 2)}, "table should give a number.* not a table"),
        ({"words": lambda o, y: ["good"]}, "words failed: ValueError"),
    ],
)
def test_what_is_refused_before_the_first_round(given: Any, words: str) -> None:
    class Never(prefed.Callback):
        def on_start(self, config: dict[str, Any]) -> None:
            raise AssertionError

    with pytest.raises(prefed.PrefedError, match="^metrics: .*" + words.replace("?", r"\?")):
        prefed.simulate(
            prefed.FedAvg(client_lr=0.1), tiny_model(), tiny_data(), rounds=1, local_steps=1,
            callbacks=[Never()], metrics=given,
        )  # fmt: skip


def test_targets_without_labels_and_data_without_a_test_set() -> None:
    x = torch.randn(9, 5, dtype=torch.float64)
    numbers = prefed.FederatedData([(x, x[:, :3])], test=(x, x[:, :3]))
    with pytest.raises(prefed.PrefedError, match="are for one label a target"):
        prefed.simulate(
            prefed.FedAvg(client_lr=0.1), tiny_model(), numbers, rounds=1, local_steps=1,
            metrics=["f1"],
        )  # fmt: skip
    with pytest.raises(prefed.PrefedError, match="metrics: there is no test set"):
        prefed.simulate(
            prefed.FedAvg(client_lr=0.1), tiny_model(), prefed.FederatedData(tiny_data().clients),
            rounds=1, local_steps=1, metrics=["f1"],
        )  # fmt: skip


def test_a_metric_that_would_hold_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LIMIT", 100)
    outputs, y = problem()
    assert computed("f1", outputs, y)
    with pytest.raises(
        prefed.PrefedError, match=r"auroc needs all outputs .* more than 100 numbers"
    ):
        computed("auroc", outputs, y)
