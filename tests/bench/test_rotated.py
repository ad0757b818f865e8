"""Full-matrix PreFed on a rotated, ill-conditioned quadratic: what bench/rotated.py claims."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.helpers import ROOT

PATH = ROOT / "bench" / "rotated.py"


@pytest.fixture(scope="module")
def rotated() -> Any:
    spec = importlib.util.spec_from_file_location("rotated", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@pytest.mark.parametrize("share", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_full_needs_five_times_fewer_rounds_than_the_best_of_the_others(
    rotated: Any, share: int
) -> None:
    """No point of the others' grids arrives before five times the rounds of one point of the full
    matrix's grid: its best is at least as good. `make test` tries every sixth of their points."""
    quadratic = rotated.problem()
    options = FULL
    assert options in rotated.GRIDS["PreFed, full"]
    assert len({len(grid) for grid in rotated.GRIDS.values()}) == 1
    full = rotated.rounds_to_target(quadratic, options, 100)
    assert full is not None
    for name in ("PreFed, diagonal", "FedAdam"):
        for other in rotated.GRIDS[name][::share]:
            assert rotated.rounds_to_target(quadratic, other, 5 * full - 1) is None, (name, other)


FULL: dict[str, Any] = {"name": "prefed", "shape": "full", "client_lr": 1.0, "tau": 1e-4}
