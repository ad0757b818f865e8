"""What many runs are doing: a table that is redrawn on a terminal, a line per run elsewhere."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from prefed.cli.options import unused
from prefed.experiments.measures import describe
from prefed.experiments.plans import Planned

ROWS = 24
"""Rows of the live table: what is running comes first."""


class LiveRuns:
    def __init__(self, total: int, quiet: bool, out: Path) -> None:
        self.total, self.quiet, self.out, self.done = total, quiet, out, 0
        self.current: dict[str, str] = {}
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
            return
        self.done += 1
        last = self.current.pop(planned.title, "")
        if not self.live and not self.quiet:
            print(f"[{self.done}/{self.total}] {planned.title}: {event['end']}  {last}", flush=True)

    def _draw(self) -> Table:
        view = Table("run", "state", title=f"{self.done} of {self.total} runs done")
        for title, state in list(self.current.items())[:ROWS]:
            view.add_row(title, state)
        return view


def new_out(kind: str, config: str) -> Path:
    """A fresh directory for an experiment without --out."""
    return unused(f"{kind}-{Path(config).stem}")


def split_names(text: str) -> Sequence[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
