"""A fleet of real processes: one executor is killed, and no stream shows it."""

import asyncio
from dataclasses import dataclass, field

import grpc.aio
import pytest

from octavo import Client, SamplingParams
from octavo.admin.v1 import admin_pb2, admin_service_pb2, admin_service_pb2_grpc
from octavo.values.outputs import Delta, Finished, Output
from tests.support.processes import Service, running_service, start_service

pytestmark = pytest.mark.timeout(300)

FAKE = "executor_svc.fake"
SCHEDULER = "scheduler_svc"
NUM_TOKENS = 96

REQUESTS = [
    SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0),
    SamplingParams(temperature=0.9, seed=1, max_tokens=NUM_TOKENS, logprobs=0),
    SamplingParams(temperature=1.0, seed=2, max_tokens=NUM_TOKENS, n=3, logprobs=0),
    SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, n=2, best_of=4),
    SamplingParams(max_tokens=NUM_TOKENS, beam_width=4, n=2, logprobs=0),
    SamplingParams(max_tokens=NUM_TOKENS, beam_width=2, length_penalty=0.5, early_stopping=True),
    SamplingParams(temperature=0.7, seed=4, max_tokens=NUM_TOKENS),
    SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS),
]


@dataclass(slots=True)
class Watched:
    """What came of one request so far: tokens and text by output, as they were streamed."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    outputs: tuple[Output, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids.values()))


async def watch(client: Client, index: int, watched: Watched) -> None:
    """Stream a request to its end; no two prompts begin alike, since the fake cannot tell equal histories apart."""
    prompt = [65 + index, *range(97, 117)]
    async for event in client.stream(prompt, REQUESTS[index]):
        if isinstance(event, Delta):
            watched.token_ids.setdefault(event.output_index, []).extend(event.token_ids)
            watched.texts[event.output_index] = watched.texts.get(event.output_index, "") + event.text
        elif isinstance(event, Finished):
            watched.outputs = tuple(event.outputs)


async def until_all_stream(streams: list[Watched], num_tokens: int) -> None:
    """Return once every request that streams before its end has so many tokens."""
    shown = [s for s, params in zip(streams, REQUESTS, strict=True) if not (params.beam_width or params.best_of)]
    while min(stream.num_tokens for stream in shown) < num_tokens:
        await asyncio.sleep(0.001)


async def losses_of_attached(scheduler: Service) -> dict[str, int]:
    """Return the address of every attached executor, and how often it was lost."""
    async with grpc.aio.insecure_channel(scheduler.other_addresses["admin"]) as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        state = await stub.GetSchedulerState(admin_service_pb2.GetSchedulerStateRequest())
    attached = admin_pb2.EXECUTOR_STATUS_ATTACHED
    return {executor.address: executor.num_losses for executor in state.executors if executor.status == attached}


@pytest.mark.slow
async def test_streams_of_every_kind_are_the_same_when_one_of_two_executors_is_killed() -> None:
    doomed = await start_service(FAKE, "--step-ms", "5")
    async with (
        running_service(FAKE, "--step-ms", "5") as survivor,
        running_service(SCHEDULER, "--executor", f"{doomed.address},{survivor.address}") as scheduler,
        Client(scheduler.address) as client,
    ):
        while set(await losses_of_attached(scheduler)) != {doomed.address, survivor.address}:
            await asyncio.sleep(0.01)
        undisturbed = [Watched() for _ in REQUESTS]
        await asyncio.gather(*(watch(client, index, stream) for index, stream in enumerate(undisturbed)))

        streams = [Watched() for _ in REQUESTS]
        running = asyncio.gather(*(watch(client, index, stream) for index, stream in enumerate(streams)))
        await until_all_stream(streams, 5)
        await doomed.kill()
        assert not any(stream.outputs for stream in streams), "a stream had ended before the kill"
        await running
        assert await losses_of_attached(scheduler) == {survivor.address: 0}

    assert streams == undisturbed
    for stream, params in zip(streams, REQUESTS, strict=True):
        assert len(stream.outputs) == (params.n or 1)
        assert {output.output_index: list(output.token_ids) for output in stream.outputs} == stream.token_ids
