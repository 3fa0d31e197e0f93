"""Which scheduler owns this executor: epoch, lease and fencing. Pure: time is an argument.

nobody ──acquire──> held until lease end ──renew──> held until a later end
                         │                 acquire by the same scheduler: next epoch, at once
                         └─lease over, or release─> still the current epoch, but anybody may acquire
"""

from shared.errors import FencedError


class Attachment:
    """The one attachment of an executor. `now` is in seconds of any monotonic clock.

    Epochs only rise, so whoever holds an older one can never write again.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.scheduler_id = ""
        self._named_by: tuple[str, bytes] | None = None
        self._lease_s = 0.0
        self._expires_s = 0.0

    def acquire(self, scheduler_id: str, lease_s: float, now: float) -> int:
        """Make `scheduler_id` the owner; return its epoch.

        Raises: FencedError: another scheduler's lease lives.
        """
        holder = self.holder(now)
        if holder not in ("", scheduler_id):
            left_s = self._expires_s - now
            raise FencedError(f"scheduler {holder!r} holds the lease for another {left_s:.1f} s (epoch {self.epoch})")
        self.epoch += 1
        self.scheduler_id = scheduler_id
        self._lease_s = lease_s
        self._expires_s = now + lease_s
        return self.epoch

    def name_blocks(self, scheduler_id: str, key_fingerprint: bytes, *, is_agreed: bool) -> bool:
        """A scheduler has attached, and names blocks from now on if that was agreed; return whether the names are its.

        They are if the scheduler of the attachment before, which may have ended, had the same id and key.
        """
        before, self._named_by = self._named_by, (scheduler_id, key_fingerprint) if is_agreed else None
        return self._named_by is not None and before == self._named_by

    def renew(self, epoch: int, now: float) -> None:
        """Prolong the lease of the current epoch, also one that ran out while nobody else came.

        Raises: FencedError: the epoch is not the current one.
        """
        self.require(epoch)
        self._expires_s = now + self._lease_s

    def release(self, epoch: int) -> None:
        """End the lease of the current epoch: anybody may acquire.

        Raises: FencedError: the epoch is not the current one.
        """
        self.require(epoch)
        self.scheduler_id, self._expires_s = "", 0.0

    def require(self, epoch: int) -> None:
        """Raise FencedError unless `epoch` is the current one."""
        if self.epoch == 0:
            raise FencedError(f"epoch {epoch} is not valid: no scheduler has attached to this instance yet")
        if epoch != self.epoch:
            raise FencedError(f"epoch {epoch} is not the current one, {self.epoch}; attach anew")

    def holder(self, now: float) -> str:
        """Return the scheduler whose lease lives; empty: none."""
        return self.scheduler_id if now < self._expires_s else ""
