"""A child process that is restarted whenever it ends, until it is told to stop."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable

from octavo.values.wording import said
from octavo_shared.process.events import Event
from octavo_shared.process.service_config import ServiceConfig

log = logging.getLogger(__name__)

# Pause before a restart, in seconds: doubled each time, until the process has run for LONGEST_PAUSE_S.
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


class KeptProcess:
    """Runs `python -m MODULE ARGUMENTS`, which reads its settings as one line of stdin and ends when stdin closes.

    Args:
        name: The process's name in the log: "engine", "front 0".
        settings: Returns the settings, for each start.
        on_line: Called with the name and each line of stdout.

    Attributes:
        has_ended: Set once the process has ended the first time.
        exit_code: The last one; None: it has never ended.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *arguments: str,
        settings: Callable[[], ServiceConfig],
        on_line: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self.has_ended = asyncio.Event()
        self.exit_code: int | None = None
        self._command = (sys.executable, "-P", "-m", module, *arguments)
        self._settings = settings
        self._on_line = on_line
        self._stopping = asyncio.Event()
        self._has_spoken = False
        self._process: asyncio.subprocess.Process | None = None

    async def keep(self) -> None:
        """Run the process again and again; return once it has ended after `stop`."""
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            ran_s = await self._run()
            if self._stopping.is_set():
                return
            if ran_s > LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            log.warning(Event("process_ended", name=self.name, code=self.exit_code, starts_again_in_s=pause_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def stop(self) -> None:
        """Ask the process to end, and do not restart it.

        It is asked by closing stdin: a terminal's Ctrl-C has reached it too, and a second signal would end it at once.
        """
        self._stopping.set()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            if not self._has_spoken:  # it is starting, has no calls, and does not read stdin yet
                with contextlib.suppress(ProcessLookupError):  # it has ended, which was not noticed yet
                    self._process.terminate()

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _run(self) -> float:
        """Run the process once; return for how many seconds it ran."""
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._has_spoken = False
        began_s = asyncio.get_running_loop().time()
        log.info(Event("process_started", name=self.name, pid=process.pid))
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(self._settings().model_dump_json().encode() + b"\n")  # left open: it ends when we do
        if self._stopping.is_set():  # `stop` ran before the process existed
            self.stop()
        async for line in process.stdout:
            self._has_spoken = True
            self._on_line(self.name, said(line.decode(errors="replace").rstrip("\n")))
        self.exit_code = await process.wait()
        self._process = None
        self.has_ended.set()
        return asyncio.get_running_loop().time() - began_s
