"""What the processes of a scheduler have in common: how they begin and end."""

import asyncio
import logging
import sys
from collections.abc import Coroutine

from octavo_shared.errors import OctavoServiceError
from octavo_shared.process.events import SLOW_STEP, Event, configure_logging
from octavo_shared.process.service_config import ServiceConfig
from scheduler_svc.processes.file_limit import raise_file_limit

# The argument of a process that a supervisor starts: its settings are a line of JSON on stdin, which it keeps open.
SETTINGS_FROM_STDIN = "-"

# What a scheduler prints for whoever started it: `octavo up` passes it on.
NOTICE = "octavo scheduler notice: "


class NoticeHandler(logging.Handler):
    """Says on stdout what people want to know at once: that steps take long because the processor has other work."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the notice of a slow step; nothing of others."""
        event = record.msg
        if isinstance(event, Event) and event.name == SLOW_STEP:
            where, cause = event.fields["executor"], event.fields["cause"]
            print(f"{NOTICE}the executor at {where} is slow: other work keeps its processor busy; {cause}", flush=True)


def run_to_end(config: ServiceConfig, serving: Coroutine[None, None, int], who: str = "scheduler") -> int:
    """Run a process and return its exit code; `who` it is, for the sentence that says why it cannot start."""
    configure_logging(config.log_level, config.log_format)
    logging.getLogger().addHandler(NoticeHandler())
    raise_file_limit()
    try:
        return asyncio.run(serving)
    except OctavoServiceError as error:
        print(f"octavo {who}: {error}", file=sys.stderr)
        return 1
