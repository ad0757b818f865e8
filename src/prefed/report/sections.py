"""A report of sections with text, tables and pictures, in the dress of the other reports."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from prefed import __version__
from prefed.core.safe_files import write_whole
from prefed.report import figures
from prefed.report.page import asset, image, template


@dataclass(frozen=True)
class Table:
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    name: str
    """Of its file."""
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Section:
    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = field(default=())

    @property
    def images(self) -> list[tuple[str, str, str | None]]:
        return [(p.name, p.caption, image(p.figure)) for p in self.pictures]


def write_sections(
    path: Path,
    title: str,
    sections: Sequence[Section],
    config: str,
    environment: dict[str, Any],
) -> list[Path]:
    """Write the page to `path` and its pictures into the folder of that name; their paths."""
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for section in sections:
        for picture in section.pictures:
            written += figures.save(picture.figure, folder / picture.name)
    page = template("sections.html").render(
        title=title,
        version=__version__,
        sections=sections,
        command=shlex.join(["prefed", *sys.argv[1:]]),
        config=config,
        environment=environment,
        style=asset("style.css"),
    )
    write_whole(path, page)
    return written
