"""Small programs in place of the services."""

import sys
import textwrap

# As the services do: a line on stdout is there at once, one on stderr in one piece.
PREFACE = "import sys; sys.stdout.reconfigure(line_buffering=True)\n"


def program(source: str, *arguments: str) -> list[str]:
    """Return the command that runs it."""
    return [sys.executable, "-c", PREFACE + textwrap.dedent(source), *arguments]
