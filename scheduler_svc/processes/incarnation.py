"""The incarnation of this engine: which place it has among the engines of one scheduler id.

Incarnations order engines, leases elect them: a number counts once an executor has granted it. Until then the engine
raises it above every number that it is told of, and afterwards a larger one means that another engine has taken its
place.
"""

import asyncio
import time
from collections.abc import Callable

from octavo_shared.errors import FencedError
from octavo_shared.process.clock import monotonic_s
from octavo_shared.step_wire.incarnation import require_believable

# How long it counts what an executor said of its holder, since its address may leave the fleet, in seconds.
SAID_S = 5.0


class SupersededError(FencedError):
    """Another engine of our scheduler id has taken our place."""


class Incarnation:
    """The number of one engine.

    Args:
        scheduler_id: Whose engine it is.
        unix_s: Returns the seconds since 1970.

    Attributes:
        scheduler_id: As above.
        number: Wall clock in milliseconds, or larger; it rises until an executor has granted it.
        largest_told: The largest number of another engine that we were told of.
        on_granted: Called once the first executor has granted the number.
        is_known: Whether an executor keeps it, for the engines that come.
    """

    def __init__(self, scheduler_id: str, unix_s: Callable[[], float] = time.time) -> None:
        self.scheduler_id = scheduler_id
        self.number = max(1, int(unix_s() * 1000))
        self.largest_told = 0
        self.on_granted: Callable[[], None] = lambda: None
        self._unix_s = unix_s
        self._is_granted = False
        self.is_known = False
        self._superseded: SupersededError | None = None
        self._is_superseded = asyncio.Event()
        self._said: dict[str, tuple[float, bool]] = {}  # by address: when, and whether another engine holds it

    @property
    def granted(self) -> int:
        """The number, once it counts; 0: no executor has granted it yet."""
        return self.number if self._is_granted else 0

    def follow(self, told: int, who: str, *, may_end: bool = True) -> None:
        """Be later than an engine that somebody knows: a larger number raises ours, or ends us.

        Args:
            told: Its number.
            who: Tells it, as the beginning of a sentence.
            may_end: Whether it ends us, where it cannot raise ours.

        Raises:
            InvalidFieldError: no engine can have this number.
            SupersededError: it is larger than ours, which was granted.
        """
        require_believable(told, self._unix_s())
        if told < self.number or (told == self.number and self._is_granted):
            return
        self.largest_told = max(self.largest_told, told)
        if not self._is_granted:
            self.number = told + 1
            return
        error = SupersededError(
            f"{who} knows an engine of scheduler {self.scheduler_id!r} with the incarnation {told}; this one has "
            f"{self.number}"
        )
        if may_end:
            self._superseded = self._superseded or error
            self._is_superseded.set()
        raise error

    def grant(self, *, is_known: bool) -> None:
        """An executor has attached us; `is_known`: and keeps our number."""
        self.is_known |= is_known
        if not self._is_granted:
            self._is_granted = True
            self.on_granted()

    def note_holder(self, address: str, *, is_other: bool) -> None:
        """An executor has said whether another engine of our id is attached to it. Raises FencedError: we stand by.

        An engine that was granted nothing leaves the executors alone that the holder has lost, while it has most of
        them.
        """
        now_s = monotonic_s()
        self._said[address] = now_s, is_other
        said = [is_held for said_at_s, is_held in self._said.values() if now_s - said_at_s < SAID_S]
        num_held = sum(said)
        if not self._is_granted and not is_other and 2 * num_held > len(said):
            raise FencedError(
                f"another scheduler of the id {self.scheduler_id!r} holds {num_held} of {len(said)} executors; this "
                "one is its standby"
            )

    def require_current(self) -> None:
        """Raise SupersededError if another engine has taken our place."""
        if self._superseded is not None:
            raise self._superseded

    async def wait_until_superseded(self) -> None:
        """Return once another engine has taken our place."""
        await self._is_superseded.wait()
