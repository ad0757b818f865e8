"""Where prefed keeps what it can make again: decoded data sets, and compiled programs."""

import os
from pathlib import Path

VARIABLE = "PREFED_CACHE"


def cache_directory() -> Path | None:
    """$PREFED_CACHE, else prefed in the user's cache; None if nothing is to be kept."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen == "off":
        return None
    try:
        if chosen:
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prefed"
    except RuntimeError:  # whoever runs this has no home
        return None
