"""prefed on Flower: drop-in strategies, and whole apps from a config (docs/flower.md).

    prefed.flower.PreFedOpt(server_lr=...)    a strategy for a Flower app of your own; so for
                                              every algorithm, by the name of its class
    prefed.flower.LoopbackGrid.of(app, 4)     its clients in this process, for notebooks and tests
    prefed.flower.client_app, server_app      a whole app from a config

Names are loaded when they are first used: a node answers a query without loading torch.
"""

import importlib
import importlib.util
from typing import Any

from prefed.core.errors import PrefedError

HOME = {
    "client_app": "prefed.flower.client",
    "server_app": "prefed.flower.server",
    "Strategy": "prefed.flower.strategy",
    "CentralDP": "prefed.flower.privacy",
    "LoopbackGrid": "prefed.flower.loopback",
    "local_train": "prefed.flower.stock_client",
    "load_model": "prefed.flower.stock_client",
    "load_state": "prefed.flower.stock_client",
    "state_record": "prefed.flower.stock_client",
    "tell_partition": "prefed.flower.stock_client",
}


def require_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise PrefedError("Flower is not installed: pip install 'prefed[flower]'")


def __getattr__(name: str) -> Any:
    if name in HOME:
        require_flower()
        return getattr(importlib.import_module(HOME[name]), name)
    if name[:1].isupper():  # not a module of this package, which is asked for in this way too
        for kind in strategies():
            if kind.__name__ == name:
                require_flower()
                return importlib.import_module("prefed.flower.named_strategies").make_strategy(kind)
    raise AttributeError(f"module 'prefed.flower' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*HOME, *(kind.__name__ for kind in strategies())])


def strategies() -> list[Any]:
    """The classes of all algorithms. One whose clients meet in every step says that it cannot run
    here when it is made."""
    from prefed.algorithms import ALGORITHMS

    return [ALGORITHMS.get(name) for name in ALGORITHMS.names()]
