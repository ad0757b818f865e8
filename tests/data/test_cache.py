"""Decoded data sets are kept: read back to the same bits, decoded anew when their files change."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prefed
from prefed.core.cache_directory import VARIABLE, cache_directory
from prefed.core.tensor_files import write_tensors
from prefed.data import cache, cifar, idx, libsvm, shakespeare
from tests.helpers import official

TEXT = "".join(f"SPEAKER {n % 7}:\nline {n}\nand more\n\n" for n in range(200))


def make_cifar(folder: Path, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 10, (20, 1 + cifar.PIXELS), np.uint8)
    (folder / "cifar-10-batches-bin").mkdir(exist_ok=True)
    for name in (*cifar.CIFAR10[0].train, cifar.CIFAR10[0].test):
        rows.tofile(folder / "cifar-10-batches-bin" / name)


def make_mnist(folder: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    for part in ("train", "t10k"):
        images = generator.integers(0, 255, (30, 28, 28), np.uint8)
        labels = generator.integers(0, 10, 30, np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(official.idx_bytes(images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(official.idx_bytes(labels))


def make_text(folder: Path, seed: int) -> None:
    (folder / "shakespeare.txt").write_text(TEXT.replace("line", f"line {seed}"))


def make_a9a(folder: Path, seed: int) -> None:
    for name in ("a9a", "a9a.t"):
        (folder / name).write_text(f"+1 3:1 7:{seed + 1}\n-1 4:0.5\n")


MADE: dict[str, tuple[Callable[[Path, int], None], Any, dict[str, Any]]] = {
    "cifar10": (make_cifar, cifar, {"complete": False}),
    "mnist": (make_mnist, idx, {"complete": False}),
    "shakespeare": (make_text, shakespeare, {"length": 10}),
    "a9a": (make_a9a, libsvm, {}),
}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "SMALL", 1)
    return tmp_path / "cache"


def settle(folder: Path, seconds: float) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - seconds,) * 2)


def tensors(dataset: Any) -> list[torch.Tensor]:
    found = [dataset.x, dataset.y, *dataset.test]
    return found if dataset.client is None else [*found, dataset.client]


def same(a: Any, b: Any) -> bool:
    pairs = zip(tensors(a), tensors(b), strict=True)
    return a.classes == b.classes and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs
    )


@pytest.mark.parametrize("name", MADE)
def test_the_second_time_nothing_is_decoded(
    name: str, tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, module, options = MADE[name]
    source = tmp_path / "source"
    source.mkdir()

    def load() -> Any:
        return prefed.DATASETS.get(name)(path=str(source), **options)

    make(source, 0)
    settle(source, 100)
    with monkeypatch.context() as off:
        off.setenv(VARIABLE, "off")
        plain = load()
    assert not kept.exists()
    assert same(load(), plain)
    assert list(kept.glob("*.safetensors"))
    assert not list(kept.glob(".*"))
    reader = "_read_binary" if name == "cifar10" else "read_idx" if name == "mnist" else "_decode"
    with monkeypatch.context() as broken:
        broken.setattr(module, reader, None)
        assert same(load(), plain)
    make(source, 1)  # of the same size
    settle(source, 50)
    changed = load()
    assert not same(changed, plain)
    with monkeypatch.context() as off:
        off.setenv(VARIABLE, "off")
        assert same(changed, load())


def decode_once(source: Path, value: float = 1.0) -> cache.Arrays:
    form: cache.Form = {"x": ((torch.float32,), (2,))}
    return cache.decoded("x", [source], 0, form, lambda: {"x": torch.full((3, 2), value)})


def test_what_does_not_fit_is_decoded_again(tmp_path: Path, kept: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"1234")
    settle(tmp_path, 100)
    decode_once(source)
    (path,) = kept.glob("*.safetensors")
    assert float(decode_once(source, 2.0)["x"].max()) == 1.0
    versions = cache._versions([source])
    assert versions is not None
    for wrong in (torch.ones(3, 3), torch.ones(3, 2).double(), torch.tensor(1.0)):
        write_tensors(path, {"x": wrong}, {"versions": versions})
        assert float(decode_once(source, 2.0)["x"].max()) == 2.0
    for content in (b"", b"garbage", path.read_bytes()[:-1]):
        path.write_bytes(content)
        assert float(decode_once(source, 3.0)["x"].max()) == 3.0


def test_a_file_that_was_just_written_is_not_kept(tmp_path: Path, kept: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"1234")
    assert float(decode_once(source)["x"].max()) == 1.0
    assert float(decode_once(source, 2.0)["x"].max()) == 2.0
    assert not kept.exists()


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"1234")
    settle(tmp_path, 100)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    assert float(decode_once(source, 2.0)["x"].max()) == 2.0


def test_what_is_read_can_be_written_to_and_does_not_change_the_file(
    tmp_path: Path, kept: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"1234")
    settle(tmp_path, 100)
    decode_once(source)["x"].fill_(7)
    assert float(decode_once(source)["x"].max()) == 1.0


def test_whoever_has_no_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert cache_directory() is None
    monkeypatch.setenv(VARIABLE, "/somewhere")
    assert cache_directory() == Path("/somewhere")
