"""Where the command `octavo` begins; the rest is octavo/commands/command_line.py.

This module imports next to nothing, so that Ctrl-C is handled also while the rest is being imported.
"""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run a command line (None: the one of this process) and exit with its status."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC's own lines would stand between ours; read at its import
    try:
        from octavo.commands.command_line import run

        status = run(sys.argv[1:] if args is None else args)
    except KeyboardInterrupt:
        status = _EXIT_INTERRUPTED
    sys.exit(status)


if __name__ == "__main__":
    main()
