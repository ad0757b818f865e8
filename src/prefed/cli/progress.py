"""Progress: a bar on a terminal, a plain line elsewhere."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def describe(record: dict[str, Any]) -> str:
    """Loss and accuracy of a round, in words."""
    loss, accuracy = record["train_loss"], record["test_accuracy"]
    text = f"loss {loss:.4f}" if loss is not None else "loss not finite"
    return text if accuracy is None else f"{text}  accuracy {accuracy:.1%}"


@contextmanager
def bar(total: int, unit: str) -> Iterator[Any]:
    """A function advance(text, plain) that moves on by one; `plain` is what is printed, if
    anything, where there is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:

        def say(text: str, plain: str | None) -> None:
            if plain is not None:
                print(plain, flush=True)

        yield say
        return
    columns = (
        BarColumn(), MofNCompleteColumn(), TextColumn(unit + "  {task.description}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=total)

        def advance(text: str, plain: str | None) -> None:
            progress.update(task, advance=1, description=text)

        yield advance


def show_log_plainly() -> None:
    """What the library has to tell, such as the engine it chose, as lines of their own."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("prefed")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def show_warnings_plainly() -> None:
    """Our own warnings as one readable line, without the source line that raised them."""

    def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show
