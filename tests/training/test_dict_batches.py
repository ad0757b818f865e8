"""Batches that are more than one tensor: dicts, tuples, and rows of unequal length, against a plain
PyTorch loop that knows nothing of the package."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import prefed
from prefed.core import draws
from prefed.core.batch import Ragged
from prefed.core.errors import PrefedError
from tests.helpers import sentences as sentences_of
from tests.helpers.sentences import CLASSES, WORDS

ROUNDS, STEPS, BATCH, LR = 3, 4, 3, 0.2
SETTINGS: dict[str, Any] = {"rounds": ROUNDS, "local_steps": STEPS, "batch_size": BATCH}
ENGINES = ("sequential", "vectorised")


class Reader(sentences_of.Reader):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.double()


class Tagger(Reader):
    """A class for each word."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.unsqueeze(-1).to(self.last.weight.dtype)
        mean = (self.words(input_ids) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        found: Tensor = self.last(self.words(input_ids) + mean)
        return found.transpose(1, 2)


Client = tuple[list[Tensor], list[Tensor]]


def sentences(tagged: bool = False, clients: int = 4) -> list[Client]:
    draw = torch.Generator().manual_seed(1)
    found = []
    for client in range(clients):
        lengths = torch.randint(2, 7, (5 + client,), generator=draw).tolist()
        texts = [torch.randint(1, WORDS, (n,), generator=draw) for n in lengths]
        y = [text % CLASSES if tagged else text.sum() % CLASSES for text in texts]
        found.append((texts, y))
    return found


def batch_of(texts: Sequence[Tensor], y: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    ids = pad_sequence([*texts], batch_first=True)
    mask = pad_sequence([torch.ones_like(t) for t in texts], batch_first=True)
    tagged = y[0].dim() > 0
    found = (
        pad_sequence([*y], batch_first=True, padding_value=-100) if tagged else torch.stack([*y])
    )
    return ids, mask, found


def by_hand(model: nn.Module, clients: list[Client]) -> nn.Module:
    """FedAvg, one batch after another, each padded to its longest."""
    server = copy.deepcopy(model)
    for round in range(ROUNDS):
        trained = []
        for client, (texts, y) in enumerate(clients):
            own = copy.deepcopy(server)
            drawn = draws.batches(0, round, client, len(texts), STEPS * BATCH).tolist()
            for k in range(STEPS):
                numbers = drawn[k * BATCH : (k + 1) * BATCH]
                ids, mask, wanted = batch_of([texts[n] for n in numbers], [y[n] for n in numbers])
                own.zero_grad()
                nn.functional.cross_entropy(own(ids, mask), wanted).backward()
                with torch.no_grad():
                    for p in own.parameters():
                        if p.grad is not None:
                            p.sub_(p.grad, alpha=LR)
            trained.append(own.state_dict())
        server.load_state_dict(
            {n: torch.stack([t[n] for t in trained]).mean(0) for n in server.state_dict()}
        )
    return server


def ragged(clients: list[Client]) -> tuple[list[Any], dict[str, Any]]:
    found = []
    for texts, y in clients:
        x = {"input_ids": texts, "attention_mask": [torch.ones_like(t) for t in texts]}
        found.append((x, y if y[0].dim() else torch.stack(y)))
    return found, {"pad": 0}


def padded(clients: list[Client]) -> tuple[list[Any], dict[str, Any]]:
    """Arrays of one width for all."""
    made = [batch_of([*texts, torch.zeros(6).long()], y) for texts, y in clients]
    return [({"input_ids": a[:-1], "attention_mask": b[:-1]}, y) for a, b, y in made], {}


class Rows(torch.utils.data.Dataset[Any]):
    """As Hugging Face's data sets give samples."""

    def __init__(self, client: Client) -> None:
        self.texts, self.y = client

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, n: int) -> dict[str, Any]:
        text = self.texts[n].tolist()
        return {"ids": text, "mask": [1] * len(text), "label": self.y[n].tolist()}


def lazy(clients: list[Client]) -> tuple[list[Any], dict[str, Any]]:
    columns = {"input_ids": "ids", "attention_mask": "mask"}
    return [Rows(c) for c in clients], {"x": columns, "y": "label", "pad": 0}


def in_order(clients: list[Client]) -> tuple[list[Any], dict[str, Any]]:
    return [((x["input_ids"], x["attention_mask"]), y) for x, y in padded(clients)[0]], {}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("given_as", [ragged, padded, lazy, in_order])
@pytest.mark.parametrize("model", [Reader, Tagger])
def test_it_equals_a_loop_by_hand(model: Any, given_as: Callable[..., Any], engine: str) -> None:
    clients = sentences(model is Tagger)
    if model is Tagger and given_as in (padded, in_order):
        pytest.skip("whether -100 is a label is not known of arrays")
    made, options = given_as(clients)
    data = prefed.FederatedData(made, test=made[0], **options)
    result = prefed.simulate(prefed.FedAvg(client_lr=LR), model(), data, engine=engine, **SETTINGS)
    wanted = by_hand(model(), clients)
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(result.model.state_dict()[name], value, rtol=0, atol=1e-10)
    ids, mask, y = batch_of(*clients[0])
    output = wanted(ids, mask)
    loss = nn.functional.cross_entropy(output, y).item()
    right = (output.argmax(1) == y)[y >= 0].double().mean()
    assert result.history[-1]["test_loss"] == pytest.approx(loss, abs=1e-10)
    assert result.history[-1]["test_accuracy"] == pytest.approx(float(right), abs=1e-10)


def test_clients_by_themselves_and_after_a_resume(tmp_path: Path) -> None:
    made, options = ragged(sentences())
    data = prefed.FederatedData(made, **options).hold_out(0.4)
    algorithm = prefed.PreFed(client_lr=0.01)
    settings = SETTINGS | {"engine": "sequential"}
    whole = prefed.simulate(algorithm, Reader(), data, **settings)
    out: dict[str, Any] = {"out": tmp_path / "run"}
    prefed.simulate(algorithm, Reader(), data, **settings | {"rounds": 1}, **out)
    resumed = prefed.simulate(algorithm, Reader(), data, **settings, **out, resume=True)
    assert torch.equal(whole.weights, resumed.weights)
    accuracies = []
    for client in range(len(data)):
        x, y = data.client_test(client).all()
        output = whole.model(x["input_ids"].padded(), x["attention_mask"].padded())
        accuracies.append(float((output.argmax(1) == y).double().mean()))
    assert whole.history[-1]["client_accuracies"] == pytest.approx(accuracies)
    two = prefed.simulate(algorithm, Reader(), data, **settings, workers=2)
    assert torch.equal(whole.weights, two.weights)


@pytest.mark.parametrize("engine", ENGINES)
def test_passes_over_the_samples(engine: str) -> None:
    """local_epochs, where clients take unequally many steps: the same in both engines."""
    made, options = ragged(sentences())
    data = prefed.FederatedData(made, **options)
    settings: dict[str, Any] = {"rounds": 2, "local_epochs": 2, "batch_size": BATCH}
    found, one = (
        prefed.simulate(prefed.SCAFFOLD(client_lr=LR), Reader(), data, engine=e, **settings)
        for e in (engine, "sequential")
    )
    torch.testing.assert_close(found.weights, one.weights, rtol=0, atol=1e-10)


@pytest.mark.parametrize("given_as", [ragged, lazy])
def test_liars_flip_labels_of_unequal_length(given_as: Callable[..., Any]) -> None:
    """As if the labels of those that lie were the other way round."""
    clients, liars = sentences(tagged=True), draws.cohort(0, 0, 4, 2, "attackers")
    other = [
        (texts, [CLASSES - 1 - y for y in labels] if client in liars else labels)
        for client, (texts, labels) in enumerate(clients)
    ]
    found, wanted = (
        prefed.simulate(
            prefed.FedAvg(client_lr=LR), Tagger(),
            prefed.FederatedData(given_as(of)[0], **given_as(of)[1]), engine="sequential",
            attackers=lies, **SETTINGS,
        )
        for of, lies in ((clients, {"share": 0.5, "attack": "label_flip"}), (other, None))
    )  # fmt: skip
    assert torch.equal(found.weights, wanted.weights)


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=6), st.data())
def test_rows_of_unequal_length(rows: list[list[int]], data: st.DataObject) -> None:
    held = Ragged.of([torch.tensor(row, dtype=torch.int64) for row in rows], -1)
    numbers = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=7))
    found = held.index_select(0, torch.tensor(numbers))
    width = max(len(rows[n]) for n in numbers)
    assert found.padded().tolist() == [rows[n] + [-1] * (width - len(rows[n])) for n in numbers]
    assert found.used().tolist() == [value for n in numbers for value in rows[n]] or (
        held.used().tolist() == found.used().tolist() and len(numbers) == len(rows)
    )
    assert held[1:].padded().shape[0] == len(rows) - 1


def test_what_is_wrong_is_said() -> None:
    made, _ = ragged(sentences())
    with pytest.raises(PrefedError, match=r"clients\[0\]: x\['input_ids'\]: its rows are of uneq"):
        prefed.simulate(prefed.FedAvg(), Reader(), prefed.FederatedData(made), **SETTINGS)
    unequal = {"input_ids": torch.ones(4, 2), "attention_mask": torch.ones(3, 2)}
    data = prefed.FederatedData([(unequal, torch.zeros(4))])
    with pytest.raises(PrefedError, match="its arrays have 3 and 4 samples"):
        prefed.simulate(prefed.FedAvg(), Reader(), data, **SETTINGS)
    wrong = {"ids": torch.ones(4, 2).long()}
    data = prefed.FederatedData([(wrong, torch.zeros(4).long())])
    with pytest.raises(PrefedError, match="x is a dict, and the model is given ids as keywords"):
        prefed.simulate(prefed.FedAvg(), Reader(), data, **SETTINGS)
    data = prefed.FederatedData([Rows(sentences()[0])], x={"input_ids": "words"}, y="label")
    with pytest.raises(PrefedError, match="x: the samples have no column 'words'"):
        prefed.simulate(prefed.FedAvg(), Reader(), data, **SETTINGS)
    tags, options = ragged(sentences(tagged=True))
    tags[1][1][0][0] = 7
    with pytest.raises(PrefedError, match=r"clients\[1\]: labels reach from 0 to 7"):
        prefed.simulate(
            prefed.FedAvg(), Tagger(), prefed.FederatedData(tags, **options), **SETTINGS
        )
