"""The threads among which programs in C divide what they do for a block of clients."""

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress


class Hands:
    """This thread, and helpers that wait for work meanwhile."""

    def __init__(self, helpers: int = 0) -> None:
        self.count = 1 + helpers
        self._helpers: list[int] = []
        """Their threads, as the system numbers them."""
        self._pool = None
        if helpers:  # a thread that knew its pool would hold it for ever
            begin = _begin, (self._helpers,)
            self._pool = ThreadPoolExecutor(helpers, "prefed-hand", *begin)
        self._sent = -1, 0
        """The core that they were last sent away from, and how many they were."""

    def work(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Do these side by side, the first in this thread; no more than there are hands."""
        first, *others = jobs
        helped = []
        if self._pool is not None and others:
            self._send_away()
            helped = [self._pool.submit(job) for job in others]
        try:
            first()
        finally:
            wait(helped)
        for job in helped:
            job.result()

    def parts(self, rows: int) -> list[slice]:
        """Of so many rows, one for each."""
        count = max(1, min(self.count, rows))
        ends = [rows * part // count for part in range(count + 1)]
        return [*map(slice, ends, ends[1:])]

    def _send_away(self) -> None:
        """Let helpers wake up on another core than this thread's. Linux takes the core of a virtual
        machine that sleeps for one that is not there: a thread that is woken after a pause may
        stand behind the one that woke it for four milliseconds."""
        if _this_core is None or (core := _this_core()) < 0:
            return
        helpers = [*self._helpers]
        if self._sent == (core, len(helpers)):
            return
        if others := os.sched_getaffinity(0) - {core}:
            for helper in helpers:
                with suppress(OSError):
                    os.sched_setaffinity(helper, others)
        self._sent = core, len(helpers)


def _begin(helpers: list[int]) -> None:
    helpers.append(threading.get_native_id())


def _find() -> Callable[[], int] | None:
    """What tells the core that a thread is on, where threads can be sent to others."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    with suppress(OSError, AttributeError):
        found: Callable[[], int] = ctypes.CDLL(None).sched_getcpu
        return found
    return None


_this_core = _find()
ALONE = Hands()
