"""What devices did, from a file: when each was on, and how fast it was then.

A trace is a CSV file, or a Parquet file with the same columns (which needs pyarrow):

client,time,on,up,down,steps_per_second
0,0,1,500000,2000000,40
0,3600,0,,,
1,0,1,,,

client   a whole number; client c of a run follows number c modulo how many there are. Or `class`:
         a name in the table of classes
time     seconds; what a row says holds until the next row of the same client. The first has 0
on       1 or 0 (or true, false): whether the device can be asked. Without the column, all can
others   amounts, as those of Devices; where there is none, Devices says
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prefed.core.draws import Floats, Numbers
from prefed.core.errors import PrefedError, did_you_mean, shown
from prefed.training.distributions import LARGEST, SMALLEST

AMOUNTS = (
    "steps_per_second", "seconds_per_sample", "operations_per_second", "up", "down", "latency",
)  # fmt: skip
NEAR = 1e-6
"""Seconds: a row holds so much earlier, or rounding could stop the clock just before it."""
COLUMNS = ("client", "class", "time", "on", *AMOUNTS)
WORDS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


@dataclass(frozen=True)
class Trace:
    """Rows in the order of their devices and times."""

    devices: list[int] | list[str]
    """The clients or the classes that it is of, in ascending order."""
    starts: Numbers
    """The first row of each device, and behind the last."""
    times: Floats
    on: np.ndarray[Any, np.dtype[np.bool_]]
    amounts: dict[str, Floats]
    """By name; NaN where the file has nothing."""
    repeat: float | None = None
    """Seconds after which it begins again."""

    @property
    def by_class(self) -> bool:
        return isinstance(self.devices[0], str)

    def rows(self, devices: Numbers, now: float) -> tuple[Numbers, float]:
        """The row that holds for each device at that time, and the time in the trace."""
        if self.repeat is not None:
            now = math.fmod(now, self.repeat)
            now = 0.0 if self.repeat - now < NEAR else now
        low, high = self.starts[devices], self.starts[devices + 1]
        while (high - low > 1).any():  # bisect, for all at once
            middle = (low + high) // 2
            later = self.times[middle] <= now + NEAR
            low, high = np.where(later, middle, low), np.where(later, high, middle)
        return low, now

    def until(self, on: bool, devices: Numbers, now: float) -> Floats:
        """Seconds until each device is on, or off: 0 if it is now, without end if it never is."""
        rows, now = self.rows(devices, now)
        which = np.flatnonzero(self.on == on)
        padded = np.append(which, len(self.times))
        times = np.append(self.times, np.inf)

        def next_from(first: Numbers) -> Floats:
            """The time of the first such row from these on, of the same device."""
            found = padded[np.searchsorted(which, first)]
            return np.where(found < self.starts[devices + 1], times[found], np.inf)

        wait = next_from(rows) - now
        if self.repeat is not None:
            again = next_from(self.starts[devices]) + self.repeat - now
            wait = np.where(np.isfinite(wait), wait, again)
        return np.where(self.on[rows] == on, 0.0, wait)


def read_trace(path: str, classes: list[str], repeat: float | None = None) -> Trace:
    """Read and check a file. Every row is checked, and what is wrong names its row."""
    found = [_row(path, number, row, classes) for number, row in _rows(Path(path))]
    if not found:
        raise PrefedError(f"{path}: has no rows")
    order = sorted(range(len(found)), key=lambda i: found[i][1:3])
    ordered = [found[i] for i in order]
    devices: list[Any] = []
    starts: list[int] = []
    for place, (number, device, time, *_) in enumerate(ordered):
        where = f"{path}: row {number}"
        if not devices or device != devices[-1]:
            if time != 0:
                raise PrefedError(
                    f"{where}: is the first of {shown(device)}, at the time {time:g}; what it does "
                    f"from 0 on is not known"
                )
            devices.append(device)
            starts.append(place)
        elif time == ordered[place - 1][2]:
            before = ordered[place - 1][0]
            raise PrefedError(f"{where}: has the client and time of row {before}")
        if repeat is not None and time >= repeat:
            raise PrefedError(f"{where}: its time {time:g} is not below repeat, {repeat:g}")
    if isinstance(devices[0], int) and devices != [*range(len(devices))]:
        missing = next(i for i, device in enumerate(devices) if i != device)
        raise PrefedError(
            f"{path}: there is no row of client {missing}; number the clients from 0 on, and leave "
            f"none out"
        )
    columns = np.array([row[4] for row in ordered], dtype=np.float64)
    return Trace(
        devices=devices,
        starts=np.array([*starts, len(ordered)], dtype=np.int64),
        times=np.array([row[2] for row in ordered], dtype=np.float64),
        on=np.array([row[3] for row in ordered], dtype=np.bool_),
        amounts={
            name: column
            for name, column in zip(AMOUNTS, columns.T, strict=True)
            if not np.isnan(column).all()
        },
        repeat=repeat,
    )


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a file, each with its number: in a CSV file that of its line."""
    try:
        if path.suffix == ".parquet":
            yield from enumerate(_parquet(path), 1)
            return
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            _check_columns(path, reader.fieldnames or [])
            for row in reader:
                if None in row or None in row.values():
                    raise PrefedError(
                        f"{path}: row {reader.line_num}: should have as many values as there are "
                        f"columns, {len(reader.fieldnames or [])}"
                    )
                yield reader.line_num, row
    except OSError as error:
        raise PrefedError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise PrefedError(f"{path}: is not a CSV file: {error}") from None


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise PrefedError(
            f"{path}: a Parquet file needs pyarrow (pip install pyarrow); or write it as CSV"
        ) from None
    try:
        table = pq.read_table(path)
    except pa.ArrowException as error:
        raise PrefedError(f"{path}: is not a Parquet file: {error}") from None
    _check_columns(path, table.column_names)
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def _check_columns(path: Path, names: Any) -> None:
    for name in names:
        if name not in COLUMNS:
            raise PrefedError(f"{path}: unknown column {name!r}{did_you_mean(str(name), COLUMNS)}")
    if len({*names}) < len(names):
        raise PrefedError(f"{path}: a column is there twice")
    if ("client" in names) == ("class" in names) or "time" not in names:
        raise PrefedError(f"{path}: should have a column time, and either client or class")


def _row(
    path: str, number: int, row: dict[str, Any], classes: list[str]
) -> tuple[int, int | str, float, bool, tuple[float, ...]]:
    def wrong(name: str, wanted: str) -> PrefedError:
        return PrefedError(
            f"{path}: row {number}: {name}: should be {wanted}, not {shown(row[name])}"
        )

    def amount(name: str, least: float, wanted: str) -> float:
        try:
            value = float(row[name])
        except (TypeError, ValueError):
            value = math.nan
        if not least <= value <= LARGEST:
            raise wrong(name, wanted)
        return value

    device: int | str
    if "class" in row:
        device = str(row["class"]).strip()
        if device not in classes:
            raise wrong("class", f"one of the classes ({', '.join(classes) or 'there are none'})")
    else:
        try:
            device = int(str(row["client"]).strip())
        except ValueError:
            device = -1
        if device < 0:
            raise wrong("client", "a whole number from 0 on")
    on = WORDS.get(str(row.get("on", 1)).strip().lower())
    if on is None:
        raise wrong("on", "1 or 0")
    amounts = []
    for name in AMOUNTS:
        empty = row.get(name) is None or str(row[name]).strip() == ""
        least = 0.0 if name == "latency" else SMALLEST
        amounts.append(math.nan if empty else amount(name, least, "a positive number or empty"))
    if sum(not math.isnan(value) for value in amounts[:3]) > 1:
        raise PrefedError(f"{path}: row {number}: has more than one of {', '.join(AMOUNTS[:3])}")
    return number, device, amount("time", 0.0, "a number from 0 on"), on, tuple(amounts)
