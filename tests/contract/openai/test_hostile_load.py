"""Many hostile clients of a scheduler in a process of its own: its memory stays, and a neighbour's stream goes on."""

import asyncio
import json
import os
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest

import octavo
from tests.contract.openai.hostile_rows import COMPLETIONS, LARGE, ROWS
from tests.contract.openai.test_hostile_http import wrong_rows
from tests.monitoring.live import scrape, value_of
from tests.support.processes import Service, running_service

NUM_READERS = 5000
NUM_IDLE = 1000
NUM_ROUNDS = 6
PATIENCE_S = 240

# 16 equal choices: more than the buffers of a client, the kernel and the scheduler hold, at the cost of one.
FIELDS = {"n": 16, "max_tokens": 32, "temperature": 0, "ignore_eos": True}

# 52 KB was measured: about 16 KB that the client does not take, the connection, the request and its answer.
MAX_READER_KIB = 100

# On a quiet machine 0.01 and 0.1 s. A client who stops the event loop makes it seconds; so does a busy machine, once.
TYPICAL_GAP_S, LONGEST_GAP_S = 0.5, 5.0


@dataclass(slots=True)
class Scheduler:
    """A running one."""

    service: Service

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.service.other_addresses["openai"].rpartition(":")
        return host, int(port)

    @property
    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.service.process.pid}/fd"))

    async def metric(self, name: str, **labels: str) -> float:
        return value_of(await scrape(self.service.other_addresses["metrics"]), name, **labels)

    async def until_files(self, number: int) -> None:
        """Return once so few are open."""
        async with asyncio.timeout(PATIENCE_S):
            while self.num_files > number:
                await asyncio.sleep(0.5)


@asynccontextmanager
async def running_scheduler() -> AsyncIterator[Scheduler]:
    blocks = ("--num-device-blocks", "65536")
    async with running_service("executor_svc.fake", "--step-ms", "2", "--max-num-seqs", "512", *blocks) as executor:
        flags = ("--executor", executor.address, "--openai-listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
        limits = ("--max-waiting-requests", str(NUM_READERS), "--log-level", "error")
        async with running_service("scheduler_svc", *flags, *limits) as service:
            async with octavo.Client(service.address) as client:
                await client.wait_until_ready()
            yield Scheduler(service)


@asynccontextmanager
async def helper(module: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a program of tests/support that talks over its standard streams."""
    command = [sys.executable, "-m", f"tests.support.{module}", *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line_of(process: asyncio.subprocess.Process, *, at_the_end: bool = False) -> bytes:
    """Return the next line of a helper; `at_the_end` the one that it says when stdin is closed."""
    assert process.stdin is not None
    assert process.stdout is not None
    if at_the_end:
        process.stdin.close()
    return await process.stdout.readline()


@asynccontextmanager
async def undisturbed_neighbour(scheduler: Scheduler) -> AsyncIterator[None]:
    """Let somebody stream meanwhile, who must not notice what happens."""
    host, port = scheduler.address
    async with helper("stream_neighbour", host, str(port)) as neighbour:
        assert await line_of(neighbour) == b"begun\n"
        yield
        typical_s, longest_s = json.loads(await line_of(neighbour, at_the_end=True))
    print(f"a neighbour's tokens came {typical_s:.3f} s (p99) and {longest_s:.3f} s at most one after the other")
    assert typical_s < TYPICAL_GAP_S
    assert longest_s < LONGEST_GAP_S


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_large_and_many_hostile_requests_leave_nothing_behind() -> None:
    rows = {**{name: row for name, row in ROWS.items() if row[1] != 408}, **LARGE}  # a body may take 30 s
    resident_mib = []
    async with running_scheduler() as scheduler, undisturbed_neighbour(scheduler):
        num_files = scheduler.num_files
        for _ in range(NUM_ROUNDS):
            names = sorted(rows)
            parts = [{name: rows[name] for name in names[first::16]} for first in range(16)]
            results = await asyncio.gather(*(wrong_rows(scheduler.address, part) for part in parts))
            assert {name: wrong for result in results for name, wrong in result.items()} == {}
            await scheduler.until_files(num_files)
            resident_mib.append(scheduler.service.resident_mib())
    assert resident_mib[-1] < resident_mib[NUM_ROUNDS // 2] + 4, resident_mib


@pytest.mark.slow
async def test_a_thousand_idle_connections_are_closed_and_disturb_nobody() -> None:
    async with running_scheduler() as scheduler, undisturbed_neighbour(scheduler):
        num_files = scheduler.num_files
        clients = []
        for number in range(NUM_IDLE):
            reader, writer = await asyncio.open_connection(*scheduler.address)
            writer.write((b"", b"GE", b"GET /health HTTP/1.1\r\nX: ", b"\r\n")[number % 4])
            clients.append((reader, writer))
        for reader, writer in clients:
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.transport.abort()
        await scheduler.until_files(num_files)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_thousands_of_slow_readers_cost_little_and_are_cut_off() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < NUM_READERS + 1000:
        pytest.skip(f"a process may open {hard} files here, and each reader is one")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        async with running_scheduler() as scheduler, undisturbed_neighbour(scheduler):
            await check_slow_readers(scheduler)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def check_slow_readers(scheduler: Scheduler) -> None:
    num_files, before_mib = scheduler.num_files, scheduler.service.resident_mib()
    host, port = scheduler.address
    async with helper("slow_readers", host, str(port), str(NUM_READERS), json.dumps(FIELDS)) as readers:
        assert json.loads(await line_of(readers)) == {"HTTP/1.1 200": NUM_READERS}
        resident_mib = [scheduler.service.resident_mib()]
        while scheduler.num_files > num_files:  # the oldest are cut off first
            await asyncio.sleep(1)
            resident_mib.append(scheduler.service.resident_mib())
        assert await scheduler.metric("octavo_http_responses_total", path=COMPLETIONS, status="499") == NUM_READERS
        assert await scheduler.metric("octavo_requests_waiting") == 0
        assert json.loads(await line_of(readers, at_the_end=True)) == {"ConnectionResetError": NUM_READERS}
    each_kib = (max(resident_mib) - before_mib) * 1024 / NUM_READERS
    print(f"{NUM_READERS} slow readers: {each_kib:.0f} KiB each")
    assert each_kib < MAX_READER_KIB
    assert max(resident_mib) < 1.05 * resident_mib[0], resident_mib
