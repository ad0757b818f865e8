"""Names for things users choose by name: algorithms, models, data sets, splits, engines.

A thing is added by writing one file: a module inside the registry's package registers itself
when it is imported, and a thing of the user's own is named "module:attribute".
"""

import importlib
import pkgutil
import sys
import traceback
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from prefed.core.errors import PrefedError, did_you_mean
from prefed.core.plain import name_of

T = TypeVar("T")

CONTRIB = "prefed.contrib"
"""Found by name in any registry, and not listed."""


class Registry(Generic[T]):
    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._things: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        def add(thing: T) -> T:
            if self._things.setdefault(name, thing) is not thing:
                raise PrefedError(f"two things are registered as {self.kind} {name!r}")
            return thing

        return add

    def names(self) -> list[str]:
        """Every name that the registry's package brings, in alphabetical order."""
        self._import_all(self.package)
        brought = (name for name, thing in self._things.items() if not _is_contrib(thing))
        return sorted(brought)

    def _import_all(self, package: str) -> None:
        folder = importlib.import_module(package).__path__
        for module in pkgutil.iter_modules(folder, package + "."):
            importlib.import_module(module.name)

    def get(self, name: str) -> T:
        """The thing of that name, or the attribute that "module:attribute" names."""
        if name in self._things:
            return self._things[name]
        if ":" in name:
            thing: T = from_user(name, self.kind)
            return thing
        known = self.names()
        if name not in self._things:
            self._import_all(CONTRIB)
        if name not in self._things:
            raise PrefedError(f"unknown {self.kind} {name!r}{did_you_mean(name, known)}")
        return self._things[name]

    def name_of(self, thing: T) -> str:
        """The registered name of a thing, or "module:attribute" for a thing of the user's."""
        for name, known in self._things.items():
            if known is thing:
                return name
        return name_of(thing)


def from_user(name: str, kind: str = "") -> Any:
    """The attribute that "module:attribute" names, of a module in the directory the user stands in
    or that Python finds elsewhere."""
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` has it
    what = f"{kind} {name!r}".strip()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise PrefedError(f"{what}: cannot import it: {error}") from error
    except Exception as error:  # it is the user's, and runs while it is imported
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
        told = f"{type(error).__name__}: {error}{where}"
        raise PrefedError(f"{what}: cannot import it: {told}") from error
    if not hasattr(module, attribute):
        found = did_you_mean(attribute, (n for n in dir(module) if not n.startswith("_")))
        raise PrefedError(f"{what}: {module_name} has no {attribute!r}{found}")
    return getattr(module, attribute)


def _is_contrib(thing: object) -> bool:
    return str(getattr(thing, "__module__", "")).startswith(CONTRIB + ".")
