"""The same curves as figures for papers: PDF and PNG."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from prefed.core.safe_files import write_whole
from prefed.experiments.measures import measure
from prefed.experiments.sweep import Scored
from prefed.report.curves import COLOURS, Chart


def draw_chart(chart: Chart) -> Figure:
    figure, axes = _figure()
    for curve in (c for c in chart.curves if c.x):
        style = ("-", "--", "-.", ":")[curve.dash % 4]
        steps = "steps-mid" if chart.steps else "default"
        axes.plot(curve.x, curve.mean, style, color=curve.colour, label=curve.label, lw=1.3,
                  drawstyle=steps)  # fmt: skip
        if curve.low:
            axes.fill_between(curve.x, curve.low, curve.high, color=curve.colour, alpha=0.15, lw=0)
    axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
    if chart.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if chart.log:
        axes.set_yscale("log")
    _mark_whole(axes, [x for curve in chart.curves for x in curve.x])
    axes.legend(frameon=False, fontsize=8)
    return figure


@dataclass(frozen=True)
class Line:
    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "-"
    """Of matplotlib: "-" for what was measured, "--" for what was claimed, "o-" for points."""


def draw_lines(
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = True,
    colours: int = len(COLOURS),
) -> Figure:
    """Any lines; the colours start again after `colours` lines, so that pairs can share one."""
    figure, axes = _figure()
    for i, line in enumerate(lines):
        colour = COLOURS[i % colours % len(COLOURS)]
        axes.plot(line.x, line.y, line.style, color=colour, label=line.label, lw=1.3, ms=4)
    axes.set(xlabel=x_label, ylabel=y_label)
    if log_x:
        axes.set_xscale("log")
    else:
        _mark_whole(axes, [x for line in lines for x in line.x])
    if log_y:
        axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
    return figure


def draw_heat_map(scored: list[Scored]) -> Figure | None:
    """What is swept for, over the first two keys (the best over the others), or None."""
    keys = list(scored[0].point)[:2]
    if len(keys) < 2:
        return None
    columns, rows = (_sorted({s.point[key] for s in scored}) for key in keys)
    if len(columns) * len(rows) > 2 * len(scored):
        return None  # drawn at random: no grid to show
    best: dict[tuple[str, str], float] = {}
    for s in scored:
        cell = (s.point[keys[0]], s.point[keys[1]])
        best[cell] = max(best.get(cell, -math.inf), s.score)
    figure, axes = _figure()
    axes.grid(False)
    by = measure([run for s in scored for run in s.runs])
    values = [
        [by.scale * by.sign * best.get((column, row), math.nan) for column in columns]
        for row in rows
    ]
    finite = [v for line in values for v in line if math.isfinite(v)]
    shown = [[v if math.isfinite(v) else math.nan for v in line] for line in values]
    colours = "viridis" if by.sign > 0 else "viridis_r"
    image = axes.imshow(shown, origin="lower", cmap=colours, aspect="auto",
                        vmin=min(finite, default=0), vmax=max(finite, default=1))  # fmt: skip
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel=keys[0], ylabel=keys[1])
    middle = (min(finite, default=0) + max(finite, default=1)) / 2
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            text = "div." if math.isinf(value) else ""
            if math.isfinite(value):
                text = by.text(value / by.scale)
            dark = math.isfinite(value) and by.sign * (value - middle) < 0
            colour = "white" if dark else "black"
            axes.text(x, y, text, ha="center", va="center", color=colour, fontsize=8)
    figure.colorbar(image, label=by.heading("validation"))
    return figure


def save(figure: Figure, path: Path) -> list[Path]:
    """As NAME.pdf and NAME.png, laid out once for both."""
    written = []
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for kind in ("pdf", "png"):
        target = path.with_name(f"{path.name}.{kind}")
        write_whole(target, to_bytes(figure, kind))
        written.append(target)
    return written


def to_bytes(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    # No date in the file: the same runs give the same bytes.
    metadata: dict[str, Any] = {"CreationDate": None} if kind == "pdf" else {"Software": None}
    figure.savefig(buffer, format=kind, dpi=160, metadata=metadata)
    return buffer.getvalue()


def _figure() -> tuple[Figure, Any]:
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, lw=0.5)
    return figure, axes


def _mark_whole(axes: Any, x: Sequence[float]) -> None:
    """Where only whole numbers stand on the axis below, as rounds, only they are marked there."""
    if all(value == int(value) for value in x):
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)


def _sorted(texts: set[str]) -> list[str]:
    try:
        return sorted(texts, key=float)
    except ValueError:
        return sorted(texts)
