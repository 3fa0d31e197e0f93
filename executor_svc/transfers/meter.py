"""What an executor counts of its transfers. Safe for several threads."""

import threading
from collections import Counter
from collections.abc import Mapping

from executor_svc.transfers.pending import Outcome, Reason, Transfer


class TransferMeter:
    """Counts the transfers of a process since its start.

    Attributes:
        num_blocks, num_bytes, seconds: Of those that ended well, by direction: "sent" or "received".
        num_cancelled: By reason.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_blocks: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.seconds = {"sent": 0.0, "received": 0.0}
        self.num_cancelled: Counter[str] = Counter()

    def ended(self, transfer: Transfer, outcome: Outcome, reason: Reason | None, num_bytes: int, now_s: float) -> None:
        """A transfer of so many bytes has ended."""
        direction = "received" if transfer.is_received else "sent"
        with self._lock:
            if outcome is Outcome.CANCELLED:
                self.num_cancelled[reason or Reason.FAULT] += 1
                return
            self.num_blocks[direction] += len(transfer.block_ids)
            self.num_bytes[direction] += num_bytes
            self.seconds[direction] += now_s - transfer.begun_at_s


def by_direction(counts: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    """Return counts as a metric with the label `direction` has them."""
    return {(direction,): counts[direction] for direction in ("sent", "received")}
