"""Adapters on Flower: the bits of simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import prefed.flower
from prefed.core.errors import PrefedError
from tests.helpers.adapters import OPTIONS
from tests.helpers.federation import Federation, config_of, simulated, told_by_all


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"freeze": ["*lora_A*"]}, {"state_dtype": "bfloat16"}])
def test_a_deployed_config_has_the_bits_of_simulation(more: dict[str, Any], tmp_path: Path) -> None:
    schedule = {"schedule": "warmup", "steps": 5, "then": 0.02}
    config = config_of(
        {"name": "prefed", **OPTIONS, **more, "client_lr": schedule},
        data={"name": "tests.helpers.sentences:texts", "split": {"name": "iid", "clients": 9}},
        model={"name": "tests.helpers.adapters:classifier"},
        micro_batch=3,
    )
    here, there = simulated(config), Federation(config, tmp_path).run()
    assert torch.equal(here.server.weights, there.server.weights)
    for ours, theirs in zip(here.history, there.history, strict=True):
        assert told_by_all(ours) == told_by_all(theirs)


@pytest.mark.parametrize("option", [{"freeze": ("a",)}, {"state_dtype": "bfloat16"}])
def test_what_an_app_of_ones_own_cannot_know(option: dict[str, Any]) -> None:
    with pytest.raises(PrefedError, match=f"{next(iter(option))}: .* prefed deploy"):
        prefed.flower.PreFed(client_lr=0.01, **option)
