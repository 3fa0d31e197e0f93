"""What the processes of a scheduler share: how they begin and end."""

import asyncio
import logging
import sys
from collections.abc import Coroutine

from octavo_shared.errors import OctavoServiceError
from octavo_shared.process.events import SLOW_STEP, Event, configure_logging
from octavo_shared.process.service_config import ServiceConfig
from scheduler_svc.processes.file_limit import raise_file_limit

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
