"""The promise of leases: who holds one keeps the executor until it runs out or is given back, whoever asks for it.

- No other scheduler gets the executor while the lease lives, of which it was last heard in its own time.
- Of schedulers with one id, no older one follows a later one, and a later one waits while the holder has its stream.
- Epochs only rise.
"""

from collections.abc import Callable
from dataclasses import dataclass

from executor_svc.service.attachment import Attachment


@dataclass(slots=True)
class AttachChecks:
    """Watches the attachments of one executor process; what it knows comes from the calls alone.

    Args:
        attachment: Of the process.
        name: Of the executor, for people.
        accuse: Told of a broken promise.
    """

    attachment: Attachment
    name: str
    accuse: Callable[[str], None]
    _acquire: Callable[..., int]
    _renew: Callable[[int, float], None]
    _release: Callable[[int], None]
    _holder: str = ""
    _lease_s: float = 0.0
    _heard_at_s: float = 0.0
    _incarnation: int = 0
    _epoch: int = 0

    def acquire(self, scheduler_id: str, lease_s: float, now: float, incarnation: int = 0) -> int:
        """See `Attachment`."""
        had_stream = self.attachment.has_stream
        epoch = self._acquire(scheduler_id, lease_s, now, incarnation)
        is_held = bool(self._holder) and now < self._heard_at_s + self._lease_s
        if is_held and self._holder != scheduler_id:
            self.accuse(f"{self.name} belongs to {scheduler_id}, and the lease of {self._holder} has not run out")
        if self._holder == scheduler_id and incarnation:
            if incarnation < self._incarnation:
                self.accuse(f"{self.name} belongs to {incarnation} of {scheduler_id}, behind {self._incarnation}")
            elif incarnation > self._incarnation and is_held and had_stream:
                self.accuse(
                    f"{self.name} belongs to {incarnation} of {scheduler_id}, and the one before has its stream"
                )
        if epoch <= self._epoch:
            self.accuse(f"the epoch {epoch} of {self.name} follows {self._epoch}")
        self._holder, self._lease_s, self._heard_at_s = scheduler_id, lease_s, now
        self._incarnation, self._epoch = incarnation, epoch
        return epoch

    def renew(self, epoch: int, now: float) -> None:
        """See `Attachment`."""
        self._renew(epoch, now)
        if epoch != self._epoch:
            self.accuse(f"the epoch {epoch} of {self.name} was renewed, and {self._epoch} is the current one")
        self._heard_at_s = now

    def release(self, epoch: int) -> None:
        """See `Attachment`."""
        self._release(epoch)
        self._holder = ""


def watch_attachment(attachment: Attachment, name: str, accuse: Callable[[str], None]) -> None:
    """Look at each call of an executor's attachment from now on."""
    checks = AttachChecks(attachment, name, accuse, attachment.acquire, attachment.renew, attachment.release)
    attachment.acquire = checks.acquire  # type: ignore[method-assign]
    attachment.renew = checks.renew  # type: ignore[method-assign]
    attachment.release = checks.release  # type: ignore[method-assign]
