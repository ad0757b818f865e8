"""prefed data ls, check and show, as a user types them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.helpers.commands import prefed_here


def test_ls(tmp_path: Path) -> None:
    listed = prefed_here("data", "ls", cwd=tmp_path).stdout
    for name in ("cifar10", "mnist", "shakespeare", "digits", "a9a"):
        assert name in listed


def test_check_says_what_is_there_and_what_is_wrong(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 2), np.float32), y=np.zeros(4, np.int64))
    (tmp_path / "broken.npz").write_bytes(b"PK not a zip")
    done = prefed_here("data", "check", str(tmp_path), cwd=tmp_path)
    assert "mine.npz" in done.stdout
    assert "broken.npz" in done.stdout
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


def test_show_draws_the_split(tmp_path: Path) -> None:
    picture = tmp_path / "split.png"
    done = prefed_here("data", "show", "digits-noniid", "-o", str(picture), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "50 clients" in done.stdout
    assert "heterogeneity 0." in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_misspelt_data_set(tmp_path: Path) -> None:
    done = prefed_here("data", "get", "cifarr10", cwd=tmp_path)
    assert done.returncode == 2
    assert 'did you mean "cifar10"' in done.stderr
