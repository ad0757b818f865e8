"""Progress bars: on a terminal, in a notebook, and plain lines elsewhere."""

import copy
import importlib
from collections.abc import Iterable
from io import StringIO
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from prefed.experiments.measures import describe
from prefed.training.observers import Callback


class Bar(Callback):
    """A bar on a terminal or in a notebook, if it is wanted, while a `with` or a run lasts.

    quiet   neither a bar nor lines; None: no lines where there is no bar
    """

    def __init__(self, total: int, quiet: bool | None, *columns: ProgressColumn) -> None:
        self._progress: Progress | None = None
        self._cell: NotebookCell | None = None
        console = Console(stderr=True)
        if (console.is_terminal or console.is_jupyter) and not quiet:
            if console.is_jupyter:
                self._cell = NotebookCell()
            self._progress = Uncut(*columns, console=console, disable=console.is_jupyter)
            self._task = self._progress.add_task("", total=total)
        self.quiet = quiet is not False
        """Whether nothing is printed in place of a bar."""

    def __enter__(self) -> Self:
        self.on_start({})
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def on_start(self, config: dict[str, Any]) -> None:
        if self._progress is not None:
            self._progress.start()

    def advance(self, by: int, text: str) -> bool:
        """Move the bar on, if there is one."""
        if self._progress is not None:
            self._progress.update(self._task, advance=by, description=text)
            if self._cell is not None:
                self._cell.show(self._progress)
        return self._progress is not None

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


class Uncut(Progress):
    """Text that has no place beside a bar goes below it."""

    NARROWER = 30
    """By how many of its 40 columns a bar may shrink."""

    def get_renderables(self) -> Iterable[RenderableType]:
        tasks = self.tasks
        view = self.make_tasks_table(tasks)
        if not tasks or self._fits(view):
            return [view]
        bare = [copy.copy(task) for task in tasks]
        for task in bare:
            task.description = ""
        return [self.make_tasks_table(bare), *(Text(task.description) for task in tasks)]

    def _fits(self, view: Table) -> bool:
        unbounded = self.console.options.update(width=1 << 16)
        width = self.console.measure(view, options=unbounded).maximum
        return width - self.NARROWER <= self.console.width


class NotebookCell:
    """The output of a notebook's cell, drawn over again: rich's own way needs widgets, and leaves
    nothing in a notebook that is saved."""

    WIDTH = 200
    """More than it takes: long lines can be scrolled."""

    def __init__(self) -> None:
        self._ipython: Any = importlib.import_module("IPython.display")
        self._handle = self._ipython.display(self._ipython.HTML(""), display_id=True)

    def show(self, progress: Progress) -> None:
        console = Console(
            record=True, file=StringIO(), width=self.WIDTH, force_jupyter=False, force_terminal=True
        )
        console.print(progress.get_renderable())
        page = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
        self._handle.update(self._ipython.HTML(page))


class RoundBar(Bar):
    """The rounds of one run: a bar, or a plain line for each."""

    def __init__(self, rounds: int, quiet: bool | None) -> None:
        text = TextColumn("rounds  {task.description}", markup=False)
        left = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        super().__init__(rounds, quiet, BarColumn(), MofNCompleteColumn(), text, *left)
        self.rounds, self._seen = rounds, 0

    def say(self, text: str) -> None:
        """What happens before the first round."""
        if not self.advance(0, text) and not self.quiet:
            print(text, flush=True)

    def on_round(self, record: dict[str, Any]) -> None:
        text = describe(record)
        by, self._seen = record["round"] - self._seen, record["round"]
        if not self.advance(by, text) and not self.quiet:
            print(f"round {record['round']}/{self.rounds}  {text}", flush=True)
