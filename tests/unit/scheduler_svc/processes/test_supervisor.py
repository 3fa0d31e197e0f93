"""When the processes of a scheduler are started again, and what their end leaves behind."""

import asyncio
import os
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest

from octavo_shared.errors import AddressError, UnavailableError
from scheduler_svc.config.client_side_config import ClientSideConfig, FrontConfig
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.processes.supervisor import Supervisor, front_config
from tests.support.patience import PATIENCE_S


class Process:
    """A process, as asyncio has it; it has ended before that is noticed."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.pid = 1
        self.stdin = Mock()
        self.stdin.close = self.end
        self.stdout = asyncio.StreamReader()
        self.ending = asyncio.Event()

    @property
    def settings(self) -> SchedulerConfig:
        """What it was given."""
        [(line,)] = (call.args for call in self.stdin.write.call_args_list)
        return SchedulerConfig.model_validate_json(line)

    def say(self, *lines: str) -> None:
        self.stdout.feed_data("".join(f"octavo {line}\n" for line in lines).encode())

    def end(self) -> None:
        self.ending.set()
        self.stdout.feed_eof()

    async def wait(self) -> int:
        await self.ending.wait()
        return 3

    def kill(self) -> None:
        self.end()
        raise ProcessLookupError

    terminate = kill


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Process]:
    started: list[Process] = []

    async def start(*command: str, **_: object) -> Process:
        started.append(Process(command[3]))
        return started[-1]

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr("scheduler_svc.processes.supervisor.FIRST_PAUSE_S", 0.001)
    return started


async def until_started(processes: list[Process], num_processes: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(processes) < num_processes:
            await asyncio.sleep(0.001)


async def settle() -> None:
    """Let everything happen that waits for nothing but its turn."""
    for _ in range(100):
        await asyncio.sleep(0)


async def serving(
    processes: list[Process], stop: "asyncio.Future[str]", capsys: pytest.CaptureFixture[str]
) -> "asyncio.Task[int]":
    """Run a supervisor whose core listens and serves."""
    supervisor = Supervisor(SchedulerConfig(fronts=2, listen="127.0.0.1:0", admin_listen="127.0.0.1:0"))
    running = asyncio.create_task(supervisor.run(stop))
    await until_started(processes, 3)
    core, *fronts = processes
    lines = (
        "serving admin on 127.0.0.1:7",
        "serving page on 127.0.0.1:6",
        "listening on 127.0.0.1:8, waiting for it",
        "serving on 127.0.0.1:8",
    )
    core.say(*(f"scheduler {line}" for line in lines))
    for front in fronts:
        await settle()
        assert not capsys.readouterr().out, "people would connect, and reach nobody"
        front.say("front listening on 127.0.0.1:8, waiting for the core")
    await settle()
    assert capsys.readouterr().out == "".join(f"octavo scheduler {line}\n" for line in lines)
    return running


async def test_whatever_ends_is_started_again_until_the_scheduler_stops(
    processes: list[Process], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = await serving(processes, stop, capsys)
    assert os.listdir(tmp_path)
    for number in range(3):
        processes[number].end()
        await until_started(processes, 4 + number)
    cores = [process for process in processes if process.module.endswith("engine_process")]
    ports = (cores[1].settings.admin_listen, cores[1].settings.page_listen)
    assert ports == ("127.0.0.1:7", "127.0.0.1:6"), "the next core has those of the one before"
    cores[1].say("scheduler serving on 127.0.0.1:8")
    await settle()
    assert capsys.readouterr().out == "", "it has been said"
    stop.set_result("the test says so")
    assert await running == 0
    assert len(processes) == 6
    assert not os.listdir(tmp_path)


async def test_the_end_waits_for_no_pause(
    processes: list[Process], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scheduler_svc.processes.supervisor.FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr("scheduler_svc.processes.supervisor.LONGEST_PAUSE_S", 3600.0)
    stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = await serving(processes, stop, capsys)
    processes[0].end()
    await settle()
    stop.set_result("the test says so")
    async with asyncio.timeout(PATIENCE_S):
        assert await running == 0


@pytest.mark.parametrize("number", [0, 1])
async def test_one_that_ends_before_they_listen_ends_the_start(processes: list[Process], number: int) -> None:
    stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(Supervisor(SchedulerConfig(fronts=1, listen="127.0.0.1:0")).run(stop))
    await until_started(processes, 2)
    processes[number].end()
    async with asyncio.timeout(PATIENCE_S):
        assert await running == 3


def test_an_address_that_is_taken_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(AddressError, match="cannot listen on"):
        Supervisor(SchedulerConfig(fronts=1, listen=f"127.0.0.1:{taken.getsockname()[1]}"))
    assert not os.listdir(tmp_path)


def test_without_room_for_its_files_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(
        UnavailableError, match=r"^temporary files cannot be written \(Not a directory\); free space, or"
    ):
        Supervisor(SchedulerConfig(fronts=1, listen="127.0.0.1:0"))


def test_a_front_has_the_settings_of_what_clients_meet_and_leaves_probes_and_metrics_to_the_core() -> None:
    given = {
        "listen": "127.0.0.1:7",
        "openai_listen": "127.0.0.1:8",
        "health_listen": "127.0.0.1:9",
        "metrics_listen": "127.0.0.1:10",
        "max_beam_width": 3,
        "tool_call_parser": "hermes",
        "shutdown_grace_s": 2.5,
        "log_format": "json",
    }
    config = SchedulerConfig.model_validate(given)
    front = FrontConfig.model_validate_json(front_config(config, "unix:/engine:0", 3).model_dump_json())
    assert (front.engine, front.front_id, front.exit_on_stdin_close) == (("unix:/engine:0",), "3", True)
    differ = {name for name in ClientSideConfig.model_fields if getattr(front, name) != getattr(config, name)}
    assert differ == {"health_listen", "metrics_listen", "exit_on_stdin_close"}
