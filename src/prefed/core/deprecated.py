"""Names that have changed and still work."""

import warnings
from collections.abc import Mapping
from typing import Any


def with_new_names(table: Any, renamed: Mapping[str, str], *, warn: bool = True) -> Any:
    """A table of options with its old names replaced. What is not a table is left alone."""
    if not isinstance(table, dict) or not table.keys() & renamed.keys():
        return table
    for old in table.keys() & renamed.keys() if warn else ():
        text = f"the option {old} is now called {renamed[old]}"
        warnings.warn(text, FutureWarning, stacklevel=3)
    return {renamed.get(name, name): value for name, value in table.items()}
