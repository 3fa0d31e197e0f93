"""Which scheduler owns this executor: epoch, lease and fencing. Pure: time is an argument.

free ────acquire──> held until lease end ──renew──> held until a later end
                         │                 acquire by the same scheduler: next epoch, at once
                         └─lease over, or release─> still the current epoch, but any scheduler may acquire

Of schedulers with one id, a later incarnation acquires only once the holder's stream is gone.
"""

import math
from collections import OrderedDict

from octavo_shared.errors import FencedError

# How long the holder may have no stream and send nothing before a later incarnation acquires, in seconds.
GRACE_S = 0.5

# The number of schedulers with a remembered incarnation.
MAX_SCHEDULERS = 16


class Attachment:
    """The one attachment of an executor. `now` is in seconds of any monotonic clock.

    Epochs only rise, so the holder of an older one can never write again.

    Attributes:
        epoch: The current one.
        scheduler_id: Of its scheduler.
        has_stream: Whether it has a stream of steps.
        incarnations: The largest one by scheduler id, for the last schedulers that attached.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.scheduler_id = ""
        self._named_by: tuple[str, bytes] | None = None
        self._lease_s = 0.0
        self._expires_s = 0.0
        self._incarnation = 0  # of the holder
        self._heard_at_s = 0.0
        self.has_stream = False
        self.incarnations: OrderedDict[str, int] = OrderedDict()

    def acquire(self, scheduler_id: str, lease_s: float, now: float, incarnation: int = 0) -> int:
        """Make `scheduler_id` the owner; return its epoch.

        Args:
            scheduler_id: Of the caller.
            lease_s: Of the caller, in seconds.
            now: As above.
            incarnation: Orders the callers of one id; 0: it has none, and takes over from any.

        Raises: FencedError: another scheduler's lease lives, or the caller has been superseded, or stands by.
        """
        holder = self.holder(now)
        if holder not in ("", scheduler_id):
            left_s = self._expires_s - now
            raise FencedError(f"scheduler {holder!r} holds the lease for another {left_s:.1f} s (epoch {self.epoch})")
        if incarnation:
            if incarnation < (largest := self.incarnations.get(scheduler_id, 0)):
                raise FencedError(
                    f"scheduler {scheduler_id!r} already attached with incarnation {largest}; this one is older, "
                    f"{incarnation}"
                )
            if self.grace_s(scheduler_id, incarnation, now):
                raise FencedError(
                    f"another scheduler of the id {scheduler_id!r} holds the lease for another "
                    f"{self._expires_s - now:.1f} s (epoch {self.epoch}); this one is its standby"
                )
            self.note_incarnation(scheduler_id, incarnation)
        self.epoch += 1
        self.scheduler_id, self._incarnation = scheduler_id, incarnation
        self._lease_s = lease_s
        self._expires_s = now + lease_s
        self._heard_at_s, self.has_stream = now, False
        return self.epoch

    def grace_s(self, scheduler_id: str, incarnation: int, now: float) -> float:
        """Return how long a caller has to wait until the holder counts as gone, in seconds; inf: it has a stream."""
        if not self._follows_holder(scheduler_id, incarnation, now):
            return 0.0
        return math.inf if self.has_stream else max(0.0, self._heard_at_s + GRACE_S - now)

    def _follows_holder(self, scheduler_id: str, incarnation: int, now: float) -> bool:
        """Whether the caller is a later scheduler than the holder, which lives and has the same id."""
        return self.holder(now) == scheduler_id and incarnation > self._incarnation > 0

    def note_incarnation(self, scheduler_id: str, incarnation: int) -> None:
        """Note an incarnation that was granted, or told to the scheduler that leaves: the next one has to be later."""
        self.incarnations[scheduler_id] = max(incarnation, self.incarnations.get(scheduler_id, 0))
        self.incarnations.move_to_end(scheduler_id)
        if len(self.incarnations) > MAX_SCHEDULERS:
            self.incarnations.popitem(last=False)

    def note_stream(self, *, is_open: bool, now: float) -> None:
        """Note that the holder's stream was opened, or has ended."""
        self.has_stream, self._heard_at_s = is_open, now

    def name_blocks(self, scheduler_id: str, key_fingerprint: bytes, *, is_agreed: bool) -> bool:
        """Begin an attachment, with names of blocks if that was agreed; return whether the kept names are its own.

        They are if the scheduler of the last attachment, which may have ended, had the same id and key.
        """
        before, self._named_by = self._named_by, (scheduler_id, key_fingerprint) if is_agreed else None
        return self._named_by is not None and before == self._named_by

    def renew(self, epoch: int, now: float) -> None:
        """Prolong the lease of the current epoch, even a lease that ran out while no other scheduler came.

        Raises: FencedError: the epoch is not the current one.
        """
        self.require(epoch)
        self._expires_s = now + self._lease_s
        self._heard_at_s = now

    def release(self, epoch: int) -> None:
        """End the lease of the current epoch: any scheduler may acquire.

        Raises: FencedError: the epoch is not the current one.
        """
        self.require(epoch)
        self.scheduler_id, self._expires_s = "", 0.0

    def require(self, epoch: int) -> None:
        """Raise FencedError unless `epoch` is the current one."""
        if self.epoch == 0:
            raise FencedError(f"epoch {epoch} is not valid: no scheduler has attached to this instance yet")
        if epoch != self.epoch:
            raise FencedError(f"epoch {epoch} is not the current epoch, {self.epoch}; attach again")

    def holder(self, now: float) -> str:
        """Return the scheduler with a live lease; empty: none."""
        return self.scheduler_id if now < self._expires_s else ""
