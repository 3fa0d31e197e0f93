"""What every other run is compared with."""

import asyncio

import pytest

from octavo import Client
from tests.skew.requests import REQUESTS, Stream, run_all
from tests.support.stack import running_stack


@pytest.fixture(scope="session")
def undisturbed() -> list[Stream]:
    """The streams of all requests with the current code on both sides, a roomy cache and no trouble."""

    async def run() -> list[Stream]:
        streams = [Stream() for _ in REQUESTS]
        async with running_stack() as stack, Client(stack.address) as client:
            await run_all(client, streams)
        return streams

    return asyncio.run(run())
