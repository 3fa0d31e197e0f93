"""The process of `octavo-scheduler --fronts N`: keeps an engine and N fronts running, each a process of its own.

    supervisor ──starts──> engine    decides steps
               ──starts──> fronts  hold the clients' calls, and join the engine

A process that dies is started again; after an engine died, the fronts continue their requests with the next one. The
supervisor passes on what the first engine prints on stdout: where it listens, and that it serves.
"""

import asyncio
import contextlib
import logging
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from octavo.values.wording import said, temporary_folder_trouble
from octavo_shared.errors import OctavoServiceError, UnavailableError
from octavo_shared.process.events import Event
from octavo_shared.process.service_config import ServiceConfig
from octavo_shared.process.tracing import MAX_FLUSH_S
from scheduler_svc.config.client_side_config import ClientSideConfig, FrontConfig
from scheduler_svc.config.prefix_key import write_prefix_key
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.http.listeners import is_free, is_shared_by_others, reserve
from scheduler_svc.processes.process import NOTICE, SETTINGS_FROM_STDIN

log = logging.getLogger(__name__)

ENGINE = "engine"

# What a process prints when it listens, and the engine when it serves (`octavo_shared/grpc/grpc_server.py`).
_LISTENING = re.compile(r"octavo \w+ listening on ")
_SERVING = "octavo scheduler serving on "
_PORT_LINE = re.compile(r"octavo scheduler serving (?P<name>\w+) on (?P<address>\S+)")

# How long processes may take to end after the grace period, in seconds: they send their traces, and a little more.
END_S = MAX_FLUSH_S + 1.0


class Supervisor:
    """Runs the processes of one scheduler.

    Raises: AddressError: an address for clients cannot be bound. UnavailableError: there is no room for its files.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        engine_module: str = "scheduler_svc.processes.engine_process",
        front_module: str = "scheduler_svc.processes.front_process",
    ) -> None:
        self._folder = ""
        try:
            self._folder = tempfile.mkdtemp(prefix="octavo-")  # private to this user
            link = link_in(self._folder)
            if config.prefix_key_file is None:  # the next engine finds what executors have cached for this one
                key_file = Path(self._folder, "prefix.key")
                write_prefix_key(key_file)
                config = config.model_copy(update={"prefix_key_file": key_file})
            config, self._reserved = reserve_addresses(config)
        except OctavoServiceError:
            self._remove_folder()
            raise
        except OSError as error:
            self._remove_folder()
            raise UnavailableError(temporary_folder_trouble(error)) from error
        self._config = config.model_copy(update={"exit_on_stdin_close": True})
        self._processes = [
            KeptProcess(ENGINE, engine_module, link, settings=lambda: self._config, on_line=self._take_line),
            *(
                KeptProcess(
                    f"front {number}",
                    front_module,
                    SETTINGS_FROM_STDIN,
                    settings=partial(front_config, config, link, number),
                    on_line=self._take_line,
                )
                for number in range(config.num_fronts)
            ),
        ]
        self._awaited = {process.name for process in self._processes}  # the processes that do not listen yet
        self._has_listened = asyncio.Event()
        self._has_served = False
        self._unsaid: list[str] = []

    async def run(self, wait_for_stop: Awaitable[str]) -> int:
        """Keep the processes running until told to stop, and end them in order.

        Returns: the exit code: 0, or that of a process which ended before all listened; it has said why.
        """
        stopping = asyncio.ensure_future(wait_for_stop)
        keeping = [asyncio.create_task(process.keep(), name=process.name) for process in self._processes]
        listening = asyncio.create_task(self._has_listened.wait())
        endings = [asyncio.create_task(process.has_ended.wait()) for process in self._processes]
        try:
            await asyncio.wait((listening, stopping, *endings), return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                await stopping
            elif stopping.done():
                log.info(Event("stopped_while_starting", reason=stopping.result()))
            else:
                return next(process.exit_code for process in self._processes if process.has_ended.is_set()) or 1
            return 0
        finally:
            for task in (stopping, listening, *endings):
                task.cancel()
            await self._stop(keeping)

    async def _stop(self, keeping: "list[asyncio.Task[None]]") -> None:
        """End all processes: engine and fronts take nothing new, and live requests have the grace period."""
        for process in self._processes:
            process.stop()
        await asyncio.wait(keeping, timeout=self._config.shutdown_delay_s + self._config.shutdown_grace_s + END_S)
        for process in self._processes:
            process.kill()
        await asyncio.gather(*keeping)
        for reserved in self._reserved:
            reserved.close()
        self._remove_folder()

    def _take_line(self, process: str, line: str) -> None:
        """Handle a line that a process printed. The engine's lines are passed on, once, when all processes listen."""
        if process == ENGINE:
            if port := _PORT_LINE.match(line):  # the next engine has the same
                name = "engine" if port["name"] == "fronts" else port["name"]
                self._config = self._config.model_copy(update={f"{name}_listen": port["address"]})
            if not self._has_served or line.startswith(NOTICE):
                self._unsaid.append(line)
            self._has_served |= line.startswith(_SERVING)
        if _LISTENING.match(line):
            self._awaited.discard(process)
        if not self._awaited:
            self._has_listened.set()
            with contextlib.suppress(BrokenPipeError):  # the reader has gone
                for each in self._unsaid:
                    print(each, flush=True)
            self._unsaid.clear()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def link_in(folder: str | Path) -> str:
    """Return the address where fronts join the engine; it has the form of an address with a port."""
    return f"unix:{folder}/engine:0"


def reserve_addresses(config: SchedulerConfig) -> tuple[SchedulerConfig, list[socket.socket]]:
    """Reserve the addresses for clients: the fronts share them, and no other process gets them.

    Returns: the configuration with the chosen ports, and the sockets that keep them.

    Raises: AddressError: an address is taken, or not ours.
    """
    chosen, reserved = {}, list[socket.socket]()
    for name, listen, flag in (
        ("listen", config.listen, "--listen"),
        ("openai_listen", config.openai_listen, "--openai-listen"),
    ):
        if listen is not None:
            sockets = reserve(listen, flag)
            reserved += sockets
            chosen[name] = f"{listen.rpartition(':')[0]}:{sockets[0].getsockname()[1]}"
    return config.model_copy(update=chosen), reserved


async def wait_for_orphans(config: SchedulerConfig) -> None:
    """Return once the processes of a killed supervisor have left our addresses, or their time is up.

    They finish their calls first, as always. Fronts of a running supervisor look the same.
    """
    of_clients = [listen for listen in (config.listen, config.openai_listen) if listen is not None]
    if not any(map(is_shared_by_others, of_clients)):
        return
    others = (
        config.admin_listen,
        config.page_listen,
        config.engine_listen,
        config.health_listen,
        config.metrics_listen,
    )
    awaited = [*of_clients, *(listen for listen in others if listen is not None)]
    longest_s = config.shutdown_delay_s + config.shutdown_grace_s + END_S
    print(
        f"{NOTICE}fronts of another scheduler listen on {config.listen}; if that was killed, they finish their calls "
        f"first: waiting up to {longest_s:.0f} s",
        flush=True,
    )
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(longest_s):
            while not all(map(is_free, awaited)):  # noqa: ASYNC110 -- no process of theirs tells us
                await asyncio.sleep(0.1)


def front_config(config: SchedulerConfig, link: str, number: int) -> FrontConfig:
    """Return the settings of a front: the scheduler's for what clients reach; probes and metrics stay at the engine."""
    shared = config.model_dump(include=set(ClientSideConfig.model_fields) - {"health_listen", "metrics_listen"})
    return FrontConfig.model_validate(
        shared | {"engine": (link,), "front_id": str(number), "exit_on_stdin_close": True}
    )


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
