"""Tensor files that are written piece by piece are what safetensors reads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from prefed.core import tensor_files
from prefed.core.tensor_files import DTYPES, write_tensors


@pytest.mark.parametrize("piece", [3, 1 << 22])
def test_what_is_written_is_read(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "PIECE", piece)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        str(dtype): torch.randint(0, 2, (3, 5), generator=generator).to(dtype) for dtype in DTYPES
    }
    tensors |= {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4)}
    tensors["turned"] = torch.randn(4, 6, generator=generator).T
    path = tmp_path / "x.safetensors"
    found = write_tensors(path, tensors, {"a": "b"})
    assert found == hashlib.sha256(path.read_bytes()).hexdigest()
    again = safetensors.torch.load_file(path)
    assert again.keys() == tensors.keys()
    for name, value in tensors.items():
        assert again[name].dtype == value.dtype
        assert torch.equal(again[name], value)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"a": "b"}


def test_it_is_as_long_as_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(7.0), "a": torch.arange(3), "c": torch.ones(5, dtype=torch.bool)}
    write_tensors(tmp_path / "x", tensors)
    assert (tmp_path / "x").read_bytes() == safetensors.torch.save(tensors)
