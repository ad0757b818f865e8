"""Devices: amounts by keyed draws, and how long a client takes."""

import math

import numpy as np
import pytest

import prefed
from prefed import Devices, PrefedError
from prefed.core import draws

EVERYONE = np.arange(100_000)


def test_constant_devices_take_as_long_as_the_formula_says() -> None:
    devices = Devices(steps_per_second=100.0, up=1e6, down=4e6, latency=0.05)
    steps, samples = np.array([10, 500, 77]), np.array([0, 0, 0])
    found = devices.seconds(3, 7, [5, 0, 12], 123_457, steps, 98_765, samples)
    for took, k in zip(found, steps, strict=True):
        assert took == pytest.approx(
            0.05 + 123_457 / 4e6 + k / 100.0 + 0.05 + 98_765 / 1e6, abs=1e-12
        )


def test_speed_by_samples_and_by_operations() -> None:
    assert Devices(seconds_per_sample=0.002).seconds(0, 0, [1], 1, 5, 1, 160) == pytest.approx(0.32)
    found = Devices(operations_per_second=1e9).seconds(0, 0, [1], 1, 5, 1, 160, operations=1e6)
    assert found == pytest.approx(3 * 160 * 1e6 / 1e9)  # backward is twice forward


SIZE = len(EVERYONE)


@pytest.mark.parametrize(
    ("table", "below"),
    [
        ({"distribution": "constant", "value": 3.0}, {2.9: 0.0, 3.1: 1.0}),
        ({"distribution": "lognormal", "median": 2.0, "sigma": 0.5},
         {2.0: 0.5, 2 * math.exp(0.5): 0.8413447, 2 * math.exp(-1.0): 0.0227501}),
        ({"distribution": "pareto", "scale": 2.0, "shape": 1.5},
         {2.0: 0.0, 4.0: 1 - 0.5**1.5, 20.0: 1 - 0.1**1.5}),
        ({"distribution": "exponential", "mean": 3.0},
         {3.0: 1 - math.exp(-1), 9.0: 1 - math.exp(-3)}),
        ({"distribution": "uniform", "low": 1.0, "high": 5.0}, {2.0: 0.25, 4.0: 0.75}),
        ({"distribution": "loguniform", "low": 1.0, "high": 100.0}, {10.0: 0.5, 31.622777: 0.75}),
    ],
    ids=lambda v: v.get("distribution") if isinstance(v, dict) else None,
)  # fmt: skip
def test_amounts_follow_their_distribution(
    table: dict[str, object], below: dict[float, float]
) -> None:
    """The share of devices below an amount is within five standard deviations of what it should
    be: a chance of one in a million for each."""
    found = Devices(latency=table).rates(1, 0, EVERYONE).latency
    for amount, share in below.items():
        bound = 5 * math.sqrt(share * (1 - share) / SIZE)
        assert abs(np.mean(found < amount) - share) <= bound


def test_what_a_client_has_depends_on_its_key_alone() -> None:
    """Not on who else is asked, nor on the order; on the job only where it says so."""
    fixed = {"distribution": "lognormal", "median": 1e6, "sigma": 1.0}
    devices = Devices(
        up=fixed,
        down={**fixed, "per": "job"},
        classes={"a": 0.5, "b": {"share": 0.5, "latency": 1}},
    )
    whole = devices.rates(4, 9, EVERYONE)
    some = np.array([77_777, 3, 41])
    few = devices.rates(4, 9, some)
    for name in ("up", "down", "latency"):
        assert np.array_equal(getattr(few, name), getattr(whole, name)[some])
    later, other = devices.rates(4, 10, some), devices.rates(5, 9, some)
    assert np.array_equal(later.up, few.up)
    assert np.array_equal(later.latency, few.latency)
    assert not np.isin(later.down, few.down).any()
    assert not np.isin(other.up, few.up).any()


def test_draws_of_different_keys_have_nothing_to_do_with_each_other() -> None:
    columns = [
        draws.uniforms(0, "a", EVERYONE),
        draws.uniforms(0, "b", EVERYONE),
        draws.uniforms(1, "a", EVERYONE),
        draws.uniforms(0, "a", EVERYONE, 1),
        np.roll(draws.uniforms(0, "a", EVERYONE), 1),
    ]
    correlation = np.corrcoef(columns) - np.eye(len(columns))
    assert np.abs(correlation).max() < 5 / math.sqrt(SIZE)
    assert all(column.min() > 0 and column.max() < 1 for column in columns)


def test_classes_have_their_shares_and_their_amounts() -> None:
    devices = Devices(
        up=5.0,
        classes={
            "phone": 0.7,
            "fast": {"share": 0.2, "steps_per_second": 10.0, "up": 50.0},
            "slow": {"share": 0.1, "latency": 2.0},
        },
    )
    kinds = devices.kinds(0, EVERYONE)
    for number, share in enumerate((0.7, 0.2, 0.1)):
        bound = 5 * math.sqrt(share * (1 - share) / SIZE)
        assert abs(np.mean(kinds == number) - share) < bound
    rates = devices.rates(0, 0, EVERYONE)
    assert {*rates.up[kinds == 0], *rates.up[kinds == 2]} == {1 / 5.0}  # said outside of the table
    assert {*rates.up[kinds == 1]} == {1 / 50.0}
    assert {*rates.latency[kinds == 2]} == {2.0}
    assert {*rates.latency[kinds == 1]} == {0.0}
    assert {*rates.step[kinds == 1]} == {0.1}
    assert not rates.operation[kinds == 1].any()
    phones = 3 / rates.operation[kinds == 0]
    assert 0.7e9 * 0.999 < phones.min() < phones.max() < 35e9 * 1.001


def test_a_name_stands_for_a_class() -> None:
    by_name = prefed.Settings(rounds=1, local_steps=1, devices="phone").devices
    assert by_name == Devices(classes={"phone": 1.0})
    again = prefed.Settings(rounds=1, local_steps=1, devices={"name": "phone", "up": 1e6}).devices
    assert again == Devices(up=1e6, classes={"phone": 1.0})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "Devices: needs a speed or a rate"),
        ({"up": -1}, "Devices.up: should be greater"),
        ({"up": math.inf}, "Devices.up: should be"),
        ({"upp": 1.0}, 'Devices.upp: unknown option; did you mean "up"?'),
        ({"up": {"distribution": "lognorm"}}, 'did you mean "lognormal"?'),
        ({"up": {"distribution": "lognormal", "median": 0, "sigma": 1}}, "up.median: should"),
        ({"up": {"distribution": "uniform", "low": 3, "high": 2}}, "low should not be above high"),
        ({"up": {"median": 1.0}}, "Devices.up: should say which distribution it is"),
        ({"steps_per_second": 1.0, "seconds_per_sample": 1.0}, "take one of them"),
        ({"classes": {"fone": 1.0}}, 'did you mean "phone"?'),
        ({"classes": {"phone": 0.5}}, "the shares add up to 0.5"),
        ({"classes": {"a": {"up": 1.0}}}, "Devices.classes.a.share: is required"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(options: dict[str, object], said: str) -> None:
    with pytest.raises(PrefedError) as error:
        Devices(**options)
    assert said in str(error.value)
