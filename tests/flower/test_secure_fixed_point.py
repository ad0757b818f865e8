"""Numbers as integers: sums are exact, the mean is right to half a step, nothing wraps around."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefed.flower.secure.fixed_point import RANGE, FixedPoint, bits_for
from tests.helpers.oracles import secure_sum as oracle

EXPONENTS = st.integers(-60, 60)


@st.composite
def clients(draw: st.DrawFn) -> tuple[list[int], list[list[float]], list[int]]:
    """Exponents of blocks of one number each, the vectors of some clients, and their weights. Many
    of the numbers are near or beyond the bound, or far below the step."""
    exponents = draw(st.lists(EXPONENTS, min_size=1, max_size=4))
    count = draw(st.integers(1, 6))
    vectors = []
    for _ in range(count):
        vector = []
        for exponent in exponents:
            size = draw(st.integers(-70, 3))
            vector.append(draw(st.floats(-1, 1)) * math.ldexp(1.0, exponent + size))
        vectors.append(vector)
    return exponents, vectors, draw(st.lists(st.integers(1, 10**6), min_size=count, max_size=count))


@settings(max_examples=300, deadline=None)
@given(clients())
def test_sums_are_exact_and_means_right_to_half_a_step(
    made: tuple[list[int], list[list[float]], list[int]],
) -> None:
    exponents, vectors, weights = made
    bits = bits_for(sum(weights))
    form = FixedPoint([1] * len(exponents), exponents, bits)
    total = np.zeros(len(exponents), np.uint64)  # modulo 2^64
    expected = [0] * len(exponents)
    cut = [False] * len(exponents)
    for vector, weight in zip(vectors, weights, strict=True):
        integers, clipped = form.encode(np.array(vector))
        by_hand = [oracle.to_integer(x, e, bits) for x, e in zip(vector, exponents, strict=True)]
        assert integers.tolist() == [integer for integer, _ in by_hand]
        assert clipped == sum(beyond for _, beyond in by_hand)
        cut = [a or b for a, (_, b) in zip(cut, by_hand, strict=True)]
        expected = [a + weight * b for a, (b, _) in zip(expected, by_hand, strict=True)]
        total += (integers * weight).view(np.uint64)
    found = total.view(np.int64)
    assert found.tolist() == expected, "no sum wraps around"
    assert form.fits(found, sum(weights))
    means = form.decode(found, sum(weights))
    for i, exponent in enumerate(exponents):
        exact = Fraction(expected[i], sum(weights)) * Fraction(2) ** (exponent - bits)
        assert abs(Fraction(means[i]) - exact) <= abs(exact) / 2**51, "rounding of float64"
        if not cut[i]:
            plain = oracle.weighted_mean([vector[i] for vector in vectors], weights)
            step = Fraction(2) ** (exponent - bits)
            assert step == Fraction(form.steps()[i])
            assert abs(exact - plain) <= step / 2


@given(st.integers(1, 10**9))
def test_the_bits_of_a_number_leave_room_for_the_sum(total: int) -> None:
    bits = bits_for(total)
    assert total * 2**bits <= 2**RANGE < 2 * total * 2**bits


def test_blocks_have_bounds_of_their_own() -> None:
    """Small numbers stay beside large ones; Flower's one scale of +-8 in 2^22 steps loses them."""
    values = np.array([1e3, -2e3, 3e-12, 1e-13], np.float64)
    form = FixedPoint([2, 2], [11, -36], bits_for(8))
    integers, clipped = form.encode(values)
    assert not clipped
    assert np.abs(form.decode(integers, 1) / values - 1).max() < 1e-9
    assert np.abs(np.round(values * 2**22 / 16) * 16 / 2**22)[2:].max() == 0


def test_what_is_beyond_the_bound_is_cut_off_and_counted() -> None:
    form = FixedPoint([4], [0], bits_for(100))
    integers, clipped = form.encode(np.array([1.0, 1.5, -np.inf, 0.25]))
    assert clipped == 2
    assert form.decode(integers, 1).tolist() == [1.0, 1.0, -1.0, 0.25]
    with pytest.raises(ValueError, match="not a number"):
        form.encode(np.array([0.0, math.nan, 0.0, 0.0]))
    assert not form.fits(integers + 1, 1)
