"""How many files, and so connections, a process may have open."""

import resource
from contextlib import suppress

# More connections than a service could serve. Without any limit some programs would iterate over all numbers.
_MOST_FILES = 2**16


def raise_file_limit() -> None:
    """Raise this process's limit as far as the system allows: many systems give 1,024 by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # the service can run with fewer
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
