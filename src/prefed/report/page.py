"""The HTML report. All of it is in one file; whatever comes from users is escaped."""

import base64
import shlex
import sys
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import tomli_w
from markupsafe import Markup
from matplotlib.figure import Figure

from prefed import __version__
from prefed.core.errors import PrefedError
from prefed.core.safe_files import write_whole
from prefed.data.describe import draw
from prefed.experiments.config import load
from prefed.experiments.measures import megabytes
from prefed.experiments.ranking import Group, flatten, group, headings
from prefed.experiments.stored_runs import StoredRun
from prefed.experiments.sweep import Scored, points_of
from prefed.report import figures as drawn
from prefed.report.curves import charts


def write_report(
    runs: Sequence[StoredRun],
    path: Path,
    *,
    target: float = 0.9,
    title: str = "prefed report",
    sweep: list[Scored] | None = None,
    notes: Sequence[str] = (),
    figures: Path | None = None,
) -> list[Path]:
    """Write the report to `path`, and into the folder `figures`, if one is named, its figures;
    their paths.

    sweep  its points, if the runs are of one; by default of two keys, if the runs differ in two
    notes  sentences for a reader to mind, such as a best point at the edge of its grid
    """
    groups = group(runs)
    shown = charts(groups)
    if sweep is None and len((found := points_of(runs) or [Scored({}, [])])[0].point) == 2:
        sweep = found
    heat_map = drawn.draw_heat_map(sweep) if sweep else None
    split = _split(runs[0])
    written = []
    if figures is not None:
        figures.mkdir(parents=True, exist_ok=True)
        for chart in shown:
            written += drawn.save(drawn.draw_chart(chart), figures / chart.name)
        for name, figure in (("heat-map", heat_map), ("split", split)):
            if figure is not None:
                written += drawn.save(figure, figures / name)
    path.parent.mkdir(parents=True, exist_ok=True)
    page = render(
        title,
        _summary(groups),
        {"charts": [chart.to_dict() for chart in shown]},
        tables=tables(groups, target, notes),
        measure=groups[0].measure.name,
        live="",
        heat_map=image(heat_map),
        split=image(split),
        configs=[(g.label, tomli_w.dumps(g.runs[0].config), _commands(g)) for g in groups],
        environment=runs[0].environment,
        command=shlex.join(["prefed", *sys.argv[1:]]),
    )
    write_whole(path, page)
    return written


def render(title: str, summary: str, data: dict[str, Any], **parts: Any) -> str:
    """The page of a report, or of runs under way: `data` is what its script draws."""
    return template("page.html").render(
        title=title,
        summary=summary,
        data=data,
        version=__version__,
        style=asset("vendor/uplot.css") + asset("style.css"),
        script=asset("vendor/uplot.js") + asset("charts.js"),
        **parts,
    )


def tables(
    groups: list[Group],
    target: float,
    notes: Sequence[str] = (),
    progress: Sequence[tuple[str, list[str]]] = (),
) -> Markup:
    """The tables of a page: a ranking for each split that runs were evaluated on, what to mind, and
    what went over the wire. For runs under way, `progress` is a row for each."""
    rankings = []
    for split, name in (("test", "the test set"), ("validation", "the validation split")):
        if own := [g for g in groups if g.split == split]:
            rows = [(g.label, g.cells(target)) for g in own]
            rankings.append({"on": name, "headings": headings(own[0], target), "rows": rows})
    text = template("tables.html").render(
        rankings=rankings,
        measure=groups[0].measure.name,
        notes=[*notes, *_diverged(groups), *_ended(groups)],
        progress=progress,
        traffic=list({g.label: _traffic(g) for g in groups}.items()),
    )
    return Markup(text)


def _traffic(g: Group) -> list[str]:
    """Megabytes of weights and of optimiser state, up and down, and the state's share of the
    upload."""
    keys = ("bytes_up_weights", "bytes_up_state", "bytes_down_weights", "bytes_down_state")
    if not all(
        isinstance(r.get(k), int | float) for k in keys for run in g.runs for r in run.history
    ):
        return ["-"] * 5  # records of an early version
    up, state, *down = (g.mean_total(key) for key in keys)
    share = 100 * state / (up + state) if up + state else 0.0
    return [*map(megabytes, (up, state, *down)), f"{share:.1f}"]


def _summary(groups: list[Group]) -> str:
    settings, seeds = len({g.label for g in groups}), max(len(g.runs) for g in groups)
    many = "setting" if settings == 1 else "settings"
    return f"{settings} {many}, up to {seeds} {'seed' if seeds == 1 else 'seeds'} each."


@cache
def template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("prefed.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def asset(name: str) -> Markup:
    return Markup(files("prefed.report").joinpath(name).read_text())


def _split(run: StoredRun) -> Figure | None:
    """The picture of the first run's split, if its data are at hand. Not if the config names
    things of a user's own: a report must be safe to make of a stranger's runs."""
    values = (value for key, value in flatten(run.config).items() if key != "device")
    if any(":" in str(value) for value in values):
        return None
    try:
        return draw(*load(run.config).make_data())
    except PrefedError:
        return None


def image(figure: Figure | None) -> str | None:
    if figure is None:
        return None
    return "data:image/png;base64," + base64.b64encode(drawn.to_bytes(figure, "png")).decode()


def _diverged(groups: list[Group]) -> list[str]:
    found = [
        f"{g.label}, seed {run.seed}: in round {len(run.history)}"
        for g in groups
        for run in g.runs
        if run.status == "diverged"
    ]
    return [f"Diverged: {'; '.join(found)}."] if found else []


def _ended(groups: list[Group]) -> list[str]:
    found = [
        f"{g.label}, seed {run.seed}: after round {len(run.history)}, {run.ended}"
        for g in groups
        for run in g.runs
        if run.ended
    ]
    return [f"Ended early: {'; '.join(found)}."] if found else []


def _commands(g: Group) -> list[str]:
    """None for models and data that were made in Python."""
    runs = [r for r in g.runs if not r.archived and "python" not in r.config.get("model", {})]
    paths = [run.folder / "config.toml" for run in runs]
    return [f"prefed run {shlex.quote(str(path))}" for path in paths]
