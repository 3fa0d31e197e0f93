"""How many files, and so connections, a process may have open."""

import resource
from contextlib import suppress

# More connections than a service could serve. Without any limit some programs would go through all numbers.
_MOST_FILES = 2**16


def raise_file_limit() -> None:
    """Take as many as the system lets this process have: many systems give 1,024 unless one asks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # less is no reason not to serve
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
