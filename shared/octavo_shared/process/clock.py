"""The monotonic clock of the running code: on an event loop the loop's own, which `asyncio.sleep` uses.

So a loop that simulates time moves all of it.
"""

import asyncio
import time


def monotonic_s() -> float:
    """Return the monotonic time of the running event loop in seconds; where none runs, the machine's."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return time.monotonic()
    return loop.time()
