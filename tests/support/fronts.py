"""Fronts that are joined by the link, as those in processes of their own, and run in the test's process."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.engine.engine import Engine
from scheduler_svc.processes.front_process import FrontService
from scheduler_svc.processes.supervisor import front_config, link_in, reserve_addresses

# Set to a number: every stack of the contract tests has so many fronts.
NUM_FRONTS_VARIABLE = "OCTAVO_TEST_FRONTS"
NUM_FRONTS = int(os.environ.get(NUM_FRONTS_VARIABLE, "0"))


class FrontInProcess:
    """Stands for the process of a front; ends as one that is killed, or told to."""

    def __init__(self, link: str, number: int, config: SchedulerConfig) -> None:
        self._told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.service = FrontService(front_config(config, link, number))
        self.task = asyncio.create_task(self.service.run(self._told))

    def knows(self, engine: Engine) -> bool:
        """Return whether it has heard which executors an engine has, and what they are."""
        [cell] = self.service.cells.values()
        if cell.model is None or engine.model is None or cell.load.max_num_seqs != engine.load.max_num_seqs:
            return False
        return cell.model.reproducibility == engine.model.reproducibility

    async def terminate(self) -> None:
        """Tell it to end, and return once it has."""
        if not self._told.done():
            self._told.set_result("the test says so")
        await asyncio.gather(self.task, return_exceptions=True)

    async def kill(self) -> None:
        """End it as a crash would."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class FrontsInProcess:
    """As many fronts as a configuration asks for.

    Attributes:
        link: Where they join.
        config: Theirs and their core's, with the ports that they have.
        fronts: They, by number.
    """

    def __init__(self, config: SchedulerConfig, folder: Path) -> None:
        self.link = link_in(folder)
        self.config, self._reserved = reserve_addresses(config)
        self.fronts = [self.start(number) for number in range(config.num_fronts)]

    def start(self, number: int) -> FrontInProcess:
        """Start one."""
        return FrontInProcess(self.link, number, self.config)

    async def wait_until_listening(self) -> None:
        """Return once all have opened their ports."""
        for front in self.fronts:
            await front.service.is_listening.wait()

    async def end(self) -> None:
        """Let all end in order."""
        await asyncio.gather(*(front.terminate() for front in self.fronts))
        for reserved in self._reserved:
            reserved.close()


@asynccontextmanager
async def fronts_in_this_process(config: SchedulerConfig) -> AsyncIterator[FrontsInProcess | None]:
    """Run the fronts of a scheduler here; None: it has none."""
    if not config.num_fronts:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        fronts = FrontsInProcess(config, Path(folder))
        try:
            yield fronts
        finally:
            await fronts.end()
