"""A sign of life on stderr while a request waits: in the queue, for a lost executor, behind a long prompt."""

import asyncio
import sys
from time import monotonic
from types import TracebackType
from typing import Self

from rich.cells import cell_len
from rich.console import Console
from rich.status import Status
from rich.text import Text

# A slow model makes a token a second. After a longer silence people begin to wonder.
SILENCE_S = 2.0

# A log gets one line, and only if something is likely to be wrong.
LOG_SILENCE_S = 10.0


class WaitingStatus:
    """Shows on a terminal what is being waited for, and since when, once nothing has come for a while.

    A file or a pipe gets one line at most. Use it as `with WaitingStatus() as waiting`, inside of an event loop, and
    tell it what comes by `saw`.

    Args:
        console: Where it shows; None: stderr.
        silence_s: Time after which a terminal shows it, in seconds.
        log_silence_s: Time after which a file or a pipe gets its line, in seconds.
    """

    def __init__(
        self, console: Console | None = None, *, silence_s: float = SILENCE_S, log_silence_s: float = LOG_SILENCE_S
    ) -> None:
        self._console = console or Console(stderr=True)
        self._silence_s = silence_s
        self._log_silence_s = log_silence_s
        self._has_logged = False
        self._timer: asyncio.TimerHandle | None = None
        self._status: Status | None = None
        self._line = ""  # what stands in the line that the cursor is in

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.hide()

    def expect(self, what: str, hint: str = "", *, is_usual: bool = False) -> None:
        """Begin to wait.

        Args:
            what: What has not come, such as "no token yet".
            hint: What else to say.
            is_usual: Whether it may well take long, so that a log is not told.
        """
        self.hide()
        loop = asyncio.get_running_loop()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._timer = loop.call_later(self._silence_s, self._show, _Silence(what, hint, monotonic()))
        elif not (is_usual or self._has_logged):
            self._timer = loop.call_later(self._log_silence_s, self._log, what, hint)

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

    def _show(self, silence: "_Silence") -> None:
        if self._line:
            self._console.file.write("\n")
        self._status = self._console.status(silence)
        self._status.start()

    def _log(self, what: str, hint: str) -> None:
        self._has_logged = True
        self._console.file.write(f"octavo: {what} after {self._log_silence_s:g} s{hint}\n")
        self._console.file.flush()


class _Silence:
    """What has not come since when, as rich draws it again and again."""

    def __init__(self, what: str, hint: str, since_s: float) -> None:
        self._what = what
        self._hint = hint
        self._since_s = since_s

    def __rich__(self) -> Text:
        return Text(f"{self._what}, {monotonic() - self._since_s:.0f} s{self._hint}")
