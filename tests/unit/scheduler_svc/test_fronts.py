"""When front processes are started again, and what their end leaves behind."""

import asyncio
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.fronts import Fronts


class Process:
    """A process of a front, as asyncio has it; it has ended before that is noticed."""

    def __init__(self) -> None:
        self.pid = 1
        self.stdin = Mock()
        self.ending = asyncio.Event()

    async def wait(self) -> int:
        await self.ending.wait()
        return 0

    def terminate(self) -> None:
        self.ending.set()
        raise ProcessLookupError

    kill = terminate


class Listening:
    """The core's side of the link, when all fronts listen."""

    async def wait_until_listening(self, num_fronts: int) -> None:
        """Return."""
        while len(processes) < num_fronts:
            await asyncio.sleep(0)


processes: list[Process] = []


@pytest.fixture
def fronts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fronts:
    processes.clear()

    async def start(*_: object, **__: object) -> Process:
        processes.append(Process())
        return processes[-1]

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr("scheduler_svc.fronts.FIRST_PAUSE_S", 0.001)
    servicer: Any = Listening()
    return Fronts(SchedulerConfig(fronts=2, listen="127.0.0.1:0"), servicer)


def names(folder: Path) -> list[str]:
    return os.listdir(folder)


async def until_started(num_processes: int) -> None:
    async with asyncio.timeout(10):
        while len(processes) < num_processes:
            await asyncio.sleep(0.001)


async def test_a_front_that_ends_is_started_again_until_the_scheduler_stops(fronts: Fronts) -> None:
    await fronts.start()
    processes[0].ending.set()
    await until_started(3)
    fronts.start_stopping()
    for process in processes:
        process.ending.set()
    await asyncio.sleep(0.05)
    assert len(processes) == 3
    await fronts.stop()


async def test_the_end_waits_for_no_pause_and_leaves_no_folder(
    fronts: Fronts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("scheduler_svc.fronts.FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr("scheduler_svc.fronts.LONGEST_PAUSE_S", 60.0)
    await fronts.start()
    assert names(tmp_path)
    processes[0].ending.set()
    await asyncio.sleep(0.01)
    async with asyncio.timeout(2):
        await fronts.stop()  # the other one has ended, and nobody has noticed yet
    assert not names(tmp_path)
