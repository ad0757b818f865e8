"""Models, losses and data that a careful check must not refuse, or take for others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import prefed
from prefed.core.flat_model import personal_names
from prefed.data.images import Divide
from prefed.rules.covariance import Covariance
from prefed.rules.muon import Muon
from prefed.rules.soap import SOAP
from prefed.rules.spectral import Spectral


def samples(*shape: int, classes: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 12, *shape, generator=generator)
    return [(own, torch.arange(12) % classes) for own in x]


def trained(model: nn.Module, clients: Any, **settings: Any) -> prefed.Result:
    asked: dict[str, Any] = {"rounds": 2, "local_steps": 2, "batch_size": 4, "device": "cpu"}
    algorithm = settings.pop("algorithm", prefed.FedAvg(client_lr=0.05))
    data = prefed.FederatedData(clients, test=clients[0])
    return prefed.simulate(algorithm, model, data, **asked | settings)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout2d])
def test_dropout_in_place_behind_pooling(kind: type[nn.Module], engine: str) -> None:
    """Pooling is computed before ReLU, which keeps what it gave."""
    results = []
    for in_place in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), kind(0.3, in_place),
            nn.Flatten(), nn.Linear(64, 3),
        )  # fmt: skip
        results.append(trained(model, samples(1, 8, 8), engine=engine).weights)
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


class TwoNames(nn.Module):
    """A layer that stands in the model, and in a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(5, 4), nn.ReLU())
        self.classifier = nn.Linear(4, 3)
        self.whole = nn.Sequential(self.features, self.classifier)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x)  # type: ignore[no-any-return]


def test_a_last_layer_with_two_names() -> None:
    assert personal_names(TwoNames(), ["@last"]) == ["classifier.weight", "classifier.bias"]
    assert trained(TwoNames(), samples(5), algorithm=prefed.FedPer(client_lr=0.05)).history


class LinearNorm(nn.Linear):
    """A linear layer, whatever it is called."""


class OwnNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, 4, 1))


def test_what_is_called_norm_and_has_a_matrix_is_none() -> None:
    layers = {"a": nn.Linear(4, 4), "b": LinearNorm(4, 4), "c": nn.LayerNorm(4), "d": OwnNorm()}
    model = nn.ModuleDict(layers)
    assert personal_names(model, ["@norm"]) == ["c.weight", "c.bias", "d.gain"]


def test_servers_that_go_matrix_by_matrix_count_no_other_weights() -> None:
    assert not Muon().counts_all
    assert not SOAP().counts_all
    assert not Covariance().counts_all
    assert Covariance(tau_relative=0.1).counts_all
    assert Spectral().counts_all


def test_several_labels_with_a_loss_that_nobody_knows() -> None:
    """Where samples have none, or several, they are no classes."""

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(output, y)

    y = torch.tensor([[0.0, 0, 0], [1, 1, 0], [0, 1, 0]]).repeat(4, 1)
    several = [(x, y) for x, _ in samples(5)]
    record = trained(nn.Linear(5, 3), several, loss=loss, metrics="f1").history[-1]
    assert 0 <= record["test_f1"] <= 1
    one = [(x, torch.eye(3).repeat(4, 1)) for x, _ in samples(5)]
    with pytest.raises(prefed.PrefedError, match="bce alone"):
        trained(nn.Linear(5, 3), one, loss=loss, metrics="f1")


def test_a_loss_that_draws_numbers_beside_micro_batch() -> None:
    def loss(output: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(output + 0.1 * torch.randn_like(output), y)

    assert trained(nn.Linear(5, 3), samples(5), loss=loss, micro_batch=2).history


class Centred(Divide):
    """What it inherits may be called for many clients at once; this not."""

    def __call__(self, x: Tensor) -> Tensor:
        found = super().__call__(x)
        return found - found.mean()


def test_a_transform_that_inherits_another() -> None:
    weights = []
    for engine in ("sequential", "vectorised"):
        torch.manual_seed(0)
        model, clients = nn.Linear(5, 3), samples(5)
        data = prefed.FederatedData(clients, test=clients[0], transform=Centred(2.0))
        asked: dict[str, Any] = {"rounds": 2, "local_steps": 2, "batch_size": 4, "device": "cpu"}
        result = prefed.simulate(prefed.FedAvg(), model, data, engine=engine, **asked)
        weights.append(result.weights)
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)
