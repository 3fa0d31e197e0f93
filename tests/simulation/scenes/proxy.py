"""A TCP proxy on loopback that breaks what goes through it, as a network does."""

import asyncio
import contextlib
import socket
import struct


class Proxy:
    """Leads to one port at a time.

    Attributes:
        port: Where it listens, or would.
        is_silent: Whether it keeps what it gets.
    """

    def __init__(self) -> None:
        self.port = 0
        self.is_silent = False
        self._target = 0
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._held = socket.socket()

    async def open(self) -> None:
        """Take a port, at which nobody listens yet."""
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port = self._held.getsockname()[1]

    async def lead_to(self, port: int) -> None:
        """Listen, and lead who comes to a port."""
        self._target = port
        if self._server is None:
            self._server = await asyncio.start_server(self._lead, sock=self._held)

    def reset(self) -> None:
        """Break all connections, so that both sides are told at once."""
        for writer in self._writers:
            if writer.is_closing():
                continue
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        """End all."""
        if self._server is not None:
            self._server.close()
        self._held.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, far_writer]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(2**16):
                if not self.is_silent:
                    sink.write(data)
                    await sink.drain()
        sink.close()
