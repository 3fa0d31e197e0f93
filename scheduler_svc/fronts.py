"""The front processes of a scheduler, and the addresses that they share."""

import asyncio
import socket

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.kept_process import KeptProcess
from shared.errors import AddressError

# How long a front may take to end.
END_S = 5.0


class Fronts:
    """Runs as many front processes as the configuration asks for.

    Args:
        config: Of the scheduler; fronts get all of it.
        link: Where they join the core.

    Attributes:
        config: As above, with the ports that were chosen for clients.
        processes: They.

    Raises: AddressError: one of their addresses cannot be bound.
    """

    def __init__(self, config: SchedulerConfig, link: str) -> None:
        self._reserved: list[socket.socket] = []
        changed = {"listen": self._reserve(config.listen, "--listen")}
        if config.openai_listen is not None:
            changed["openai_listen"] = self._reserve(config.openai_listen, "--openai-listen")
        self.config = config.model_copy(update=changed)
        self.processes = [
            KeptProcess(
                f"front {number}",
                "scheduler_svc.front_process",
                link,
                str(number),
                settings=self.config.model_dump_json,
            )
            for number in range(config.fronts)
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start them all, and each again whenever it ends."""
        self._tasks = [asyncio.create_task(process.keep(), name=process.name) for process in self.processes]

    def start_stopping(self) -> None:
        """Start none again: the end of one is expected now."""
        for process in self.processes:
            process.start_stopping()

    async def stop(self) -> None:
        """End all; their calls have ended, or end now."""
        self.start_stopping()
        for process in self.processes:
            process.terminate()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=END_S)
            for process in self.processes:
                process.kill()
            for task in late:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for reserved in self._reserved:
            reserved.close()

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
