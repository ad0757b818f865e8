"""Many runs side by side: worker processes that take configs and answer with records.

A worker is `python -m prefed.experiments.jobs`. It reads one job per line of JSON on standard input
and writes events as lines of JSON on standard output: nothing but JSON crosses between processes.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefed.experiments.trackers import Tracking

Event = tuple[int, dict[str, Any]]
"""The number of the job, and {"record": ...}, {"done": true} or {"failed": message}."""


@dataclass(frozen=True)
class Job:
    config: dict[str, Any]
    folder: Path | None = None
    tracking: "Tracking | None" = None
    name: str = ""
    """Of the run, for trackers."""

    def to_json(self) -> str:
        """As a worker reads it."""
        table = {"config": self.config, "folder": self.folder, "name": self.name}
        if self.tracking is not None:
            table["tracking"] = asdict(self.tracking)
        return json.dumps(table, default=str)


def run_jobs(jobs: list[Job], workers: int) -> Iterator[Event]:
    """Run the jobs on `workers` processes with one thread each; events come as they happen."""
    events: queue.Queue[Event | None] = queue.Queue()
    waiting: queue.Queue[tuple[int, Job]] = queue.Queue()
    for item in enumerate(jobs):
        waiting.put(item)
    workers = max(1, min(workers, len(jobs)))
    processes: list[subprocess.Popen[str]] = []
    threads: list[threading.Thread] = []
    tellers: list[threading.Thread] = []
    told: set[str] = set()
    try:
        for _ in range(workers):
            process = subprocess.Popen(
                [sys.executable, "-m", "prefed.experiments.jobs"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            processes.append(process)
            teller = threading.Thread(target=_tell, args=(process.stderr, told), daemon=True)
            tellers.append(teller)
            teller.start()
            threads.append(threading.Thread(target=_serve, args=(process, waiting, events)))
            threads[-1].start()
        while workers:
            event = events.get()
            if event is None:
                workers -= 1
            else:
                yield event
        while not waiting.empty():
            yield waiting.get()[0], {"failed": "no worker process is left"}
    finally:
        waiting.queue.clear()
        for process in processes:
            process.terminate()
        for thread in threads:
            thread.join()
        for process in processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
        for teller in tellers:
            teller.join(timeout=1)  # what a tracker has started may hold the pipe open


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
                process.stdin.write(job.to_json() + "\n")
                process.stdin.flush()
            except OSError:
                pass  # the worker is gone: reading says so below
            if not _relay(number, process.stdout, events):
                return  # the jobs that wait are for the others
    finally:
        events.put(None)


def _tell(lines: IO[str], told: set[str]) -> None:
    """Pass on what a worker has to say besides events, through this process, lest it run into a
    live table. What several runs say alike is said once; indented lines are of tracebacks."""
    with lines:
        for line in lines:
            if line[:1].isspace() or line not in told:
                told.add(line)
                print(line, end="", file=sys.stderr, flush=True)


def _relay(number: int, lines: IO[str], events: queue.Queue[Event | None]) -> bool:
    """Pass on the events of one job; whether the worker is still there after it."""
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            break  # killed in the middle of a line
        events.put((number, event))
        if "record" not in event:
            return True
    events.put((number, {"failed": "its worker process died"}))
    return False


def _listen(stream: IO[str]) -> queue.Queue[str]:
    """The lines of a stream, as they come. When it ends, because whoever started this process has,
    however that came about, the process ends at once, also in the middle of a job: runs on disk
    bear that, and no process is left behind."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _work() -> None:
    jobs = _listen(sys.stdin)
    import torch

    from prefed.core.errors import Diverged, PrefedError
    from prefed.core.safe_files import to_json
    from prefed.experiments.config import load
    from prefed.experiments.run_directory import execute
    from prefed.experiments.trackers import Tracking
    from prefed.training.observers import Callback
    from prefed.training.trainer import Record

    class Tell(Callback):
        def on_round(self, record: Record) -> None:
            print(f'{{"record": {to_json(record)}}}', file=out, flush=True)

    torch.set_num_threads(1)
    out = sys.stdout
    sys.stdout = sys.stderr  # what a model or a plug-in prints must not mix with the events
    while True:
        job = json.loads(jobs.get())
        folder = None if job["folder"] is None else Path(job["folder"])
        try:
            callbacks: list[Callback] = [Tell()]
            if about := job.get("tracking"):
                tracking = Tracking(about["names"], Path(about["out"]), about["group"])
                callbacks += tracking.callbacks(job["name"])
            execute(load(job["config"]), folder, resume=True, callbacks=callbacks)
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
