"""The client goes on with an answer whose call broke: at the same scheduler or another one, to the same end."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.client import Client
from octavo.errors import UnavailableError
from octavo.outputs import Accepted, Delta, Event, FailedRequest, Finished
from tests.support.stack import Stack, running_stack, until

PROMPT = [40, 41, 42, 43, 44]
NUM_TOKENS = 40

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 1, "prompt_logprobs": 0},
    "a seed that the scheduler chose": {"temperature": 1.0, "n": 3},
    "stop strings": {"temperature": 1.0, "seed": 4, "n": 2, "stop": ["a", "e"]},
    "best of three": {"temperature": 1.0, "seed": 5, "best_of": 3, "n": 2},
    "beams": {"beam_width": 3, "n": 2, "logprobs": 0},
}


class Cutter:
    """A TCP proxy before a scheduler, whose connections a test breaks."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""

    async def __aenter__(self) -> "Cutter":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Break every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    def close(self) -> None:
        """Take no more connections, and break those that are there."""
        assert self._server is not None
        self._server.close()
        self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, upstream}
        try:
            await asyncio.gather(self._carry(reader, upstream), self._carry(upstream_reader, writer))
        finally:
            self._writers -= {writer, upstream}
            writer.transport.abort()
            upstream.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Stack, Cutter]]:
    """Run a scheduler behind a proxy."""
    async with running_stack(FakeWorker(step_ms=1)) as stack, Cutter(stack.address) as cutter:
        yield stack, cutter


def joined(events: list[Event], index: int) -> tuple[str, tuple[int, ...], tuple[float, ...]]:
    """Return what the deltas of an output bring together."""
    deltas = [event for event in events if isinstance(event, Delta) and event.output_index == index]
    return (
        "".join(delta.text for delta in deltas),
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        tuple(logprob for delta in deltas for logprob in delta.logprobs),
    )


@pytest.mark.parametrize("params", REQUESTS.values(), ids=REQUESTS)
async def test_a_call_that_breaks_again_and_again_goes_on_to_the_same_end(params: dict[str, Any]) -> None:
    async with served() as (stack, cutter), Client(cutter.address) as client:
        events: list[Event] = []
        num_cuts = 0
        async for event in client.stream(PROMPT, max_tokens=NUM_TOKENS, **params):
            events.append(event)
            num_tokens = sum(len(seen.token_ids) for seen in events if isinstance(seen, Delta))
            if num_cuts < 3 and not isinstance(event, Finished) and num_tokens >= 9 * num_cuts:
                cutter.cut()
                num_cuts += 1
        first, last = events[0], events[-1]
        assert isinstance(first, Accepted)
        assert isinstance(last, Finished)
        assert last.num_resumptions >= 1
        assert not any(isinstance(event, Accepted) for event in events[1:])
        for output in last.outputs:
            assert joined(events, output.output_index) == (output.text, output.token_ids, output.logprobs)
        seed = stack_seed(params, last)
        await until(lambda: not stack.engine.requests)
        if seed:
            whole = await client.generate(PROMPT, max_tokens=NUM_TOKENS, **params)
            assert (whole.outputs, whole.prompt_logprobs) == (last.outputs, last.prompt_logprobs)
            assert whole.num_resumptions == 0


def stack_seed(params: dict[str, Any], last: Finished) -> bool:
    """Return whether the request can be repeated: its seed is known, or nothing is drawn."""
    return "seed" in params or "beam_width" in params or params.get("temperature") == 0


async def test_many_requests_on_one_stream_go_on() -> None:
    async with served() as (stack, cutter), Client(cutter.address) as client:
        prompts = [[50 + number, 41, 42] for number in range(6)]
        whole = [
            await client.generate(prompt, max_tokens=NUM_TOKENS, temperature=0.0, logprobs=0) for prompt in prompts
        ]
        brought: dict[int, list[Event]] = {number: [] for number in range(6)}
        num_events = 0
        async for index, event in client.stream_many(
            prompts, max_tokens=NUM_TOKENS, temperature=0.0, logprobs=0, max_in_flight=4
        ):
            assert not isinstance(event, FailedRequest), event.error
            brought[index].append(event)
            num_events += 1
            if num_events in (2, 20, 60):
                cutter.cut()
        ends = [brought[number][-1] for number in range(6)]
        assert [end.outputs for end in ends if isinstance(end, Finished)] == [output.outputs for output in whole]
        assert sum(end.num_resumptions for end in ends if isinstance(end, Finished)) >= 4
        for number, events in brought.items():
            output = whole[number].outputs[0]
            assert joined(events, 0) == (output.text, output.token_ids, output.logprobs)
            assert sum(isinstance(event, Accepted) for event in events) == 1
        await until(lambda: not stack.engine.requests)


async def test_another_address_goes_on_and_takes_new_requests() -> None:
    async with (
        served() as (_, first),
        running_stack(FakeWorker(step_ms=1)) as stack,
        Client([first.address, stack.address]) as client,
    ):
        whole = await client.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0)
        events: list[Event] = []
        async for event in client.stream(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0):
            events.append(event)
            if len(events) == 8:
                first.close()
        last = events[-1]
        assert isinstance(last, Finished)
        assert last.outputs == whole.outputs
        assert client.address == stack.address
        assert (await client.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0)).outputs == whole.outputs


async def test_the_first_address_that_answers_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    async with running_stack() as stack, Client([nobody, stack.address]) as client:
        assert len((await client.generate(PROMPT, max_tokens=3)).outputs[0].token_ids) == 3
    async with Client([nobody, nobody]) as client:
        with pytest.raises(UnavailableError, match="no scheduler answers"):
            await client.generate(PROMPT, max_tokens=3)


@pytest.mark.parametrize("timeout_s", [0.0, 0.3])
async def test_it_tries_for_a_limited_time(timeout_s: float) -> None:
    async with served() as (_, cutter), Client(cutter.address, resume_timeout_s=timeout_s) as client:
        with pytest.raises(UnavailableError, match=r"lost|no scheduler answers") as error:
            async for event in client.stream(PROMPT, max_tokens=100_000, ignore_eos=True):
                if isinstance(event, Delta):
                    cutter.close()
        assert ("nobody has gone on with it" in str(error.value)) == bool(timeout_s)
