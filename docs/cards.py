"""A card for each algorithm, made from the program, from docs/cards.toml (in words) and from the
records in docs/results (all numbers): docs/algorithms.md shows them."""

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import reference
import torch

import prefed
from prefed.algorithms import ALGORITHMS, Algorithm
from prefed.experiments.measures import duration
from prefed.experiments.printed_tables import TableRuns, read
from prefed.experiments.stored_runs import StoredRun, load_archive
from prefed.experiments.toml_files import tables
from prefed.rules import SGD, Rule
from prefed.training.traffic import traffic

HERE = Path(__file__).parent
RESULTS = HERE / "results"
WORDS: dict[str, dict[str, str]] = tomllib.loads((HERE / "cards.toml").read_text())
UNKNOWN = "Computed on a few cores of a CPU; which one was not written down with these runs."
STEPS = 10
"""Local steps of a round whose bytes are counted: they matter if clients meet in every step."""


@dataclass(frozen=True)
class Ours:
    """A result of a study or a table."""

    task: str
    printed: str
    found: str
    seconds: float
    """Of a run."""
    machine: str


def results() -> dict[str, list[Ours]]:
    """What the records have of each algorithm."""
    found: dict[str, list[Ours]] = {name: [] for name in ALGORITHMS.names()}
    for name, ours in [*_of_studies(), *_of_tables()]:
        found[name].append(ours)
    return found


def _of_studies() -> Iterator[tuple[str, Ours]]:
    """Algorithms as they are by default: pages of their own have what variants gave. A run that is
    in two studies counts once."""
    seen = set()
    for path in sorted(RESULTS.glob("*.json")):
        study = json.loads(path.read_text())
        if not isinstance(study, dict) or "lines" not in study:
            continue
        runs = load_archive(RESULTS / study["config"])
        for line in study["lines"]:
            name = line["algorithm"]["name"]
            key = study["config"], name
            if (
                line["label"] != ALGORITHMS.get(name).__name__
                or line["mean"] is None
                or key in seen
            ):
                continue
            seen.add(key)
            low, high = line["interval"]
            unit = " %" if line["measure"].endswith("accuracy") else " (loss)"
            interval = "" if low is None else f" [{low:.4g}, {high:.4g}]"  # of one run
            text = f"{line['mean']:.4g}{interval}{unit}"
            if lost := line.get("diverged"):
                text += f", {lost} runs diverged"
            used = [run for run in runs.values() if run.algorithm == name]
            task = f"{study['title']} (`prefed study {path.stem}`)"
            yield name, Ours(task, "", text, line["seconds"], machine(used))


def _of_tables() -> Iterator[tuple[str, Ours]]:
    for table in tables():
        if not (RESULTS / "tables" / table / "runs.jsonl.xz").exists():
            continue
        _, plan = read(table)
        runs = TableRuns(table, plan, RESULTS / "tables")
        known = load_archive(runs.folder)
        for point, number, _ in runs.results():
            if number is None:
                continue
            used = [known[planned.folder.name] for planned in point.planned]
            cell = point.cell
            printed = "" if cell.printed is None else f"{cell.printed:g}"
            seconds = fmean(run.total("seconds") for run in used)
            task = f"{plan.title}; {cell.row}, {cell.column} (`prefed table {table}`)"
            found = Ours(task, printed, f"{number:.3g}", seconds, machine(used))
            yield used[0].algorithm, found


def machine(runs: list[StoredRun]) -> str:
    """What these runs were computed on, as far as it was written down."""
    known = {
        f"{e['processor']}, {e['cores']} cores, torch {e['torch']}"
        for run in runs
        if (e := run.environment)
    }
    return "; ".join(sorted(known))


def shared(name: str) -> tuple[dict[str, int], int]:
    """Exact bytes of a client's round, and of a vector of the model's weights."""
    algorithm = ALGORITHMS.get(name)(client_lr=0.1)
    middle = torch.nn.BatchNorm1d(128) if "@norm" in algorithm.personal else torch.nn.ReLU()
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), middle, torch.nn.Linear(128, 10))
    data = prefed.FederatedData([(torch.zeros(4, 64), torch.tensor([0, 1, 2, 3]))])
    run = prefed.Run(algorithm, model, data, prefed.Settings(rounds=1, local_steps=STEPS))
    size = sum(p.nbytes for p in model.parameters())
    return traffic(algorithm, run.server, 1, STEPS), size


def bytes_line(name: str) -> str:
    found, size = shared(name)
    ways = [
        f"{found[f'bytes_{way}']:,} bytes {way} ({found[f'bytes_{way}'] / size:.3g} d)"
        for way in ("up", "down")
    ]
    steps = f", {STEPS} local steps" if ALGORITHMS.get(name)(client_lr=0.1).client_rule().lockstep \
        else ""  # fmt: skip
    return f"{' and '.join(ways)} for each client and round, for a model of d = {size // 4:,} " \
           f"weights in float32{steps}."  # fmt: skip


def formula(name: str) -> list[str]:
    """What the algorithm says of itself, and its rules where the docstring leaves the steps to
    them."""
    kind = ALGORITHMS.get(name)
    algorithm = kind(client_lr=0.1)
    lines = [reference.text_of(kind), "", f"- On a client: {rule_text(algorithm.client_rule())}"]
    server = algorithm.server_rule()
    plain = isinstance(server, SGD) and not server.momentum
    mean = "w += server_lr * (mean change of the clients)."
    lines.append(f"- On the server: {mean if plain else rule_text(server)}")
    return lines


def rule_text(rule: Rule) -> str:
    """The first paragraph of a rule's docstring, and the formula behind it if there is one."""
    text = reference.text_of(type(rule))
    found = re.match(r"(.*?)\n\n(```text\n.*?```)?", text + "\n\n", flags=re.S)
    assert found
    shown = "\n\n".join(part for part in found.groups() if part)
    return f"`{type(rule).__name__}`: " + shown.replace("\n", "\n  ")


def result_lines(ours: list[Ours]) -> list[str]:
    if not ours:
        return ["No study and no table has it yet."]
    rows = [f"| {o.task} | {o.printed} | {o.found} | {duration(o.seconds)} |" for o in ours]
    machines = "; ".join(dict.fromkeys(o.machine for o in ours if o.machine))
    about = f"Computed on {machines}." if machines else UNKNOWN
    return ["| task | printed | ours | a run takes |", "|---|---|---|---|", *rows, "", about]


def card(name: str, ours: list[Ours]) -> str:
    kind, words = ALGORITHMS.get(name), WORDS[name]
    base = Algorithm.model_fields
    own = [
        option
        for option in reference.options_of(kind, {})
        if option.name not in base
        or kind.model_fields[option.name].default != base[option.name].default
    ]
    lines = [
        f"## {kind.__name__}", "", f"`prefed.{kind.__name__}`, in a config `{name}`.", "",
        *formula(name), "",
        "**From.** " + words["reference"] + ".", "",
        "**Use it for.** " + words["use"], "",
        "**Bytes.** " + bytes_line(name), "",
        "**Options** of its own:" if own else "**Options:** those that all algorithms have.",
        *reference.table(own), "",
        "**Results.**", "", *result_lines(ours), "",
    ]  # fmt: skip
    return "\n".join(lines)


def page() -> str:
    found = results()
    return "\n".join(card(name, found[name]) for name in ALGORITHMS.names())


if __name__ == "__main__":
    print(page())
