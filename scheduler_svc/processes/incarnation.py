"""The incarnation of this engine: its place in the order of engines with one scheduler id.

Incarnations order engines, leases elect them: a number counts once an executor has granted it. Until then the engine
raises it above every number that it is told. Afterwards, a larger number at an executor means that another engine has
taken its place. A front proves nothing: an engine that it reports is later only if no executor contradicts, and then
that changes what fronts see, never what executors do.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from octavo_shared.errors import FencedError
from octavo_shared.process.clock import monotonic_s
from octavo_shared.step_wire.incarnation import require_believable

# How long an executor's report of its holder counts, in seconds, since its address may leave the fleet.
SAID_S = 5.0

# How far a front's number may be ahead of our clock: the front must believe all numbers that outbid it later.
MAX_DAYS_AHEAD_OF_FRONT = 1
# How often a front may raise our number, and how soon executors are asked again after none answered, in seconds.
RAISE_INTERVAL_S = 60.0
ASK_INTERVAL_S = 5.0


class SupersededError(FencedError):
    """Another engine with our scheduler id has taken our place."""


class Incarnation:
    """The number of one engine.

    Args:
        unix_s: Returns the seconds since 1970.

    Attributes:
        number: Wall clock in milliseconds, or larger; rises until an executor has granted it. Executors see it.
        largest_told: The largest number of another engine that was reported.
        on_granted: Called once the first executor has granted the number, and when fronts see a larger one.
    """

    def __init__(self, scheduler_id: str, unix_s: Callable[[], float] = time.time) -> None:
        self.scheduler_id = scheduler_id
        self.number = max(1, int(unix_s() * 1000))
        self.largest_told = 0
        self.on_granted: Callable[[], None] = lambda: None
        self._unix_s = unix_s
        self._is_granted = False
        self._raised = 0  # above the numbers that fronts reported; only fronts see it
        self._may_raise_at_s = 0.0
        self._superseded: SupersededError | None = None
        self._is_superseded = asyncio.Event()
        self._said: dict[str, tuple[float, bool]] = {}  # by address: when, and whether another engine holds it

    @property
    def granted(self) -> int:
        """The number that fronts see, once it counts; 0: no executor has granted ours yet."""
        return max(self.number, self._raised) if self._is_granted else 0

    def follow(self, told: int, who: str) -> None:
        """Become later than an engine that an executor knows: a larger number raises ours, or ends us.

        Args:
            told: The other engine's number.
            who: Who reports it, as the beginning of a sentence.

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
        self._superseded = self._superseded or SupersededError(
            f"{who} knows an engine of scheduler {self.scheduler_id!r} with the incarnation {told}; this one has "
            f"{self.number}"
        )
        self._is_superseded.set()
        raise self._superseded

    async def follow_front(self, told: int, who: str, ask_executors: Callable[[], Awaitable[bool]]) -> None:
        """Become later than an engine that a front has joined, unless that engine is in our place.

        Args:
            told: The other engine's number.
            who: The front, as the beginning of a sentence.
            ask_executors: Calls `follow` with what each executor knows; returns whether any has answered.

        Raises:
            InvalidFieldError: the number is too far ahead of the clock.
            SupersededError: an executor knows a later engine.
            FencedError: no executor denies it, or our number was raised a moment ago.
        """
        if told < self.number or told <= self.granted:
            return
        require_believable(told, self._unix_s(), max_ahead_days=MAX_DAYS_AHEAD_OF_FRONT)
        if not self._is_granted:
            self.follow(told, who)
            return
        later = f"{who} has joined an engine of scheduler {self.scheduler_id!r} with the incarnation {told}"
        if (wait_s := self._may_raise_at_s - monotonic_s()) > 0:
            raise FencedError(f"{later}; this one has {self.granted}, and follows it in {wait_s:.0f} s at the earliest")
        self._may_raise_at_s = monotonic_s() + ASK_INTERVAL_S
        if not await ask_executors():
            raise FencedError(f"{later}; no executor answers whether it is in the place of this one, {self.granted}")
        self._may_raise_at_s = monotonic_s() + RAISE_INTERVAL_S
        self._raised = max(self._raised, told + 1)
        self.on_granted()

    def grant(self) -> None:
        """Note that an executor has attached us."""
        if not self._is_granted:
            self._is_granted = True
            self.on_granted()

    def note_holder(self, address: str, *, is_other: bool) -> None:
        """Note whether another engine with our id is attached to an executor. Raises FencedError: we are its standby.

        While the holder has most executors, an engine that none has granted leaves alone those that the holder lost.
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
