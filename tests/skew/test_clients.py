"""Clients go on with an answer at a scheduler of another release, whichever of the three is older."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo import Client
from tests.skew.peers import (
    CURRENT,
    SCHEDULER,
    WITH_CONTINUATIONS,
    Code,
    attached_executors,
    each,
    executor_here,
    running,
)
from tests.skew.requests import NUM_LONG_TOKENS, REQUESTS, WITH_LONG, Stream, watch
from tests.support.processes import Service
from tests.support.stack import running_stack

pytestmark = pytest.mark.timeout(120)

NUM_BLOCKS = 300  # of 16 tokens: sequences of 4,800
STEP_MS = 10


async def answers(code: Code, first: Service, second: Service) -> list[list[object]]:
    """Return what a client of a release has in the end; the first scheduler is killed in the middle."""
    command = [sys.executable, "-P", "-m", "tests.skew.client_process", first.address, second.address]
    client = await asyncio.create_subprocess_exec(*command, stdout=PIPE, env=code.environment_of_tests())
    assert client.stdout is not None
    assert await client.stdout.readline() == b"streaming\n"
    await first.kill()
    answer, _ = await client.communicate()
    summaries: list[list[object]] = json.loads(answer)
    return summaries


def as_json(streams: list[Stream]) -> object:
    """Return streams as a process tells them."""
    return json.loads(json.dumps([stream.summary() for stream in streams]))


@pytest.mark.parametrize(
    ("client_is_current", "first_is_current", "second_is_current"),
    [
        (True, True, False),
        (False, True, True),
        pytest.param(True, False, True, marks=pytest.mark.slow),
        pytest.param(False, True, False, marks=pytest.mark.slow),
        pytest.param(False, False, True, marks=pytest.mark.slow),
    ],
    ids=lambda is_current: "current" if is_current else "release",
)
@each(WITH_CONTINUATIONS)
async def test_a_client_goes_on_at_another_scheduler_to_the_same_end(
    release: Code,
    client_is_current: bool,
    first_is_current: bool,
    second_is_current: bool,
    undisturbed: list[Stream],
) -> None:
    client, first_code, second_code = (
        CURRENT if is_current else release for is_current in (client_is_current, first_is_current, second_is_current)
    )
    async with (
        executor_here(FakeWorker(num_device_blocks=NUM_BLOCKS, step_ms=STEP_MS)) as one,
        executor_here(FakeWorker(num_device_blocks=NUM_BLOCKS)) as other,
        running(first_code, SCHEDULER, "--executor", one.address) as first,
        running(second_code, SCHEDULER, "--executor", other.address) as second,
    ):
        await attached_executors(first, 1)
        await attached_executors(second, 1)
        streams = await answers(client, first, second)
    assert streams == as_json(undisturbed + await answers_to_the_long_requests())


async def answers_to_the_long_requests() -> list[Stream]:
    """Return the streams of the long requests as they are undisturbed."""
    streams = [Stream() for _ in WITH_LONG[len(REQUESTS) :]]
    worker = FakeWorker(num_device_blocks=NUM_BLOCKS)
    async with running_stack(worker) as stack, Client(stack.address) as client:
        for index, stream in enumerate(streams, start=len(REQUESTS)):
            await watch(client, index, stream)
            assert stream.num_tokens == NUM_LONG_TOKENS
    return streams
