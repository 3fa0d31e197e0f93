"""Where Octavo keeps what it can make again, on this machine: models, compiled code, converted tokenizers."""

import os
from pathlib import Path


def user_cache_directory() -> Path:
    """Return the directory: OCTAVO_CACHE_DIR, else XDG_CACHE_HOME/octavo, else ~/.cache/octavo.

    Raises: RuntimeError: nothing names one, and the user has no home directory.
    """
    if octavo_cache := os.environ.get("OCTAVO_CACHE_DIR"):
        return Path(octavo_cache).expanduser().absolute()
    xdg_cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification wants relative paths ignored.
    return (xdg_cache if xdg_cache.is_absolute() else Path.home() / ".cache") / "octavo"
