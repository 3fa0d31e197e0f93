"""The front processes of a scheduler, and the addresses that they share."""

import asyncio
import socket

from octavo_shared.process.tracing import MAX_FLUSH_S
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.http.listeners import reserve
from scheduler_svc.processes.kept_process import KeptProcess

# How long a front may take to end, in seconds: it sends its traces, and a little more.
END_S = MAX_FLUSH_S + 1.0


class Fronts:
    """Runs as many front processes as the configuration asks for.

    Args:
        config: Of the scheduler; fronts get all of it.
        link: Where they join the core.
        module: What their processes run.

    Attributes:
        config: As above, with the ports that were chosen for clients.
        processes: They.

    Raises: AddressError: one of their addresses cannot be bound.
    """

    def __init__(
        self, config: SchedulerConfig, link: str, module: str = "scheduler_svc.processes.front_process"
    ) -> None:
        self._reserved: list[socket.socket] = []
        changed = {"listen": self._reserve(config.listen, "--listen")}
        if config.openai_listen is not None:
            changed["openai_listen"] = self._reserve(config.openai_listen, "--openai-listen")
        self.config = config.model_copy(update=changed)
        self.processes = [
            KeptProcess(
                f"front {number}",
                module,
                link,
                str(number),
                settings=self.config.model_dump_json,
            )
            for number in range(config.num_fronts)
        ]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start them all, and each again whenever it ends."""
        self._tasks = [asyncio.create_task(process.keep(), name=process.name) for process in self.processes]

    def start_stopping(self) -> None:
        """Start none again: the end of one is expected now."""
        for process in self.processes:
            process.start_stopping()

    async def stop(self, timeout_s: float = END_S) -> None:
        """End all; their calls have ended, or end now. Who has not ended in that time, or in END_S, is killed."""
        self.start_stopping()
        for process in self.processes:
            process.terminate()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=max(END_S, timeout_s))
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
        reserved = reserve(listen, flag)
        self._reserved += reserved
        return f"{listen.rpartition(':')[0]}:{reserved[0].getsockname()[1]}"
