"""What the command line prints while it works, besides bars."""

import logging
import sys
import warnings
from typing import Any

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from prefed.cli.text import folded, say
from prefed.core.safe_files import to_json
from prefed.experiments.bars import Bar
from prefed.training.observers import Callback


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
        moved = self.advance(1, text)
        if (
            not moved
            and not self.quiet
            and 10 * before // self.total < 10 * self.done // self.total
        ):
            print(f"{100 * self.done // self.total} %  {text}", flush=True)


class JsonLines(Callback):
    """Each round as a line of JSON, for other programs."""

    def on_round(self, record: dict[str, Any]) -> None:
        print(to_json(record), flush=True)


class _Stderr(logging.StreamHandler[Any]):
    """Writes to what stderr is at the moment: while a bar is drawn, lines go above it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        return folded(super().format(record), "  ", self.stream)


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
        say(f"warning: {message}", "  ", sys.stderr)

    warnings.showwarning = show
