"""The transfers that have begun and were not told as ended: who may copy what, and how each one ends. Thread-safe.

    begun ──> copying (a thread reads or writes blocks) ──> begun ──> arrived | sent | cancelled ──> told
                  │
                  └─ cancelled meanwhile: it ends when the thread lets go of the blocks

So once a transfer has ended nothing touches its blocks any more.
"""

import asyncio
import enum
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from octavo_shared.process.clock import monotonic_s
from octavo_shared.step_wire.step import Int32Array

# Transfers that were told as ended and may still be cancelled: a scheduler cancels before it has read the answers.
NUM_REMEMBERED = 4096


class Outcome(enum.Enum):
    """How a transfer ends."""

    ARRIVED = enum.auto()
    SENT = enum.auto()
    CANCELLED = enum.auto()


class Reason(enum.StrEnum):
    """Why a transfer was cancelled; a label of metrics."""

    ASKED = "asked"
    PEER = "peer"
    DIFFERENCE = "difference"
    SILENCE = "silence"
    ATTACH = "attach"
    DRAIN = "drain"
    WEIGHTS = "weights"
    FAULT = "fault"


class TransferEndedError(Exception):
    """The transfer has ended, or must: its blocks may be touched no more.

    Args:
        reason: Why.
        words: One sentence.
    """

    def __init__(self, reason: Reason, words: str) -> None:
        self.reason, self.words = reason, words
        super().__init__(words)


@dataclass(eq=False, slots=True)
class Transfer:
    """One transfer. `address` and `instance_id` are the receiver's; empty: this executor receives.

    Attributes:
        begun_at_s: When its step was launched, in seconds of the monotonic clock.
        is_claimed: Whether the sender's call has come; of a receiver.
        outcome: None: it is pending.
        ending: Why it has to end, once that is known.
        limit: What the event loop waits for in its name; None: nothing.
    """

    transfer_id: int
    block_ids: Int32Array
    secret: bytes = field(repr=False)
    address: str = ""
    instance_id: str = ""
    begun_at_s: float = field(default_factory=monotonic_s)
    is_claimed: bool = False
    is_copying: bool = False
    outcome: Outcome | None = None
    ending: TransferEndedError | None = None
    limit: asyncio.Timeout | None = None

    @property
    def is_received(self) -> bool:
        """Whether this executor is the receiver."""
        return not self.address


OnEnd = Callable[[Transfer, Outcome, TransferEndedError | None], None]


class PendingTransfers:
    """All of them. Any thread may call any method.

    Args:
        on_end: Told of each end, on the thread that brings it about; must not wait.
    """

    def __init__(self, on_end: OnEnd = lambda *_: None) -> None:
        self._on_end = on_end
        self._lock = threading.Condition()
        self._by_id: dict[int, Transfer] = {}  # until the end is told
        self._told: dict[int, None] = {}  # the last NUM_REMEMBERED that were told, oldest first

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Transfer]:
        with self._lock:
            return iter(list(self._by_id.values()))

    def __contains__(self, transfer_id: int) -> bool:
        return transfer_id in self._by_id

    def was_told(self, transfer_id: int) -> bool:
        """Return whether a transfer was lately told as ended."""
        return transfer_id in self._told

    def begin(self, transfer: Transfer) -> None:
        """Add a transfer, whose id is not there."""
        with self._lock:
            self._by_id[transfer.transfer_id] = transfer

    def claim(self, transfer: Transfer) -> bool:
        """Let one call bring the blocks; return False if there is another one, or the transfer has ended."""
        with self._lock:
            is_free = not transfer.is_claimed and transfer.outcome is None and transfer.ending is None
            transfer.is_claimed |= is_free
            return is_free

    def awaited(self, transfer_id: int) -> Transfer | None:
        """Return the transfer that is to be received under an id and has not ended."""
        transfer = self._by_id.get(transfer_id)
        return transfer if transfer is not None and transfer.is_received and transfer.outcome is None else None

    @contextmanager
    def copying(self, transfer: Transfer) -> Iterator[None]:
        """Its blocks are read or written in the block, by this thread.

        Raises: TransferEndedError: it has ended, or was cancelled meanwhile; what was read means nothing.
        """
        with self._lock:
            _require_alive(transfer)
            transfer.is_copying = True
        try:
            yield
        finally:
            with self._lock:
                transfer.is_copying = False
                if transfer.ending is not None:
                    self._end(transfer, Outcome.CANCELLED)
                self._lock.notify_all()
        _require_alive(transfer)

    def finish(self, transfer: Transfer, outcome: Outcome) -> None:
        """End a transfer whose blocks have all arrived or been sent. Raises TransferEndedError: it was cancelled."""
        with self._lock:
            _require_alive(transfer)
            self._end(transfer, outcome)

    def cancel(self, transfer: Transfer, reason: Reason, words: str) -> None:
        """End a transfer as cancelled, once no thread copies; one that has ended, or is to end, stays as it is."""
        with self._lock:
            if transfer.outcome is not None or transfer.ending is not None:
                return
            transfer.ending = TransferEndedError(reason, words)
            if not transfer.is_copying:
                self._end(transfer, Outcome.CANCELLED)

    def cancel_id(self, transfer_id: int, reason: Reason, words: str) -> None:
        """Cancel the transfer of an id, if there is one."""
        transfer = self._by_id.get(transfer_id)
        if transfer is not None:
            self.cancel(transfer, reason, words)

    def cancel_all(self, reason: Reason, words: str) -> None:
        """Cancel all of them, and return when no thread copies any more."""
        for transfer in self:
            self.cancel(transfer, reason, words)
        with self._lock:
            self._lock.wait_for(lambda: not any(transfer.is_copying for transfer in self._by_id.values()))

    def forget(self) -> None:
        """Forget all of them: an epoch begins, and nobody is to be told. All have ended."""
        with self._lock:
            self._by_id.clear()
            self._told.clear()

    def take_ended(self) -> dict[Outcome, tuple[int, ...]]:
        """Return the ids that have ended and were not told, by their outcome; they count as told now."""
        with self._lock:
            ended = [transfer for transfer in self._by_id.values() if transfer.outcome is not None]
            for transfer in ended:
                del self._by_id[transfer.transfer_id]
                self._told[transfer.transfer_id] = None
            while len(self._told) > NUM_REMEMBERED:
                del self._told[next(iter(self._told))]
        return {
            outcome: tuple(transfer.transfer_id for transfer in ended if transfer.outcome is outcome)
            for outcome in Outcome
        }

    def _end(self, transfer: Transfer, outcome: Outcome) -> None:
        if transfer.outcome is None:
            transfer.outcome = outcome
            self._on_end(transfer, outcome, transfer.ending)


def _require_alive(transfer: Transfer) -> None:
    if transfer.ending is not None:
        raise transfer.ending
