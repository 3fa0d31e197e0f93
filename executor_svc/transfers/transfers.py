"""The transfers of one executor: steps begin and cancel them, and answers tell their ends.

step thread   check ──> (the step is launched) ──> begin ──> take_ended, for the answer
event loop    `sender.py` sends; `servicer.py` receives
threads       read, write, hash
"""

import asyncio
import logging
from collections.abc import Callable

import grpc.aio

from executor_svc.transfers.messages import BlockFormat
from executor_svc.transfers.meter import TransferMeter
from executor_svc.transfers.pending import Outcome, PendingTransfers, Reason, Transfer, TransferEndedError
from executor_svc.transfers.sender import SILENCE_S, Dial, hurry, send
from executor_svc.transfers.servicer import BlockTransferServicer
from executor_svc.transfers.step_check import check_transfers, named
from executor_svc.worker.interface import Worker
from octavo_shared.errors import UnavailableError
from octavo_shared.process.clock import monotonic_s
from octavo_shared.process.events import Event
from octavo_shared.step_wire.step import Step, StepResult

_logger = logging.getLogger(__name__)

# Reasons that are nobody's fault.
_EXPECTED = frozenset({Reason.ASKED, Reason.ATTACH, Reason.DRAIN, Reason.WEIGHTS})


class Transfers:
    """Owns the transfers; the step thread calls its methods, unless they say otherwise.

    Args:
        dial: Opens channels to other executors.
        clock: Monotonic time in seconds, for metrics.

    Attributes:
        meter: Counts them.
        servicer: Receives blocks.
    """

    def __init__(self, dial: Dial = grpc.aio.insecure_channel, clock: Callable[[], float] = monotonic_s) -> None:
        self.meter = TransferMeter()
        self._dial = dial
        self._clock = clock
        self._pending = PendingTransfers(self._ended)
        self.servicer = BlockTransferServicer(self._pending, self._place)
        self._sending: set[asyncio.Task[None]] = set()
        self._placed: tuple[Worker, BlockFormat] | None = None

    def start(self, worker: Worker) -> None:
        """Be ready for a worker; on the event loop."""
        self._loop = asyncio.get_running_loop()
        self.reset(worker, uses_groups=False)

    def reset(self, worker: Worker, *, uses_groups: bool) -> None:
        """Begin an epoch, once `cancel_all` has ended the transfers of the last one: none of them is told any more."""
        self._pending.forget()
        self._pools = pools = worker.info.pools(agreed=uses_groups)
        self._place_in(worker)
        self._windows = [pool.window_tokens for pool in pools if pool.has_block_tables]

    def cancel_all(self, reason: Reason, words: str) -> None:
        """Cancel all transfers; return when no block is read or written any more."""
        self._pending.cancel_all(reason, words)

    def follow_weights(self, worker: Worker) -> None:
        """Cancel all transfers, since a worker has other weights now; later ones say that they are of these."""
        self.cancel_all(Reason.WEIGHTS, "the weights have changed")
        self._place_in(worker)

    def _place_in(self, worker: Worker) -> None:
        self._placed = worker, BlockFormat(worker.info, self._pools, worker.block_bytes)

    def check(self, step: Step) -> None:
        """Accept a step, not yet applied to the table. Raises InvalidStepError: see `step_check.py`."""
        worker, block_format = self._place()
        check_transfers(
            step,
            worker.table,
            self._pending,
            num_blocks=block_format.num_blocks,
            max_transfers=worker.info.max_transfers,
            windows=self._windows,
        )

    def begin(self, step: Step) -> None:
        """Begin what a step that was launched asks for."""
        for transfer_id in step.transfers_to_cancel:
            self._pending.cancel_id(transfer_id, Reason.ASKED, "the scheduler wants it no more")
        if not (step.blocks_to_send or step.blocks_to_receive):
            return
        self._place()[0].begin_transfers()
        sends = [
            Transfer(each.transfer_id, each.block_ids, each.secret, each.address, each.instance_id, self._clock())
            for each in step.blocks_to_send
        ]
        receives = [
            Transfer(each.transfer_id, each.block_ids, each.secret, begun_at_s=self._clock())
            for each in step.blocks_to_receive
        ]
        for transfer in (*sends, *receives):
            self._pending.begin(transfer)
            self._call_on_loop(self._attend, transfer)

    def take_ended(self, result: StepResult) -> None:
        """Tell in an answer which transfers have ended since the last one."""
        if not len(self._pending):
            return
        ended = self._pending.take_ended()
        result.arrived_transfers = ended[Outcome.ARRIVED]
        result.sent_transfers = ended[Outcome.SENT]
        result.cancelled_transfers = ended[Outcome.CANCELLED]

    def _place(self) -> tuple[Worker, BlockFormat]:
        if self._placed is None:
            raise UnavailableError("the model is loading")
        return self._placed

    def _attend(self, transfer: Transfer) -> None:
        """Send a transfer, or wait for its sender; on the event loop."""
        if transfer.is_received:
            self._loop.call_later(SILENCE_S, self._give_up, transfer)
            return
        sending = send(transfer, self._pending, *self._place(), self._dial)
        task = asyncio.ensure_future(sending)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def _give_up(self, transfer: Transfer) -> None:
        """Cancel a transfer whose sender has not come."""
        if not transfer.is_claimed:
            self._pending.cancel(transfer, Reason.SILENCE, f"no executor has sent its blocks for {SILENCE_S:g} s")

    def _ended(self, transfer: Transfer, outcome: Outcome, ending: TransferEndedError | None) -> None:
        """Count an end, and let what waits for the peer know; on any thread."""
        is_whole = ending is None
        num_bytes = sum(part.num_bytes for part in self._place()[1].parts(transfer.block_ids)) if is_whole else 0
        reason = None if ending is None else ending.reason
        self.meter.ended(transfer, outcome, reason, num_bytes, self._clock())
        if ending is not None:
            log = _logger.info if ending.reason in _EXPECTED else _logger.warning
            log(Event("transfer_cancelled", transfer=named(transfer.transfer_id), reason=ending.words))
        self._call_on_loop(hurry, transfer)

    def _call_on_loop(self, callback: Callable[[Transfer], None], transfer: Transfer) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, transfer)
