"""The paper's claims, and a few others, against what the studies measured: docs/results/claims.md.

    python scripts/claims.py

Reads docs/results/STUDY.json of every study. A claim says that one line of a study is
better than another; it is judged by the paired differences over seeds and their 95 % interval:
"holds" if the interval lies above zero, "does not hold" if it lies below, "open" otherwise. Three
seeds decide only large differences.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from prefed.core.safe_files import write_whole
from prefed.experiments.stats import student_interval

ATTENTION = ("cifar10-vit", "shakespeare-gpt", "shakespeare-lora")
"""Studies of transformers."""

RESULTS = Path(__file__).parent.parent / "docs" / "results"


@dataclass(frozen=True)
class Claim:
    says: str
    better: str
    worse: str
    of: str = "values"
    """What is compared: "values" (accuracy or loss at the end), or "jumps" (fewer are better)."""
    studies: tuple[str, ...] = ()
    """Those that it is about, if not all."""


CLAIMS = [
    Claim("PreFed outperforms AdaAlter", "PreFed", "AdaAlter"),
    Claim("PreFed outperforms FedAdam", "PreFed", "FedAdam"),
    Claim("PreFedOpt outperforms AdaAlter", "PreFedOpt", "AdaAlter"),
    Claim("PreFedOpt outperforms FedAdam", "PreFedOpt", "FedAdam"),
    Claim("preconditioning outperforms FedAvg", "PreFed", "FedAvg"),
    Claim("FedAvg jumps more from round to round than PreFed", "PreFed", "FedAvg", "jumps"),
    Claim("... than PreFedOpt", "PreFedOpt", "FedAvg", "jumps"),
    Claim("... than FedAdam", "FedAdam", "FedAvg", "jumps"),
    Claim("(not in the paper) adaptivity on the clients beats the server's", "PreFed", "PreFedOpt"),
    Claim("synchronising m pays: averaged against reset", "PreFed", "PreFed, m reset"),
    Claim("... averaged against kept", "PreFed", "PreFed, m kept"),
    Claim("synchronising P pays: each round against every 16th", "PreFed", "PreFed, P every 16"),
    Claim("(not in the paper) m derived beats m averaged", "PreFed, m derived", "PreFed"),
    Claim("(not in the paper) PreFedLite beats PreFed", "PreFedLite", "PreFed"),
    Claim("a moving average beats AdaGrad's sum, on the clients", "LocalAdam", "AdaAlter"),
    Claim("... on the server", "FedAdam", "FedAdagrad"),
    *(
        Claim(f"(not in the paper) adaptive clients win on attention models: {ours}, not {theirs}",
              ours, theirs, studies=ATTENTION)
        for ours in ("PreFed", "LocalAdam", "FedAdamW")
        for theirs in ("FedAvg", "FedAvgM", "FedAdam", "PreFedOpt")
    ),
    Claim("(not in the paper) LoRA: training A as well pays", "PreFed", "PreFed, A frozen"),
    Claim("... for FedAvg", "FedAvg", "FedAvg, A frozen"),
    *(
        Claim(f"(not in the paper) PreFedM outperforms {theirs}", "PreFedM", theirs)
        for theirs in ("FedAvgM", "FedAdam", "AdaAlter", "FedAvg", "PreFed", "FedAdamW")
    ),
    *(
        Claim(f"(not in the paper) PreFedS outperforms {theirs}", "PreFedS", theirs)
        for theirs in ("FedMuon", "FedPAC", "PreFedM", "FedAvgM", "FedAdam", "AdaAlter", "PreFed")
    ),
    *(
        Claim(f"(not in the paper) PreFedC outperforms {theirs}", "PreFedC", theirs)
        for theirs in ("PreFedS", "FedMuon", "FedPAC", "FedAvgM", "FedAdam", "AdaAlter", "PreFed")
    ),
]  # fmt: skip

CHOSEN = ("PreFedS", "PreFedSLite", "PreFedC", "PreFedCLite", "PreFedM", "PreFedMLite")
"""Algorithms that should be first in every study, or level with the first."""
MEANT = ", mean of rounds"
"""What lines are called that were given such a mean besides what their papers have."""


def main() -> None:
    write_whole(RESULTS / "claims.md", text())
    print(text())


def text() -> str:
    studies = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    lines = ["| claim | study | better by | |", "|---|---|---|---|"]
    for claim in CLAIMS:
        seen = set()  # studies of one config share their runs
        for name, study in studies.items():
            if claim.studies and name not in claim.studies:
                continue
            if study["config"] not in seen and (row := judged(claim, study)) is not None:
                lines.append(f"| {claim.says} | {name} | {row} |")
                seen.add(study["config"])
    return "\n".join([*lines, "", *places(studies), "", *tau(studies)]) + "\n"


def judged(claim: Claim, study: dict[str, Any]) -> str | None:
    """Two cells: the difference with its interval, and the verdict."""
    rows = {row["label"]: row for row in study["lines"]}
    if claim.better not in rows or claim.worse not in rows:
        return None
    ours, theirs = rows[claim.better][claim.of], rows[claim.worse][claim.of]
    lower = claim.of == "jumps" or rows[claim.better]["measure"] == "test_loss"
    seeds = [s for s in ours if s in theirs and None not in (ours[s], theirs[s])]
    differences = [(ours[s] - theirs[s]) * (-1 if lower else 1) for s in seeds]
    if len(differences) < 2:
        return None
    low, high = student_interval(differences)
    verdict = "holds" if low > 0 else "does not hold" if high < 0 else "open"
    digits = 5 if rows[claim.better]["measure"] == "test_loss" else 2
    mean = f"{fmean(differences):+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"{mean}, {len(differences)} seeds | {verdict}"


def places(studies: dict[str, Any]) -> list[str]:
    """Where the chosen algorithms stand: against the best of the others as their papers have them,
    and against the best of those that were given a mean over rounds as well."""
    heads = "first or level with the first?", "study", "better than the best other by", "", \
            "than the best with a mean over rounds by", ""  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for chosen in CHOSEN:
        for name, study in studies.items():
            rows = {row["label"]: row for row in study["lines"] if row.get("mean") is not None}
            if chosen not in rows:
                continue
            own = chosen.removesuffix("Lite")
            others = [label for label in rows if not label.startswith(own)]
            meant = [label for label in others if label.endswith(MEANT)]
            cells = [place(chosen, [n for n in others if n not in meant], study, rows)]
            cells += [place(chosen, meant, study, rows)] if meant else [" | "]
            lines.append(f"| {chosen} | {name} | " + " | ".join(cells) + " |")
    return lines if len(lines) > 2 else []


def place(chosen: str, others: list[str], study: dict[str, Any], rows: dict[str, Any]) -> str:
    """Two cells: the difference to the best of the others, and what it comes to."""
    sign = -1 if rows[chosen]["measure"] == "test_loss" else 1
    best = max(others, key=lambda label: sign * float(rows[label]["mean"]))
    difference, verdict = (judged(Claim("", chosen, best), study) or "? | ?").split(" | ")
    said = {"holds": "first", "open": "level", "does not hold": "behind"}.get(verdict, "?")
    return f"{difference} ({best}) | {said}"


def tau(studies: dict[str, Any]) -> list[str]:
    """The best score on the validation split for each tau of the tuning."""
    lines = ["| tau: best validation score | study | |", "|---|---|---|"]
    for name, study in studies.items():
        path = RESULTS / study["config"] / "tuning.json"
        if not study["tuned"] or not path.exists():
            continue
        best: dict[str, dict[float, float]] = {}
        for key, score in json.loads(path.read_text())["scores"].items():
            algorithm, *options = key.split()
            values = dict(option.split("=", 1) for option in options)
            if "tau" in values and score is not None:
                taus = best.setdefault(algorithm, {})
                value = float(values["tau"])
                taus[value] = max(taus.get(value, score), score)
        for algorithm, taus in best.items():
            cells = ", ".join(
                f"{value:g}: {100 * score if score > 0 else -score:.4g}"
                for value, score in sorted(taus.items())
            )
            lines.append(f"| {algorithm} | {name} | {cells} |")
    return lines if len(lines) > 2 else []


if __name__ == "__main__":
    main()
