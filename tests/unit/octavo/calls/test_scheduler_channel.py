"""How a client looks for a scheduler that is not there."""

import asyncio
import contextlib

from octavo import Client
from octavo.errors import OctavoError


async def test_a_scheduler_that_restarts_is_looked_for_again_and_again() -> None:
    """With gRPC's own pauses the fifth attempt comes after 9 s, and later ones up to 120 s apart."""
    attempts = asyncio.Semaphore(0)

    def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        attempts.release()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def ask(client: Client) -> None:
        while True:
            with contextlib.suppress(OctavoError):
                await client.get_model()
            await asyncio.sleep(0.01)

    async with server, Client(f"127.0.0.1:{port}") as client:
        asking = asyncio.create_task(ask(client))
        async with asyncio.timeout(20):  # gRPC's own pauses would be 26 s
            for _ in range(7):
                await attempts.acquire()
        asking.cancel()


async def test_of_many_calls_that_fail_at_once_only_the_first_moves_on() -> None:
    async with Client(["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]) as client:
        failed = client._endpoint()
        client._move_on(failed)
        client._move_on(failed)
        assert client.address == "127.0.0.1:2"
        client._move_on(client._endpoint())
        client._move_on(client._endpoint())
        assert client.address == "127.0.0.1:1"
