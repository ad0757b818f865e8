"""Trace files: what is read is what was written, and every row that is wrong is named."""

from __future__ import annotations

import contextlib
import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import prefed
from prefed import Devices, PrefedError
from prefed.training.traces import Trace, read_trace
from tests.helpers.commands import prefed_here

Rows = list[list[tuple[float, bool, float | None]]]
"""Of each client: (time, on, up)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


TIMES = st.lists(st.integers(1, 50), max_size=5, unique=True).map(lambda t: [0, *sorted(t)])
UP = st.none() | st.floats(1e-3, 1e9)


@st.composite
def traces(draw: st.DrawFn) -> Rows:
    return [
        [(float(time), draw(st.booleans()), draw(UP)) for time in draw(TIMES)]
        for _ in range(draw(st.integers(1, 4)))
    ]


def write(path: Path, rows: Rows, order: list[int] | None = None) -> Path:
    lines = [
        (client, time, int(on), "" if up is None else up)
        for client, own in enumerate(rows)
        for time, on, up in own
    ]
    lines = [lines[i] for i in order] if order else lines
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("client", "time", "on", "up"), *lines])
    return path


def holds(own: list[tuple[float, bool, float | None]], now: float) -> tuple[bool, float | None]:
    """Whether the device is on then, and its rate: the newest row says."""
    return next(row[1:] for row in reversed(own) if row[0] <= now)


def waits(own: list[tuple[float, bool, float | None]], on: bool, now: float) -> float:
    """Time until the device is on (or off), step by step: times are whole numbers."""
    if holds(own, now)[0] == on:
        return 0.0
    return next((t - now for t, state, _ in own if t > now and state == on), math.inf)


@settings(deadline=None, max_examples=80)
@given(traces(), st.randoms(use_true_random=False), st.sampled_from([0.0, 0.5, 3.0, 17.25, 60.0]))
def test_what_is_read_is_what_was_written(
    folder: Path, rows: Rows, random: Any, now: float
) -> None:
    """Rows in any order; clients beyond the last follow the first ones again."""
    order = [*range(sum(map(len, rows)))]
    random.shuffle(order)
    path = write(folder / "any.csv", rows, order)
    clients = np.arange(2 * len(rows) + 1)
    devices = Devices(trace=str(path), up=7.0)
    up = devices.rates(0, 0, clients, now).up
    on = devices.until_on(0, now, clients)
    off = devices.lost(0, 0, clients, np.full(len(clients), 1e9), now)
    for client in clients:
        own = rows[client % len(rows)]
        wanted = holds(own, now)[1]
        assert up[client] == pytest.approx(1 / (7.0 if wanted is None else wanted), rel=1e-12)
        assert on[client] == waits(own, True, now)
        assert off[client] == waits(own, False, now)


@settings(deadline=None, max_examples=40)
@given(traces(), st.sampled_from([0.0, 0.5, 17.25, 59.0, 60.0, 100.5, 600.0]))
def test_a_trace_that_repeats(folder: Path, rows: Rows, now: float) -> None:
    trace = read_trace(str(write(folder / "again.csv", rows)), [], repeat=60.0)
    places = np.arange(len(rows))
    for on in (True, False):
        found = trace.until(on, places, now)
        for client, own in enumerate(rows):
            twice = [*own, *((t + 60, state, up) for t, state, up in own)]
            assert found[client] == waits(twice, on, now % 60)


def test_classes(folder: Path) -> None:
    path = folder / "classes.csv"
    path.write_text("class,time,on,down\nlaptop,0,true,50\nlaptop,10,off,\nphone,0,on,5\n")
    shares = {"phone": 0.5, "laptop": 0.3, "edge": 0.2}
    devices = Devices(trace=str(path), classes=shares)
    clients = np.arange(100)
    kinds = devices.kinds(0, clients)
    down, on = devices.rates(0, 0, clients, 3.0).down, devices.until_on(0, 12.0, clients)
    assert {*down[kinds == 0]} == {1 / 5}
    assert {*down[kinds == 1]} == {1 / 50}
    assert {*down[kinds == 2]} == {1 / 12.5e6}  # nothing in the trace: as the class has it
    assert {*on[kinds == 0], *on[kinds == 2]} == {0.0}
    assert {*on[kinds == 1]} == {math.inf}


def test_a_speed_in_a_trace_stands_in_place_of_another(folder: Path) -> None:
    path = folder / "speed.csv"
    path.write_text("client,time,seconds_per_sample\n0,0,0.5\n1,0,\n")
    devices = Devices(trace=str(path), steps_per_second=10.0)
    assert devices.seconds(0, 0, [0, 1], 0, 4, 0, 6).tolist() == [3.0, 0.4]


def test_parquet(folder: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    table = {"client": [0, 0, 1], "time": [0.0, 5.0, 0.0], "on": [True, False, True]}
    path = folder / "trace.parquet"
    parquet.write_table(pa.table(table | {"up": [2.0, None, 3.0]}), path)
    same = folder / "same.csv"
    same.write_text("client,time,on,up\n0,0,1,2\n0,5,0,\n1,0,1,3\n")
    a, b = (read_trace(str(p), []) for p in (path, same))
    assert [*a.devices] == [*b.devices]
    for name in ("starts", "times", "on"):
        assert np.array_equal(getattr(a, name), getattr(b, name))
    assert np.array_equal(a.amounts["up"], b.amounts["up"], equal_nan=True)
    parquet.write_table(pa.table({"client": [0, 0], "time": [0.0, None]}), path)
    with pytest.raises(PrefedError, match=r"row 2: time: should be a number from 0 on, not None"):
        read_trace(str(path), [])
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(PrefedError, match="is not a Parquet file"):
        read_trace(str(path), [])


GOOD = "client,time,on,up\n0,0,1,5\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("client,time,on,up\n", "has no rows"),
        ("", "should have a column time"),
        ("client,tiem\n0,0\n", "unknown column 'tiem'; did you mean \"time\"?"),
        ("client,class,time\n0,a,0\n", "either client or class"),
        ("client,time,time\n0,0,0\n", "a column is there twice"),
        (GOOD + "0,x,1,5\n", "row 3: time: should be a number from 0 on, not 'x'"),
        (GOOD + "0,-1,1,5\n", "row 3: time: should be"),
        (GOOD + "0,nan,1,5\n", "row 3: time: should be"),
        (GOOD + "0,9,maybe,5\n", "row 3: on: should be 1 or 0, not 'maybe'"),
        (GOOD + "0,9,1,0\n", "row 3: up: should be a positive number or empty, not '0'"),
        (GOOD + "0,9,1,inf\n", "row 3: up: should be a positive number"),
        (GOOD + "0,9,1\n", "row 3: should have as many values as there are columns, 4"),
        (GOOD + "0,9,1,5,6\n", "row 3: should have as many values as there are columns, 4"),
        (GOOD + "0.5,9,1,5\n", "row 3: client: should be a whole number from 0 on, not '0.5'"),
        (GOOD + "0,0,0,7\n", "row 3: has the client and time of row 2"),
        (GOOD + "1,9,1,5\n", "row 3: is the first of 1, at the time 9"),
        (GOOD + "2,0,1,5\n", "there is no row of client 1"),
        ("client,time\n0,0\n0,70\n", "row 3: its time 70 is not below repeat, 60"),
        ("class,time\nfone,0\n", "row 2: class: should be one of the classes (phone), not 'fone'"),
        ("client,time,steps_per_second,seconds_per_sample\n0,0,1,1\n", "row 2: has more than one"),
        ("client,time\n0,0\n\xff\n", "is not a CSV file"),
    ],
)
def test_what_is_wrong_names_its_row(folder: Path, text: str, said: str) -> None:
    path = folder / "wrong.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PrefedError) as error:
        read_trace(str(path), ["phone"], repeat=60.0)
    assert said in str(error.value)
    assert str(path) in str(error.value)


@settings(deadline=None, max_examples=150)
@given(st.text(st.sampled_from('client,time on0159.-"\n\rup;\0é'), max_size=60), st.booleans())
def test_whatever_a_file_holds_it_is_read_or_refused(folder: Path, text: str, head: bool) -> None:
    path = folder / "fuzz.csv"
    path.write_text(("client,time,on,up\n" if head else "") + text)
    with contextlib.suppress(PrefedError):
        assert isinstance(read_trace(str(path), []), Trace)


def test_a_run_and_validate_read_the_trace_first(tmp_path: Path) -> None:
    with pytest.raises(PrefedError, match=r"no\.csv: cannot be read: No such file"):
        prefed.simulate(
            prefed.FedAvg(client_lr=0.1), *_problem(), rounds=1, local_steps=1,
            devices={"trace": str(tmp_path / "no.csv")},
        )  # fmt: skip
    (tmp_path / "bad.csv").write_text("client,time\n0,1\n")
    done = prefed_here("validate", "digits-iid", "--set", "devices.trace=bad.csv", cwd=tmp_path)
    assert done.returncode == 2
    assert "bad.csv: row 2: is the first of 0" in done.stderr
    (tmp_path / "on.csv").write_text("client,time,on\n0,0,0\n")
    both = Devices(trace=str(tmp_path / "on.csv"), windows={"start": 0, "hours": 1})
    with pytest.raises(PrefedError, match="says when devices are on, and so does windows"):
        both.until_on(0, 0.0, [0])
        both.rates(0, 0, [0])


def _problem() -> Any:
    from tests.helpers.problems import tiny_data, tiny_model

    return tiny_model(), tiny_data()
