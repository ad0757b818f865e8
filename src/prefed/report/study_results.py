"""The results of a study: a table, a figure, and the numbers of both."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from prefed.algorithms import ALGORITHMS
from prefed.core.safe_files import to_json, write_whole
from prefed.experiments.measures import (
    ACCURACY,
    LOSS,
    Measure,
    duration,
    measure,
    megabytes,
    merit,
)
from prefed.experiments.ranking import Group
from prefed.experiments.stats import student_interval
from prefed.experiments.stored_runs import StoredRun
from prefed.experiments.study import Point
from prefed.experiments.study_runs import Runs, StudyRuns
from prefed.report.curves import COLOURS
from prefed.report.figures import to_bytes

Row = dict[str, Any]


def write(study_runs: StudyRuns, name: str) -> tuple[list[str], list[list[str]], str]:
    """Write STUDY.json, STUDY.md and, if there are runs, STUDY.png; the headings and the cells of
    the table, and what to mind."""
    study, runs = study_runs.study, study_runs.runs()
    rows = summarise(runs, study.reference, study.target)
    best = study_runs.best()
    edges = {n: e for n, p in best.items() if (e := study_runs.on_edge(n, p))}
    record = {
        "title": study.title,
        "config": study.config,
        "tuned": best,
        "at_the_edge": edges,
        "lines": rows,
    }
    head, lines = table(rows, study.reference)
    note = _edge_note(edges, best) if edges else ""
    text = markdown(head, lines) + (f"\n\n{note}" if note else "")
    write_whole(study_runs.out / f"{name}.json", to_json(record, indent=1) + "\n")
    write_whole(study_runs.out / f"{name}.md", text + "\n")
    shown = study.curves or list(study.compared())
    if rows:
        chosen = {label: runs[label] for label in shown if label in runs}
        picture = draw(rows, chosen, against_upload=study.ends == "upload")
        write_whole(study_runs.out / f"{name}.png", to_bytes(picture, "png"))
    return head, lines, note


def _edge_note(edges: dict[str, list[str]], best: dict[str, Point]) -> str:
    """For whoever reads the table: whose best options might lie outside of what was tried."""
    lines = (
        f"{ALGORITHMS.get(name).__name__} ({', '.join(f'{k} = {best[name][k]}' for k in keys)})"
        for name, keys in edges.items()
    )
    return f"Best at the edge of the grid, so perhaps better beyond it: {', '.join(lines)}."


def evaluations(run: StoredRun, by: Measure) -> list[tuple[int, float]]:
    """(round, accuracy in per cent or loss) of every round with an evaluation."""
    found = ((r["round"], r.get(by.key)) for r in run.history)
    return [(round, by.scale * value) for round, value in found if value is not None]


def jumps(run: StoredRun, by: Measure) -> float:
    """How much the curve jumps in the second half of the run, in per cent or units of the loss: the
    standard deviation of evaluations around their trend, estimated as the root mean square of
    second differences over sqrt(6)."""
    values = [v for _, v in evaluations(run, by)]
    values = values[len(values) // 2 :]
    bends = [a - 2 * b + c for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return math.sqrt(fmean(b * b for b in bends) / 6) if bends else math.nan


def summarise(runs: Runs, reference: str | None, target: float | None = None) -> list[Row]:
    """A row for each label with a run that has ended, the best first."""
    by = measure([run for by_seed in runs.values() for run in by_seed.values()])

    def judged(by_seed: dict[int, StoredRun]) -> dict[int, float]:
        found = {s: by.final(run) for s, run in _not_diverged(by_seed).items()}
        return {s: by.scale * value for s, value in found.items() if value is not None}

    base = judged(runs.get(reference or "", {}))
    rows = []
    for label, by_seed in runs.items():
        values = judged(by_seed)
        paired = [values[s] - base[s] for s in values if s in base]
        first = next(iter(by_seed.values()))
        up = fmean(run.total("bytes_up") for run in by_seed.values())
        whole = list(_not_diverged(by_seed).values()) or [first]
        rows.append(
            {
                "label": label,
                "algorithm": first.config["algorithm"],
                "measure": by.key,
                "values": values,
                "mean": fmean(values.values()) if values else None,
                "interval": by.cut(student_interval(list(values.values())), 0),
                "difference": fmean(paired) if paired and label != reference else None,
                "difference_interval": (
                    by.cut(student_interval(paired), -by.span) if label != reference else None
                ),
                "jumps": {run.seed: jumps(run, by) for run in whole},
                "diverged": len(by_seed) - len(values),
                "megabytes_up": up / 1e6,
                "vectors_up": up / first.total("bytes_down_weights"),
                "megabytes_down": fmean(r.total("bytes_down") for r in by_seed.values()) / 1e6,
                "seconds": fmean(run.total("seconds") for run in by_seed.values()),
            }
            | _in_time(Group(label, list(by_seed.values())), target)
        )
    return sorted(rows, key=lambda row: _merit(row, by), reverse=True)


def _in_time(runs: Group, target: float | None) -> Row:
    """Virtual time, if there is one, and what it took to get to the target, if there is one."""
    timed, found = [run for run in runs.runs if run.timed], Row()
    if timed:
        found["seconds_virtual"] = fmean(run.history[-1]["seconds_virtual"] for run in timed)
    if target is not None:
        rounds, up, count = runs.to_target(target) or (None, None, 0)
        found["to_target"] = {"accuracy": target, "runs": count, "rounds": rounds, "bytes_up": up}
        if timed:
            found["to_target"]["seconds_virtual"] = runs.time_to(target)
    return found


def _merit(row: Row, by: Measure) -> tuple[bool, float]:
    return merit([*row["values"].values(), *[None] * row["diverged"]], by)


def _is_accuracy(rows: list[Row]) -> bool:
    return any(row["measure"] == ACCURACY.key for row in rows)


def _not_diverged(by_seed: dict[int, StoredRun]) -> dict[int, StoredRun]:
    return {seed: run for seed, run in by_seed.items() if run.status != "diverged"}


def table(rows: list[Row], reference: str | None) -> tuple[list[str], list[list[str]]]:
    """Headings and cells."""
    accuracy = _is_accuracy(rows)
    what = "test accuracy %" if accuracy else "test loss"
    head = ["", what, "jumps", "MB up", "up / d", "seeds"]
    if reference:
        head.insert(2, f"minus {reference}")
    lines = []
    digits = 2 if accuracy else 5
    for row in rows:
        cells = [row["label"], _with_interval(row["mean"], row["interval"], f".{digits}f")]
        if reference:
            difference = row["difference"], row["difference_interval"]
            cells.append(_with_interval(*difference, f"+.{digits}f"))
        seeds = str(len(row["values"]))
        if row["diverged"]:
            seeds += f", {row['diverged']} diverged"
        jumps = fmean(row["jumps"].values())
        cells += [
            f"{jumps:.{digits}f}" if math.isfinite(jumps) else "",
            megabytes(1e6 * row["megabytes_up"]),
            f"{row['vectors_up']:.3g}",
            seeds,
        ]
        lines.append(cells)
    for name, column in _columns_in_time(rows):
        head.insert(-1, name)
        for cells, cell in zip(lines, column, strict=True):
            cells.insert(-1, cell)
    return head, lines


def _columns_in_time(rows: list[Row]) -> Iterator[tuple[str, list[str]]]:
    """The columns of the table that not every study has."""
    for name, key, text in (
        ("rounds", "rounds", "{:.0f}".format),
        ("MB up", "bytes_up", megabytes),
        ("virtual time", "seconds_virtual", duration),
    ):
        found = [row.get("to_target", {}) for row in rows]
        if any(key in reached for reached in found):
            target = next(reached["accuracy"] for reached in found if reached)
            values = [reached.get(key) for reached in found]
            cells = [
                "-" if value is None else text(value) + _share(row)
                for value, row in zip(values, rows, strict=True)
            ]
            yield f"{name} to {target:.0%}", cells
    if any("seconds_virtual" in row for row in rows):
        ends = [row.get("seconds_virtual") for row in rows]
        yield "virtual time", ["-" if end is None else duration(end) for end in ends]


def _share(row: Row) -> str:
    """Of the seeds that have reached the target, where some have not."""
    runs, seeds = row["to_target"]["runs"], len(row["values"])
    return f" ({runs}/{seeds})" if runs < seeds else ""


def markdown(head: list[str], lines: list[list[str]]) -> str:
    rows = ["| " + " | ".join(cells) + " |" for cells in (head, *lines)]
    return "\n".join([rows[0], "|" + "---|" * len(head), *rows[1:]])


def _with_interval(mean: float | None, interval: Sequence[float] | None, form: str) -> str:
    if mean is None:
        return ""
    text = f"{mean:{form}}"
    if interval is not None and math.isfinite(interval[0]):
        text += f" [{interval[0]:{form}}, {interval[1]:{form}}]"
    return text


def draw(rows: list[Row], shown: Runs, against_upload: bool) -> Figure:
    """On the left the curves of `shown` by round, on the right the final results of all rows."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    curves, ends = figure.subplots(1, 2)
    accuracy = _is_accuracy(rows)
    by = ACCURACY if accuracy else LOSS
    label = "test accuracy %" if accuracy else "test loss"
    styles = {name: _style(i) for i, name in enumerate(shown)}
    for name, by_seed in shown.items():
        _curve(curves, list(_not_diverged(by_seed).values()), by, name, *styles[name][:2])
    curves.set(xlabel="round", ylabel=label, title="mean over seeds")
    curves.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=(1, 2, 5, 10)))
    if not accuracy:
        curves.set_yscale("log")
    (_against_upload if against_upload else _line_by_line)(
        ends, [row for row in rows if row["mean"] is not None], styles
    )
    seeds = sorted({len(row["values"]) for row in rows if row["values"]})
    of = " to ".join(map(str, dict.fromkeys((*seeds[:1], *seeds[-1:])))) or "no"
    ends.set(title=f"at the end, 95 % intervals of {of} {'seed' if of == '1' else 'seeds'}")
    (ends.set_ylabel if against_upload else ends.set_xlabel)(label)
    for axes in (curves, ends):
        axes.grid(alpha=0.25, lw=0.5)
        axes.tick_params(labelsize=8)
    curves.legend(frameon=False, fontsize=7, ncols=2)
    return figure


Styles = dict[str, tuple[str, str, str]]
PLAIN = ("#7f7f7f", "-", ".")


def _line_by_line(axes: Axes, rows: list[Row], styles: Styles) -> None:
    """The final results, one line of the table above the other, the best on top."""
    low, high, shown = _limits(rows)
    for place, row in enumerate(reversed(rows)):
        colour, _, marker = styles.get(row["label"], PLAIN)
        if row in shown:
            axes.errorbar(row["mean"], place, xerr=_bar(row), fmt=marker, color=colour, ms=6, lw=1)
        else:
            edge, arrow = (low, "<") if row["mean"] < low else (high, ">")
            axes.plot(edge, place, arrow, color=colour, ms=6, clip_on=False)
    axes.set_yticks(range(len(rows)), [row["label"] for row in reversed(rows)])
    axes.set_xlim(low, high)


def _against_upload(axes: Axes, rows: list[Row], styles: Styles) -> None:
    low, high, shown = _limits(rows)
    for row in rows:
        colour, _, marker = styles.get(row["label"], PLAIN)
        if row in shown:
            axes.errorbar(row["megabytes_up"], row["mean"], _bar(row), fmt=marker, color=colour,
                          ms=6, lw=0.8)  # fmt: skip
        else:
            edge, arrow = (low, "v") if row["mean"] < low else (high, "^")
            axes.plot(row["megabytes_up"], edge, arrow, color=colour, ms=6, clip_on=False)
    axes.set(xlabel="megabytes uploaded", xscale="log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(low, high)


def _bar(row: Row) -> list[list[float]] | None:
    low, high = row["interval"]
    return None if not math.isfinite(low) else [[row["mean"] - low], [high - row["mean"]]]


def _style(i: int) -> tuple[str, str, str]:
    """Colour, line style and marker of the i-th label; after eight, the colours with others."""
    return COLOURS[i % 8], ("-", "--", ":")[i // 8 % 3], "os^vDP*X"[(i + i // 8) % 8]


def _curve(
    axes: Axes, runs: list[StoredRun], by: Measure, label: str, colour: str, line: str
) -> None:
    if not runs:
        return
    found = [evaluations(run, by) for run in runs]
    rounds = [r for r, _ in min(found, key=len)]
    mean = [fmean(values) for values in zip(*([v for _, v in f] for f in found), strict=False)]
    axes.plot(rounds, mean, line, color=colour, label=label, lw=1.3)


def _limits(rows: list[Row]) -> tuple[float, float, list[Row]]:
    """Limits of the axis of results, and the rows that it shows, with the whole of their intervals.
    The others failed: far from the best, they would squeeze the rest, and become arrows."""
    values = [row["mean"] for row in rows]
    best = (max if _is_accuracy(rows) else min)(values)
    middle = sorted(values)[len(values) // 2]
    far = 3 * max(3 * abs(best - middle), 0.02 * abs(best))
    low, high = best - far, best + far
    shown: list[Row] = []
    while (inside := [row for row in rows if low <= row["mean"] <= high]) != shown:
        shown = inside
        ends = [e for row in shown for e in (row["mean"], *row["interval"]) if math.isfinite(e)]
        room = 0.04 * (max(ends) - min(ends)) or 0.02 * abs(best) or 1.0
        low, high = min(ends) - room, max(ends) + room
    return low, high, shown
