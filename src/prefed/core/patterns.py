"""Parameters by patterns of their names, such as "head.*"."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from prefed.core.errors import PrefedError


def named(option: str, pattern: str, names: Iterable[str]) -> list[str]:
    """Those of the names that the pattern of this option stands for; there has to be one."""
    known = [*names]
    if matching := [name for name in known if fnmatchcase(name, pattern)]:
        return matching
    raise PrefedError(
        f"{option}: {pattern!r} names no parameter of the model that is trained; it has "
        f"{', '.join(known)}"
    )
