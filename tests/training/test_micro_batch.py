"""A gradient that is computed in parts is the gradient of the whole batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import prefed
from prefed.core.losses import make_loss
from tests.helpers.problems import tiny_data, tiny_model
from tests.helpers.sentences import Reader, texts

SETTINGS: dict[str, Any] = {"rounds": 2, "local_steps": 3, "engine": "sequential"}


def weights(data: prefed.FederatedData, model: nn.Module, **settings: Any) -> torch.Tensor:
    algorithm = prefed.PreFed(client_lr=0.01)
    return prefed.simulate(algorithm, model, data, **SETTINGS | settings).weights


@pytest.mark.parametrize("micro", [1, 3, 4, 100])
@pytest.mark.parametrize("size", [7, None])
def test_labels(size: int | None, micro: int) -> None:
    whole = weights(tiny_data(), tiny_model(), batch_size=size)
    parts = weights(tiny_data(), tiny_model(), batch_size=size, micro_batch=micro, workers=2)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-10)


def test_targets_that_do_not_count() -> None:
    """Parts weigh by the targets in them that count, and one may have none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 6, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (12, 6), generator=generator)
    y[torch.rand(12, 6, generator=generator) < 0.5] = -100
    y[:3] = -100
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3).double(), Last())
    for loss in (nn.functional.cross_entropy, make_loss("cross_entropy", ignore_index=-100)):
        data = prefed.FederatedData([(x, y)])
        whole = weights(data, model, batch_size=None, loss=loss)
        parts = weights(data, model, batch_size=None, loss=loss, micro_batch=3)
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-10)


def own_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, y)


WEIGHT = torch.tensor([1.0, 5.0, 0.1], dtype=torch.float64)
KNOWN = {
    "module": nn.CrossEntropyLoss(),
    "smooth": nn.CrossEntropyLoss(WEIGHT, ignore_index=2, label_smoothing=0.1),
    "weights": partial(nn.functional.cross_entropy, weight=WEIGHT),
    "weights of a module": nn.CrossEntropyLoss(WEIGHT),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "sum by function": partial(nn.functional.cross_entropy, reduction="sum", weight=WEIGHT),
    "sum of squares": partial(nn.functional.mse_loss, reduction="sum"),
}


def some_that_do_not_count(samples: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the last third nearly none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 6, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (samples, 6), generator=generator)
    y[samples // 3 * 2 :, 1:] = -100
    return x, y


def reader() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3).double(), Last())


@pytest.mark.parametrize("name", KNOWN)
def test_the_mean_of_every_cross_entropy(name: str) -> None:
    """With weights of classes, with targets that do not count, and sums."""
    x, y = some_that_do_not_count()
    target = y if "squares" not in name else torch.randn(12, 3, 6, dtype=torch.float64)
    if KNOWN[name] is KNOWN["smooth"]:
        target = target.masked_fill(y < 0, 2)
    data, common = prefed.FederatedData([(x, target)]), {"batch_size": None, "loss": KNOWN[name]}
    whole = weights(data, reader(), **common)
    parts = weights(data, reader(), **common, micro_batch=3)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [*KNOWN, "function", "probabilities"])
def test_the_loss_of_a_test_set_in_several_batches(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = some_that_do_not_count()
    target = y if "squares" not in name else torch.randn(12, 3, 6, dtype=torch.float64)
    loss: Any = KNOWN.get(name, nn.functional.cross_entropy)
    if loss is KNOWN["smooth"]:
        target = target.masked_fill(y < 0, 2)
    elif name == "probabilities":
        target = torch.rand(12, 3, 6, dtype=torch.float64).softmax(1)
    data = prefed.FederatedData([(x, target)], test=(x, target))
    monkeypatch.setattr("prefed.training.task.EVALUATION_BATCH", 5)
    result = prefed.simulate(
        prefed.FedAvg(client_lr=0.01), reader(), data, rounds=1, local_steps=1, loss=loss
    )
    wanted = float(loss(result.model(x), target).detach())
    assert result.history[-1]["test_loss"] == pytest.approx(wanted, abs=1e-12)


def test_a_loss_that_is_no_mean_over_samples(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a function that nothing is known of it is tried."""
    x, y = some_that_do_not_count()
    data = prefed.FederatedData([(x, y)], test=(x, y))
    with pytest.raises(prefed.PrefedError, match=r"^micro_batch, loss: .* leave micro_batch out"):
        weights(data, reader(), loss=own_loss, micro_batch=3)
    assert not caplog.records
    monkeypatch.setattr("prefed.training.task.EVALUATION_BATCH", 5)
    weights(data, reader(), loss=own_loss)
    assert "test_loss: the loss is no mean over samples" in caplog.text
    counting = (x, y.clamp(min=0))
    caplog.clear()
    data = prefed.FederatedData([counting], test=counting)
    parts = weights(data, reader(), loss=own_loss, micro_batch=3)
    whole = weights(data, reader(), loss=own_loss)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-10)
    assert not caplog.records


class Last(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


def test_texts_of_unequal_length() -> None:
    """The batch is padded as a whole, then cut."""
    made = texts()
    data = prefed.FederatedData((made.x, made.y), parts=torch.arange(60).split(20), pad=0)
    torch.manual_seed(0)
    model = Reader().double()
    whole = weights(data, model, batch_size=9)
    parts = weights(data, model, batch_size=9, micro_batch=2)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-10)


def test_dropout_differs_from_part_to_part() -> None:
    """Two parts with the same samples: with the same masks their gradients would be equal, and the
    mean that of one of them."""
    x, y = torch.ones(1, 50, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(50, 1).double())
    one, two = (
        weights(
            prefed.FederatedData([(x.repeat(n, 1), y.repeat(n, 1))]), model, batch_size=None,
            micro_batch=1, local_steps=1, rounds=1,
        )
        for n in (1, 2)
    )  # fmt: skip
    assert not torch.allclose(one, two)


def test_the_vectorised_engine_steps_aside() -> None:
    with pytest.warns(prefed.EngineWarning, match="micro_batch"):
        found = weights(tiny_data(), tiny_model(), batch_size=6, micro_batch=2, engine="vectorised")
    assert torch.equal(found, weights(tiny_data(), tiny_model(), batch_size=6, micro_batch=2))
