"""The HTML report. All of it is in one file; whatever comes from users is escaped."""

import base64
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

import jinja2
import tomli_w
from markupsafe import Markup
from matplotlib.figure import Figure

from prefed import __version__
from prefed.core.errors import PrefedError
from prefed.core.safe_files import write_whole
from prefed.data.describe import draw
from prefed.experiments.config import load
from prefed.experiments.ranking import Group, flatten, group, headings
from prefed.experiments.stored_runs import StoredRun
from prefed.experiments.sweep import Scored
from prefed.report import figures
from prefed.report.curves import charts


def write_report(
    runs: Sequence[StoredRun],
    path: Path,
    *,
    target: float = 0.9,
    title: str = "prefed report",
    sweep: list[Scored] | None = None,
) -> list[Path]:
    """Write the report to `path` and its figures into the folder of that name; their paths."""
    groups = group(runs)
    shown = charts(groups)
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in shown:
        written += figures.save(figures.draw_chart(chart), folder / chart.name)
    heat_map = figures.draw_heat_map(sweep) if sweep else None
    if heat_map is not None:
        written += figures.save(heat_map, folder / "heat-map")
    split = _split(runs[0])
    if split is not None:
        written += figures.save(split, folder / "split")
    page = template("page.html").render(
        title=title,
        version=__version__,
        measure=groups[0].measure.name,
        headings=headings(groups[0].measure, target, groups[0].fair),
        rows=[(g.label, g.cells(target)) for g in groups],
        seeds=max(len(g.runs) for g in groups),
        diverged=_diverged(groups),
        ended=_ended(groups),
        charts=shown,
        data=[asdict(chart) for chart in shown],
        heat_map=image(heat_map),
        split=image(split),
        configs=[(g.label, tomli_w.dumps(g.runs[0].config), _commands(g)) for g in groups],
        environment=runs[0].environment,
        command=shlex.join(["prefed", *sys.argv[1:]]),
        style=asset("style.css"),
        script=asset("charts.js"),
    )
    write_whole(path, page)
    return written


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
    return "data:image/png;base64," + base64.b64encode(figures.to_bytes(figure, "png")).decode()


def _diverged(groups: list[Group]) -> list[str]:
    return [
        f"{g.label}, seed {run.seed}: in round {len(run.history)}"
        for g in groups
        for run in g.runs
        if run.status == "diverged"
    ]


def _ended(groups: list[Group]) -> list[str]:
    return [
        f"{g.label}, seed {run.seed}: after round {len(run.history)}, {run.ended}"
        for g in groups
        for run in g.runs
        if run.ended
    ]


def _commands(g: Group) -> list[str]:
    """None for models and data that were made in Python."""
    runs = [r for r in g.runs if not r.archived and "python" not in r.config.get("model", {})]
    paths = [run.folder / "config.toml" for run in runs]
    return [f"prefed run {shlex.quote(str(path))}" for path in paths]
