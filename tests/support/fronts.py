"""Fronts that are joined by the link, as those in processes of their own, and run in the test's process."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.front_process import serve
from scheduler_svc.fronts import Fronts

# Set to a number: every stack of the contract tests has so many fronts.
NUM_FRONTS_VARIABLE = "OCTAVO_TEST_FRONTS"
NUM_FRONTS = int(os.environ.get(NUM_FRONTS_VARIABLE, "0"))


class FrontInProcess:
    """Stands for the process of a front; ends as one that is killed, or told to."""

    def __init__(self, link: str, number: int, settings: str) -> None:
        self._told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        config = SchedulerConfig.model_validate_json(settings)
        self.pid = os.getpid()
        self.task = asyncio.create_task(serve(config, link, str(number), self._wait))

    async def _wait(self) -> str:
        return await self._told

    def terminate(self) -> None:
        if not self._told.done():
            self._told.set_result("the test says so")

    def kill(self) -> None:
        self.task.cancel()


@contextmanager
def fronts_in_this_process() -> Iterator[None]:
    """Let the fronts of schedulers run here."""

    async def keep(self: Fronts, number: int, settings: str) -> None:
        front = FrontInProcess(self.link, number, settings)
        self._processes[number] = front  # type: ignore[assignment]
        try:
            await front.task
        finally:
            front.task.cancel()
            self._processes.pop(number, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fronts, "_keep", keep)
        yield
