"""Texts that are on every machine with Python: the language reference that `help()` shows, and the standard library.

The texts of two releases of Python differ a little, so a figure names the release.
"""

import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

_HELD_OUT = 6  # every so many chapters are measured with, and never trained on
_LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "pydoc_data", "lib2to3", "idlelib", "encodings"}


def held_out_text() -> str:
    """Return the text to measure with: some chapters of Python's language reference, about 12,000 tokens."""
    return "\n\n".join(topics[name] for name in sorted(topics)[::_HELD_OUT])


def training_text() -> str:
    """Return the other chapters, some 400,000 characters."""
    return "\n\n".join(topics[name] for number, name in enumerate(sorted(topics)) if number % _HELD_OUT)


def library_text() -> str:
    """Return the modules of the standard library, some 9 million characters of Python and English."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(library.rglob("*.py")) if not _LEFT_OUT & set(path.relative_to(library).parts)]
    return "\n\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in paths)
