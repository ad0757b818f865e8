"""The parts of a run by name, for whoever wants to know where its time goes.

A function says which part it is with `@timed("evaluation")`. While nobody watches, that costs a
tenth of a microsecond a call; whoever watches is told when a part begins and ends, in which thread,
and can change nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Watch(Protocol):
    """Who is told, in the thread that does the work."""

    def begin(self, name: str) -> None: ...

    def end(self) -> None: ...


_watch: Watch | None = None


@contextmanager
def watched_by(watch: Watch) -> Iterator[None]:
    """Tell `watch` of all parts, of all threads."""
    global _watch
    before, _watch = _watch, watch
    try:
        yield
    finally:
        _watch = before


def timed(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The function is this part of a run, but for what is a part of its own inside it."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def told(*args: P.args, **options: P.kwargs) -> R:
            if (watch := _watch) is None:
                return function(*args, **options)
            watch.begin(name)
            try:
                return function(*args, **options)
            finally:
                watch.end()

        return told

    return decorate
