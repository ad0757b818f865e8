"""Small data sets in the official formats, for tests that need files."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np

SPEAKERS = 12


def cifar10(root: Path, images: int = 240) -> Path:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for seed, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        rng = np.random.default_rng(seed)
        count = images if seed < 5 else 10
        records = rng.integers(0, 256, (count, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(count) % 10
        records.tofile(folder / f"{name}.bin")
    return folder


def cifar100(root: Path, images: int = 1200) -> Path:
    folder = root / "cifar-100-binary"
    folder.mkdir(parents=True)
    for seed, (name, count) in enumerate((("train", images), ("test", 10))):
        records = np.random.default_rng(seed).integers(0, 256, (count, 3074), dtype=np.uint8)
        records[:, 0], records[:, 1] = np.arange(count) % 20, np.arange(count) % 100
        records.tofile(folder / f"{name}.bin")
    return folder


def python2(content: Any) -> bytes:
    """A pickle of protocol 2 as Python 2 wrote it, with its strings, as in the official files."""
    return b"\x80\x02" + _python2(content) + b"."


def _python2(value: Any) -> bytes:
    match value:
        case bytes() if len(value) < 256:
            return b"U" + bytes([len(value)]) + value
        case bytes():
            return b"T" + struct.pack("<i", len(value)) + value
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            return b"K" + bytes([value]) if 0 <= value < 256 else b"J" + struct.pack("<i", value)
        case list():
            return b"]q\x01(" + b"".join(map(_python2, value)) + b"e"
        case tuple():
            return b"(" + b"".join(map(_python2, value)) + b"t"
        case dict():
            pairs = (_python2(key) + _python2(item) for key, item in value.items())
            return b"}q\x02(" + b"".join(pairs) + b"u"
    dtype = b"cnumpy\ndtype\n" + _python2((b"u1", 0, 1)) + b"R"
    dtype += b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    make = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    shape, order = _python2(value.shape), _python2(False)
    return make + b"(K\x01" + shape + dtype + order + _python2(value.tobytes()) + b"tb"


def cifar_pickles(folder: Path, kind: int = 10, images: int = 20) -> Path:
    """The Python layout of CIFAR-10 or CIFAR-100."""
    folder.mkdir(parents=True)
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    for seed, name in enumerate(names if kind == 10 else ["train", "test"]):
        pixels = np.random.default_rng(seed).integers(0, 256, (images, 3072), dtype=np.uint8)
        labels = [k % kind for k in range(images)]
        keys: dict[bytes, Any] = {b"batch_label": b"training batch", b"data": pixels}
        if kind == 10:
            keys[b"labels"] = labels
        else:
            keys |= {b"fine_labels": labels, b"coarse_labels": [k % 20 for k in labels]}
        keys[b"filenames"] = [b"%d.png" % k for k in range(images)]
        (folder / name).write_bytes(python2(keys))
    return folder


def idx_bytes(array: np.ndarray[Any, Any]) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.tobytes()


def idx(folder: Path, prefix: tuple[str, str] = ("train", "t10k"), images: int = 1200) -> Path:
    folder.mkdir(parents=True)
    for seed, part in enumerate(prefix):
        count = images if seed == 0 else 50
        pixels = np.random.default_rng(seed).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(pixels), 1))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    return folder


def shakespeare(folder: Path) -> Path:
    folder.mkdir(parents=True)
    line = "Speak the speech, I pray you, as I pronounced it to you, trippingly on the tongue."
    blocks = [f"SPEAKER {k % SPEAKERS}:\n{line[k % 7 :]}\n{line}" for k in range(4 * SPEAKERS)]
    blocks.append("ONCE ONLY:\nExit.")
    (folder / "input.txt").write_text("\n\n".join(blocks) + "\n")
    return folder


def a9a(root: Path, samples: int = 160) -> Path:
    """LIBSVM text: three of 123 features for each sample."""
    rng = np.random.default_rng(5)
    for name in ("a9a", "a9a.t"):
        rows = [np.sort(rng.choice(123, 3, replace=False)) + 1 for _ in range(samples)]
        labels = ["-1" if row[0] > 30 else "+1" for row in rows]
        features = [" ".join(f"{i}:1" for i in row) for row in rows]
        lines = [f"{y} {x}" for y, x in zip(labels, features, strict=True)]
        (root / name).write_text("\n".join(lines) + "\n")
    return root


def everything(root: Path) -> Path:
    cifar10(root)
    cifar100(root)
    idx(root / "mnist")
    idx(root / "fashion-mnist")
    a9a(root)
    shakespeare(root / "shakespeare")
    return root
