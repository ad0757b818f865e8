"""prefed: adaptive and preconditioned federated optimisation.

The names below are loaded when they are first used, so that `prefed --help` answers
without importing torch. What they are is listed once, in `prefed._api`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from prefed._api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module 'prefed' has no attribute {name!r}")
    api = importlib.import_module("prefed._api")
    try:
        return getattr(api, name)
    except AttributeError:
        raise AttributeError(f"module 'prefed' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return [*importlib.import_module("prefed._api").__all__, "__version__"]
