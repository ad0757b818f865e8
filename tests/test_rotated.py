"""Full-matrix PreFed on a rotated, ill-conditioned quadratic: the claim of bench/rotated.py, small."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import rotated


def test_full_needs_five_times_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    pass
