"""Parameters by patterns of their names, such as "head.*"."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from prefed.core.errors import PrefedError


def _names(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """A single one is a list of one."""
    try:
        return check([given] if isinstance(given, str) else given)
    except ValidationError:
        raise ValueError("should be a list of names") from None


Patterns = Annotated[tuple[str, ...], WrapValidator(_names)]


def named(option: str, pattern: str, names: Iterable[str]) -> list[str]:
    """Those of the names that the pattern of this option stands for; there has to be one."""
    known = [*names]
    if matching := [name for name in known if fnmatchcase(name, pattern)]:
        return matching
    raise PrefedError(
        f"{option}: {pattern!r} names no parameter of the model that is trained; it has "
        f"{', '.join(known)}"
    )
