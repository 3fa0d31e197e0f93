"""`octavo up` and `octavo demo` on fake executors: what dies comes back, and a second one is told of the first."""

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from octavo import Client, SamplingParams
from octavo.admin_client import AdminClient
from octavo.commands.command_line import run
from octavo.values.outputs import Accepted, Delta
from tests.support.processes import running_service

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

# The command line, with fake executors in place of those with a model.
PROGRAM = """
import os, sys
from octavo.local.options import LocalOptions

FAKE = [sys.executable, "-P", "-m", "executor_svc.fake", "--exit-on-stdin-close", *os.environ["FAKE_FLAGS"].split()]
LocalOptions.executor_command = lambda self: [*FAKE, "--listen", "127.0.0.1:0"]
LocalOptions.prepare_model = lambda self: None

from octavo.cli import main

main(sys.argv[1:])
"""
ANY_PORT = ("--listen", "127.0.0.1:0")
PROMPT = list(range(97, 117))
PARAMS = SamplingParams(temperature=0.0, max_tokens=160)


async def start(folder: Path, *arguments: str, fake_flags: str = "--step-ms 5") -> asyncio.subprocess.Process:
    """Start a command; its temporary files are in `folder`."""
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-c", PROGRAM, *arguments, "--model", "some/model"]
    environment = {**os.environ, "TMPDIR": str(folder), "FAKE_FLAGS": fake_flags}
    return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=environment)


async def line_of(stream: asyncio.StreamReader | None, pattern: str) -> re.Match[str]:
    """Return the match of the next line, which must have the pattern."""
    assert stream is not None
    line = (await stream.readline()).decode()
    match = re.fullmatch(pattern, line.strip())
    assert match, line
    return match


@dataclass(slots=True)
class Up:
    """A running `octavo up --executors 2`."""

    process: asyncio.subprocess.Process
    address: str
    admin_address: str
    page_address: str

    def child_pids(self) -> dict[str, int]:
        """Return its services: the scheduler by its name, each executor by its number."""
        pids = {}
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children", encoding="utf-8") as file:
            executors = []
            for pid in map(int, file.read().split()):
                with open(f"/proc/{pid}/cmdline", encoding="utf-8") as command:
                    if "scheduler_svc" in command.read():
                        pids["scheduler"] = pid
                    else:
                        executors.append(pid)
        return pids | {f"executor {number}": pid for number, pid in enumerate(sorted(executors), start=1)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Up]:
    process = await start(tmp_path_factory.mktemp("logs"), "up", "--executors", "2", *ANY_PORT)
    try:
        serving = await line_of(process.stdout, r"serving some/model on (\S+) with 2 executors; press Ctrl-C to stop")
        operators = await line_of(process.stdout, r"operators: http://(\S+) \(live page\), octavo top --address (\S+)")
        yield Up(process, serving[1], operators[2], operators[1])
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_stream_survives_its_executor_and_the_executor_comes_back(up: Up) -> None:
    async with Client(up.address) as client, AdminClient(up.admin_address) as admin:
        undisturbed = await client.generate(PROMPT, PARAMS)
        token_ids: list[int] = []
        request_id, victim = "", ""
        async for event in client.stream(PROMPT, PARAMS):
            if isinstance(event, Accepted):
                request_id = event.request_id
            elif isinstance(event, Delta):
                token_ids += event.token_ids
                if not victim and len(token_ids) >= 5:
                    victim = (await admin.get_request(request_id)).executor
                    number = [executor.address for executor in (await admin.get_state()).executors].index(victim) + 1
                    os.kill(up.child_pids()[f"executor {number}"], signal.SIGKILL)
        assert token_ids == list(undisturbed.outputs[0].token_ids)
        lost = (
            r"octavo: executor (\d) stopped \(signal SIGKILL, possibly out of memory\); the other executors take over "
            r"its "
        )
        assert (await line_of(up.process.stderr, lost + r"streams; restarting it in .* s \[log: .*\]"))[1] == str(
            number
        )
        await line_of(up.process.stderr, rf"octavo: executor {number} is back after .* s")
        assert [executor.address for executor in (await admin.get_state()).executors].count(victim) == 1


async def test_the_scheduler_comes_back_at_its_address_and_takes_the_executors_over(up: Up) -> None:
    executors = {name: pid for name, pid in up.child_pids().items() if name != "scheduler"}
    os.kill(up.child_pids()["scheduler"], signal.SIGKILL)
    await line_of(
        up.process.stderr, (r"octavo: the scheduler stopped \(signal SIGKILL, .*\); its calls were cut off; .*")
    )
    await line_of(up.process.stderr, r"octavo: the scheduler is back after .* s")
    assert executors.items() < up.child_pids().items()
    async with Client(up.address) as client:
        assert len((await client.generate(PROMPT, PARAMS)).outputs[0].token_ids) == 160
    async with aiohttp.ClientSession() as session, session.get(f"http://{up.page_address}/") as page:
        assert "<title>Octavo</title>" in await page.text()


async def second(*flags: str, model: str = "some/model") -> int:
    return await asyncio.to_thread(run, ["serve", "--model", model, *flags])


async def test_a_second_one_says_that_one_runs_already(up: Up, capsys: pytest.CaptureFixture[str]) -> None:
    assert await second("--listen", up.address, "--admin-listen", up.admin_address) == 1
    assert capsys.readouterr().err == (
        f'octavo: octavo is already running on {up.address} and serves fake; `octavo generate "..." --address '
        f"{up.address}` "
        "uses it, `octavo up --listen 127.0.0.1:0` starts another one\n"
    )
    assert await second("--listen", "127.0.0.1:0", "--admin-listen", up.admin_address) == 1
    assert capsys.readouterr().err == (
        f"octavo: octavo is already running with admin address {up.admin_address}; it serves fake; "
        "`octavo up --admin-listen 127.0.0.1:0` starts another one\n"
    )


async def test_one_that_has_no_model_yet_is_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_service("scheduler_svc", "--executor", "127.0.0.1:1") as scheduler:
        assert await second("--listen", scheduler.address) == 1
        told = capsys.readouterr().err
        assert told.startswith(
            f"octavo: octavo is already running on {scheduler.address}, but its model is still loading; "
        )
        assert await second("--listen", "0.0.0.0:0", "--admin-listen", scheduler.other_addresses["admin"]) == 1
        assert "; its model is still loading; " in capsys.readouterr().err


async def test_a_wrong_model_is_told_before_a_taken_port(up: Up, capsys: pytest.CaptureFixture[str]) -> None:
    assert await second("--listen", up.address, model="./nowhere") == 1
    assert capsys.readouterr().err == "octavo: the model directory nowhere does not exist\n"


@contextmanager
def another_program() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("flag", ["--listen", "--admin-listen", "--page-listen"])
async def test_a_port_of_another_program_is_told(
    flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.local.taken_ports._ANSWER_TIMEOUT_S", 0.2)
    with another_program() as address:
        flags = {"--listen": "127.0.0.1:0", "--admin-listen": "127.0.0.1:0", flag: address}
        assert await second(*(word for pair in flags.items() for word in pair)) == 1
    assert capsys.readouterr().err == (
        f"octavo: {flag} {address} is in use by another program; choose another port, or 0 for any free one\n"
    )


def check_demo(output: str, num_tokens: int) -> None:
    """Assert that an executor was killed in the middle, and that the answer was the same."""
    killed = re.search(
        (r"── executor (\d) is computing this answer: kill -9 (\d+) ── executor (\d) takes over ──\n"), output
    )
    assert killed, output
    assert {killed[1], killed[3]} == {"1", "2"}
    assert f"executor {killed[1]} (model, KV cache), process {killed[2]}" in output
    end = f"{num_tokens} tokens; the stream paused for "
    assert output.index("> Why is the sky blue?") < killed.start() < killed.end() < output.index(end)
    assert f"Asked again, without a kill: the same {num_tokens} tokens." in output


async def test_the_demo_kills_an_executor_and_finds_the_same_tokens(tmp_path: Path) -> None:
    process = await start(tmp_path, "demo")
    output, _ = await process.communicate()
    assert process.returncode == 0
    check_demo(output.decode(), 256)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow  # the demo that kills one is above
async def test_a_demo_whose_answer_is_short_kills_nobody(tmp_path: Path) -> None:
    process = await start(tmp_path, "demo", fake_flags="--eos-probability 0.5")
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert re.search(
        r"^\d tokens: the answer finished before an executor could be killed; ask for more tokens\.$",
        output.decode(),
        re.MULTILINE,
    )
    assert "kill -9" not in output.decode()


@pytest.mark.slow
@pytest.mark.model
async def test_the_demo_with_the_real_model(demo_model: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "octavo.cli", "demo", "--kv-cache-gib", "0.3"), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    check_demo(output.decode(), 97)
