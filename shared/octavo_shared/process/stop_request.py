"""The request that a process ends: SIGTERM, SIGINT, or the end of stdin."""

import asyncio
import contextlib
import os
import signal
import sys
import threading


class StopRequest:
    """The request that this process ends: SIGTERM, SIGINT or, if asked for, the end of stdin.

    Make it once, early, inside the running loop. A second signal ends the process at once.
    """

    def __init__(self, *, exit_on_stdin_close: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._reason: asyncio.Future[str] = self._loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        self._stdin_watch = self._loop.create_task(self._watch_stdin()) if exit_on_stdin_close else None

    async def wait(self) -> str:
        """Return the reason once there is one."""
        return await asyncio.shield(self._reason)

    def _on_signal(self, number: signal.Signals) -> None:
        self._end(number.name)
        for handled in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(handled)
            signal.signal(handled, signal.SIG_DFL)

    async def _watch_stdin(self) -> None:
        await stdin_closed()
        self._end("stdin closed")

    def _end(self, reason: str) -> None:
        if not self._reason.done():
            self._reason.set_result(reason)


async def stdin_closed() -> None:
    """Return when standard input reaches its end.

    A parent holds the other end of the pipe; when it dies, even by SIGKILL, the pipe closes. What
    arrives before is thrown away. A thread reads, because an event loop cannot poll a file.
    """
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()

    def read_to_end() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop has ended before stdin
            loop.call_soon_threadsafe(closed.set)

    threading.Thread(target=read_to_end, name="stdin-watch", daemon=True).start()
    await closed.wait()
