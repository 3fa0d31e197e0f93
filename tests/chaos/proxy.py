"""A TCP proxy before an executor, whose connections can be cut and delayed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

CHUNK_BYTES = 2**16


class Proxy:
    """Passes bytes to and fro.

    Args:
        target: HOST:PORT that it stands for.

    Attributes:
        address: Where it listens.
        delay_s: Bytes are so many seconds late, in both directions.
    """

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._writers: set[asyncio.StreamWriter] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self.address = ""
        self.delay_s = 0.0

    def cut(self) -> int:
        """Reset all connections; return how many there were."""
        for writer in self._writers:
            writer.transport.abort()
        return len(self._writers)

    async def start(self) -> asyncio.Server:
        """Listen."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, far_writer}
        self._writers |= pair
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass(reader, far_writer))
                tasks.create_task(self._pass(far_reader, writer))
        finally:
            self._writers -= pair
            for each in pair:
                each.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def running_proxy(target: str) -> AsyncIterator[Proxy]:
    """Run a proxy until the end of the block."""
    proxy = Proxy(target)
    server = await proxy.start()
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
