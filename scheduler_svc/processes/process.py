"""What the processes of a scheduler share: how they begin and end."""

import asyncio
import logging
import resource
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress

from octavo.generation.v1 import generation_service_pb2
from octavo_shared.errors import OctavoServiceError
from octavo_shared.process.events import SLOW_STEP, Event, configure_logging
from octavo_shared.process.service_config import ServiceConfig

# The argument of a process that a supervisor starts: its settings are a line of JSON on stdin, which stays open.
SETTINGS_FROM_STDIN = "-"

# The prefix of lines that a scheduler prints for its parent: `octavo up` passes them on.
NOTICE = "octavo scheduler notice: "


class NoticeHandler(logging.Handler):
    """Prints at once on stdout what people want to know: that steps are slow because the processor has other work."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the notice of a slow step; ignore other records."""
        event = record.msg
        if isinstance(event, Event) and event.name == SLOW_STEP:
            where, cause = event.fields["executor"], event.fields["cause"]
            print(f"{NOTICE}the executor at {where} is slow: other work keeps its processor busy; {cause}", flush=True)


def run_to_end(config: ServiceConfig, serving: Coroutine[None, None, int], who: str = "scheduler") -> int:
    """Run a process and return its exit code; `who` is its name in the error if it cannot start."""
    configure_logging(config.log_level, config.log_format)
    logging.getLogger().addHandler(NoticeHandler())
    raise_file_limit()
    try:
        return asyncio.run(serving)
    except OctavoServiceError as error:
        print(f"octavo {who}: {error}", file=sys.stderr)
        return 1


GENERATION_SERVICE = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name


# More connections than a service could serve. Without any limit some programs would iterate over all numbers.
_MOST_FILES = 2**16


def raise_file_limit() -> None:
    """Raise this process's limit as far as the system allows: many systems give 1,024 by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # the service can run with fewer
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# How often the lag is measured. A shorter stall may be missed, a longer one may look shorter by up to this much.
INTERVAL_S = 0.02

WINDOW_S = 60.0


class LoopLag:
    """Remembers the longest lag of the last minute: how late a timer of the loop was.

    Args:
        clock: Monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._window_began_at_s = clock()
        self._longest_s = self._longest_before_s = 0.0

    async def watch(self) -> None:
        """Watch the running loop until cancelled."""
        while True:
            due_at_s = self._clock() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            self.note(self._clock() - due_at_s)

    def note(self, lag_s: float) -> None:
        """Note how late a timer came, in seconds."""
        self._forget_old()
        self._longest_s = max(self._longest_s, lag_s)

    @property
    def longest_s(self) -> float:
        """The longest lag of the last minute, in seconds; lags up to a minute older may still count."""
        self._forget_old()
        return max(self._longest_s, self._longest_before_s)

    def _forget_old(self) -> None:
        """Keep two windows: the current one, and the one before it."""
        now_s = self._clock()
        while now_s - self._window_began_at_s >= WINDOW_S:
            self._longest_s, self._longest_before_s = 0.0, self._longest_s
            self._window_began_at_s += WINDOW_S
