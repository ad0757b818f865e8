"""Ctrl-C: once finishes the round and saves, twice stops at once."""

import signal
import sys
from types import FrameType
from typing import Any


class StopOnSignal:
    """While open, the first SIGINT or SIGTERM only makes `asked` true; the second interrupts."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._asked = False
        self._before: dict[int, Any] = {}

    def asked(self) -> bool:
        return self._asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        if not self._quiet:
            print("finishing the round; once more to stop at once", file=sys.stderr, flush=True)

    def __enter__(self) -> "StopOnSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
