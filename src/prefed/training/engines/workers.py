"""The workers of a run: threads in one process, each with an engine and a model of its own.

Threads are enough: torch lets go of the interpreter's lock while it computes, and a thread needs a
third of the memory of a process. Each computes with one core, because one client per core beats
several cores per client for all but large models.

A cohort is cut into blocks without regard to the number of workers, a block is computed by one
thread, and the mean is taken in a fixed order: the bits depend on the engine and on the threads
per worker, not on how many workers there are.
"""

import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol, TypeVar, runtime_checkable

import torch

from prefed.algorithms import Algorithm
from prefed.core.hands import ALONE, Hands
from prefed.data import FederatedData
from prefed.training.engines.engine import ENGINES, Engine, EngineWarning
from prefed.training.means.in_turn import is_wide
from prefed.training.settings import Settings
from prefed.training.task import Task

Clients = tuple[int, Sequence[int]]
"""A block: the position of its first client in the cohort, and its clients."""
T = TypeVar("T")
Train = Callable[[Engine, Sequence[int]], T]
"""What is done with a block of clients on an engine."""


@runtime_checkable
class Divides(Protocol):
    """An engine that divides a block among threads, where there is but one."""

    hands: Hands


class Workers:
    def __init__(
        self, engine: str, workers: int, task: Task, data: FederatedData, settings: Settings
    ) -> None:
        if workers > 1 and task.randomness == "generator":
            warnings.warn(
                "the model draws from torch's global generator, which threads cannot share; "
                "it runs with one worker",
                EngineWarning,
                stacklevel=2,
            )
            workers = 1
        first = ENGINES.get(engine)(task, data, settings)
        # What was found out, or compiled, need not be again.
        again: Callable[..., Engine] = getattr(first, "again", type(first))
        self._another: Callable[[], Engine] = lambda: again(task.copy(data), data, settings)
        self.count = workers
        self.engines: list[Engine] = [first]
        self._start()
        self.in_turn = is_wide(task.flat.shared.size)
        """Updates are given in the order of the blocks: each waits in its worker's own memory."""
        self.threads: ThreadPoolExecutor | None = None
        if workers > 1:
            self.threads = ThreadPoolExecutor(
                workers, "prefed", initializer=_begin, initargs=(task.device,)
            )
        self.divides, self.hands = None, ALONE
        if isinstance(first, Divides):
            self.divides, self.hands = first, Hands(workers - 1)
        self.device = task.device

    def _start(self) -> None:
        self.engines += [self._another() for _ in range(self.count - len(self.engines))]

    def rest(self) -> None:
        """Let go of all models but the first, until there is work again."""
        del self.engines[1:]

    def blocks(self, algorithm: Algorithm, cohort: Sequence[int]) -> Sequence[Clients]:
        """The cohort cut up; whole if it meets in every step."""
        whole = algorithm.client_rule().lockstep
        size = len(cohort) if whole else self.engines[0].block_size(algorithm, len(cohort))
        return [(first, cohort[first : first + size]) for first in range(0, len(cohort), size)]

    def updates(
        self, train: Train[T], blocks: Sequence[Clients]
    ) -> Generator[tuple[int, T], None, None]:
        """What `train` makes of each block, with the position of its first client: in turn, or as
        soon as it is there. The tensors of an update are only valid until the next one is asked
        for."""
        if self.divides is not None:
            self.divides.hands = self.hands if len(blocks) == 1 else ALONE
        if self.threads is None or len(blocks) == 1:
            for first, clients in blocks:
                yield first, train(self.engines[0], clients)
            return
        self._start()
        waiting = iter(blocks)
        running: dict[Future[T], tuple[int, Engine]] = {}

        def start(engine: Engine) -> None:
            if (block := next(waiting, None)) is not None:
                assert self.threads is not None
                job = self.threads.submit(_ordered(train, self.device), engine, block[1])
                running[job] = (block[0], engine)

        # The mean is added up in this thread meanwhile: more threads for it would take the
        # cores from the workers.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for engine in self.engines:
                start(engine)
            while running:
                done: Iterable[Future[T]] = [next(iter(running))]  # the first to be started
                if not self.in_turn:
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    first, engine = running.pop(future)
                    yield first, future.result()
                    start(engine)
        finally:
            wait(running)
            torch.set_num_threads(threads)


def _begin(device: torch.device) -> None:
    """A worker computes on one core, and on a GPU in a stream of its own."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))


def _ordered(train: Train[T], device: torch.device) -> Train[T]:
    """On a GPU: after what this thread has asked for until now, as the stream of a worker knows
    nothing of it; and whole when the worker is done."""
    if device.type != "cuda":
        return train
    asked = torch.cuda.current_stream(device).record_event()

    def run(engine: Engine, clients: Sequence[int]) -> T:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(asked)
        update = train(engine, clients)
        stream.synchronize()
        return update

    return run
