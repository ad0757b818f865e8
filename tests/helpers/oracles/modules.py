"""Federated averaging in plain PyTorch: a module a client, torch.optim, and means of state dicts.

Written without a look at the package: no flat vector, no layout, no policy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

Entries = dict[str, Tensor]


def federated(
    model: nn.Module,
    clients: Sequence[tuple[Tensor, Tensor]],
    cohorts: Sequence[Sequence[int]],
    lr: float,
    steps: int,
    *,
    momentum: float = 0.0,
    statistics: Literal["average", "keep", "reset"] = "average",
    personal: Callable[[str], bool] = lambda name: False,
    personal_steps: int = 0,
    align: float = 0.0,
    mixed: bool = False,
) -> tuple[nn.Module, dict[int, nn.Module]]:
    """The global model after these cohorts, and the one that each client would use.

    With personal_steps the first steps move the personal parameters alone, and the others the rest.
    With align each step also moves what is shared along the mean change of the round before.
    """
    server = copy.deepcopy(model)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())

    def stays(name: str) -> bool:
        return personal(name) if name in parameters else statistics == "keep"

    own: dict[int, Entries] = {}
    along = {n: torch.zeros_like(p) for n, p in parameters.items() if not personal(n)}
    for cohort in cohorts:
        start = {n: server.get_parameter(n).detach().clone() for n in along}
        trained: list[dict[str, Any]] = []
        for client in cohort:
            module = copy.deepcopy(server).train()
            module.load_state_dict(own.get(client, {}), strict=False)
            pull = {n: align / steps * v for n, v in along.items()}, align if mixed else 0.0
            train(module, *clients[client], lr, steps, momentum, personal, personal_steps, pull)
            after = module.state_dict()
            own[client] = {n: v.clone() for n, v in after.items() if stays(n)}
            trained.append(after)
        mean = {}
        for name, first in model.state_dict().items():
            if stays(name) or (name in buffers and statistics == "reset"):
                mean[name] = first
            else:
                values = torch.stack([after[name].double() for after in trained]).mean(0)
                mean[name] = values.to(first.dtype)
        server.load_state_dict(mean)
        along = {n: mean[n] - value for n, value in start.items()}
    used = {}
    for client in range(len(clients)):
        used[client] = copy.deepcopy(server)
        used[client].load_state_dict(own.get(client, {}), strict=False)
    return server, used


def train(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    lr: float,
    steps: int,
    momentum: float,
    personal: Callable[[str], bool],
    personal_steps: int,
    pull: tuple[Entries, float],
) -> None:
    named = dict(module.named_parameters())
    head = [p for n, p in named.items() if personal(n)]
    body = [p for n, p in named.items() if not personal(n)]
    of_head, of_body, of_all = (
        torch.optim.SGD(part, lr, momentum) if part else None
        for part in (head, body, [*named.values()])
    )
    for step in range(steps):
        module.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        alone = of_head if step < personal_steps else of_body
        optimiser = alone if personal_steps else of_all
        assert optimiser is not None
        before = {n: p.detach().clone() for n, p in named.items()}
        optimiser.step()
        for name, along in pull[0].items():
            with torch.no_grad():
                named[name].add_(pull[1] * (before[name] - named[name]) + along)


def check_same(found: nn.Module, wanted: nn.Module, tolerance: float = 1e-10) -> None:
    """All parameters and buffers, by name."""
    a, b = found.state_dict(), wanted.state_dict()
    assert a.keys() == b.keys()
    for name, value in b.items():
        assert a[name].dtype == value.dtype, name
        off = float((a[name].double() - value.double()).abs().max())
        assert off <= tolerance, f"{name}: {off}"
