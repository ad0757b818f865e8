"""Draws of many clients at once, against one after another."""

from __future__ import annotations

import numpy as np
import pytest

from prefed.core import draws


@pytest.fixture(params=["NumPy", pytest.param("C", marks=pytest.mark.process)])
def drawn_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "_batches_in_c", None)
    if request.param == "C":
        draws.compile_batches()
        if draws._batches_in_c is None:
            pytest.skip("no C compiler")


@pytest.mark.usefixtures("drawn_by")
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 200])
def test_batches_of_many_clients_are_those_of_each(count: int) -> None:
    """Sizes with which NumPy draws again now and then (above 2^31, every second time) or does not
    use 32 bits."""
    sizes = [1, 2, 3, 100, 60_000, 2**31 + 5, 3 * 2**30, 2**32 - 1, 2**32, 2**32 + 5]
    clients = [7, 0, 123_456, 5, 6, 8, 9, 10, 11, 12]
    found = draws.batches_of(3, 4, clients, sizes, count)
    for row, client, size in zip(found, clients, sizes, strict=True):
        np.testing.assert_array_equal(row, draws.batches(3, 4, client, size, count))


@pytest.mark.usefixtures("drawn_by")
def test_nothing_is_drawn_of_nothing() -> None:
    for count in (1, 2):
        with pytest.raises(ValueError, match="high <= 0"):
            draws.batches_of(0, 0, [1, 2], [5, 0], count)
