"""How often a round waits for the device, counted on "meta", which like a GPU has no values ready.

A GPU is told what to do and computes meanwhile; whoever asks for a value waits until all of it is
done. That may happen once a block or once a round, but not in each local step."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import prefed
from prefed.models.chars import CharTransformer
from prefed.models.cnn import cnn
from prefed.rules import SGD, Rule, State
from prefed.training.engines.auto import Choice
from prefed.training.engines.vectorised import Vectorised
from prefed.training.engines.workers import Workers
from prefed.training.local_trainer import LocalTrainer
from prefed.training.round import Server, server_update
from prefed.training.task import Task

CLIENTS = 4
aten = torch.ops.aten
VALUES = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default,
          aten.is_nonzero.default, aten.equal.default, aten._unique2.default}  # fmt: skip
"""What asks for values: item, float, bool and int are the first."""
FROM_LISTS = {torch.tensor, torch.as_tensor, Tensor.new_tensor}
"""What copies from the host, which waits: the memory may be moved meanwhile."""


def on_device(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


class Waits(TorchDispatchMode):
    """Counts values that come from the device, and answers for it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.down, self.up = Counter[str](), Counter[str]()
        self.lists = Lists(self.up)

    def __enter__(self) -> Waits:
        self.lists.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.lists.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = any(map(on_device, tree_leaves((args, kwargs))))
        if given and func in VALUES:
            self.down[str(func)] += 1
            return True if "is_nonzero" in str(func) or "equal" in str(func) else 1.0
        if func is aten._to_copy.default and "device" in kwargs:
            to_device = torch.device(kwargs["device"]).type == "meta"
            if given and not to_device:
                self.down[str(func)] += 1
                dtype = kwargs.get("dtype") or args[0].dtype
                return torch.ones(args[0].shape, dtype=dtype)
        return func(*args, **kwargs)


class Lists(TorchFunctionMode):
    """Counts tensors that are made on the device from numbers of the host."""

    def __init__(self, up: Counter[str]) -> None:
        super().__init__()
        self.up = up

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in FROM_LISTS and on_device(found):
            self.up[func.__name__] += 1
        return found


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    match kind:
        case "chain":
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
        case "dropout":
            drops = nn.Sequential(nn.Linear(64, 16), nn.GELU(), nn.Dropout(0.2))
            return nn.Sequential(nn.Flatten(), drops, nn.Linear(16, 10))
        case "convolutions":
            return cnn((1, 8, 8), 10)
        case _:
            return CharTransformer((8,), 10, width=16)


def data(kind: str) -> prefed.FederatedData:
    if kind == "attention":
        text = torch.randint(10, (CLIENTS, 6, 9))
        return prefed.FederatedData([(t[:, :-1], t[:, 1:]) for t in text])
    x = torch.randn(CLIENTS, 6, 1, 8, 8)
    return prefed.FederatedData([(part, torch.arange(6) % 10) for part in x])


def waits(
    algorithm: prefed.Algorithm, kind: str, engine: str, steps: int, **options: Any
) -> tuple[dict[str, int], dict[str, int]]:
    """Of one round, as a run has it: local steps, their mean, the server's step."""
    given = {"rounds": 1, "local_steps": steps, "batch_size": 3, "engine": engine, **options}
    of, settings = data(kind), prefed.Settings(device="meta", **given)
    task = Task(model(kind), None, of, torch.device("meta"))
    task.randomness = "dropout" if kind == "dropout" else "none"
    task.attends = kind == "attention"
    trainer = LocalTrainer(algorithm, task, of, settings)
    flat = task.flat
    server = Server.start(algorithm, flat.shared, flat.weights, flat.read_buffers())
    trainer.choice = Choice(engine, 1)
    trainer.workers = Workers(engine, 1, task, of, settings)
    with Waits() as seen:
        arrived = trainer.train(server, [*range(CLIENTS)])
        server_update(algorithm, server, arrived.mean, steps, 1.0)
    return dict(seen.down), dict(seen.up)


ALGORITHMS = ("fedavg", "fedadam", "prefed", "prefedopt", "scaffold")


@pytest.fixture(autouse=True)
def without_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial of a model compares gradients, of which there are none. Autocast, which is off,
    knows no such device."""
    monkeypatch.setattr(Vectorised, "why_not", lambda engine: None)
    monkeypatch.setattr(torch, "autocast", lambda *given: nullcontext())


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("kind", ["chain", "dropout", "convolutions", "attention"])
def test_a_round_waits_as_often_whatever_its_steps(name: str, engine: str, kind: str) -> None:
    algorithm = prefed.ALGORITHMS.get(name)()
    few, many = (waits(algorithm, kind, engine, steps) for steps in (2, 5))
    assert few == many
    down, up = few
    blocks = CLIENTS if engine == "sequential" else 1
    fields = sum(policy.kind == "average" for policy in algorithm.sharing().values())
    fields -= sum(name.endswith("_mass") for name in algorithm.sharing())
    assert down["aten._to_copy.default"] == blocks  # losses
    assert down["aten._local_scalar_dense.default"] <= 5 + fields  # of the mean; docs/gpu.md
    assert sum(up.values()) <= 3 * blocks


def test_a_step_that_asks_for_a_value_is_noticed() -> None:
    class Curious(SGD):
        def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
            w.sub_(g, alpha=lr if float(g.sum()) else 0.0)

    class FedCurious(prefed.FedAvg):
        def client_rule(self) -> Rule:
            return Curious()

    few, many = (waits(FedCurious(client_lr=0.1), "chain", "sequential", n) for n in (2, 5))
    more = many[0]["aten._local_scalar_dense.default"] - few[0]["aten._local_scalar_dense.default"]
    assert more == 3 * CLIENTS
