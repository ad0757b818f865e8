"""Accuracy against megabytes up: the study of docs/upload.md.

    python scripts/study_upload.py digits
    PREFED_DATA=... python scripts/study_upload.py cifar10 --out /somewhere --workers 2
    python scripts/study_upload.py cifar10 --out /somewhere --draw

The first two run what is not there yet (the same command goes on after a stop) and then draw; the
last only draws, from whatever has come to its end. Drawing writes docs/results/upload/STUDY.json
and .png, and the tables between the marks in docs/upload.md.

Step sizes are chosen first, for every algorithm the best of four on a validation split with a seed
that no table uses; all settings of PreFed take PreFed's. On digits they are those of the preset.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from prefed.config import load
from prefed.experiments import Planned, run_all
from prefed.files import write_whole
from prefed.report.figures import to_bytes
from prefed.results import StoredRun
from prefed.sweep import score

DOCS = Path(__file__).parent.parent / "docs"
TUNING_SEED = 1000
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
"""The 97.5 % point of Student's distribution for so many seeds."""

Options = dict[str, Any]
LITE = "PreFedLite"
BASE = "PreFed"
FEDAVG = "FedAvg"

SETTINGS: dict[str, tuple[str, Options]] = {
    BASE: ("prefed", {}),
    LITE: ("prefedlite", {}),  # w bfloat16, P log8, m derived
    FEDAVG: ("fedavg", {}),
    "w int8, P log8, m derived": (
        "prefed", {"upload": "int8", "P_codec": "log8", "momentum": "derived"}
    ),
    "w int8, P log4, m derived": (
        "prefed", {"upload": "int8", "P_codec": "log4", "momentum": "derived"}
    ),
    "w exact, P row, m derived": ("prefed", {"P_codec": "row", "momentum": "derived"}),
    "w bfloat16, P log8, m int8": (
        "prefed", {"upload": "bfloat16", "P_codec": "log8", "m_codec": "int8"}
    ),
    "m derived": ("prefed", {"momentum": "derived"}),
    "w int8, P row, m derived": (
        "prefed", {"upload": "int8", "P_codec": "row", "momentum": "derived"}
    ),
    "w int8, P log8, m int8": (
        "prefed", {"upload": "int8", "P_codec": "log8", "m_codec": "int8"}
    ),
    "m reset": ("prefed", {"momentum": "reset"}),
    "m kept": ("prefed", {"momentum": "keep"}),
    "m int8": ("prefed", {"m_codec": "int8"}),
    "P bfloat16": ("prefed", {"P_codec": "bfloat16"}),
    "P float8": ("prefed", {"P_codec": "float8"}),
    "P log8": ("prefed", {"P_codec": "log8"}),
    "P log4": ("prefed", {"P_codec": "log4"}),
    "P row": ("prefed", {"P_codec": "row"}),
    "P tensor": ("prefed", {"P_codec": "tensor"}),
    "P every 4": ("prefed", {"P_every": 4}),
    "P every 16": ("prefed", {"P_every": 16}),
    "mean by sqrt(P)": ("prefed", {"aggregate": "sqrtP"}),
    "mean by sqrt(P), m derived": ("prefed", {"aggregate": "sqrtP", "momentum": "derived"}),
    "w bfloat16": ("prefed", {"upload": "bfloat16"}),
    "w float16": ("prefed", {"upload": "float16"}),
    "w int8": ("prefed", {"upload": "int8"}),
    "w topk(0.1)": ("prefed", {"upload": "topk(0.1)"}),
    "FedAvg, w bfloat16": ("fedavg", {"upload": "bfloat16"}),
    "FedAvg, w int8": ("fedavg", {"upload": "int8"}),
    "FedAvg, w topk(0.1)": ("fedavg", {"upload": "topk(0.1)"}),
    "FedAdam": ("fedadam", {}),
    "PreFedOpt": ("prefedopt", {}),
    "AdaAlter": ("adaalter", {}),
}  # fmt: skip
"""What is compared, the most important first. w: how the change of the weights goes up."""


Runs = dict[str, dict[int, StoredRun]]
"""Finished runs by setting and seed."""

STYLES = {
    LITE: ("*", "#d55e00"),
    BASE: ("o", "#0072b2"),
    FEDAVG: ("s", "#009e73"),
    "FedAdam": ("^", "#cc79a7"),
    "PreFedOpt": ("v", "#e69f00"),
    "AdaAlter": ("D", "#56b4e9"),
}
FAMILY = {"prefed": (".", "#0072b2"), "fedavg": (".", "#009e73")}
OTHER = (".", "#7f7f7f")


@dataclass(frozen=True)
class Study:
    preset: str
    seeds: int
    grids: dict[str, list[Options]]
    """Tried for each algorithm; empty if the preset's step sizes are well chosen already."""
    key_seeds: int
    """For the first seven settings, on which the recommendation rests."""


def cosine(start: float) -> Options:
    return {"client_lr": {"schedule": "cosine", "start": start, "rounds": 40}}


STUDIES = {
    "digits": Study("digits-noniid", 5, {}, 10),
    "cifar10": Study(
        "upload-cifar10",
        3,
        {
            "prefed": [cosine(lr) for lr in (0.001, 0.003, 0.01, 0.03)],
            "fedavg": [cosine(lr) for lr in (0.03, 0.1, 0.2, 0.4)],
            "adaalter": [cosine(lr) for lr in (0.003, 0.01, 0.03, 0.1)],
            "fedadam": [{**cosine(0.05), "server_lr": lr} for lr in (0.003, 0.01, 0.03, 0.1)],
            "prefedopt": [{**cosine(0.05), "server_lr": lr} for lr in (0.003, 0.01, 0.03, 0.1)],
        },
        6,
    ),
}
KEY = list(SETTINGS)[:7]


def plan(study: Study, algorithm: str, options: Options, seed: int, folder: Path) -> Planned:
    table = {"name": algorithm, **options}
    like = "prefed" if algorithm == "prefedlite" else algorithm  # whose step sizes it takes
    changes = [f"algorithm={like}", f"seed={seed}", "device=cpu"]
    if folder.parent.name == "tuning":
        changes.append("data.validation=0.1")
    config = load(study.preset, changes)
    whole = config.to_dict()
    whole["algorithm"] = {**whole["algorithm"], **table}
    return Planned(folder.name, load(whole), folder)


def slug(text: str) -> str:
    return "".join(c if c.isalnum() or c == "." else "-" for c in text)


def tuning(study: Study, out: Path) -> dict[str, list[tuple[Options, Planned]]]:
    found = {}
    for name, grid in study.grids.items():
        found[name] = [
            (o, plan(study, name, o, TUNING_SEED, out / "tuning" / f"{name}-{i}"))
            for i, o in enumerate(grid)
        ]
    return found


def tuned(study: Study, out: Path) -> dict[str, Options]:
    """The best options of each algorithm, by finished runs on the validation split."""
    best = {}
    for name, points in tuning(study, out).items():
        scored = [(score(run), i) for i, (_, p) in enumerate(points) if (run := p.stored())]
        if len(scored) == len(points):
            best[name] = points[max(scored)[1]][0]
    if "prefed" in best:
        best["prefedlite"] = best["prefed"]
    return best


def comparison(study: Study, best: dict[str, Options], out: Path) -> Iterator[tuple[str, Planned]]:
    for seed in range(max(study.seeds, study.key_seeds)):
        for label, (algorithm, options) in SETTINGS.items():
            if seed < study.seeds or (seed < study.key_seeds and label in KEY):
                folder = out / "runs" / f"{slug(label)}-seed{seed}"
                chosen = {**best.get(algorithm, {}), **options}
                yield label, plan(study, algorithm, chosen, seed, folder)


def run(study: Study, out: Path, workers: int) -> None:
    def tell(planned: Planned, event: dict[str, Any]) -> None:
        if "end" in event:
            print(f"{planned.title}: {event['end']}", flush=True)

    # What the recommendation rests on comes first, then everything.
    for tried, compared in ((["prefed"], KEY), (list(study.grids), list(SETTINGS))):
        points = {name: found for name, found in tuning(study, out).items() if name in tried}
        run_all([p for found in points.values() for _, p in found], workers, tell)
        best = tuned(study, out)
        plans = [
            planned
            for label, planned in comparison(study, best, out)
            if label in compared and (SETTINGS[label][0] in best or not study.grids)
        ]
        run_all(plans, workers, tell)


def interval(values: list[float]) -> tuple[float, float]:
    """Student's 95 % interval of the mean; as wide as can be with one value."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = T95[len(values)] * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def finished(study: Study, out: Path) -> Runs:
    runs: Runs = {}
    for label, planned in comparison(study, tuned(study, out), out):
        stored = planned.stored()
        if stored is not None and stored.status == "finished":
            runs.setdefault(label, {})[stored.seed] = stored
    return runs


def summarise(runs: Runs) -> list[dict[str, Any]]:
    """A row for each setting with a finished run: accuracy, difference to PreFed, bytes."""
    rows = []
    for label, by_seed in runs.items():
        accuracy = {seed: 100 * score(run) for seed, run in by_seed.items()}
        base = {seed: 100 * score(run) for seed, run in runs.get(BASE, {}).items()}
        paired = [accuracy[s] - base[s] for s in accuracy if s in base]
        first = next(iter(by_seed.values()))
        floats = _floats(first)
        up = fmean(r.total("bytes_up") for r in by_seed.values())
        rows.append(
            {
                "setting": label,
                "algorithm": first.config["algorithm"],
                "accuracy": accuracy,
                "mean": fmean(accuracy.values()),
                "interval": interval(list(accuracy.values())),
                "difference": fmean(paired) if paired and label != BASE else None,
                "difference_interval": interval(paired) if label != BASE else None,
                "megabytes_up": up / 1e6,
                "d_floats_up": up / (4 * floats),
                "megabytes_down": fmean(r.total("bytes_down") for r in by_seed.values()) / 1e6,
            }
        )
    return sorted(rows, key=lambda row: -row["mean"])


def _floats(run: StoredRun) -> float:
    """Float32 weights that go down over the whole run: what FedAvg sends up."""
    return run.total("bytes_down_weights") / 4


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| Setting | up, in d floats | MB up | test accuracy % | minus PreFed's, points | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["interval"]
        accuracy = f"{row['mean']:.2f}" + (f" [{low:.2f}, {high:.2f}]" if low > -math.inf else "")
        difference = ""
        if row["difference"] is not None:
            low, high = row["difference_interval"]
            difference = f"{row['difference']:+.2f}"
            difference += f" [{low:+.2f}, {high:+.2f}]" if low > -math.inf else ""
        name = f"**{row['setting']}**" if row["setting"] in (LITE, BASE) else row["setting"]
        lines.append(
            f"| {name} | {row['d_floats_up']:.3f} | {row['megabytes_up']:.1f} | {accuracy} "
            f"| {difference} | {len(row['accuracy'])} |"
        )
    return "\n".join(lines)


def picture(rows: list[dict[str, Any]], runs: Runs) -> Figure:
    """The end of all runs, and the way there of some, against the megabytes sent up."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    ends, curves = figure.subplots(1, 2)
    for row in rows:
        marker, colour = STYLES.get(row["setting"], FAMILY.get(row["algorithm"]["name"], OTHER))
        low, high = row["interval"]
        error = None if low == -math.inf else [[row["mean"] - low], [high - row["mean"]]]
        label = row["setting"] if row["setting"] in STYLES else None
        ends.errorbar(row["megabytes_up"], row["mean"], error, fmt=marker, color=colour,
                      label=label, ms=11 if marker == "*" else 5, lw=0.8, alpha=0.8)  # fmt: skip
    for label, (_, colour) in STYLES.items():
        by_seed = runs.get(label, {})
        lines = [
            [r["test_accuracy"] for r in run.history if r["test_accuracy"] is not None]
            for run in by_seed.values()
        ]
        if not lines:
            continue
        some = next(iter(by_seed.values()))
        sent = list(accumulate(r["bytes_up"] / 1e6 for r in some.history))
        x = [b for b, r in zip(sent, some.history, strict=True) if r["test_accuracy"] is not None]
        y = [100 * fmean(values) for values in zip(*lines, strict=True)]
        curves.plot(x, y, color=colour, label=label, lw=1.4)
    best = max(row["mean"] for row in rows)
    ends.set(ylabel="test accuracy %, last tenth of the rounds", title="at the end")
    ends.set_ylim(best - 8, best + 2.5)
    curves.set(ylabel="test accuracy %", title="on the way")
    for axes in (ends, curves):
        axes.set(xlabel="megabytes uploaded", xscale="log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="both", labelsize=7)
        axes.grid(alpha=0.25, lw=0.5)
        axes.legend(frameon=False, fontsize=8)
    return figure


def draw(name: str, study: Study, out: Path) -> None:
    rows = summarise(finished(study, out))
    if not rows:
        raise SystemExit(f"{out}: no run has come to its end yet")
    target = DOCS / "results" / "upload"
    target.mkdir(parents=True, exist_ok=True)
    record = {"preset": study.preset, "tuned": tuned(study, out), "settings": rows}
    plain = json.dumps(record, indent=1).replace("-Infinity", "null").replace("Infinity", "null")
    write_whole(target / f"{name}.json", plain + "\n")
    write_whole(target / f"{name}.png", to_bytes(picture(rows, finished(study, out)), "png"))

    page = DOCS / "upload.md"
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = page.read_text().split(begin)
    after = rest.split(end)[1]
    write_whole(page, f"{before}{begin}\n{table(rows)}\n{end}{after}")
    print(table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--out", type=Path, default=Path("runs/upload"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--draw", action="store_true", help="only draw what there is")
    chosen = parser.parse_args()
    study, out = STUDIES[chosen.study], chosen.out / chosen.study
    if not chosen.draw:
        run(study, out, chosen.workers)
    draw(chosen.study, study, out)


if __name__ == "__main__":
    main()
