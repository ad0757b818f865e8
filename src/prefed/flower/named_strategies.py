"""A strategy for each algorithm, under the name of its class."""

import inspect
from collections.abc import Callable
from typing import Any, cast

from prefed.algorithms import Algorithm
from prefed.flower.strategy import Strategy


def make_strategy(kind: type[Algorithm]) -> Callable[..., Strategy]:
    """The constructor of a strategy: options of the algorithm and of the strategy in one."""
    named = cast(type[Strategy], type(kind.__name__, (Strategy,), {}))  # Flower logs the name

    def make(**options: Any) -> Strategy:
        known = {*kind.model_fields, *kind.contrib_options}
        ours = {k: v for k, v in options.items() if k in known}
        theirs = {k: v for k, v in options.items() if k not in known}
        for name in theirs:
            if name not in inspect.signature(Strategy).parameters:
                kind(**{name: theirs[name]})  # raises, with the nearest name
        return named(kind(**ours), **theirs)

    make.__name__ = make.__qualname__ = kind.__name__
    make.__doc__ = f"{kind.__doc__}\n\n{Strategy.__doc__}"
    return make
