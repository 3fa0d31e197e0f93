"""A sign of life on stderr while a request waits: in the queue, for a lost executor, behind a long prompt."""

import asyncio
import sys
from types import TracebackType
from typing import Self

from rich.cells import cell_len
from rich.console import Console
from rich.status import Status

# A slow model makes a token a second; who waits longer wonders.
SILENCE_S = 2.0


class WaitingStatus:
    """Shows on a terminal what is being waited for, once nothing has come for a while; elsewhere nothing.

    Use it as `with WaitingStatus() as waiting`, inside of an event loop, and tell it what comes by `saw`.

    Args:
        console: Where it shows; None: stderr.
        silence_s: Time without a call of `saw` after which it shows, in seconds.
    """

    def __init__(self, console: Console | None = None, *, silence_s: float = SILENCE_S) -> None:
        self._console = console or Console(stderr=True)
        self._silence_s = silence_s
        self._timer: asyncio.TimerHandle | None = None
        self._status: Status | None = None
        self._line = ""  # what stands in the line that the cursor is in

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.hide()

    def expect(self, what: str) -> None:
        """Begin to wait, for `what`."""
        self.hide()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._timer = asyncio.get_running_loop().call_later(self._silence_s, self._show, f"waiting: {what}")

    def hide(self) -> None:
        """Wait no more; leave the cursor where it was before it showed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._status is None:
            return
        self._status.stop()
        self._status = None
        # It stood in the line below: back up, and to the right. After a full line that is where text goes on.
        if column := cell_len(self._line.expandtabs()) % self._console.width:
            self._console.file.write(f"\x1b[A\x1b[{column}C")
            self._console.file.flush()

    def saw(self, text: str) -> None:
        """Take note of what was printed on stdout; if that is a terminal too, the status must not stand in its line."""
        if sys.stdout.isatty():
            self._line = (self._line + text).rpartition("\n")[2]

    def _show(self, what: str) -> None:
        if self._line:
            self._console.file.write("\n")
        self._status = self._console.status(what)
        self._status.start()
