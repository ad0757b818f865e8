"""Parameter groups against torch.optim, which has them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import prefed
from prefed.core.errors import PrefedError
from prefed.rules import Adam
from tests.helpers.federation import Federation, config_of, simulated
from tests.helpers.problems import tiny_data, tiny_model

ROUNDS, STEPS, LR = 3, 4, 0.02
ENGINES = ("sequential", "vectorised")
GROUPS: list[dict[str, Any]] = [
    {"params": "2.weight", "lr_scale": 0.3, "weight_decay": 0.2, "decoupled_weight_decay": 0.3},
    {"params": ["@vectors"], "weight_decay": 0.0, "decoupled_weight_decay": 0.0, "lr_scale": 2.5},
]


def groups_of(model: nn.Module, decay: str, **base: Any) -> list[dict[str, Any]]:
    """The same in torch's words."""
    named = dict(model.named_parameters())
    return [
        {"params": [named["2.weight"]], **base, "lr": LR * 0.3, "weight_decay": 0.2}
        if decay == "weight_decay"
        else {"params": [named["2.weight"]], **base, "lr": LR * 0.3, "weight_decay": 0.3},
        {"params": [named["0.bias"], named["2.bias"]], "lr": LR * 2.5, "weight_decay": 0.0},
        {"params": [named["0.weight"]], "lr": LR, "weight_decay": 0.1},
    ]


def by_torch(make: Callable[[nn.Module], torch.optim.Optimizer]) -> torch.Tensor:
    """Full batches, a new optimiser in each round, the mean of all clients."""
    server, data = tiny_model(), tiny_data()
    for _ in range(ROUNDS):
        trained = []
        for client in range(len(data)):
            x, y = data.client(client).all()
            own = copy.deepcopy(server)
            optimiser = make(own)
            for _ in range(STEPS):
                optimiser.zero_grad()
                nn.functional.cross_entropy(own(x), y).backward()
                optimiser.step()
            trained.append(own.state_dict())
        server.load_state_dict(
            {n: torch.stack([t[n] for t in trained]).mean(0) for n in server.state_dict()}
        )
    return torch.cat([p.detach().reshape(-1) for p in server.parameters()])


def ours(algorithm: Any, engine: str = "sequential", **more: Any) -> torch.Tensor:
    settings: dict[str, Any] = {"rounds": ROUNDS, "local_steps": STEPS, "batch_size": None}
    return prefed.simulate(
        algorithm, tiny_model(), tiny_data(), engine=engine, **settings | more
    ).weights


def only(decay: str) -> Any:
    other = {"weight_decay", "decoupled_weight_decay"} - {decay}
    return [{k: v for k, v in group.items() if k not in other} for group in GROUPS]


@pytest.mark.parametrize("engine", ENGINES)
def test_sgd_with_momentum(engine: str) -> None:
    found = ours(
        prefed.FedAvg(
            client_lr=LR, client_momentum=0.9, weight_decay=0.1, groups=only("weight_decay")
        ),
        engine,
    )
    wanted = by_torch(lambda m: torch.optim.SGD(groups_of(m, "weight_decay"), momentum=0.9))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("taus", [False, True])
def test_adamw_with_a_tau_of_its_own(taus: bool, engine: str) -> None:
    """torch decays by lr*decay, also where lr is the group's."""
    groups = only("decoupled_weight_decay")
    if taus:
        groups[0]["tau"], groups[1]["tau"] = 1e-2, 3e-1
    found = ours(
        prefed.Pair(
            client_lr=LR, client=Adam(beta2=0.99, tau=1e-3, bias_correction=True),
            decoupled_weight_decay=0.1, groups=groups,
        ),
        engine,
    )  # fmt: skip

    def make(model: nn.Module) -> torch.optim.Optimizer:
        given = groups_of(model, "decoupled")
        for group, eps in zip(given, (1e-2, 3e-1, 1e-3) if taus else (1e-3,) * 3, strict=True):
            group["eps"] = eps
        return torch.optim.AdamW(given, betas=(0.9, 0.99))

    torch.testing.assert_close(found, by_torch(make), rtol=0, atol=1e-10)


def test_groups_that_change_nothing_and_layers_that_stand_still() -> None:
    plain = ours(prefed.PreFed(client_lr=LR, weight_decay=0.1))
    same = ours(prefed.PreFed(client_lr=LR, weight_decay=0.1, groups=[{"params": "0.*"}]))
    torch.testing.assert_close(same, plain, rtol=0, atol=1e-14)
    still = ours(prefed.PreFed(client_lr=LR, groups=[{"params": "0.*", "lr_scale": 0}]))
    first = torch.cat([p.detach().reshape(-1) for p in tiny_model().parameters()])
    assert torch.equal(still[:24], first[:24])
    assert not torch.equal(still[24:], first[24:])


def test_rules_that_look_back() -> None:
    """SCAFFOLD's variates and a derived m are in the units of gradients, whatever the scale: with
    all steps scaled they are those of a smaller client_lr."""
    everything = [{"params": "*", "lr_scale": 0.5}]
    for make in (
        lambda lr, groups: prefed.SCAFFOLD(client_lr=lr, groups=groups),
        lambda lr, groups: prefed.PreFed(client_lr=lr, momentum="derived", groups=groups),
        lambda lr, groups: prefed.PreFed(
            client_lr=lr, momentum="derived", personal=("@last",), groups=groups
        ),
    ):
        torch.testing.assert_close(
            ours(make(LR, everything)), ours(make(LR / 2, ())), rtol=0, atol=1e-10
        )


def test_in_a_config_and_on_flower(tmp_path: Path) -> None:
    groups = [{"params": ["@vectors"], "weight_decay": 0.0, "lr_scale": 0.5, "tau": 0.01}]
    config = config_of({"name": "prefed", "weight_decay": 0.01, "groups": groups})
    assert config.to_dict()["algorithm"]["groups"] == groups
    here, there = simulated(config), Federation(config, tmp_path).run()
    assert torch.equal(here.server.weights, there.server.weights)
    without = config_of({"name": "prefed", "weight_decay": 0.01})
    assert "groups" not in without.to_dict()["algorithm"]
    assert not np.array_equal(simulated(without).server.weights, here.server.weights)


@pytest.mark.parametrize(("algorithm", "says"), [
    (prefed.FedAvg(groups=[{"params": "head.*"}]), r"groups\[0\].params: 'head.\*' names no param"),
    (prefed.FedAvg(groups=[{"params": "*", "tau": 1.0}]), r"groups\[0\].tau: the client rule, SGD"),
    (prefed.FedRep(groups=[{"params": "*"}]), "its parts move in turns"),
    (prefed.MimeLite(groups=[{"params": "*", "tau": 0.1}]), r"groups\[0\]\.tau: the client rule"),
])  # fmt: skip
def test_what_cannot_be_is_said(algorithm: Any, says: str) -> None:
    with pytest.raises(PrefedError, match=says):
        ours(algorithm)


def test_a_single_table_is_a_list_of_one() -> None:
    table = {"params": "@vectors", "weight_decay": 0}
    assert prefed.FedAvg(groups=table) == prefed.FedAvg(groups=[table])
    (group,) = prefed.FedAvg(groups=table).groups
    assert prefed.FedAvg(groups=group).groups == (group,)
    for wrong in ("@vectors", 3):
        with pytest.raises(
            PrefedError, match=r"FedAvg\.groups: should be a list of tables such as"
        ):
            prefed.FedAvg(groups=wrong)


def test_what_is_no_group() -> None:
    with pytest.raises(PrefedError, match=r"FedAvg\.groups\.0\.lr"):
        prefed.FedAvg(groups=[{"params": "*", "lr": 0.1}])
