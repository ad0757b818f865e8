"""prefed: adaptive and preconditioned federated optimisation.

The names below are loaded when they are first used, so that `prefed --help` answers
without importing torch. What they are is listed once, in `prefed._api`.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from prefed._moved import MovedModules

__version__ = "0.1.0"

sys.meta_path.insert(0, MovedModules())

if TYPE_CHECKING:
    from prefed._api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if not name.startswith("_") or name == "__all__":
        if importlib.util.find_spec(f"prefed.{name}") is not None:
            return importlib.import_module(f"prefed.{name}")  # without all the other names
        api = importlib.import_module("prefed._api")
        if hasattr(api, name):
            return getattr(api, name)
    raise AttributeError(f"module 'prefed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*importlib.import_module("prefed._api").__all__, "__version__"]
