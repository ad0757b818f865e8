"""Data, models, losses and rules of one's own that do the unexpected: taken as they are meant, or
refused before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import prefed

X = torch.randn(4, 12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(48).view(4, 12) % 3


def run(data: Any = None, model: nn.Module | None = None, **more: Any) -> prefed.Result:
    torch.manual_seed(0)
    data = prefed.FederatedData([*zip(X, Y, strict=True)]) if data is None else data
    algorithm = more.pop("algorithm", None) or prefed.FedAvg(client_lr=0.1)
    asked = {"rounds": 2, "local_steps": 2, "batch_size": 4, "progress": False} | more
    return prefed.simulate(algorithm, model or nn.Linear(4, 3), data, **asked)


IN_PLACE: dict[str, dict[str, Any]] = {
    "transform": {"transform": lambda x: x.sub_(1).mul_(0.5)},
    "augment": {"augment": lambda x, generator: x.mul_(0.5)},
    "model": {},
}


@pytest.mark.process  # the native engine asks for a compiler
@pytest.mark.filterwarnings("ignore::prefed.EngineWarning")
@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("engine", ["sequential", "vectorised", "native"])
@pytest.mark.parametrize("which", IN_PLACE)
def test_data_stay_as_they_are(which: str, engine: str, batch_size: int | None) -> None:
    x, test = X.clone(), (X[0].clone(), Y[0])
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)) if which == "model" else None
    data = prefed.FederatedData([*zip(x, Y, strict=True)], test=test, **IN_PLACE[which])
    history = run(data, model, engine=engine, batch_size=batch_size).history
    assert torch.equal(x, X)
    assert torch.equal(test[0], X[0])
    if which == "transform":
        fresh = prefed.FederatedData(
            [*zip(X, Y, strict=True)], test=test, transform=lambda x: (x - 1) * 0.5
        )
        other = run(fresh, engine=engine, batch_size=batch_size).history
        assert history[-1]["test_loss"] == pytest.approx(other[-1]["test_loss"], rel=1e-6)


class SameLayer(nn.Module):
    """One layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second, self.last = self.first, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return out


class SameWeight(nn.Module):
    """One weight of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    forward = SameLayer.forward


@pytest.mark.parametrize("kind", [SameLayer, SameWeight])
def test_what_stands_in_two_places(kind: type[nn.Module]) -> None:
    data = prefed.FederatedData([*zip(X.double(), Y, strict=True)], test=(X[0].double(), Y[0]))
    torch.manual_seed(1)
    model = kind().double()
    one, two = (run(data, model, engine=engine) for engine in ("sequential", "vectorised"))
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-14)


class Made:
    """Clients that are made on demand."""

    def __init__(self, third: Any) -> None:
        self.third = third

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> Any:
        return self.third if number == 3 else (X[number], Y[number])


@pytest.mark.parametrize(
    ("third", "words"),
    [
        ((X[3, :0], Y[3, :0]), "it has no samples"),
        ((X[3], Y[3] + 5), "labels reach from 5 to 7"),
        ((X[3].double(), Y[3]), "must have the same dtypes"),
        ((X[3] / 0, Y[3]), "not finite"),
    ],
)
def test_clients_made_on_demand_are_looked_at(third: Any, words: str) -> None:
    with pytest.raises(prefed.PrefedError, match=rf"clients\[3\].*{words}"):
        run(prefed.FederatedData(Made(third)))


@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.uint64])
def test_unsigned_labels(kind: Any) -> None:
    pairs = [(x, y.numpy().astype(kind)) for x, y in zip(X, Y, strict=True)]
    found = run(prefed.FederatedData(pairs)).history[-1]["train_loss"]
    assert found == run().history[-1]["train_loss"]


def bad_weights() -> nn.Module:
    model = nn.Linear(4, 3)
    model.weight.data[0, 0] = torch.nan
    return model


def with_parts(parts: Any) -> prefed.FederatedData:
    return prefed.FederatedData((X[0], Y[0]), parts=parts)


def with_(**more: Any) -> prefed.FederatedData:
    return prefed.FederatedData([*zip(X, Y, strict=True)], **more)


def masked() -> Any:
    return np.ma.masked_array(X[0].numpy(), mask=X[0].numpy() > 1)


class NoCopy(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a socket")


def loader() -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X[0], Y[0]))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "parts by name": (lambda: with_parts({0: [1, 2]}), r"give list\(parts.values\(\)\)"),
    "a number for a part": (lambda: with_parts([3, 4]), r"parts\[0\]: should be a list"),
    "a mask": (lambda: run(prefed.FederatedData([(masked(), Y[0])])), r"x\.filled\(0\)"),
    "a loss in a list": (
        lambda: run(loss=lambda o, t: nn.functional.cross_entropy(o, t).view(1)),
        r"one number for a batch, as loss.mean\(\), not \[1\]",
    ),
    "nothing": (lambda: run(with_(transform=lambda x: None)), "transform: should return tensors"),
    "an array": (lambda: run(with_(transform=lambda x: x.numpy())), "should return tensors"),
    "no generator": (lambda: run(with_(augment=lambda x: x)), "augment: it is called with"),
    "fewer": (lambda: run(with_(augment=lambda x, g: x[:1])), "augment: should return as many"),
    "a loader": (lambda: prefed.FederatedData(loader()), "no clients by number; give a list"),
    "on meta": (lambda: run(model=nn.Linear(4, 3, device="meta")), "it is on the device meta"),
    "no copy": (lambda: run(model=NoCopy(4, 3)), "it cannot be copied .TypeError: a socket"),
    "weights": (lambda: run(model=bad_weights()), "model: some of its weights are not finite"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_refused(which: str) -> None:
    made, words = REFUSED[which]
    with pytest.raises(prefed.PrefedError, match=words):
        made()


class Normed(prefed.Rule):
    def __init__(self, by_rows: bool, name: str = "") -> None:
        self.by_rows, self.name = by_rows, name

    def fields(self, layout: Any) -> dict[str, Any]:
        return {self.name: prefed.Field((layout.size,))} if self.name else {}

    def step(self, w: Tensor, g: Tensor, state: Any, lr: float, k: int) -> None:
        norm = g.norm(dim=-1, keepdim=True) if self.by_rows else g.norm()
        w.sub_(g / norm, alpha=lr)


@pytest.mark.parametrize(
    ("rule", "policies", "words"),
    [
        (Normed(True), {}, ""),
        (Normed(False), {}, "two clients in a block"),
        (Normed(True, "weights"), {"weights": prefed.average()}, "a field 'weights'"),
        (Normed(True, "m"), {"m": prefed.derived()}, "has no `derive` that says from what"),
        (Normed(True, "m"), {"m": "average"}, r"give a policy, as prefed.average\(\)"),
    ],
)
def test_rules_of_ones_own(rule: prefed.Rule, policies: Any, words: str) -> None:
    class Own(prefed.FedAvg):
        def client_rule(self) -> prefed.Rule:
            return rule

        def sharing(self) -> Any:
            return policies

    if not words:
        run(algorithm=Own(client_lr=0.1))
        return
    with pytest.raises(prefed.PrefedError, match=words):
        run(algorithm=Own(client_lr=0.1))


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int8])
def test_arrays_that_are_changed_in_place_count_as_they_are(dtype: type) -> None:
    """Between two runs: what was looked at is not what is trained on."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3, 8, 4)).astype(np.float32), rng.integers(3, size=(3, 8))
    arrays = [*zip(x, y.astype(dtype), strict=True)]
    data, model = prefed.FederatedData(arrays), torch.nn.Linear(4, 3)

    def trained(given: prefed.FederatedData) -> Tensor:
        algorithm = prefed.FedAvg(client_lr=0.1)
        return prefed.simulate(algorithm, model, given, rounds=2, local_steps=2).weights

    before = trained(data)
    for _, labels in arrays:
        labels[:] = (labels + 1) % 3
    after = trained(data)
    assert torch.equal(after, trained(prefed.FederatedData(arrays)))
    assert not torch.equal(after, before)
