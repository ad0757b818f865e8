"""Several processes: the bits of one, and an end in bounded time if one of them dies."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from prefed.training import ranks
from tests.helpers import ROOT
from tests.helpers.ranks import weights, wide_weights


def start(
    size: int, out: Path, module: str = "tests.helpers.ranks", **more: str
) -> list[subprocess.Popen[str]]:
    """What torchrun does: a process a rank, told where to meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, str(out)],
            env=os.environ | meet | more | {"RANK": str(r), "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(size)
    ]


@pytest.mark.process
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_same_bits_on_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    """Kept state, shared state, lockstep, and fewer clients than ranks."""
    processes = start(ranks, tmp_path)
    expected = weights() | wide_weights()
    for process in processes:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    for rank in range(ranks):
        found = safetensors.torch.load_file(tmp_path / f"{rank}.safetensors")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), f"{name} on rank {rank}"


@pytest.mark.process
def test_a_dead_rank_ends_the_run(tmp_path: Path) -> None:
    first, second = start(2, tmp_path, DIES="1")
    _, error = first.communicate(timeout=120)
    second.communicate()
    assert first.returncode != 0
    assert "RankLost: rank 0 has lost another process of the run" in error


@pytest.mark.parametrize(("items", "size"), [(1, 3), (2, 4), (5, 4), (8, 2), (3, 8)])
def test_shares_are_neighbours_and_lower_ranks_come_first(items: int, size: int) -> None:
    shares = [ranks.share(range(items), rank, size) for rank in range(size)]
    assert [item for share in shares for item in share] == list(range(items))
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
