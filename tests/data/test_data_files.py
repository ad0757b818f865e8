"""Data sets from their files: read right, and damaged or hostile ones refused with a place."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prefed
from prefed.data.cifar_pickle import read_pickle
from prefed.data.idx import read_idx
from prefed.data.libsvm import read_libsvm
from prefed.data.own import read_npz
from prefed.data.shakespeare import speeches
from tests.helpers import ROOT, official

SHARED = ROOT.parent / "shared" / "data"
IMAGES = official.idx_bytes(np.zeros((3, 28, 28), np.uint8))


def load(name: str, path: Path, **options: Any) -> Any:
    return prefed.DATASETS.get(name)(path=str(path), **options)


def test_cifar_layouts_agree(tmp_path: Path) -> None:
    folder = official.cifar_pickles(tmp_path / "py" / "cifar-10-batches-py")
    dataset = load("cifar10", tmp_path / "py", complete=False)
    with open(folder / "data_batch_1", "rb") as file:  # made by this test
        trusted = pickle.load(file, encoding="bytes")  # noqa: S301
    assert np.array_equal(dataset.x[:20].flatten(1), trusted[b"data"])
    assert dataset.y[:20].tolist() == trusted[b"labels"]
    binary = tmp_path / "bin" / "cifar-10-batches-bin"
    binary.mkdir(parents=True)
    for path in folder.iterdir():
        content = read_pickle(path)
        rows = np.column_stack([content[b"labels"], content[b"data"]]).astype(np.uint8)
        rows.tofile(binary / f"{path.name}.bin")
    again = load("cifar10", tmp_path / "bin", complete=False)
    assert torch.equal(dataset.x, again.x)
    assert torch.equal(dataset.test[1], again.test[1])
    with pytest.raises(prefed.PrefedError, match=r"data_batch_1.bin: byte \d+: it holds 20 images"):
        load("cifar10", tmp_path / "bin")


def test_cifar100_labels(tmp_path: Path) -> None:
    official.cifar_pickles(tmp_path / "cifar-100-python", 100, images=150)
    fine = load("cifar100", tmp_path, complete=False)
    coarse = load("cifar100", tmp_path, complete=False, labels="coarse")
    assert fine.y[:102].tolist() == [*range(100), 0, 1]
    assert coarse.y[:21].tolist() == [*range(20), 0]
    assert (fine.outputs, coarse.outputs) == (100, 20)


def test_idx_family(tmp_path: Path) -> None:
    for name in ("mnist", "fashion-mnist", "kmnist"):
        official.idx(tmp_path / name)
        dataset = load(name, tmp_path, complete=False)
        assert (dataset.x.shape, dataset.x.dtype) == ((1200, 1, 28, 28), torch.uint8)
        assert dataset.y[:11].tolist() == [*range(10), 0]
    official.idx(tmp_path / "emnist", ("emnist-digits-train", "emnist-digits-test"))
    raw = read_idx(
        tmp_path / "emnist" / "emnist-digits-train-images-idx3-ubyte.gz", (None, 28, 28), 9999
    )
    upright = load("emnist", tmp_path, part="digits")
    assert np.array_equal(upright.x[5, 0].numpy(), raw[5].T)


def test_shakespeare(tmp_path: Path) -> None:
    official.shakespeare(tmp_path / "shakespeare")
    dataset = load("shakespeare", tmp_path)
    assert len(dataset.client.unique()) == official.SPEAKERS
    assert torch.equal(dataset.x[0, 1:].long(), dataset.y[0, :-1])
    said = speeches("A:\nOne.\nTwo.\n\nB:\nThree.\n\nmore\n\nA:\nFour.\n")
    assert said == {"A": ["One.\nTwo.", "Four."], "B": ["Three.\n\nmore"]}


def test_libsvm_and_own_arrays(tmp_path: Path) -> None:
    (tmp_path / "some").write_text("+1 1:1 3:1 # note\n-1 2:1\n\n-1 3:1\n+1\n")
    x, labels = read_libsvm(tmp_path / "some", 3, None)
    assert x.tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert (x.dtype, labels.tolist()) == (np.uint8, [1, -1, -1, 1])
    dataset = prefed.DATASETS.get("libsvm")(path=str(tmp_path / "some"), features=3)
    assert dataset.outputs == 2
    for name, size in (("a9a", 123), ("a9a.t", 123)):
        (tmp_path / name).write_text(f"-1 3:1 {size}:1\n+1 1:1\n")
    assert load("a9a", tmp_path).x.shape == (2, 123)

    own = tmp_path / "own.npz"
    owners = np.array(["b", "a", "b", "c", "a", "c"])
    np.savez(own, x=np.eye(6), y=np.arange(6) % 3, client=owners)
    dataset = load("npz", own)
    assert (len(dataset.y), len(dataset.client), dataset.outputs) == (5, 5, 3)
    rows = dataset.x.argmax(1).numpy()
    assert [int(k) for k in dataset.client] == ["abc".index(owners[r]) for r in rows]


def test_a_function_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_data_4.py").write_text(
        "import torch\nfrom torch import nn\nfrom prefed.data.dataset import Dataset\n"
        "def make(size: int = 8) -> Dataset:\n"
        "    x, y = torch.ones(size, 2), torch.arange(size) % 2\n"
        "    return Dataset(x, y, (x, y))\n"
        "def net(inputs, classes):\n    return nn.Linear(inputs[0], classes)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    table = {
        "rounds": 1, "local_steps": 1, "algorithm": "fedavg", "model": "my_data_4:net",
        "data": {"name": "my_data_4:make", "size": 6, "split": {"name": "iid", "clients": 2}},
    }  # fmt: skip
    from prefed.experiments.config import load as load_config

    assert load_config(table).make_run().run_round()["test_accuracy"] == 0.5
    with pytest.raises(prefed.PrefedError, match=r"data\.sizes: unknown option"):
        load_config(table, ["data.sizes=3"])


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data, which is not committed")
def test_the_real_shakespeare() -> None:
    dataset = load("shakespeare", SHARED)
    assert len(dataset.client.unique()) == 247


@pytest.mark.skipif("PREFED_CIFAR" not in os.environ, reason="needs PREFED_CIFAR=DIR with CIFAR-10")
def test_the_real_cifar() -> None:
    dataset = load("cifar10", Path(os.environ["PREFED_CIFAR"]))
    assert torch.bincount(dataset.y).tolist() == [5000] * 10
    assert torch.bincount(dataset.test[1]).tolist() == [1000] * 10


class Hostile:
    def __reduce__(self) -> Any:
        return (os.system, ("touch hacked",))


def zipped(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name.replace("_", "."), content)
    return out.getvalue()


def npy(array: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, **options)
    return out.getvalue()


def cifar_record(label: int) -> bytes:
    return bytes([label]) + bytes(3072)


def with_cifar(path: Path) -> Any:
    """Load CIFAR-10 with this as its first file."""
    folder = official.cifar10(path.parent / "root", images=2)
    (folder / "data_batch_1.bin").write_bytes(path.read_bytes())
    return load("cifar10", path.parent / "root", complete=False)


def with_mnist(path: Path) -> Any:
    folder = official.idx(path.parent / "root", images=3)
    (folder / "train-labels-idx1-ubyte").write_bytes(path.read_bytes())
    return load("mnist", path.parent / "root", complete=False)


def images(path: Path) -> Any:
    return read_idx(path, (None, 28, 28), 10_000)


def numbers(path: Path) -> Any:
    return read_libsvm(path, 5, 2)


def pickled(path: Path) -> Any:
    folder = path.parent / "cifar-10-batches-py"
    official.cifar_pickles(folder)
    (folder / "data_batch_1").write_bytes(path.read_bytes())
    return load("cifar10", path.parent, complete=False)


GOOD_PICKLE = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2]}
PICKLE = official.python2(GOOD_PICKLE)
LABELS = official.idx_bytes(np.array([1, 2, 3], np.uint8))
BOMB = gzip.compress(bytes([0, 0, 8, 3]) + struct.pack(">3I", 10_000, 28, 28) + bytes(7_840_000))

BAD: dict[str, tuple[Callable[[Path], Any], bytes, str]] = {
    "cifar empty": (with_cifar, b"", "byte 0: the file ends here"),
    "cifar cut short": (with_cifar, cifar_record(1) * 2 + b"abc", "byte 6149: .*record 2"),
    "cifar label": (with_cifar, cifar_record(1) + cifar_record(10), "byte 3073: .*label 10"),
    "idx empty": (images, b"", "byte 0: the file ends"),
    "idx header cut": (images, IMAGES[:9], "byte 9: the file ends here, 7 bytes"),
    "idx magic": (images, b"\0\0\x09\x03" + IMAGES[4:], "byte 0: the magic number is 00000903"),
    "idx dimensions": (images, LABELS, "byte 0: the magic number"),
    "idx image size": (images, IMAGES[:8] + struct.pack(">2I", 27, 28), "byte 8: dimension 1"),
    "idx no images": (images, b"\0\0\x08\x03" + bytes(12), "byte 4: dimension 0"),
    "idx absurd count": (images, IMAGES[:4] + b"\xff" * 4 + IMAGES[8:], "byte 4: dimension 0"),
    "idx cut short": (images, IMAGES[:1000], "byte 1000: the file ends here, 1368 bytes"),
    "idx goes on": (images, IMAGES + b"x", "byte 2368: the data should end"),
    "idx bomb": (images, BOMB, "byte 4: it claims to hold 7840000"),
    "gzip cut": (images, gzip.compress(IMAGES)[:-9], r"byte \d+: cannot be read on"),
    "gzip checksum": (images, gzip.compress(IMAGES)[:-8] + bytes(8), r"byte \d+: cannot be read"),
    "gzip damaged": (images, gzip.compress(IMAGES)[:12] + b"\xff" * 40, "cannot be read on"),
    "mnist label": (with_mnist, LABELS[:-1] + b"\x0a", "byte 10: the label 10"),
    "mnist counts": (with_mnist, official.idx_bytes(np.zeros(2, np.uint8)), "2 labels for the 3"),
    "pickle of a call": (pickled, pickle.dumps(Hostile(), 2), r"asks for posix.system.*nothing"),
    "pickle protocol 4": (pickled, pickle.dumps(Hostile(), 4), "asks for posix.system"),
    "pickle text": (pickled, pickle.dumps(Hostile(), 0), "byte 0: .*posix.system"),
    "pickle inst": (pickled, b"(S'touch hacked'\nios\nsystem\n.", "opcode STRING|opcode INST"),
    "pickle getattr": (pickled, b"\x80\x02cbuiltins\ngetattr\n.", "byte 2: it asks for builtins"),
    "pickle eval": (pickled, b"\x80\x02cnumpy\neval\n.", "byte 2: it asks for numpy.eval"),
    "pickle persistent": (pickled, b"\x80\x02U\x01aQ.", "byte 5: the opcode BINPERSID"),
    "pickle extension": (pickled, b"\x80\x02\x82\x01.", "byte 2: the opcode EXT1"),
    "pickle new object": (pickled, b"\x80\x02cnumpy\nndarray\n)\x81.", "opcode NEWOBJ"),
    "pickle cut": (pickled, PICKLE[:500], "not a pickle of this format"),
    "pickle goes on": (pickled, PICKLE + b"x", "the data should end here"),
    "pickle memo": (pickled, b"\x80\x02h\x05.", "byte 2: not a pickle"),
    "pickle shape": (
        pickled,
        PICKLE.replace(struct.pack("<i", 3072), struct.pack("<i", 1 << 30)),
        "an array of shape",
    ),
    "pickle of a list": (pickled, official.python2([1]), "a dict should stand"),
    "pickle labels": (pickled, official.python2({**GOOD_PICKLE, b"labels": [1, 11]}), "label 11"),
    "pickle counts": (pickled, official.python2({**GOOD_PICKLE, b"labels": [1]}), "1 entries"),
    "libsvm label": (numbers, b"one 1:1\n", "byte 0: line 1: the label 'one'"),
    "libsvm index": (numbers, b"1 1:1\n1 9:1\n", "byte 6: line 2: the index '9'"),
    "libsvm order": (numbers, b"1 3:1 2:1\n", "the index '2' should lie above 3"),
    "libsvm pair": (numbers, b"1 3=1\n", "'3=1' should be index:value"),
    "libsvm nan": (numbers, b"1 3:nan\n", "should be index:value"),
    "libsvm huge index": (numbers, b"1 999999999999:1\n", "the index"),
    "libsvm too many": (numbers, b"1 1:1\n" * 3, "byte 12: more than the 2 samples"),
    "libsvm empty": (numbers, b"\n\n", "byte 2: it holds no samples"),
    "npz no zip": (read_npz, b"hello", "byte 0: not a readable .npz"),
    "npz object": (read_npz, zipped(x_npy=npy(np.array([{}]), allow_pickle=True)), "not read"),
    "npz header lies": (
        read_npz,
        zipped(x_npy=npy(np.zeros(9)).replace(b"(9,), ", b"(999,)")),
        "has 7992 bytes, not 72",
    ),
    "npz bomb": (read_npz, zipped(x_npy=npy(np.zeros(1 << 20))), "it claims to hold 8388"),
    "npz other file": (read_npz, zipped(x_txt=b"hello"), "is no array"),
    "text not utf-8": (lambda p: load("shakespeare", p), b"A:\n\xff\xfe", "byte 3: not UTF-8"),
    "text no speakers": (lambda p: load("shakespeare", p), b"Nothing.\n", "no speaker with two"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, content, message = BAD[case]
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "the-file"
    path.write_bytes(content)
    with pytest.raises(prefed.PrefedError, match=message) as caught:
        read(path)
    assert ": byte " in str(caught.value)
    assert not (tmp_path / "hacked").exists()


def test_memory_stays_near_the_size_of_the_file(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1000, 3072), dtype=np.uint8)
    cases: dict[str, tuple[Callable[[Path], Any], bytes]] = {
        "pickle": (read_pickle, official.python2({b"data": pixels, b"labels": [0] * 1000})),
        "pickle that lies": (read_pickle, b"\x80\x02B\xff\xff\xff\x7f" + bytes(1 << 20)),
        "pickle memo": (read_pickle, b"\x80\x02]r\xff\xff\xff\x7f" + bytes(1 << 20)),
        "idx": (images, official.idx_bytes(pixels[:, :784].reshape(1000, 28, 28))),
        "bomb": (images, BOMB),
    }
    for name, (read, content) in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        tracemalloc.start()
        with contextlib.suppress(prefed.PrefedError):
            read(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 * len(content) + (1 << 20), name
