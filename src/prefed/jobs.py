"""Many runs side by side: worker processes that take configs and answer with records.

A worker is `python -m prefed.jobs`. It reads one job per line of JSON on standard input and writes
events as lines of JSON on standard output, so that nothing but JSON crosses between processes.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

Event = tuple[int, dict[str, Any]]
"""The number of the job, and {"record": ...}, {"done": true} or {"failed": message}."""


@dataclass(frozen=True)
class Job:
    config: dict[str, Any]
    folder: Path | None = None


def run_jobs(jobs: list[Job], workers: int) -> Iterator[Event]:
    """Run the jobs on so many processes with one thread each; events come as they happen."""
    events: queue.Queue[Event | None] = queue.Queue()
    waiting: queue.Queue[tuple[int, Job]] = queue.Queue()
    for item in enumerate(jobs):
        waiting.put(item)
    workers = max(1, min(workers, len(jobs)))
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "prefed.jobs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(workers)
    ]
    threads = [threading.Thread(target=_serve, args=(p, waiting, events)) for p in processes]
    try:
        for thread in threads:
            thread.start()
        while workers:
            event = events.get()
            if event is None:
                workers -= 1
            else:
                yield event
    finally:
        waiting.queue.clear()
        for process in processes:
            process.terminate()
        for thread, process in zip(threads, processes, strict=True):
            thread.join()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]


def _serve(
    process: subprocess.Popen[str],
    waiting: queue.Queue[tuple[int, Job]],
    events: queue.Queue[Event | None],
) -> None:
    """Hand one worker its jobs, one at a time, and pass its events on."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        while True:
            try:
                number, job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                folder = None if job.folder is None else str(job.folder)
                process.stdin.write(json.dumps({"config": job.config, "folder": folder}) + "\n")
                process.stdin.flush()
            except OSError:
                pass  # the worker is gone: reading says so below
            _relay(number, process.stdout, events)
    finally:
        events.put(None)


def _relay(number: int, lines: IO[str], events: queue.Queue[Event | None]) -> None:
    for line in lines:
        event = json.loads(line)
        events.put((number, event))
        if "record" not in event:
            return
    events.put((number, {"failed": "its worker process died"}))


def _work() -> None:
    import torch

    from prefed.config import load
    from prefed.errors import Diverged, PrefedError
    from prefed.runs import execute, to_json
    from prefed.simulation import Callback, Record

    class Tell(Callback):
        def on_round(self, record: Record) -> None:
            print(f'{{"record": {to_json(record)}}}', file=out, flush=True)

    torch.set_num_threads(1)
    out = sys.stdout
    sys.stdout = sys.stderr  # what a model or a plug-in prints must not mix with the events
    for line in sys.stdin:
        job = json.loads(line)
        folder = None if job["folder"] is None else Path(job["folder"])
        try:
            execute(load(job["config"]), folder, resume=True, callbacks=[Tell()])
            event: dict[str, Any] = {"done": True}
        except Diverged as error:
            event = {"diverged": str(error)}
        except PrefedError as error:
            event = {"failed": str(error)}
        except Exception as error:  # a job that fails must not take the others with it
            event = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(event), file=out, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all: the parent ends us
    _work()
