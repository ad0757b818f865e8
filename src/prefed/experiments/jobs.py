"""Many runs side by side: worker processes that take configs and answer with records.

A worker (nursery.py) reads one job per line of JSON on standard input and writes events as lines of
JSON on standard output: nothing but JSON crosses between processes.
"""

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, Self

from prefed.experiments.nursery import Nursery, Worker, nursery

if TYPE_CHECKING:
    from prefed.experiments.config import Config, MadeData
    from prefed.experiments.trackers import Tracking
    from prefed.training.run import MakeTrainer
    from prefed.training.trainer import Trainer

Event = tuple[int, dict[str, Any]]
"""The number of the job, and {"record": ...}, {"done": true} or {"failed": message}."""


@dataclass(frozen=True)
class Job:
    config: dict[str, Any]
    folder: Path | None = None
    tracking: "Tracking | None" = None
    name: str = ""
    """Of the run, for trackers."""
    evaluate_from: int = 1
    """Nobody looks at evaluations before this round."""

    def to_json(self, engine: str = "") -> str:
        """As a worker reads it."""
        table: dict[str, Any] = {"config": self.config, "folder": self.folder, "name": self.name}
        table |= {"evaluate_from": self.evaluate_from, "engine": engine}
        if self.tracking is not None:
            table["tracking"] = asdict(self.tracking)
        return json.dumps(table, default=str)

    @property
    def kind(self) -> str:
        """What decides which engine is the fastest: all but seeds, step sizes and the like."""
        algorithm = self.config["algorithm"]

        def is_rate(value: Any) -> bool:
            return isinstance(value, float) or (isinstance(value, dict) and "schedule" in value)

        algorithm = {k: v for k, v in algorithm.items() if not is_rate(v)}
        return json.dumps({**self.config, "algorithm": algorithm, "seed": 0}, sort_keys=True)


class Processes:
    """Worker processes with one thread each, which import and measure once for all their runs.

    They end with the block, and with this process, however it ends.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.engines: dict[str, str] = {}
        """What "auto" has chosen for the first run of each kind; the others take it over."""
        self._nursery: Nursery | None = None
        self._workers: list[Worker] = []
        self._tellers: list[threading.Thread] = []
        self._told: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, jobs: Sequence[Job]) -> Iterator[Event]:
        """Run the jobs; events come as they happen."""
        events: queue.Queue[Event | None] = queue.Queue()
        waiting: queue.Queue[tuple[int, Job]] = queue.Queue()
        for item in enumerate(jobs):
            waiting.put(item)
        threads: list[threading.Thread] = []
        done = False
        try:
            for worker in self._started(min(self.most, len(jobs))):
                rest = worker, waiting, events, self.engines
                threads.append(threading.Thread(target=_serve, args=rest))
                threads[-1].start()
            working = len(threads)
            while working:
                event = events.get()
                if event is None:
                    working -= 1
                else:
                    yield event
            done = True
            while not waiting.empty():
                yield waiting.get()[0], {"failed": "no worker process is left"}
        finally:
            waiting.queue.clear()
            for worker in () if done else self._workers:  # some are in the middle of a job
                worker.end()
            for thread in threads:
                thread.join()
            if not done:
                self.close()

    def _started(self, count: int) -> list[Worker]:
        """So many that are alive."""
        for worker in [w for w in self._workers if w.is_gone]:
            worker.close()
            self._workers.remove(worker)
        if self._nursery is None or not self._nursery.is_alive:
            if self._nursery is not None:
                self._nursery.close()
            self._nursery = nursery()
        while len(self._workers) < count:
            self._workers.append(worker := self._nursery.worker())
            teller = threading.Thread(target=_tell, args=(worker.stderr, self._told), daemon=True)
            self._tellers.append(teller)
            teller.start()
        return self._workers[:count]

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            worker.close()
        if self._nursery is not None:
            self._nursery.close()
        for teller in self._tellers:
            teller.join(timeout=1)  # what a tracker has started may hold the pipe open
        self._nursery, self._workers, self._tellers = None, [], []


Many = int | Processes | None
"""Runs at a time, one for each core if None; or the processes that run them."""


def run_jobs(jobs: Sequence[Job], workers: Many) -> Iterator[Event]:
    """Run the jobs side by side; events come as they happen."""
    if isinstance(workers, Processes):
        yield from workers.run(jobs)
        return
    from prefed.core.machine import cores

    with Processes(workers or cores()) as processes:
        yield from processes.run(jobs)


def _serve(
    worker: Worker,
    waiting: queue.Queue[tuple[int, Job]],
    events: queue.Queue[Event | None],
    engines: dict[str, str],
) -> None:
    """Hand one worker its jobs, one at a time, and pass its events on."""
    try:
        while True:
            try:
                number, job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                worker.stdin.write(job.to_json(engines.get(job.kind, "")) + "\n")
                worker.stdin.flush()
            except (OSError, ValueError):
                pass  # the worker is gone, or told to end: reading says so below
            last = _relay(number, worker.stdout, events)
            if last is None:
                worker.is_gone = True
                return  # the jobs that wait are for the others
            if "engine" in last:
                engines.setdefault(job.kind, last["engine"])
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


def _relay(number: int, lines: IO[str], events: queue.Queue[Event | None]) -> dict[str, Any] | None:
    """Pass on the events of one job; the last of them, or None if the worker died."""
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            break  # killed in the middle of a line
        events.put((number, event))
        if "record" not in event:
            return dict(event)
    events.put((number, {"failed": "its worker process died"}))
    return None


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


def prepare() -> None:
    """Import what a worker needs; the more so that a config is read by."""
    import torch

    from prefed.experiments.config import load

    for name in ("run_directory", "trackers"):
        import_module(f"prefed.experiments.{name}")
    load("digits-noniid")
    torch.set_num_threads(1)


def work() -> NoReturn:
    """Carry out jobs until the input ends."""
    jobs = _listen(sys.stdin)
    prepare()
    from prefed.core.errors import Diverged, PrefedError
    from prefed.core.safe_files import to_json
    from prefed.experiments.config import load
    from prefed.experiments.run_directory import execute
    from prefed.experiments.trackers import Tracking
    from prefed.training.observers import Callback
    from prefed.training.run import Run
    from prefed.training.trainer import Record

    class Tell(Callback):
        def on_round(self, record: Record) -> None:
            print(f'{{"record": {to_json(record)}}}', file=out, flush=True)

    newest = NewestData()
    out = sys.stdout
    sys.stdout = sys.stderr  # what a model or a plug-in prints must not mix with the events

    def carry_out(job: dict[str, Any]) -> dict[str, Any]:
        """The last event of the job. Nothing of it is left when the next begins."""
        folder = None if job["folder"] is None else Path(job["folder"])
        tell = Tell()
        try:
            callbacks: list[Callback] = [tell]
            if about := job.get("tracking"):
                tracking = Tracking(about["names"], Path(about["out"]), about["group"])
                callbacks += tracking.callbacks(job["name"])
            config = load(job["config"])
            make, data = made_with(job["engine"]), newest.of(config)
            what: Config | Run = config
            if job["evaluate_from"] > 1:
                what = config.make_run(make, data=data)
                what.evaluate_from = job["evaluate_from"]
            execute(what, folder, resume=True, callbacks=callbacks, make_trainer=make, data=data)
            return {"done": True, "engine": tell.run.trainer.engine}
        except Diverged as error:
            return {"diverged": str(error)}
        except PrefedError as error:
            return {"failed": str(error)}
        except Exception as error:  # a job that fails must not take the others with it
            return {"failed": f"{type(error).__name__}: {error}"}

    while True:
        print(json.dumps(carry_out(json.loads(jobs.get()))), file=out, flush=True)


class NewestData:
    """The data set and split of the newest run, which the next one may have in common with it."""

    def __init__(self) -> None:
        self._key: object = None
        self._made: MadeData | None = None

    def of(self, config: "Config") -> "MadeData":
        if self._made is None or self._key != (config.data, config.seed):
            self._made = None  # there are never two of them in memory
            self._made, self._key = config.make_data(), (config.data, config.seed)
        return self._made


def made_with(engine: str) -> "MakeTrainer":
    """Trainers that take over what "auto" has chosen for another run of the same kind."""
    from prefed.training.engines.auto import Choice
    from prefed.training.local_trainer import LocalTrainer
    from prefed.training.ranks import make_trainer

    def make(*parts: Any) -> "Trainer":
        trainer = make_trainer(*parts)
        if engine and isinstance(trainer, LocalTrainer) and trainer.settings.engine == "auto":
            trainer.choice = Choice.parse(engine)
        return trainer

    return make


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all: the parent ends us
    work()
