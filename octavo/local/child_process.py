"""One service as a child process: start it, learn its address, notice its end, stop it.

The child is in a session of its own, so Ctrl-C in the terminal reaches only the parent, which then stops
its children in order. It holds the reading end of a pipe whose writing end only the parent has:
when the parent dies, however it dies, the pipe closes and the child leaves (`--exit-on-stdin-close`).
octavo/local/services.py puts these together, octavo/local/restarts.py starts them again.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from octavo.errors import LocalServiceError
from octavo.values.wording import said

# The lines that a service prints on stdout: one for each port with a purpose of its own, then that the main one
# listens, and in the end that it serves: what it needs for that is there.
_PORT_LINE = re.compile(r"^octavo \w+ (?P<state>listening|serving)(?: (?P<purpose>\w+))? on (?P<address>[^\s,]+)")

# What an executor prints when it has chosen what computes.
_KERNELS_LINE = re.compile(r"^octavo \w+ kernels: (.+)$", re.MULTILINE)

# What a service prints for people while it serves.
_NOTICE_LINE = re.compile(r"^octavo \w+ notice: (.+)$", re.MULTILINE)

# A line of a service's log that may say why it ended.
_ALARMING_LINE = re.compile(r"^time=\S+ level=(ERROR|CRITICAL) ")

# More than a pipe and its reader hold: output that was on its way may follow the last words in the log.
_LOG_TAIL_BYTES = 512 * 1024


class ChildProcess:
    """Owns one child process, from `start` to `stop`; an ended child may be started again.

    Args:
        service: "executor" or "scheduler".
        command: Program and arguments.
        log_path: Where its output goes; None: to this process' stderr.
        number: From 1, where there are several of the service; None: there is one.
        environment: Variables that it gets beside the ones of this process.
        on_notice: Called with a sentence that the child has for people.

    Attributes:
        service: As above.
        title: What people call it: "the executor", "executor 2".
        address: Where it serves, HOST:PORT; after `start`.
        addresses: Where its other ports are, by purpose; after `start`.
        kernels: What computes its model, once it has said so; "" before, and of others than executors.
    """

    def __init__(
        self,
        service: str,
        command: Sequence[str],
        *,
        log_path: Path | None,
        number: int | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        on_notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._on_notice = on_notice
        self.service = service
        self.title = f"the {service}" if number is None else f"{service} {number}"
        self.address = ""
        self.addresses: dict[str, str] = {}
        self.kernels = ""
        self._command = command
        self._environment = environment
        self._log_path = log_path
        self._log_start = 0  # what stands before it in the log is of an earlier process
        self._process: asyncio.subprocess.Process | None = None
        self._is_listening = False
        self._is_serving = asyncio.Event()
        self._relay: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the child and wait until its port listens; it may need more before it serves.

        An ended child gets the ports that it had.

        Raises:
            LocalServiceError: it could not be run, or ended before it listened.
        """
        await self.stop(0.0)
        self._is_listening = False
        self._is_serving.clear()
        log = None if self._log_path is None else self._log_path.open("ab")
        try:
            if log is not None:
                self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                *self._port_flags(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**_environment(), **self._environment},
            )
        except OSError as error:
            raise LocalServiceError(f"{self.title} cannot be run: {error}") from error
        finally:
            if log is not None:
                log.close()
        await self._read_port_lines(self._process)

    async def wait_until_serving(self) -> None:
        """Return once the child takes work: it has said so.

        Raises:
            LocalServiceError: it ended before.
        """
        serving, end = asyncio.create_task(self._is_serving.wait()), asyncio.create_task(self.wait_for_end())
        try:
            await asyncio.wait([serving, end], return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise self.failure(end.result())
        finally:
            serving.cancel()
            end.cancel()

    async def wait_for_end(self) -> str:
        """Return, once the child has ended by itself, a sentence that says so with its last words."""
        assert self._process is not None, "start() comes first"
        status = await self._process.wait()
        cause = f"{self.title} stopped ({_describe_status(status)})"
        if self._log_path is None:
            return cause
        words = _last_words(
            self._log_path, self._log_start, speaker=f"octavo {self.service}: ", is_any_line_telling=status >= 0
        )
        return f"{cause}: {words}" if words else cause

    @property
    def log_hint(self) -> str:
        """What follows a sentence about its end: where its messages are."""
        return "; its messages are above" if self._log_path is None else f" [log: {self._log_path}]"

    def failure(self, sentence: str) -> LocalServiceError:
        """Return the error that ends with where its messages are."""
        return LocalServiceError(f"{sentence}{self.log_hint}")

    @property
    def pid(self) -> int:
        """The id of its process."""
        assert self._process is not None, "start() comes first"
        return self._process.pid

    @property
    def has_started(self) -> bool:
        """Whether it ran at some time."""
        return self._process is not None

    @property
    def has_ended(self) -> bool:
        """Whether it ran and does not any more."""
        return self._process is not None and self._process.returncode is not None

    async def stop(self, grace_s: float) -> None:
        """Ask the child to end (SIGTERM); kill it, and what it started, after `grace_s` seconds.

        It is safe in every state: never started, ended by itself, stopped before.
        """
        process = self._process
        if process is None:
            return
        try:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # the group: start_new_session made it the child's own
            assert process.stdin is not None
            process.stdin.close()
        await process.wait()
        if self._relay is not None:
            await self._relay

    async def _read_port_lines(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self._write_output(line)
            self._take_note(line)
            if self._is_listening:
                self._relay = asyncio.create_task(self._relay_output(process.stdout))
                return
        # Its stdout is closed: it is ending, or has lost its way.
        raise self.failure(await self.wait_for_end())

    def _port_flags(self) -> list[str]:
        """Return the flags that give it the ports that it had before."""
        if not self.address:
            return []
        flags = {"--listen": self.address}
        flags |= {f"--{purpose}-listen": address for purpose, address in self.addresses.items()}
        return [word for flag in flags.items() for word in flag]

    def _take_note(self, line: bytes) -> None:
        """Learn where it listens, and whether it serves, from a line that it printed."""
        match = _PORT_LINE.match(said(line.decode(errors="replace")))
        if match is None:
            return
        if match["purpose"]:
            self.addresses[match["purpose"]] = match["address"]
            return
        self.address = match["address"]
        self._is_listening = True
        if match["state"] == "serving":
            self._is_serving.set()

    async def _relay_output(self, stdout: asyncio.StreamReader) -> None:
        """Read what else it prints, or a full pipe would stop it; whole lines, as its stderr has the same log."""
        unfinished = b""
        while chunk := await stdout.read(64 * 1024):
            lines, newline, unfinished = (unfinished + chunk).rpartition(b"\n")
            self._write_output(lines + newline)
            for line in lines.splitlines():
                self._take_note(line)
        self._write_output(unfinished)

    def _write_output(self, output: bytes) -> None:
        spoken = "\n".join(map(said, output.decode(errors="replace").splitlines()))
        if match := _KERNELS_LINE.search(spoken):
            self.kernels = match[1].strip()
        for notice in _NOTICE_LINE.findall(spoken):
            self._on_notice(notice.strip())
        if self._log_path is None:
            sys.stderr.write(output.decode(errors="replace"))
        else:
            with contextlib.suppress(OSError), self._log_path.open("ab") as log:  # a full disk costs lines, no service
                log.write(output)


def _environment() -> dict[str, str]:
    """Return this process' variables without PYTHONUNBUFFERED, which writes a line of stderr and its end apart.

    A line of stdout, in the same log, would come between.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def _describe_status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    if -status == signal.SIGKILL:  # the kernel sent it: nothing here kills a running service
        return "signal SIGKILL, possibly out of memory"
    return f"signal {signal.Signals(-status).name}"


def _last_words(log_path: Path, start: int, *, speaker: str, is_any_line_telling: bool) -> str:
    """Return what the service told people last, else its last line that may say why it ended, else "".

    With `is_any_line_telling` that is any line: a program that ends by itself ends with its reason, such
    as the last line of a traceback. One that is killed ends anywhere; there only errors count. What is before `start`
    in the log is of an earlier process.
    """
    with log_path.open("rb") as log:
        log.seek(max(start, log_path.stat().st_size - _LOG_TAIL_BYTES))
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    told = [line.removeprefix(speaker) for line in lines if line.startswith(speaker)]
    alarming = [line for line in lines if _ALARMING_LINE.match(line)]
    return (told or (lines if is_any_line_telling else alarming) or [""])[-1]
