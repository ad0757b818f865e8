"""Progress: a bar on a terminal, a plain line elsewhere."""

import logging
import sys
import warnings
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from prefed.core.safe_files import to_json
from prefed.experiments.measures import describe
from prefed.training.observers import Callback


class Bar(Callback):
    """A bar on a terminal, if it is wanted, while a `with` or a run lasts."""

    def __init__(self, total: int, quiet: bool, *columns: ProgressColumn) -> None:
        self.quiet = quiet
        self._progress: Progress | None = None
        console = Console(stderr=True)
        if console.is_terminal and not quiet:
            self._progress = Progress(*columns, console=console)
            self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Self:
        self.on_start({})
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def on_start(self, config: dict[str, Any]) -> None:
        if self._progress is not None:
            self._progress.start()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


class RoundBar(Bar):
    """The rounds of one run: a bar on a terminal, a plain line for each elsewhere."""

    def __init__(self, rounds: int, quiet: bool) -> None:
        text = TextColumn("rounds  {task.description}", markup=False)
        left = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        super().__init__(rounds, quiet, BarColumn(), MofNCompleteColumn(), text, *left)
        self.rounds, self._seen = rounds, 0

    def say(self, text: str) -> None:
        """What happens before the first round."""
        if self._progress is not None:
            self._progress.update(self._task, description=text)
        elif not self.quiet:
            print(text, flush=True)

    def on_round(self, record: dict[str, Any]) -> None:
        text = describe(record)
        by, self._seen = record["round"] - self._seen, record["round"]
        if self._progress is not None:
            self._progress.update(self._task, advance=by, description=text)
        elif not self.quiet:
            print(f"round {record['round']}/{self.rounds}  {text}", flush=True)


class WorkBar(Bar):
    """Pieces of work of one kind or another: a bar on a terminal, a plain line for each elsewhere
    whenever a tenth is done."""

    def __init__(self, total: int, quiet: bool) -> None:
        share = TextColumn("{task.percentage:>3.0f}%")
        text = TextColumn("{task.description}", markup=False)
        left = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        super().__init__(total, quiet, BarColumn(), share, *left, text)
        self.total, self.done = total, 0

    def tick(self, text: str) -> None:
        before, self.done = self.done, self.done + 1
        if self._progress is not None:
            self._progress.update(self._task, advance=1, description=text)
        elif not self.quiet and 10 * before // self.total < 10 * self.done // self.total:
            print(f"{100 * self.done // self.total} %  {text}", flush=True)


class JsonLines(RoundBar):
    """Each round as a line of JSON, for other programs."""

    def __init__(self) -> None:
        super().__init__(0, quiet=True)

    def on_round(self, record: dict[str, Any]) -> None:
        print(to_json(record), flush=True)


class _Stderr(logging.StreamHandler[Any]):
    """Writes to what stderr is at the moment: while a bar is drawn, lines go above it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def show_log_plainly() -> None:
    """What the library has to tell, such as the engine it chose, as lines of their own."""
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("prefed")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def show_warnings_plainly() -> None:
    """Our own warnings as one readable line, without the source line that raised them."""

    def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show
