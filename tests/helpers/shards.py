"""One rank of a client whose model lies in shards (FSDP2), for test_shards.py:
python -m tests.helpers.shards OUT."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import prefed.optim
from prefed.rules import Covariance
from prefed.rules.rule import Rule

STEPS, LR = 5, 0.05
Step = Callable[[], None]


def model() -> nn.Module:
    """Odd sizes: the shards of two ranks are unequal."""
    torch.manual_seed(0)
    layers = (nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return nn.Sequential(*layers).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 5, generator=draw, dtype=torch.float64), torch.arange(8) % 3


def by_rule(module: nn.Module) -> Step:
    """prefed's rule on what each rank has of each parameter."""
    rule: Rule = Covariance(beta1=0.9, beta2=0.9, tau=1e-3)
    state = {
        name: {field: torch.zeros_like(local(p)) for field in ("m", "P")}
        for name, p in module.named_parameters()
    }

    @torch.no_grad()
    def step() -> None:
        for name, p in module.named_parameters():
            assert p.grad is not None
            rule.apply(local(p), local(p.grad), state[name], LR, 0)

    return step


def by_optimiser(module: nn.Module) -> Step:
    optimiser = prefed.optim.Covariance(module.parameters(), lr=LR, betas=(0.9, 0.9), tau=1e-3)

    def step() -> None:
        optimiser.step()

    return step


WAYS = {"rule": by_rule, "optimiser": by_optimiser}


def local(p: Tensor) -> Tensor:
    return p.to_local() if isinstance(p, DTensor) else p.detach()


def train(module: nn.Module, step: Step, rank: int = 0, size: int = 1) -> dict[str, Tensor]:
    """Local steps of a client; each of `size` ranks has its part of every batch. torch averages
    their gradients and gives each rank those of its shards."""
    for k in range(STEPS):
        x, y = batch(k)
        module.zero_grad()
        rows = slice(rank, None, size)
        nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
        step()
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p
             for n, p in module.named_parameters()}  # fmt: skip
    return {name: value.detach().clone() for name, value in whole.items()}


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    found: dict[str, Tensor] = {}
    for way, make in WAYS.items():
        module = model()
        for layer in module:  # type: ignore[attr-defined]
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        held = sum(local(p).numel() for p in module.parameters())
        trained = train(module, make(module), rank, size)
        found |= {f"{way}.{name}": value for name, value in trained.items()}
        found[f"{way} holds"] = torch.tensor(held)
    safetensors.torch.save_file(found, f"{out}/{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(sys.argv[1])
