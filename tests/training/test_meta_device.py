"""The two functions of a round with every tensor on the "meta" device, where nothing is computed.

A tensor that one of them makes on the CPU by mistake would meet tensors of a GPU; here, without a
GPU, it is seen at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import prefed
import prefed.rules.covariance_fused  # on import it makes a tensor of its own
from prefed.core.flat_model import FlatModel
from prefed.core.layout import Layout
from prefed.rules import SGD, Field, Rule
from prefed.rules.rule import State
from prefed.training.block import Block
from prefed.training.block_state import first_kept
from prefed.training.messages import to_mean
from prefed.training.round import local_update, server_update
from prefed.training.server_state import LOCAL_STEPS, Server
from tests.helpers.problems import SIZES

STEPS, CLIENTS = 3, [4, 7]
VALUES = {
    "full": "eigendecompositions look at values",
    "block": "eigendecompositions look at values",
    "kronecker": "eigendecompositions look at values",
    "soap": "eigendecompositions look at values",
}
"""Shapes of the covariance, and a rule, that are left out, and why."""
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "fedadam": [{"bias_correction": True, "tau_inside": True}],
    "fedyogi": [{"bias_correction": True}],
    "adaalter": [{"frozen": True, "v0": 1.0}],
    "localadam": [{"state": state, "bias_correction": True} for state in ("average", "keep")],
    "prefed": [
        *({"momentum": kind} for kind in ("average", "reset", "keep", "derived")),
        {"bias_correction": True, "momentum": "derived", "aggregate": "sqrtP"},
        {"accumulate": "sum", "clip_norm": 1.0, "weight_decay": 0.1},
        {"align": 0.3, "align_form": "mixed", "momentum": "derived", "decoupled_weight_decay": 0.1},
        {"upload": "topk(0.1)", "P_codec": "log4", "P_every": 2},
        {"beta1": 0.0},
        {"tau_relative": 0.1, "momentum": "derived", "bias_correction": True},
    ],
    "fedmuon": [{"momentum": "average", "align": 0.5, "align_form": "mixed"}],
    "fedpac": [{"rule": "sophia"}, {"rule": "muon", "align_form": "added"}],
    "mimelite": [{"optimiser": "adam", "clip_norm": 1.0, "weight_decay": 0.1}],
    "pair": [{"client": "adam", "server": {"name": "sgd", "momentum": 0.9, "nesterov": True},
              "share": {"m": "keep", "v": "average"}, "per_step": True}],
    "prefedopt": [{"step_with": "m", "bias_correction": True}, {"per_step": False},
                  {"tau_relative": 0.1}],
    "fedadamw": [{"means": means} for means in ("row", "whole")],
}  # fmt: skip
CASES = [(n, o) for n in prefed.ALGORITHMS.names() for o in [{}, *OPTIONS.get(n, [])]]
CASES.remove(("fedpac", {}))  # with SOAP


class OnMeta(TorchDispatchMode):
    """Fails when an operation gives or takes a tensor that is not on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, Tensor) and value.device.type != "meta":
                raise AssertionError(f"{func} on {value.device}: make tensors like others")
        return result


class MetaBlock(Block):
    """Clients that have gradients without values."""

    def __init__(self, layout: Layout, server: Server) -> None:
        self.clients, self.layout, self.steps = CLIENTS, layout, [STEPS] * len(CLIENTS)
        self.weights = server.weights.new_empty(len(CLIENTS), layout.size)
        self.gradient = torch.empty_like(self.weights)
        self.buffers = server.buffers.expand(len(CLIENTS), -1).clone()

    def differentiate(self, k: int) -> Tensor:
        self.gradient = torch.empty_like(self.weights)
        return self.weights.new_empty(len(self.clients))

    def other_gradient(self, kind: str, k: int) -> Tensor:
        return torch.empty_like(self.weights)

    def state(self, name: str, field: Field) -> Tensor:
        return field.new(self.weights, len(self.clients))

    def read_buffers(self) -> Tensor:
        return self.buffers

    def write_buffers(self, buffers: Tensor, steps: Tensor) -> None:
        self.buffers.copy_(buffers)

    def cohort_mean(self, rows: Tensor) -> Tensor:
        return rows.mean(0)


def round_on_meta(algorithm: prefed.Algorithm, dtype: torch.dtype = torch.float32) -> Server:
    inputs, hidden, classes = SIZES
    layers = (nn.Linear(inputs, hidden), nn.Linear(hidden, classes, bias=False),
              nn.BatchNorm1d(1, affine=False))  # fmt: skip
    flat = FlatModel(nn.Sequential(*layers).to("meta", dtype))
    layout = flat.layout
    with OnMeta():
        server = Server.start(algorithm, layout, flat.weights, flat.read_buffers())
        kept = {CLIENTS[0]: first_kept(algorithm, flat)}
        for _ in range(3):
            update = local_update(algorithm, server, MetaBlock(layout, server), kept)
            steps = torch.full((len(CLIENTS), 1), STEPS, dtype=torch.float64, device="meta")
            values = to_mean(algorithm, update.values, steps)
            mean = {n: v.mean(0) for n, v in values.items() if n != LOCAL_STEPS}
            server_update(algorithm, server, mean, STEPS, 0.5)
            kept = {
                client: {name: rows[i] for name, rows in update.kept.items()}
                for i, client in enumerate(CLIENTS)
            }
    return server


def ident(value: Any) -> str:
    return value if isinstance(value, str) else ",".join(f"{k}={v}" for k, v in value.items())


@pytest.mark.parametrize(("name", "options"), CASES, ids=ident)
def test_no_tensor_is_made_elsewhere(name: str, options: dict[str, Any]) -> None:
    algorithm = prefed.ALGORITHMS.get(name)(**options)
    for dtype in (torch.float32, torch.float64):
        server = round_on_meta(algorithm, dtype)
        assert server.round == 3
        tensors = {"weights": server.weights, **server.shared, **server.optimiser}
        assert {v.device.type for v in tensors.values()} == {"meta"}
        assert {v.dtype for v in tensors.values()} == {dtype}


def test_only_shapes_that_look_at_values_are_left_out() -> None:
    from prefed.rules import SHAPES

    assert {"diagonal", *VALUES} - {"soap"} == set(SHAPES.names())


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_tensor_on_the_cpu_is_noticed(side: str) -> None:
    class Careless(SGD):
        def step(self, w: Tensor, g: Tensor, state: State, lr: float, k: int) -> None:
            w.sub_(g * torch.tensor(lr))

    class FedCareless(prefed.FedAvg):
        def client_rule(self) -> Rule:
            return Careless() if side == "client" else super().client_rule()

        def server_rule(self) -> Rule:
            return Careless() if side == "server" else super().server_rule()

    with pytest.raises((AssertionError, RuntimeError), match="cpu"):
        round_on_meta(FedCareless(client_lr=0.1))
