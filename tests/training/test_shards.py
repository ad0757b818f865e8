"""A model in shards (FSDP2, torch's own) on two ranks: prefed's element-wise rules on the local
shards are the rule on the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.helpers import shards
from tests.training.test_distributed import start


@pytest.mark.process
def test_steps_on_shards_are_those_of_the_whole_model(tmp_path: Path) -> None:
    processes = start(2, tmp_path, "tests.helpers.shards")
    for process in processes:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    files = [safetensors.torch.load_file(tmp_path / f"{rank}.safetensors") for rank in range(2)]
    for way, make in shards.WAYS.items():
        module = shards.model()
        first = {name: p.detach().clone() for name, p in module.named_parameters()}
        wanted = shards.train(module, make(module))
        total = sum(p.numel() for p in first.values())
        held = [int(file[f"{way} holds"]) for file in files]
        assert sum(held) == total
        assert max(held) < 0.8 * total
        for name, value in wanted.items():
            assert not torch.equal(value, first[name])
            for file in files:
                torch.testing.assert_close(file[f"{way}.{name}"], value, rtol=0, atol=1e-12)
