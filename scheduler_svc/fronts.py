"""The front processes of a scheduler: started, watched, started again, ended."""

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable

from octavo.admin.v1 import admin_pb2
from octavo.core.v1 import core_service_pb2_grpc
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.link.core_servicer import CoreServicer
from scheduler_svc.link.front_metrics import FrontMetrics
from scheduler_svc.link.front_session import FrontSession
from shared.errors import AddressError, UnavailableError
from shared.events import Event
from shared.grpc_server import GrpcServer
from shared.health import Health

log = logging.getLogger(__name__)

# Before a front is started again, in seconds: twice as long each time, until one has run for LONGEST_PAUSE_S.
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

# How long a front may take to end.
END_S = 5.0


class Fronts:
    """Runs as many front processes as the configuration asks for.

    Args:
        config: Of the scheduler; fronts get all of it.
        servicer: The core's side of the link.

    Attributes:
        link: The address where fronts join.
        other_addresses: Where fronts serve beside the main address, by name; after `start`.
    """

    def __init__(self, config: SchedulerConfig, servicer: CoreServicer) -> None:
        self._config = config
        self._servicer = servicer
        folder = tempfile.mkdtemp(prefix="octavo-")  # nobody else may enter it
        self._remove_folder = weakref.finalize(
            self, shutil.rmtree, folder, ignore_errors=True
        )  # at the latest: at exit
        self.link = f"unix:{folder}/core.sock"
        self._reserved: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._num_restarts: Counter[int] = Counter()
        self.other_addresses: dict[str, str] = {}

    def server(self, health: Health) -> GrpcServer:
        """Return the port of the link: only processes of the same user reach it."""
        port = GrpcServer(
            listen=self.link,
            max_message_bytes=self._config.max_message_bytes,
            service_names=(),
            health=health,
            flag="the link to the fronts",
        )
        core_service_pb2_grpc.add_CoreServiceServicer_to_server(self._servicer, port.server)
        return port

    @property
    def num_fronts(self) -> int:
        """How many there ought to be."""
        return self._config.fronts

    @property
    def sessions(self) -> list[FrontSession]:
        """The fronts that have joined."""
        return self._servicer.sessions

    @property
    def metrics(self) -> FrontMetrics:
        """What they have counted."""
        return self._servicer.metrics

    def states(self) -> list[admin_pb2.FrontState]:
        """Return how each of them is, by its number."""
        sessions = {session.name: session for session in self.sessions}
        states = []
        for number in range(self._config.fronts):
            session, process = sessions.get(str(number)), self._processes.get(number)
            states.append(
                admin_pb2.FrontState(
                    front_id=str(number),
                    pid=0 if process is None else process.pid,
                    is_ready=session is not None and session.is_ready,
                    num_requests=0 if session is None else session.num_requests,
                    num_restarts=self._num_restarts[number],
                    num_sessions=self._servicer.num_sessions[str(number)],
                    num_output_tokens=self._servicer.num_output_tokens(str(number)),
                    num_credits=None if session is None else session.num_credits,
                    loop_lag_us=0 if session is None else session.loop_lag_us,
                )
            )
        return states

    async def start(self) -> str:
        """Start all, and wait until they listen; return the address that clients use.

        Raises: AddressError: one of their addresses cannot be bound. UnavailableError: one ended at once.
        """
        config = self._config
        listen = self._reserve(config.listen, "--listen")
        changed: dict[str, object] = {"listen": listen}
        if config.openai_listen is not None:
            changed["openai_listen"] = self.other_addresses["openai"] = self._reserve(
                config.openai_listen, "--openai-listen"
            )
        settings = config.model_copy(update=changed).model_dump_json()
        for number in range(config.fronts):
            self._tasks.append(asyncio.create_task(self._keep(number, settings), name=f"front-{number}"))
        listening = asyncio.create_task(self._servicer.wait_until_listening(config.fronts))
        failing = asyncio.create_task(self._has_ended.wait())
        await asyncio.wait((listening, failing), return_when=asyncio.FIRST_COMPLETED)
        has_failed = not listening.done()
        for task in (listening, failing):
            task.cancel()
        if has_failed:
            await self.stop()
            raise UnavailableError("a front process ended before it served; its own words are above")
        return listen

    async def wait_until_ready(self) -> None:
        """Return once all of them take calls: clients do not choose whom they reach."""
        await self._servicer.wait_until_ready(self._config.fronts)

    def start_stopping(self) -> None:
        """Start no front again: the end of one is expected now."""
        self._stopping.set()

    async def stop(self) -> None:
        """End all; their calls have ended, or end now."""
        self.start_stopping()
        for process in list(self._processes.values()):
            _unless_ended(process.terminate)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=END_S)
            for process in list(self._processes.values()):
                _unless_ended(process.kill)
            for task in late:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for reserved in self._reserved:
            reserved.close()
        self._remove_folder()

    async def _keep(self, number: int, settings: str) -> None:
        """Run a front, and start it again whenever it ends."""
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "scheduler_svc.front_process",
                self.link,
                str(number),
                stdin=asyncio.subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            self._processes[number] = process
            assert process.stdin is not None
            process.stdin.write(settings.encode() + b"\n")  # and kept open: a front ends when we do
            began_s = asyncio.get_running_loop().time()
            log.info(Event("front_started", front=number, pid=process.pid))
            code = await process.wait()
            del self._processes[number]
            self._has_ended.set()
            ran_s = asyncio.get_running_loop().time() - began_s
            pause_s = FIRST_PAUSE_S if ran_s > LONGEST_PAUSE_S else min(LONGEST_PAUSE_S, 2 * pause_s)
            if self._stopping.is_set():
                return
            self._num_restarts[number] += 1
            log.warning(Event("front_ended", front=number, code=code, starts_again_in_s=pause_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()

    def _reserve(self, listen: str, flag: str) -> str:
        """Keep an address for the fronts: they share it, and nobody else gets it. Returns it with its port.

        Raises: AddressError: it is taken, or not ours.
        """
        host, _, port = listen.rpartition(":")
        plain = host.strip("[]")
        family = socket.AF_INET6 if ":" in plain else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as alone:  # refused where anybody is already
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind((plain, int(port)))
                bound = alone.getsockname()[1]
            shared = socket.socket(family, socket.SOCK_STREAM)
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            shared.bind((plain, bound))
        except OSError as error:
            raise AddressError(flag, listen) from error
        self._reserved.append(shared)
        return f"{host}:{bound}"


def _unless_ended(tell: Callable[[], None]) -> None:
    """Tell a process something; nothing happens if it has ended, which is not noticed at once."""
    with contextlib.suppress(ProcessLookupError):
        tell()
