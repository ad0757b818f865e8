"""Those who look on while a run goes: run directories, progress, trackers, the user's own."""

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from prefed.core.errors import PrefedError
from prefed.training.trainer import Record

if TYPE_CHECKING:
    from prefed.training.result import Result
    from prefed.training.run import Run


class Callback:
    """Looks on while a run goes. Override what you need; the run does not change.

    Every callback hears `on_start`, `on_round` for each round, and then exactly one of `on_end`
    and `on_stop`, in `prefed.simulate` as on the command line.
    """

    run: "Run"
    """The run, from `on_start` on. `self.run.stop()` ends it after the round."""

    def on_start(self, config: dict[str, Any]) -> None:
        """Before the first round of this process, with plain values that say what is run."""

    def on_round(self, record: Record) -> None:
        """After each round."""

    def on_end(self, result: "Result") -> None:
        """After the last round."""

    def on_stop(self, reason: str) -> None:
        """In place of on_end if the run did not get there: it diverged, failed or was stopped."""

    def close(self) -> None:
        """After on_end or on_stop, whatever they made of it."""


class Observers:
    """Tells callbacks what happens, in the order in which they were given."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        for callback in callbacks:
            if isinstance(callback, type) or not hasattr(callback, "on_start"):
                name = getattr(callback, "__name__", type(callback).__name__)
                raise PrefedError(
                    f"callbacks: should be objects of classes like prefed.Callback, not {name}"
                )
        self.callbacks = callbacks
        self.listening: list[Callback] = []
        """Those that have heard the start, and neither an end nor a stop."""

    def start(self, run: "Run", config: dict[str, Any]) -> None:
        for callback in self.callbacks:
            callback.run = run
            callback.on_start(config)
            self.listening.append(callback)

    def round(self, record: Record) -> None:
        for callback in self.callbacks:
            callback.on_round(record)

    def end(self, result: "Result") -> None:
        while self.listening:
            with closing(self.listening.pop(0)) as callback:
                callback.on_end(result)

    def stop(self, error: BaseException) -> Exception | None:
        """Why the run ends early. Returns what a callback raised on hearing of it, if any did."""
        reason, raised = str(error) or type(error).__name__, None
        while self.listening:
            try:
                with closing(self.listening.pop(0)) as callback:
                    callback.on_stop(reason)
            except Exception as another:
                raised = raised or another
        return raised
