"""What a fuzzer has: valid cases, a way to spoil them, and the code that reads them."""

import abc
import asyncio
import logging
import random
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from typing import ClassVar, TypeAlias

Case: TypeAlias = tuple[bytes, ...]
"""The bytes of others that make up one try: messages of a stream in order, or the files of a directory."""

# What no peer may bring about, as the log has it.
COMPLAINTS = ("executor_lost", "engine_failed", "rpc_failed")


class Target(abc.ABC):
    """One reader of bytes of others.

    Attributes:
        name: For `--only`.
        allowed: What it may raise: errors of ours with a sentence.
        max_seconds: How long a case may take.
    """

    name: ClassVar[str]
    allowed: ClassVar[tuple[type[Exception], ...]] = ()
    max_seconds: ClassVar[float] = 5.0

    @abc.abstractmethod
    def corpus(self) -> Sequence[Case]:
        """Return valid cases; called once, before any other method."""

    def change(self, case: Case, chance: random.Random) -> Case:
        """Return a case that is spoiled somewhere."""
        place = chance.randrange(len(case))
        return (*case[:place], flipped(case[place], chance), *case[place + 1 :])

    @abc.abstractmethod
    def one(self, case: Case) -> None:
        """Let the reader have it. Raises what is not mended, and of `allowed` what may be."""

    def close(self) -> None:  # noqa: B027  (most have nothing to end)
        """End what runs."""


class LoopTarget(Target):
    """A reader on an event loop; what it complains of in the log is a failure too."""

    complaints: ClassVar[tuple[str, ...]] = COMPLAINTS

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self._running = AsyncExitStack()
        self._log = _Complaints(self.complaints)

    def corpus(self) -> Sequence[Case]:
        """Start what reads, and return valid cases."""
        logging.getLogger().addHandler(self._log)
        return self.runner.run(self.open(self._running))

    @abc.abstractmethod
    async def open(self, running: AsyncExitStack) -> Sequence[Case]:
        """Start what reads, which `running` ends; return valid cases."""

    @abc.abstractmethod
    async def run(self, case: Case) -> None:
        """As `one`."""

    def one(self, case: Case) -> None:
        """Run a case, and look into the log."""
        self._log.told.clear()
        try:
            self.runner.run(within(self.max_seconds, self.run(case)))
        finally:
            told = list(self._log.told)
        assert not told, told[0]

    def close(self) -> None:
        """End what runs."""
        self.runner.run(self._running.aclose())
        self.runner.close()
        logging.getLogger().removeHandler(self._log)


async def within(seconds: float, running: Awaitable[None]) -> None:
    """Wait for something. Raises AssertionError: it took longer than it may."""
    try:
        async with asyncio.timeout(seconds):
            await running
    except TimeoutError:
        raise AssertionError(f"it takes more than {seconds:g} s") from None


class _Complaints(logging.Handler):
    """Keeps lines of the log with a traceback, and those that no peer may bring about."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.told: list[str] = []
        self._names = names
        self._formatter = logging.Formatter("%(name)s: %(message)s")

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        is_ours = not record.name.startswith("grpc") or message.startswith("Unexpected")
        if (record.exc_info and is_ours) or any(name in message for name in self._names):
            self.told.append(self._formatter.format(record))


def flipped(content: bytes, chance: random.Random) -> bytes:
    """Return bytes of which some are others, missing or doubled."""
    changed = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 8])):
        place = chance.randrange(len(changed) + 1)
        match chance.randrange(6):
            case 0:
                changed[place : place + chance.choice([1, 1, 4, 64])] = b""
            case 1:
                changed[place:place] = chance.randbytes(chance.choice([1, 1, 4, 64]))
            case 2:
                changed[place:place] = changed[place : place + chance.choice([1, 16, 256])]
            case _ if place < len(changed):
                changed[place] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, changed[place] ^ 1 << chance.randrange(8)])
    return bytes(changed)
