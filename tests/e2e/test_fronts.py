"""Fronts as processes: their answers, their death, their core's death, the end of all."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from octavo.admin_client import AdminClient
from octavo.client import Client
from octavo.errors import UnavailableError
from octavo.values.outputs import Delta, Finished
from tests.support.patience import PATIENCE_S
from tests.support.processes import Service, children_of, running_service

PROMPTS = [[40 + number, 41, 42] for number in range(8)]


@dataclass(slots=True)
class Running:
    """A scheduler with fronts, and its executor."""

    scheduler: Service
    executor: Service

    def fronts(self) -> list[int]:
        """The processes of its fronts."""
        return children_of(self.scheduler.process.pid, "scheduler_svc.processes.front_process")

    def cores(self) -> list[int]:
        """The process of its core, if there is one now."""
        return children_of(self.scheduler.process.pid, "scheduler_svc.processes.engine_process")


@asynccontextmanager
async def running(num_fronts: int, *flags: str, step_ms: int = 5, script: str = "") -> AsyncIterator[Running]:
    """Run both services until the end of the block; the scheduler serves; `script`: of the model's answers."""
    fake = ("--step-ms", str(step_ms), "--log-level", "warning", *(("--script", script) if script else ()))
    async with running_service("executor_svc.fake", *fake) as executor:
        flags = ("--executor", executor.address, "--fronts", str(num_fronts), "--log-level", "warning", *flags)
        async with running_service("scheduler_svc", *flags) as scheduler:
            assert scheduler.process.stdout is not None
            async with asyncio.timeout(PATIENCE_S):
                while b"serving on" not in await scheduler.process.stdout.readline():  # now all fronts take requests
                    pass
            yield Running(scheduler, executor)


def runs(pid: int) -> bool:
    """Return whether a process is there."""
    return Path(f"/proc/{pid}").exists()


async def answers(address: str) -> list[object]:
    """Return what a client gets for some requests, without their ids."""
    async with Client(address) as client:
        outputs = [await client.generate(prompt, max_tokens=12, temperature=0.0) for prompt in PROMPTS[:2]]
        outputs.append(
            await client.generate("Hello", max_tokens=40, temperature=1.0, seed=3, n=2, stop=["a", "e", "i"])
        )
        outputs.append(await client.generate("Bees", max_tokens=6, beam_width=3, n=2, logprobs=0))
        many = [event async for _, event in client.stream_many(PROMPTS[2:5], max_tokens=9, temperature=0.0, logprobs=2)]
        refused = [event.outputs for event in many if isinstance(event, Finished)]
        return [[output.outputs for output in outputs], sorted(map(repr, refused))]


async def test_the_answers_are_those_of_a_scheduler_without_fronts() -> None:
    async with running(0) as alone, running(2, "--openai-listen", "127.0.0.1:0") as joined:
        assert await answers(joined.scheduler.address) == await answers(alone.scheduler.address)
        url = f"http://{joined.scheduler.other_addresses['openai']}/v1/completions"
        body = {"model": "fake", "prompt": [40, 41, 42], "max_tokens": 4, "temperature": 0}
        async with aiohttp.ClientSession() as session:
            models = await (await session.get(url.replace("completions", "models"))).json()
            body["model"] = models["data"][0]["id"]
            answer = await (await session.post(url, json=body)).json()
        assert answer["usage"]["completion_tokens"] == 4


async def read_all(client: Client, prompt: list[int], begun: asyncio.Event | None = None) -> list[int]:
    """Return the tokens of a long answer, and say when the first of them is there."""
    token_ids: list[int] = []
    async for event in client.stream(prompt, max_tokens=400, temperature=0.0, ignore_eos=True):
        if isinstance(event, Delta):
            token_ids += event.token_ids
            if begun:
                begun.set()
    return token_ids


async def begin_reading(client: Client, prompt: list[int]) -> asyncio.Task[list[int]]:
    """Return who reads a long answer, once its first token is there."""
    begun = asyncio.Event()
    reading = asyncio.create_task(read_all(client, prompt, begun))
    waiting = asyncio.create_task(begun.wait())
    await asyncio.wait((reading, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return reading


async def test_a_front_that_is_killed_takes_its_own_calls_with_it_and_nothing_else() -> None:
    async with running(2) as services:
        address, [killed, _] = services.scheduler.address, services.fronts()
        clients = [Client(address) for _ in PROMPTS]  # a connection each: the kernel deals them to both fronts
        tasks = []
        for client, prompt in zip(clients, PROMPTS, strict=True):
            await client.__aenter__()
            tasks.append(await begin_reading(client, prompt))
        os.kill(killed, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for client in clients:
            await client.close()
        whole = [result for result in results if isinstance(result, list)]
        broken = [result for result in results if not isinstance(result, list)]
        assert all(isinstance(error, UnavailableError) for error in broken), broken
        assert all(len(token_ids) == 400 for token_ids in whole)
        while len(services.fronts()) < 2 or killed in services.fronts():  # it is started again
            await asyncio.sleep(0.02)
        async with Client(address) as client:
            await client.wait_until_ready(timeout_s=PATIENCE_S)
            assert len((await client.generate([40], max_tokens=3, temperature=0.0)).outputs[0].token_ids) == 3


@pytest.mark.slow
async def test_a_front_that_is_told_to_end_lets_its_streams_finish_and_another_one_comes() -> None:
    async with running(1) as services, Client(services.scheduler.address) as client:
        reading = await begin_reading(client, PROMPTS[0])
        [front] = services.fronts()
        os.kill(front, signal.SIGTERM)
        with pytest.raises(UnavailableError, match="shutting down"):
            while not reading.done():  # until the signal has arrived
                await client.generate([40], max_tokens=3)
        assert len(await reading) == 400
        while services.fronts() in ([], [front]):
            await asyncio.sleep(0.02)
        await client.wait_until_ready(timeout_s=PATIENCE_S)
        assert len((await client.generate([40], max_tokens=3)).outputs[0].token_ids) == 3


@pytest.mark.slow
async def test_core_and_fronts_end_with_their_supervisor() -> None:
    async with running(1) as services:
        pids = services.fronts() + services.cores()
        await services.scheduler.kill()
        async with asyncio.timeout(PATIENCE_S):
            while any(map(runs, pids)):
                await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_scheduler_waits_for_the_fronts_of_one_that_was_killed() -> None:
    async with running(1) as services, Client(services.scheduler.address) as client:
        reading = await begin_reading(client, PROMPTS[0])
        await services.scheduler.kill()
        flags = ("--fronts", "1", "--admin-listen", services.scheduler.other_addresses["admin"])
        addresses = ("--executor", services.executor.address, "--listen", services.scheduler.address)
        async with running_service("scheduler_svc", *flags, *addresses) as next_one:
            assert reading.done(), "it finished before the next one got the port"
            assert len(await reading) == 400
            async with Client(next_one.address) as other:
                await other.wait_until_ready(timeout_s=PATIENCE_S)
                assert len((await other.generate([40], max_tokens=3)).outputs[0].token_ids) == 3


async def test_a_core_that_is_killed_under_streams_is_started_again_and_nobody_notices() -> None:
    async with running(2) as services, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(services.scheduler.address)) for _ in PROMPTS]
        whole = await asyncio.gather(*map(read_all, clients, PROMPTS))
        long_prompt = list(range(33, 133))
        assert not (await clients[0].generate(long_prompt, max_tokens=3, temperature=0.0)).usage.num_cached_tokens
        reading = [await begin_reading(*pair) for pair in zip(clients, PROMPTS, strict=True)]
        [core] = services.cores()
        os.kill(core, signal.SIGKILL)
        late = asyncio.create_task(read_all(clients[0], PROMPTS[0]))  # nobody refuses it either
        assert await asyncio.gather(*reading) == whole
        assert await late == whole[0]
        assert services.cores() != [core]
        again = await clients[0].generate(long_prompt, max_tokens=3, temperature=0.0)
        assert again.usage.num_cached_tokens >= 96, "the executor has kept it, and says so to the next core"


async def test_streams_of_messages_do_not_notice_that_their_core_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text(json.dumps({"say": "Word after word, ü. " * 10}))
    num_streams, num_begun = 20, 0

    async def read(session: aiohttp.ClientSession, number: int) -> list[bytes]:
        """Return the events without ids and counts."""
        nonlocal num_begun
        body = {"model": "fake", "max_tokens": 300, "stream": True}
        events = []
        async with session.post(
            "/v1/messages", json={**body, "messages": [{"role": "user", "content": f"{number}"}]}
        ) as answer:
            async for line in answer.content:
                if line.startswith((b'data: {"type":"content_block', b'data: {"type":"message_stop', b"event: error")):
                    events.append(line)
                    num_begun += len(events) == 5
        return events

    async with running(2, "--openai-listen", "127.0.0.1:0", script=str(script)) as services:
        url = f"http://{services.scheduler.other_addresses['openai']}"
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(url, connector=connector) as session, asyncio.timeout(PATIENCE_S):
            whole = await asyncio.gather(*(read(session, number) for number in range(num_streams)))
            num_begun = 0
            reading = asyncio.gather(*(read(session, number) for number in range(num_streams)))
            while num_begun < num_streams:
                await asyncio.sleep(0.01)
            [core] = services.cores()
            os.kill(core, signal.SIGKILL)
            assert await reading == whole
        assert services.cores() != [core]
    assert {len(events) for events in whole} == {200 + 3}


async def test_streams_of_events_are_the_same_when_their_core_is_killed() -> None:
    async with running(2, "--openai-listen", "127.0.0.1:0") as services, aiohttp.ClientSession() as session:
        url = f"http://{services.scheduler.other_addresses['openai']}/v1/responses"
        body = {"model": "fake", "temperature": 0, "max_output_tokens": 200, "stream": True}
        num_events = 0

        async def events(number: int) -> list[bytes]:
            nonlocal num_events
            told = []
            asked = {**body, "input": f"hello {number}", "request_id": f"r{number}"}
            async with session.post(url, json=asked) as response:
                async for line in response.content:
                    if line.startswith(b"data: "):
                        told.append(line)
                        num_events += 1
            assert b'"status":"incomplete"' in told[-1], "it has ended by its length"
            return told[2:-1]  # the others have the time

        whole = await asyncio.gather(*map(events, range(20)))
        num_events_of_whole = num_events
        reading = asyncio.gather(*map(events, range(20)))
        async with asyncio.timeout(PATIENCE_S):
            while num_events < num_events_of_whole + 500:
                await asyncio.sleep(0.01)
        [core] = services.cores()
        os.kill(core, signal.SIGKILL)
        assert await reading == whole
        assert services.cores() != [core]


async def test_a_front_that_stands_still_keeps_no_other_from_the_next_core() -> None:
    async with running(2) as services, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(services.scheduler.address)) for _ in PROMPTS]
        whole = await asyncio.gather(*map(read_all, clients, PROMPTS))
        operator = await stack.enter_async_context(AdminClient(services.scheduler.other_addresses["admin"]))
        reading = [await begin_reading(*pair) for pair in zip(clients, PROMPTS, strict=True)]
        fronts = (await operator.get_state()).fronts
        still = min(fronts, key=lambda front: front.num_requests)
        assert still.num_requests < len(PROMPTS)
        os.kill(still.pid, signal.SIGSTOP)
        try:
            [core] = services.cores()
            os.kill(core, signal.SIGKILL)
            ended = set[asyncio.Task[list[int]]]()
            async with asyncio.timeout(PATIENCE_S):
                while len(ended) < len(PROMPTS) - still.num_requests:
                    ended, _ = await asyncio.wait(reading, timeout=0.05)
        finally:
            os.kill(still.pid, signal.SIGCONT)
        assert await asyncio.gather(*reading) == whole


@pytest.mark.parametrize("is_ctrl_c", [False, True])
async def test_a_scheduler_that_is_told_to_end_lets_streams_through_fronts_finish(is_ctrl_c: bool) -> None:
    async with running(1) as services:
        async with Client(services.scheduler.address, resume_timeout_s=0) as client:
            reading = await begin_reading(client, PROMPTS[0])
            [front] = services.fronts()
            if is_ctrl_c:  # a terminal tells them all
                for pid in (*services.cores(), front, services.scheduler.process.pid):
                    os.kill(pid, signal.SIGINT)
                assert len(await reading) == 400
                assert await services.scheduler.process.wait() == 0
                return
            ending = asyncio.create_task(services.scheduler.terminate())
            assert len(await reading) == 400
        assert await ending == 0
        assert not runs(front)


async def test_a_scheduler_that_is_told_to_end_before_its_fronts_listen_does_not_wait_for_them(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")  # a front waits for whoever writes it
    flags = ["--fronts", "1", "--tokenizer", f"{tmp_path}", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "scheduler_svc", *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE_S):
        while b"name='front 0'" not in await process.stderr.readline():
            pass
    process.send_signal(signal.SIGTERM)
    while b"stopped_while_starting" not in (line := await process.stderr.readline()) and line:
        with suppress(OSError):  # let the front go on, should it be there: it ends with an error
            os.close(os.open(tmp_path / "tokenizer.json", os.O_WRONLY | os.O_NONBLOCK))
    assert await process.wait() == 0
    assert await process.stdout.read() == b""


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
async def test_fronts_share_the_addresses_of_a_name_and_of_ipv6(host: str) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    async with running(2, "--listen", f"{host}:0", "--openai-listen", f"{host}:0") as services:
        async with Client(services.scheduler.address) as client:
            assert len((await client.generate([40], max_tokens=3)).outputs[0].token_ids) == 3
        url = f"http://{services.scheduler.other_addresses['openai']}/health"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            assert answer.status == 200


def refused_start(*flags: str) -> str:
    """Return what a scheduler with a front says that cannot start."""
    flags = ("--fronts", "1", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", *flags)
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "scheduler_svc", *flags],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    return ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--listen", "--openai-listen"])
def test_an_address_that_is_taken_is_refused(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"cannot listen on {address}" in refused_start(flag, address)


def test_what_only_a_front_finds_wrong_ends_the_start_with_its_sentence(tmp_path: Path) -> None:
    words = refused_start("--tokenizer", str(tmp_path))
    assert f"octavo scheduler: front 0: {tmp_path}/tokenizer.json does not exist" in words
