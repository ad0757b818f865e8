"""Data as people have it: the same bits as tensors, and read when a client needs it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, random_split

import prefed
from prefed.core import draws
from prefed.training.engines.stacked_batches import gather
from tests.helpers.problems import SIZES, tiny_model

Image = pytest.importorskip("PIL.Image")

rng = np.random.default_rng(0)
X = torch.from_numpy(rng.normal(size=(48, SIZES[0])).astype(np.float32))
Y = torch.from_numpy(rng.integers(0, SIZES[2], 48))
PARTS = [np.arange(c, 48, 6) for c in range(6)]


class Rows(Dataset[Any]):
    """A data set of the user's own, which notes what is read."""

    def __init__(self, x: Any = X, y: Any = Y) -> None:
        self.x, self.y, self.read = x, y, []  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        self.read.append(number)
        return self.x[number], self.y[number]


def hugging_face() -> Any:
    """Numbers as Python has them: floats, which are as exact as ours, and integers."""
    datasets = pytest.importorskip("datasets")  # takes seconds, and most tests do without
    return datasets.Dataset.from_dict({"features": X.tolist(), "label": Y.tolist()})


def natural() -> Any:
    """A partitioner of flwr-datasets that makes our parts."""
    owner = {int(n): f"{client}" for client, part in enumerate(PARTS) for n in part}
    whole = hugging_face().add_column("owner", [owner[n] for n in range(48)])
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    partitioner = partitioners.NaturalIdPartitioner(partition_by="owner")
    partitioner.dataset = whole
    return partitioner


COLUMNS: dict[str, Any] = {"x": "features", "y": "label"}
SOURCES: dict[str, Callable[[], prefed.FederatedData]] = {
    "TensorDataset": lambda: prefed.FederatedData(
        [TensorDataset(X[part], Y[part]) for part in PARTS], test=TensorDataset(X, Y)
    ),
    "Subset of TensorDataset": lambda: prefed.FederatedData(
        [Subset(TensorDataset(X, Y), part.tolist()) for part in PARTS], test=(X, Y)
    ),
    "arrays and parts": lambda: prefed.FederatedData((X, Y), parts=PARTS, test=(X, Y)),
    "Dataset": lambda: prefed.FederatedData(
        [Rows(X[part], Y[part]) for part in PARTS], test=Rows()
    ),
    "Subset": lambda: prefed.FederatedData(
        [Subset(Rows(), part.tolist()) for part in PARTS], test=Rows()
    ),
    "one Dataset and parts": lambda: prefed.FederatedData(Rows(), parts=PARTS, test=Rows()),
    "Hugging Face": lambda: prefed.FederatedData(
        [hugging_face().select(part) for part in PARTS], test=hugging_face(), **COLUMNS
    ),
    "Hugging Face as torch": lambda: prefed.FederatedData(
        [hugging_face().with_format("torch").select(part) for part in PARTS],
        test=hugging_face().with_format("numpy"),
        **COLUMNS,
    ),
    "one of Hugging Face and parts": lambda: prefed.FederatedData(
        hugging_face(), parts=[part.tolist() for part in PARTS], test=hugging_face(), **COLUMNS
    ),
    "partitioner": lambda: prefed.FederatedData(natural(), test=hugging_face(), **COLUMNS),
    "partitions": lambda: prefed.FederatedData(
        [natural().load_partition(c) for c in range(6)], test=hugging_face(), **COLUMNS
    ),
}


def train(data: prefed.FederatedData, **settings: Any) -> prefed.Result:
    settings = {"rounds": 3, "local_steps": 3, "batch_size": 4, "clients_per_round": 4} | settings
    algorithm = prefed.PreFed(client_lr=0.01)
    model = tiny_model(dtype=torch.float32)
    return prefed.simulate(algorithm, model, data, device="cpu", weighting="samples", **settings)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("batch", [4, None])
def test_the_bits_of_tensors(source: str, engine: str, batch: int | None) -> None:
    tensors = prefed.FederatedData([(X[part], Y[part]) for part in PARTS], test=(X, Y))
    expected = train(tensors, engine=engine, batch_size=batch)
    found = train(SOURCES[source](), engine=engine, batch_size=batch)
    assert torch.equal(found.weights, expected.weights)
    for ours, theirs in zip(found.history, expected.history, strict=True):
        assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}


def test_threads_read_one_after_another() -> None:
    one = train(SOURCES["Subset"](), engine="sequential", workers=1)
    two = train(SOURCES["Subset"](), engine="sequential", workers=3)
    assert torch.equal(one.weights, two.weights)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_nothing_is_read_that_is_not_used(engine: str) -> None:
    whole = Rows()
    data = prefed.FederatedData(whole, parts=PARTS)
    assert whole.read == []
    settings = prefed.Settings(
        rounds=1, local_steps=1, batch_size=3, clients_per_round=2, engine=engine, device="cpu"
    )
    run = prefed.Run(prefed.FedAvg(), tiny_model(dtype=torch.float32), data, settings)
    run.prepare()
    assert {*whole.read} <= {*PARTS[0].tolist()}  # the model is tried on the first client
    whole.read.clear()
    cohort = run.run_round()["cohort"]
    theirs = {int(n) for client in cohort for n in PARTS[client]}
    assert {*whole.read} <= theirs
    assert 2 <= len(whole.read) == len({*whole.read}) <= 2 * 3  # each of a batch once


def test_samples_are_not_read_to_hold_some_out_or_to_name_a_run() -> None:
    whole = Rows()
    data = prefed.FederatedData(whole, parts=PARTS).hold_out(0.25)
    assert whole.read == []
    settings = prefed.Settings(
        rounds=1, local_steps=1, batch_size=1, clients_per_round=1, evaluate_clients=1, device="cpu"
    )
    run = prefed.Run(prefed.FedAvg(), tiny_model(dtype=torch.float32), data, settings)
    assert len({*whole.read}) <= 4  # the model is tried on two samples, and on a client's test
    whole.read.clear()
    record = run.run_round()
    (client,) = record["evaluated_clients"]
    x, y = X[PARTS[client]], Y[PARTS[client]]
    eager = prefed.FederatedData([(x, y)] * 6).hold_out(0.25).client_test(client).all()[0]
    assert torch.equal(data.client_test(client).all()[0], eager)


def test_a_data_set_that_differs_each_time_can_be_resumed(tmp_path: Path) -> None:
    class Noisy(Rows):
        def __getitem__(self, number: int) -> tuple[Any, Any]:
            return self.x[number] + torch.randn(SIZES[0]), self.y[number]

    data = prefed.FederatedData(Noisy(), parts=PARTS)
    train(data, out=tmp_path / "run")
    assert len(train(data, out=tmp_path / "run", resume=True, rounds=9).history) == 9


def pixels(shape: tuple[int, ...]) -> Any:
    return rng.integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA"])
def test_images_are_channels_first_from_0_to_1(mode: str) -> None:
    pictures = [Image.fromarray(pixels((6, 5, 3))).convert(mode) for _ in range(4)]
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(img=datasets.Image(), label=datasets.Value("int64"))
    table = {"img": pictures, "label": [0, 1, 2, 3]}
    data = prefed.FederatedData(
        [datasets.Dataset.from_dict(table, features=features)], x="img", y="label"
    )
    x, y = data.client(0).take(torch.tensor([2, 0, 2]))
    assert y.tolist() == [2, 0, 2]
    shown = [pictures[n].convert({"1": "L", "P": "RGB"}.get(mode, mode)) for n in (2, 0, 2)]
    by_hand = np.stack([np.asarray(p).reshape(6, 5, -1) for p in shown]).astype(np.float32) / 255
    assert x.shape == (3, by_hand.shape[3], 6, 5)
    np.testing.assert_array_equal(x.numpy(), by_hand.transpose(0, 3, 1, 2))


def test_arrays_of_pixels() -> None:
    """With the channels last they are images; all else stays what it is."""
    images = pixels((4, 6, 5, 3))
    x, _ = prefed.FederatedData([Rows(images, Y)]).client(0).take(torch.arange(2))
    np.testing.assert_array_equal(
        x.numpy(), images[:2].transpose(0, 3, 1, 2).astype(np.float32) / 255
    )
    first = images.transpose(0, 3, 1, 2)
    x, _ = prefed.FederatedData([Rows(first, Y)]).client(0).take(torch.arange(2))
    assert x.dtype == torch.uint8
    np.testing.assert_array_equal(x.numpy(), first[:2])


def test_a_model_of_images() -> None:
    images = [Image.fromarray(pixels((8, 8, 3))) for _ in range(12)]
    data = prefed.FederatedData(
        Rows(images, [n % 2 for n in range(12)]),
        parts=[range(6), range(6, 12)],
        transform=lambda x: (x - 0.5) / 0.25,
    )
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.LazyLinear(2)
    )
    model(torch.zeros(1, 3, 8, 8))
    result = prefed.simulate(
        prefed.FedAvg(client_lr=0.1), model, data, rounds=20, local_steps=2, batch_size=None
    )
    assert result.history[-1]["train_loss"] < 0.7 * result.history[0]["train_loss"]


def test_columns_of_a_table() -> None:
    table = pytest.importorskip("datasets").Dataset.from_dict(
        {"age": [1.5, 2, 3], "height": [4, 5, 6], "tall": [True, False, True]}
    )
    x, y = prefed.FederatedData([table], x=["age", "height"], y="tall").client(0).all()
    assert x.tolist() == [[1.5, 4], [2, 5], [3, 6]]
    assert x.dtype == torch.float32
    assert y.tolist() == [1, 0, 1]
    assert y.dtype == torch.int64


def test_collate_pads_tokens() -> None:
    """Sequences of any length, with targets that a loss of one's own leaves out."""
    texts = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 1]]

    def pad(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.zeros(len(rows), 5, dtype=torch.int64)
        y = torch.full((len(rows), 5), -100)
        for n, row in enumerate(rows):
            tokens = torch.tensor(row["tokens"])
            x[n, : len(tokens)] = tokens
            y[n, : len(tokens) - 1] = tokens[1:]
        return x, y

    data = prefed.FederatedData(
        pytest.importorskip("datasets").Dataset.from_dict({"tokens": texts}),
        parts=[[0, 1], [2, 3]],
        collate=pad,
    )
    x, y = data.client(1).take(torch.tensor([1, 0]))
    assert x.tolist() == [[7, 8, 9, 1, 0], [5, 6, 0, 0, 0]]
    assert y.tolist() == [[8, 9, 1, -100, -100], [6, -100, -100, -100, -100]]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "one data set": (
        lambda: prefed.FederatedData(hugging_face()), "clients: this is one data set; give a list"
    ),
    "a stream": (
        lambda: prefed.FederatedData([Endless()]).client(0),
        "clients[0]: should be a pair (x, y) of arrays, or a data set with len()",
    ),
    "no len": (lambda: prefed.FederatedData(iter([(X, Y)])), "no clients by number; give a list"),
    "columns": (
        lambda: prefed.FederatedData([hugging_face()], test=hugging_face()),
        "x: the samples have no column 'x', only 'features', 'label'; say which",
    ),
    "misspelt": (
        lambda: prefed.FederatedData([hugging_face()], x="features", y="lable").client(0).all(),
        "y: the samples have no column 'lable'",
    ),
    "lengths": (
        lambda: prefed.FederatedData([Rows([[1, 2], [3]], [0, 1])]).client(0).all(),
        "x: samples have shapes (1,) and (2,); bring them to one shape",
    ),
    "text": (
        lambda: prefed.FederatedData([Rows(["a", "b"], [0, 1])]).client(0).all(),
        "x: is of type str, which does not become one array",
    ),
    "x alone": (
        lambda: prefed.FederatedData([[[1.0], [2.0], [3.0]]]).client(0), "clients[0]: should be a"
    ),
    "triples": (
        lambda: prefed.FederatedData([TensorDataset(X, X, Y)]).client(0).all(),
        "a sample should be a pair (x, y) or a dict, not tuple",
    ),
    "parts": (
        lambda: prefed.FederatedData(Rows(), parts=[[0, 1], [2, 48]]),
        "parts: sample numbers reach from 0 to 48, but there are 48 samples",
    ),
    "no parts": (lambda: prefed.FederatedData(Rows(), parts=[]), "parts: there is no client"),
    "an empty client": (
        lambda: train(prefed.FederatedData(Rows(), parts=[[0, 1], []]), clients_per_round=2),
        "clients[1]: it has no samples",
    ),
    "an empty data set": (
        lambda: train(prefed.FederatedData([Rows(), Rows([], [])]), clients_per_round=2),
        "clients[1]: it has no samples",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(what: str) -> None:
    make, text = WRONG[what]
    with pytest.raises(prefed.PrefedError) as error:
        make()
    assert text in str(error.value)


def test_random_split_of_torch() -> None:
    parts = random_split(Rows(), [20, 28], torch.Generator().manual_seed(0))
    data = prefed.FederatedData(parts)
    assert [len(data.client(c)) for c in range(2)] == [20, 28]
    x, _ = data.client(1).take(torch.tensor([5]))
    assert torch.equal(x[0], X[parts[1].indices[5]])


class WithTargets(Rows):
    """As those of torchvision; `more` is added to a target when it is read."""

    def __init__(self, y: Any, more: int = 0) -> None:
        super().__init__(X, y)
        self.targets, self.more = y.tolist(), more

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        x, y = super().__getitem__(number)
        return x, y + self.more


def wrong(number: int, label: int = 7) -> torch.Tensor:
    y = Y.clone()
    y[number] = label
    return y


def columns(y: torch.Tensor) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"features": X.tolist(), "label": y.tolist()})


# Sample 31 is that of client 1 with the number 5.
IN_ONE = "sample 31 of its data set has the label 7, but the model has outputs for labels 0 to 2"
MISLABELLED: dict[str, tuple[Callable[[], prefed.FederatedData], str]] = {
    "Subset": (
        lambda: prefed.FederatedData([Subset(Rows(X, wrong(31)), p.tolist()) for p in PARTS]),
        "clients[1]: sample 5 of its data set has the label 7",
    ),
    "one Dataset and parts": (
        lambda: prefed.FederatedData(Rows(X, wrong(31)), parts=PARTS), f"clients[1]: {IN_ONE}"
    ),
    "held out": (
        lambda: prefed.FederatedData(Rows(X, wrong(31)), parts=PARTS).hold_out(0.5),
        f"s[1]: {IN_ONE}",
    ),
    "made on demand": (
        lambda: prefed.FederatedData([(X, Y)] * 6, client_tests=[Rows(X[:5], wrong(3))] * 6),
        "client_tests[0]: sample 3 of its data set has the label 7",
    ),
}  # fmt: skip


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("batch", [None, 100])
@pytest.mark.parametrize("source", MISLABELLED)
def test_a_label_of_no_class_is_told_when_it_is_read(
    source: str, batch: int | None, engine: str
) -> None:
    make, words = MISLABELLED[source]
    settings = {"batch_size": batch, "engine": engine, "clients_per_round": None}
    with pytest.raises(prefed.PrefedError, match=re.escape(words)):
        train(make(), **settings)


TOLD: dict[str, Callable[[Any], prefed.FederatedData]] = {
    "targets": lambda y: prefed.FederatedData(
        [Subset(WithTargets(y), part.tolist()) for part in PARTS]
    ),
    "targets and parts": lambda y: prefed.FederatedData(WithTargets(y), parts=PARTS),
    "a column": lambda y: prefed.FederatedData(
        [columns(y).with_format("torch").select(part) for part in PARTS], **COLUMNS
    ),
    "a column and parts": lambda y: prefed.FederatedData(columns(y), parts=PARTS, **COLUMNS),
    "held out": lambda y: prefed.FederatedData(
        [columns(y).select(part) for part in PARTS], **COLUMNS
    ).hold_out(0.2),
}


@pytest.mark.parametrize("label", [3, -1])
@pytest.mark.parametrize("source", TOLD)
def test_labels_that_are_at_hand_are_checked_before_the_first_round(
    source: str, label: int
) -> None:
    settings = prefed.Settings(rounds=1, local_steps=1, device="cpu")
    model = tiny_model(dtype=torch.float32)
    data = TOLD[source](wrong(31, label))
    with pytest.raises(prefed.PrefedError, match=rf"^clients\[1\]: sample .* label {label}, but"):
        prefed.Run(prefed.FedAvg(client_lr=0.1), model, data, settings)
    prefed.Run(prefed.FedAvg(client_lr=0.1), model, TOLD[source](Y), settings)


def test_a_column_costs_no_reading_and_samples_go_before_it() -> None:
    whole = WithTargets(Y)
    prefed.FederatedData(whole, parts=PARTS).check(classes=3)
    assert whole.read == []
    moved = WithTargets(Y + 1, more=-1)  # labels from 1 on, which it makes ours
    found = train(prefed.FederatedData(moved, parts=PARTS), engine="sequential")
    assert torch.equal(
        found.weights, train(SOURCES["arrays and parts"](), engine="sequential").weights
    )
    unused = [part[part != 31] for part in PARTS]
    train(prefed.FederatedData(WithTargets(wrong(31)), parts=unused))


def test_labels_that_count_nowhere_and_losses_of_ones_own() -> None:
    data = prefed.FederatedData(WithTargets(wrong(31, -100)), parts=PARTS)
    loss = torch.nn.functional.cross_entropy
    train(data, loss=loss)
    train(data, loss=lambda output, y: loss(output, y.clamp(min=0)))
    with pytest.raises(prefed.PrefedError, match="label -100, but"):
        train(data)


def test_a_block_reads_a_data_set_once() -> None:
    """Clients that are parts of one data set, two of them of the same samples: what was drawn is
    read together, each sample once."""
    rows, parts = Rows(), [PARTS[0], PARTS[1], PARTS[0]]
    data = prefed.FederatedData(rows, parts=parts)
    settings, rows.read = prefed.Settings(rounds=1, local_steps=3, batch_size=5), []
    (stack,) = gather(data, range(3), 0, settings, 10, torch.device("cpu"))
    assert rows.read == sorted(set(rows.read))
    _, x, y = next(stack.batches(1))
    for row, part in enumerate(parts):
        drawn = part[draws.batches(settings.seed, 0, row, len(part), 15)[5:10]]
        assert isinstance(x, torch.Tensor)
        assert torch.equal(x[row], X[drawn])
        assert torch.equal(y[row], Y[drawn])
