"""What many runs are doing: a table that is redrawn on a terminal, a line per run elsewhere."""

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from prefed.cli.options import unused
from prefed.experiments.measures import describe, duration
from prefed.experiments.plans import OnEvent, Planned

ROWS = 24
"""Rows of the live table: what is running comes first."""


class LiveRuns:
    """rounds are those of each run, for an estimate of the time that is left."""

    def __init__(self, rounds: Sequence[int], quiet: bool, out: Path) -> None:
        self.total, self.quiet, self.out, self.done = len(rounds), quiet, out, 0
        self.current: dict[str, str] = {}
        self.began, self.rounds_done, self.rounds_left = time.monotonic(), 0, sum(rounds)
        self.rounds_of: dict[str, int] = {}
        """Of the runs under way: how many are done."""
        console = Console(stderr=True)
        self.live = None
        if console.is_terminal and not quiet:
            self.live = Live(
                console=console, refresh_per_second=6, get_renderable=self._draw, transient=True
            )

    def __enter__(self) -> "LiveRuns":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self.live:
            self.live.stop()
        if kind is KeyboardInterrupt:
            print(f"stopped; the same command with --out {self.out} goes on", file=sys.stderr)

    def on_event(self, planned: Planned, event: dict[str, Any]) -> None:
        if "record" in event:
            record = event["record"]
            rounds = f"round {record['round']}/{planned.config.rounds}"
            self.current[planned.title] = f"{rounds}  {describe(record)}"
            self.rounds_of[planned.title] = self.rounds_of.get(planned.title, 0) + 1
            self.rounds_done += 1
            self.rounds_left -= 1
            return
        self.done += 1
        self.rounds_left -= planned.config.rounds - self.rounds_of.pop(planned.title, 0)
        last = self.current.pop(planned.title, "")
        if not self.live and not self.quiet:
            text = f"[{self.done}/{self.total}] {planned.title}: {event['end']}  {last}"
            print(f"{text}{self._left()}", flush=True)

    def _left(self) -> str:
        """The time that is left, if the rounds to come take as long as those that were seen."""
        if not self.rounds_done or self.rounds_left <= 0:
            return ""
        seconds = (time.monotonic() - self.began) * self.rounds_left / self.rounds_done
        return f"  about {duration(seconds)} left"

    def _draw(self) -> Table:
        title = f"{self.done} of {self.total} runs done{self._left()}"
        view = Table("run", "state", title=title)
        for title, state in list(self.current.items())[:ROWS]:
            view.add_row(title, state)
        return view


def for_minutes(minutes: float | None, on_event: OnEvent) -> OnEvent:
    """The same, until the time is over: then TimeoutError."""
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes

    def check(planned: Planned, event: dict[str, Any]) -> None:
        on_event(planned, event)
        if time.monotonic() > end:
            raise TimeoutError

    return check


def new_out(kind: str, config: str) -> Path:
    """A fresh directory for an experiment without --out."""
    return unused(f"{kind}-{Path(config).stem}")


def split_names(text: str) -> Sequence[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
