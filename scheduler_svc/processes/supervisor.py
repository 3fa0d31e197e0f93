"""The process of `octavo-scheduler --fronts N`: keeps a core and N fronts running, each a process of its own.

    supervisor ──starts──> core    decides steps
               ──starts──> fronts  hold the clients' calls, and join the core

A core that dies is started again, and the fronts have it go on with their requests; a front that dies is started again
too. What the core prints on stdout the supervisor passes on, the first time: where it listens, and that it serves.
"""

import asyncio
import contextlib
import re
import shutil
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from octavo_shared.errors import OctavoServiceError
from scheduler_svc.config.prefix_key import write_prefix_key
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.processes.fronts import Fronts
from scheduler_svc.processes.kept_process import KeptProcess
from scheduler_svc.processes.process import DRAINED_LINE, NOTICE

# How the core says that it listens, behind its ports, and that it serves (`octavo_shared/grpc/grpc_server.py`).
_LISTENING = "octavo scheduler listening on "
_SERVING = "octavo scheduler serving on "
_PORT_LINE = re.compile(r"octavo scheduler serving (?P<name>\w+) on (?P<address>\S+)")

# How long the core may take to end once its fronts have, in seconds.
END_S = 5.0


class Supervisor:
    """Runs the processes of one scheduler.

    Args:
        config: Of the scheduler.
        core_module: What the core's process runs.
        front_module: What the fronts' processes run.

    Raises: AddressError: an address for clients cannot be bound.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        core_module: str = "scheduler_svc.processes.core_process",
        front_module: str = "scheduler_svc.processes.front_process",
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="octavo-")  # nobody else may enter it
        link = f"unix:{self._folder}/core.sock"
        if config.prefix_key_file is None:  # the next core finds what executors have cached for this one
            key_file = Path(self._folder, "prefix.key")
            write_prefix_key(key_file)
            config = config.model_copy(update={"prefix_key_file": key_file})
        try:
            self._fronts = Fronts(config, link, front_module)
        except OctavoServiceError:
            self._remove_folder()
            raise
        self._config = self._fronts.config
        self._core = KeptProcess(
            "core",
            core_module,
            link,
            settings=lambda: self._config.model_dump_json(),
            on_line=self._take_line,
        )
        self._has_listened = asyncio.Event()
        self._has_served = False
        self._has_drained = asyncio.Event()

    async def run(self, wait_for_stop: Awaitable[str]) -> int:
        """Keep them running until somebody wants the scheduler to stop, and end them in order.

        Returns: the exit code: 0, or that of one which ended before they listened; it has said why.
        """
        stopping = asyncio.ensure_future(wait_for_stop)
        keeping = asyncio.create_task(self._core.keep(), name="core")
        self._fronts.start()
        try:
            failed = await self._failed_start(stopping)
            if failed is None:
                await stopping
            return 0 if failed is None else failed.exit_code or 1
        finally:
            stopping.cancel()
            await self._stop(keeping)

    async def _failed_start(self, stopping: "asyncio.Future[str]") -> KeptProcess | None:
        """Return once the core listens, which it does when all fronts do, or the process that ended before."""
        processes = [self._core, *self._fronts.processes]
        listening = asyncio.create_task(self._has_listened.wait())
        endings = [asyncio.create_task(process.has_ended.wait()) for process in processes]
        waited: list[asyncio.Future[Any]] = [listening, stopping, *endings]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        failed = [process for process in processes if process.has_ended.is_set()]
        for task in (listening, *endings):
            task.cancel()
        return failed[0] if failed and not self._has_listened.is_set() else None

    async def _stop(self, keeping: "asyncio.Task[None]") -> None:
        """End the core once its requests have ended, and the fronts before it: they still have words to deliver."""
        self._core.start_stopping()
        self._fronts.start_stopping()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._config.shutdown_grace_s
        self._has_drained.clear()
        self._core.terminate()
        drained = asyncio.create_task(self._has_drained.wait())
        limit_s = self._config.shutdown_grace_s + END_S
        await asyncio.wait((drained, keeping), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        await self._fronts.stop(deadline_s - loop.time())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await asyncio.shield(keeping)
        self._core.kill()
        await keeping
        self._remove_folder()

    def _take_line(self, line: str) -> None:
        """The core has printed a line: people get it once, however often the core starts."""
        if line == DRAINED_LINE:
            self._has_drained.set()
            return
        if port := _PORT_LINE.match(line):  # the next core has the same
            name = "core" if port["name"] == "fronts" else port["name"]
            self._config = self._config.model_copy(update={f"{name}_listen": port["address"]})
        if not self._has_served or line.startswith(NOTICE):
            print(line, flush=True)
        if line.startswith(_LISTENING):
            self._has_listened.set()
        elif line.startswith(_SERVING):
            self._has_served = True

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
