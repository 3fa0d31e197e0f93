"""A client of any release: `python -P -m tests.skew.client_process ADDRESS...` runs all requests.

It says "streaming" once every stream is in its middle, and at its end what came of each request.
"""

import asyncio
import json
import sys

import tests.skew.former_names  # noqa: F401
from octavo import Client
from tests.skew.requests import WITH_LONG, Stream, run_all, until_all_stream

NUM_TOKENS_BEFORE = 3


async def run(addresses: list[str]) -> list[Stream]:
    """Run all requests."""
    streams = [Stream() for _ in WITH_LONG]
    async with Client(addresses) as client:
        everything = asyncio.create_task(run_all(client, streams))
        await until_all_stream(streams, NUM_TOKENS_BEFORE, everything.done)
        print("streaming", flush=True)
        await everything
    return streams


if __name__ == "__main__":
    print(json.dumps([stream.summary() for stream in asyncio.run(run(sys.argv[1:]))]))
