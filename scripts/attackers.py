"""Means against clients that lie, on digits: docs/results/attackers.md.

    python scripts/attackers.py [DIRECTORY]

Every run that has ended stands in DIRECTORY/attackers/runs.json, so that a script that was stopped
goes on where it was; DIRECTORY is docs/results. 20 of 50 clients are drawn in each of 30 rounds,
step sizes are those of the presets, and numbers are test accuracies in percent after the last
round, for one seed. Deterministic on machines of one kind.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from prefed.core.errors import Diverged
from prefed.core.safe_files import write_whole
from prefed.experiments.config import load

RESULTS = Path(__file__).parent.parent / "docs" / "results"

MEANS: dict[str, Any] = {
    "plain": "plain",
    "median": "median",
    "trimmed": {"name": "trimmed", "share": 0.4},
    "clipped": "clipped",
    "krum": {"name": "krum", "share": 0.4},
    "multi-krum": {"name": "multi-krum", "share": 0.4},
    "geometric": "geometric",
    "median of 2": {"name": "median", "bucket": 2},
}
"""The most that they bear, as one who does not know how many lie would set them."""
SHARES = (0.0, 0.1, 0.2, 0.4)
PRESETS = {"iid": "digits-iid", "non-iid": "digits-noniid"}
ATTACKS = ("sign_flip", "scaled", "noise", "label_flip", "alie", "huge_state", "tiny_state")
SETTINGS = ("clients_per_round=20", "rounds=30", "evaluate_every=30", "engine=vectorised")


@dataclass(frozen=True)
class Case:
    data: str
    algorithm: str
    attack: str
    share: float
    mean: str

    @property
    def key(self) -> str:
        return ", ".join(str(part) for part in astuple(self))

    def accuracy(self) -> float | None:
        """In percent; None if the run diverged."""
        config = load(PRESETS[self.data], [f"algorithm={self.algorithm}", *SETTINGS]).to_dict()
        config |= {"mean": MEANS[self.mean], "seed": 0}
        if self.share:
            config["attackers"] = {"share": self.share, "attack": self.attack}
        try:
            record = load(config).make_run().run().history[-1]
        except Diverged:
            return None
        return round(100 * float(record["test_accuracy"]), 2)


def cases() -> Iterator[Case]:
    """Shares of one attack for both algorithms and splits, then all attacks at one share."""
    for data in PRESETS:
        for algorithm in ("fedavg", "prefed"):
            for mean in MEANS:
                for share in SHARES:
                    yield Case(data, algorithm, "sign_flip" if share else "none", share, mean)
    for data in PRESETS:
        for mean in MEANS:
            for attack in ATTACKS:
                yield Case(data, "prefed", attack, 0.2, mean)


def run(folder: Path) -> dict[str, float | None]:
    path = folder / "attackers" / "runs.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    done: dict[str, float | None] = json.loads(path.read_text()) if path.exists() else {}
    for case in cases():
        if case.key not in done:
            done[case.key] = case.accuracy()
            write_whole(path, json.dumps(done, indent=1) + "\n")
            print(f"{case.key}: {done[case.key]}", flush=True)
    return done


def text(done: dict[str, float | None]) -> str:
    lines = ["# Means against clients that lie", "", "Made by `python scripts/attackers.py`.", ""]
    for algorithm, label in (("fedavg", "FedAvg"), ("prefed", "PreFed")):
        for data in PRESETS:
            heads = [f"{100 * share:g} %" for share in SHARES]
            rows = [
                [Case(data, algorithm, "sign_flip" if s else "none", s, m) for s in SHARES]
                for m in MEANS
            ]
            lines += _table(f"{label}, {data}: share of sign-flippers", heads, rows, done)
    for data in PRESETS:
        rows = [[Case(data, "prefed", a, 0.2, m) for a in ATTACKS] for m in MEANS]
        lines += _table(f"PreFed, {data}: 20 % that lie", list(ATTACKS), rows, done)
    return "\n".join(lines)


def _table(
    title: str, heads: list[str], rows: list[list[Case]], done: dict[str, float | None]
) -> list[str]:
    lines = [f"## {title}", "", f"| mean | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for row in rows:
        found = [done.get(case.key, "") for case in row]
        cells = ["diverged" if n is None else f"{n:.1f}" if n != "" else "" for n in found]
        lines.append(f"| {row[0].mean} | {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    write_whole(folder / "attackers.md", text(run(folder)))


if __name__ == "__main__":
    main()
