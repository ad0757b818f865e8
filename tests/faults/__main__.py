"""Try every fault and print one table: fault, times tried, survived, lost.

python -m tests.faults                       everything, two faults at a time
python -m tests.faults --quick kill disk     a small part of two modules
python -m tests.faults --share 0.1           a tenth of everything
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import pkgutil
import random
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

import tests.faults
from prefed import ALGORITHMS, DATASETS, ENGINES, MODELS, SPLITS
from prefed.cli import interrupt, progress  # noqa: F401  imported here once for all children
from tests.faults.trials import FAULTS, CannotTry, Fault

logging.getLogger("prefed").addHandler(logging.NullHandler())
LANES = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help="modules, or module.fault; all unless given")
    parser.add_argument("--quick", action="store_true", help="the part that make test runs")
    parser.add_argument("--share", type=float, default=1.0, help="of the times to try")
    parser.add_argument("--first", action="store_true", help="leave a fault at its first loss")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for module in pkgutil.iter_modules(tests.faults.__path__, "tests.faults."):
        if module.name.rpartition(".")[2] not in ("__main__", "protections"):
            importlib.import_module(module.name)
    for registry in (ALGORITHMS, DATASETS, ENGINES, MODELS, SPLITS):
        registry.names()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = {
        name: fault
        for name, fault in FAULTS.items()
        if not arguments.names or {name, name.partition(".")[0]} & {*arguments.names}
    }
    if not chosen:
        sys.exit(f"no such fault; there are: {', '.join(FAULTS)}")
    if arguments.quick:
        chosen = {name: fault for name, fault in chosen.items() if fault.quick}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run_all(chosen, arguments, Path(folder))
        rows = [Row.read(Path(folder) / name, fault) for name, fault in chosen.items()]
    print_table(rows)
    lost = sum(row.lost for row in rows)
    print(f"lost {lost} of {sum(row.tried for row in rows)} "
          f"in {(time.monotonic() - begin) / 60:.1f} minutes")  # fmt: skip
    return 1 if lost else 0


def run_all(chosen: dict[str, Fault], arguments: argparse.Namespace, folder: Path) -> None:
    """A forked process for each fault, so many at a time, the long ones first."""
    waiting = sorted(chosen, key=lambda name: chosen[name].seconds)
    running: set[int] = set()
    while waiting or running:
        while waiting and len(running) < LANES:
            name = waiting.pop()
            fault = chosen[name]
            times = fault.quick if arguments.quick else max(1, round(fault.times * arguments.share))
            sys.stdout.flush()
            if (pid := os.fork()) == 0:
                try_it(name, fault, times, arguments, folder / name)
                os._exit(0)
            running.add(pid)
        pid, _ = os.wait()
        running.discard(pid)


def try_it(name: str, fault: Fault, times: int, arguments: argparse.Namespace, note: Path) -> None:
    """Write a line for each time into the note, so that a fault that dies is seen to have."""
    warnings.simplefilter("ignore")
    rng = random.Random(zlib.crc32(name.encode()) + arguments.seed)
    begin = time.monotonic()
    with open(note, "w", buffering=1) as file:
        try:
            for problem in fault.trials(times, rng):
                print(json.dumps({"problem": problem}), file=file)
                if problem:
                    print(f"{name}: {problem}", file=sys.stderr, flush=True)
                    if arguments.first:
                        break
        except CannotTry as reason:
            print(json.dumps({"skipped": str(reason)}), file=file)
        except BaseException:
            text = traceback.format_exc()
            print(json.dumps({"problem": text}), file=file)
            print(f"{name}: {text}", file=sys.stderr, flush=True)
        print(json.dumps({"seconds": time.monotonic() - begin}), file=file)


@dataclass(frozen=True)
class Row:
    title: str
    tried: int
    lost: int
    seconds: float
    skipped: str

    @classmethod
    def read(cls, note: Path, fault: Fault) -> Row:
        lines = [json.loads(line) for line in note.read_text().splitlines()]
        problems = [line["problem"] for line in lines if "problem" in line]
        seconds = [line["seconds"] for line in lines if "seconds" in line]
        if not seconds:
            problems.append("it died")
        reason = next((line["skipped"] for line in lines if "skipped" in line), "")
        return cls(fault.title, len(problems), sum(map(bool, problems)), sum(seconds), reason)


def print_table(rows: list[Row]) -> None:
    width = max(len(row.title) for row in rows)
    print(f"{'fault':<{width}}   tried  survived  lost  seconds")
    for row in rows:
        skipped = f"  skipped: {row.skipped}" if row.skipped else ""
        print(f"{row.title:<{width}}  {row.tried:>6}  {row.tried - row.lost:>8}  {row.lost:>4}  "
              f"{row.seconds:>7.0f}{skipped}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
