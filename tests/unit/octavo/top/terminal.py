"""A terminal of a test's own, in which a command runs."""

import asyncio
import os
import pty
import struct
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fcntl import ioctl

from tests.support.patience import PATIENCE_S


class Terminal:
    """The other end of a terminal in which a command runs."""

    def __init__(self, num_columns: int, num_lines: int) -> None:
        self.ours, self.theirs = pty.openpty()
        ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", num_lines, num_columns, 0, 0))
        os.set_blocking(self.ours, False)
        self.seen = b""
        self._came = asyncio.Event()
        asyncio.get_running_loop().add_reader(self.ours, self._read)

    @property
    def modes(self) -> list[object]:
        """How the terminal treats what is typed."""
        return termios.tcgetattr(self.theirs)

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.ours, text.encode())

    async def shows(self, text: bytes) -> None:
        """Return once a text has come, without taking time from the process that it comes from."""
        async with asyncio.timeout(PATIENCE_S):
            while text not in self.seen:
                self._came.clear()
                await self._came.wait()

    def close(self) -> None:
        """Take the terminal away."""
        asyncio.get_running_loop().remove_reader(self.ours)
        os.close(self.ours)
        os.close(self.theirs)

    def _read(self) -> None:
        self.seen += os.read(self.ours, 65536)
        self._came.set()


@asynccontextmanager
async def terminal(num_columns: int = 100, num_lines: int = 30) -> AsyncIterator[Terminal]:
    """Open a terminal."""
    opened = Terminal(num_columns, num_lines)
    try:
        yield opened
    finally:
        opened.close()
