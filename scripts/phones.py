"""What reaches a target first on phones and in a data centre: docs/results/phones.md.

    python scripts/phones.py DATA [DIRECTORY]

DATA holds CIFAR-10 (cifar-10-batches-bin) and shakespeare.txt. Every run that has ended stands in
DIRECTORY/phones/runs.json, so that a script that was stopped goes on where it was; DIRECTORY is
docs/results. Step sizes are those of the presets, which synchronous rounds were tuned with; nothing
is tuned for late updates. Two runs at a time; one seed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from prefed.core.errors import Diverged
from prefed.core.safe_files import write_whole
from prefed.experiments.config import load

RESULTS = Path(__file__).parent.parent / "docs" / "results"
TASKS = {"cifar10-small": 0.30, "shakespeare": 0.40}
"""Presets, and the test accuracy that is to be reached."""
LINES = {
    "FedAvg": ["algorithm=fedavg"],
    "FedAvg, int8": ["algorithm=fedavg", "upload=int8"],
    "FedAvgM": ["algorithm=fedavgm"],
    "FedAdam": ["algorithm=fedadam"],
    "PreFedOpt": ["algorithm=prefedopt"],
    "PreFed": ["algorithm=prefed"],
    "PreFedLite": ["algorithm=prefedlite"],
}
PHONES = {
    "operations_per_second": {"distribution": "loguniform", "low": 1e9, "high": 50e9},
    "up": {"distribution": "loguniform", "low": 0.125e6, "high": 2.5e6},
    "down": {"distribution": "loguniform", "low": 0.5e6, "high": 10e6},
    "latency": 0.05,
}
"""1 to 20 Mbit/s up, four times as much down, speeds over a factor of 50."""
PLACES: dict[str, Any] = {"phones": PHONES, "data centre": "datacentre"}
IN_FLIGHT = {"FedBuff, 30 at work": 30, "FedBuff, 13 at work": 13}
WAYS = ("all wait", "130 % asked", *IN_FLIGHT)
Numbers = dict[str, float | None]


@dataclass(frozen=True)
class Case:
    task: str
    line: str
    place: str
    way: str

    @property
    def key(self) -> str:
        return ", ".join(astuple(self))

    def run(self, data: str) -> Numbers | None:
        """Seconds, megabytes and wasted device hours until the target, and the accuracy at the end;
        None if the run diverged."""
        config = load(self.task, [*LINES[self.line], f"data.path={data}"]).to_dict()
        devices = PLACES[self.place]
        if self.way in IN_FLIGHT:
            config["asynchronous"] = {"buffer": 10, "concurrency": IN_FLIGHT[self.way]}
        elif self.way == "130 % asked":
            known = {"classes": {devices: {"share": 1.0}}} if isinstance(devices, str) else devices
            devices = {**known, "over_selection": 1.3}
        config |= {"devices": devices, "seed": 0, "evaluate_every": 2, "workers": 1}
        try:
            history = load(config).make_run().run().history
        except Diverged:
            return None
        sent = busy = 0.0
        there: Numbers = {"hours": None, "MB": None, "wasted": None}
        for record in history:
            sent += record["bytes_up"] + record["bytes_down"] + record["wasted_bytes_up"]
            busy += record["wasted_device_seconds"]
            if (record["test_accuracy"] or 0) >= TASKS[self.task]:
                there = {"hours": record["seconds_virtual"] / 3600, "MB": sent / 1e6,
                         "wasted": busy / 3600}  # fmt: skip
                break
        return there | {"accuracy": 100 * history[-1]["test_accuracy"]}


def cases() -> Iterator[Case]:
    for place in PLACES:
        for task in TASKS:
            for way in WAYS:
                for line in LINES:
                    yield Case(task, line, place, way)


def run(data: str, folder: Path) -> dict[str, Numbers | None]:
    path = folder / "phones" / "runs.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    done: dict[str, Numbers | None] = json.loads(path.read_text()) if path.exists() else {}
    left = [case for case in cases() if case.key not in done]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        running = {pool.submit(case.run, data): case for case in left}
        for number, future in enumerate(as_completed(running), 1):
            done[running[future].key] = future.result()
            write_whole(path, json.dumps(dict(sorted(done.items())), indent=1) + "\n")
            print(f"{number}/{len(left)}  {running[future].key}: {future.result()}", flush=True)
    return done


def text(done: dict[str, Numbers | None]) -> str:
    lines = [
        "# On phones and in a data centre", "", "Made by `python scripts/phones.py`: 60 steps of "
        "the server, 10 updates each, seed 0.", "Virtual time, megabytes both ways and wasted "
        "device time until the target; the accuracy at the end.", "",
    ]  # fmt: skip
    for task, target in TASKS.items():
        for place in PLACES:
            if any(Case(task, line, place, way).key not in done for line in LINES for way in WAYS):
                continue  # some of its runs are still to come
            lines += [f"## {task}, {place}: {100 * target:g} %", ""]
            lines += [f"|  | {' | '.join(WAYS)} |", "|---" * (len(WAYS) + 1) + "|"]
            for line in LINES:
                cells = [_cell(done.get(Case(task, line, place, way).key, {})) for way in WAYS]
                lines.append(f"| {line} | {' | '.join(cells)} |")
            lines.append("")
    return "\n".join(lines)


def _cell(found: Numbers | None) -> str:
    if found is None:
        return "diverged"
    if not found:
        return ""
    end = f"{found['accuracy']:.1f} %"
    if found["hours"] is None or found["MB"] is None or found["wasted"] is None:
        return f"never; {end}"
    took, wasted = _time(found["hours"]), _time(found["wasted"])
    return f"{took}, {found['MB']:.0f} MB, {wasted} wasted; {end}"


def _time(hours: float) -> str:
    minutes = 60 * hours
    if minutes >= 1 or not minutes:
        return f"{minutes:.3g} min"
    return f"{60 * minutes:.3g} s" if minutes >= 1 / 60 else f"{60e3 * minutes:.3g} ms"


def main() -> None:
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else RESULTS
    write_whole(folder / "phones.md", text(run(sys.argv[1], folder)))


if __name__ == "__main__":
    main()
