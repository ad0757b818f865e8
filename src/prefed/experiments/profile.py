"""Where the time of a run goes: a table by parts of a run and by operators of torch, and a trace.

profile.txt   the table
trace.json    a few rounds, operator by operator, for ui.perfetto.dev or chrome://tracing

It looks on: a run ends in the same bits with it and without.
"""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from prefed.core.parts import timed, watched_by
from prefed.core.safe_files import write_whole
from prefed.training.observers import Callback
from prefed.training.trainer import Record

TRACED = 2
"""Rounds in the trace, after the first, which also allocates memory."""
MOST_STEPS = 300
"""Local steps in the trace, about: of a run whose rounds have more, it is of one round; of none, if
they have ten times as many."""
OPERATORS = 20
"""Rows of the table by operator."""
WHOLE = "engine choice"
"""A part that has all threads to itself: what is measured inside it is nobody's training."""
STEP = "forward and backward"


class Profile(Callback):
    """Adds up the seconds of each part, less those of the parts inside it, thread by thread."""

    def __init__(self, before: float = 0.0) -> None:
        """`before` is how long the process was at it already."""
        self.began = time.perf_counter() - before
        self.main = threading.get_ident()
        self.seconds: dict[tuple[str, bool], float] = defaultdict(float)
        """Of each part, in the main thread (True) and in all others together."""
        self.processor: dict[str, float] = defaultdict(float)
        """Of each part, in all threads that tell of it."""
        self.calls: dict[str, int] = defaultdict(int)
        self.local = threading.local()
        self.muted = False
        self.torch: Any = None
        """Torch's profiler, while it is on."""
        self.operators: Any = None
        self.engine, self.traced = "", 0
        if before:
            self.seconds["imports", True], self.calls["imports"] = before, 1
            self.processor["imports"] = time.process_time()

    @contextmanager
    def watching(self) -> Iterator[None]:
        with watched_by(self):
            yield
        self.total = time.perf_counter() - self.began
        self.total_processor = time.process_time()

    # Parts

    def begin(self, name: str) -> None:
        stack = self.local.__dict__.setdefault("stack", [])
        if name == WHOLE:
            self.muted = True
        mark = None
        if self.torch is not None:
            mark = record_function(name)
            mark.__enter__()
        stack.append([name, time.perf_counter(), time.thread_time(), 0.0, 0.0, mark])

    def end(self) -> None:
        stack = self.local.stack
        name, start, used, inner, inner_used, mark = stack.pop()
        elapsed, used = time.perf_counter() - start, time.thread_time() - used
        if mark is not None:
            mark.__exit__(None, None, None)
        if stack:
            stack[-1][3] += elapsed
            stack[-1][4] += used
        if name == WHOLE:
            self.muted, inner, inner_used = False, 0.0, 0.0
        if not self.muted:
            self.seconds[name, threading.get_ident() == self.main] += elapsed - inner
            self.processor[name] += used - inner_used
            self.calls[name] += 1

    # Operators, in a few rounds

    def on_start(self, config: dict[str, Any]) -> None:
        self.engine = self.run.trainer.engine
        self.last = self.run.settings.rounds
        if self.last - self.run.server.round <= 1:
            self._trace()

    def on_round(self, record: Record) -> None:
        steps = self.calls[STEP] / max(1, len(self.run.history))
        if self.torch is not None:
            self.traced += 1
            if self.traced >= TRACED or steps > MOST_STEPS:
                self._stop()
        elif not self.traced and record["round"] < self.last and steps < 10 * MOST_STEPS:
            self._trace()

    def close(self) -> None:
        self._stop()

    @timed("the profile itself")
    def _trace(self) -> None:
        self.torch = profile(activities=[ProfilerActivity.CPU], experimental_config=_all_threads())
        self.torch.start()

    @timed("the profile itself")
    def _stop(self) -> None:
        if self.torch is not None:
            self.torch.stop()
            self.operators, self.torch, self.traced = self.torch, None, max(1, self.traced)

    # What was found

    def write(self, folder: Path) -> str:
        """The table, which is also written into the directory of the run, as the trace is."""
        text = "\n".join([*self._parts(), "", *self._by_operator()]) + "\n"
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "profile.txt", text)
        if self.operators is not None:
            draft = folder / ".trace.json.tmp"
            self.operators.export_chrome_trace(str(draft))
            os.replace(draft, folder / "trace.json")
        return text

    def _parts(self) -> Iterator[str]:
        others = any(not main for _, main in self.seconds)
        known = sum(value for (_, main), value in self.seconds.items() if main)
        yield f"{self.total:.2f} s, {self.total_processor:.2f} s of processor time; {self.engine}"
        yield ""
        head = f"{'part':<24}{'seconds':>10}{'share':>9}"
        yield f"{head}{'in workers' if others else '':>12}{'processor':>11}{'calls':>9}".rstrip()
        names = {name for name, _ in self.seconds}
        order = sorted(
            names, key=lambda n: -sum(self.seconds.get((n, m), 0) for m in (True, False))
        )
        for name in [*order, "the rest"]:
            here = self.seconds.get((name, True), 0.0)
            here = self.total - known if name == "the rest" else here
            line = f"{name:<24}{here:>10.3f}{here / self.total:>9.1%}"
            there = f"{self.seconds.get((name, False), 0.0):.3f}" if others else ""
            rest = self.total_processor - sum(self.processor.values())
            used = rest if name == "the rest" else self.processor[name]
            yield f"{line}{there:>12}{used:>11.3f}{self.calls[name] or '':>9}".rstrip()

    def _by_operator(self) -> Iterator[str]:
        if self.operators is None:
            yield f"no trace: a round has more than {10 * MOST_STEPS} local steps"
            return
        events = [e for e in self.operators.key_averages() if e.key.startswith("aten::")]
        events.sort(key=lambda e: -e.self_cpu_time_total)
        total = sum(e.self_cpu_time_total for e in events) or 1.0
        yield f"operators of torch in {self.traced} round{'s' if self.traced > 1 else ''}, alone"
        yield ""
        yield f"{'operator':<44}{'seconds':>10}{'share':>9}{'calls':>10}"
        for e in events[:OPERATORS]:
            share = e.self_cpu_time_total / total
            seconds = e.self_cpu_time_total / 1e6
            yield f"{e.key.removeprefix('aten::'):<44}{seconds:>10.3f}{share:>9.1%}{e.count:>10}"


def _all_threads() -> Any:
    """Operators of worker threads too, where torch can tell."""
    make = torch._C._profiler._ExperimentalConfig
    try:
        return make(profile_all_threads=True)
    except TypeError:
        return make()


def since_start() -> float:
    """Seconds since this process began; where that is not known, those that it has computed for."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError, IndexError):
        return time.process_time()
