"""No step touches the blocks of a pending transfer, and what it may do beside one is not refused."""

from dataclasses import replace

import numpy as np
import pytest

from executor_svc.transfers.pending import Outcome, PendingTransfers, Transfer
from executor_svc.transfers.step_check import check_transfers
from octavo_shared.errors import InvalidStepError
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import (
    Admission,
    BlockReceive,
    BlockSend,
    Fork,
    Int32Array,
    SamplingRow,
    Step,
    TableDelta,
    pairs,
)
from tests.support.each_row import each_row

SECRET = bytes(16)
SENT, RECEIVED = 20, 30  # block 20 is being sent, 30 is being received


def ids(*block_ids: int) -> Int32Array:
    return np.array(block_ids, np.int32)


def sequence(slot: int, num_tokens: int, *block_ids: int, num_computed: int = 0) -> Admission:
    return Admission(
        slot, 1, np.arange(num_tokens, dtype=np.int32), num_tokens, num_computed, ids(*block_ids), SamplingRow()
    )


def table() -> BatchTable:
    """Return a table of blocks of 4 tokens. Slot 0 is active and writes block 2 next, slot 1 has computed 4 of 8.

    Slot 0 sees the blocks 1, 2; slot 1 has SENT and 4; slot 2 is active behind SENT and writes that block next.
    """
    batch = BatchTable(6, 64, 4, 40)
    admitted = (sequence(0, 4, 1, 2), sequence(1, 8, SENT, 4), sequence(2, 3, SENT))
    layout = batch.apply(TableDelta(admissions=admitted, prefill_chunks=pairs((0, 4), (1, 4), (2, 3))))
    batch.resolve(layout, ids(*[7] * len(layout.sample_slots)))
    return batch


def pending() -> PendingTransfers:
    transfers = PendingTransfers()
    transfers.begin(Transfer(1, ids(SENT), SECRET, "there:1", "x"))
    transfers.begin(Transfer(2, ids(RECEIVED), SECRET))
    return transfers


def step(**fields: object) -> Step:
    """Return a step, in which slot 2 does not write the block that is sent."""
    delta = fields.pop("delta", None) or TableDelta()
    assert isinstance(delta, TableDelta)
    released = delta.released_slots if len(delta.released_slots) else ids(2)
    return Step(1, 9, replace(delta, released_slots=released), **fields)  # type: ignore[arg-type]


def check(tested: Step, transfers: PendingTransfers | None = None, window: int = 0) -> None:
    check_transfers(tested, table(), transfers or pending(), num_blocks=40, max_transfers=4, windows=[window])


def send(transfer_id: int, *block_ids: int, secret: bytes = SECRET, address: str = "there:1") -> BlockSend:
    return BlockSend(transfer_id, address, "x", ids(*block_ids), secret)


def receive(transfer_id: int, *block_ids: int) -> BlockReceive:
    return BlockReceive(transfer_id, ids(*block_ids), SECRET)


BESIDE = {
    "nothing": step(),
    "a read of what is sent": step(delta=TableDelta(prefill_chunks=pairs((1, 4)))),
    "an admission behind what is sent": step(
        delta=TableDelta(admissions=(sequence(3, 8, SENT, 5, num_computed=4),), prefill_chunks=pairs((3, 4)))
    ),
    "a copy of what is sent": step(blocks_to_copy=pairs((SENT, 9))),
    "a copy before the write": step(
        delta=TableDelta(released_slots=ids(0), replaced_blocks=pairs((2, 0, 9))), blocks_to_copy=pairs((SENT, 9))
    ),
    "a second transfer of a block": step(blocks_to_send=(send(3, SENT, 1),)),
    "blocks of a sequence that leaves": step(
        delta=TableDelta(released_slots=ids(0, 2)), blocks_to_receive=(receive(3, 2, 1),)
    ),
    "blocks of nobody": step(blocks_to_receive=(receive(3, 10, 11),)),
    "an end": step(transfers_to_cancel=(2, 1)),
}


@pytest.mark.parametrize("what", BESIDE)
def test_a_step_may_do_beside_transfers(what: str) -> None:
    check(BESIDE[what])


def admitting(admission: Admission, chunk: int) -> Step:
    return step(delta=TableDelta(admissions=(admission,), prefill_chunks=pairs((admission.slot, chunk))))


FILLS, SENDS = f"block {RECEIVED}, which a pending transfer fills", f"block {SENT}, which a pending transfer sends"
REFUSED: dict[str, tuple[Step, str]] = {
    "append": (step(delta=TableDelta(appended_blocks=pairs((0, RECEIVED)))), f"appends {FILLS}"),
    "append to write": (step(delta=TableDelta(appended_blocks=pairs((0, SENT)))), f"appends {SENDS}"),
    "replace": (step(delta=TableDelta(replaced_blocks=pairs((0, 1, SENT)))), f"puts in place {SENDS}"),
    "admit": (admitting(sequence(3, 8, RECEIVED, 5, num_computed=4), 4), f"admits slot 3 with {FILLS}"),
    "admit to write": (admitting(sequence(3, 4, SENT), 4), f"writes into {SENDS}"),
    "decode": (step(delta=TableDelta(released_slots=ids(0))), f"writes into {SENDS}"),
    "chunk": (
        step(delta=TableDelta(deactivated_slots=ids(2), released_slots=ids(0), prefill_chunks=pairs((2, 1)))),
        f"writes into {SENDS}",
    ),
    "fork of a beam": (
        step(
            delta=TableDelta(
                released_slots=ids(0),
                deactivated_slots=ids(2),
                beam_forks=(Fork(2, 4, 1, SamplingRow()), Fork(4, 5, 1, SamplingRow())),
                activated_slots=ids(5),
            )
        ),
        f"writes into {SENDS}",
    ),
    "copy from": (step(blocks_to_copy=pairs((RECEIVED, 9))), f"copies from {FILLS}"),
    "copy to": (step(blocks_to_copy=pairs((9, SENT))), f"copies to {SENDS}"),
    "swap out": (step(blocks_to_swap_out=pairs((RECEIVED, 0))), f"swaps out {FILLS}"),
    "swap in": (step(blocks_to_swap_in=pairs((0, SENT))), f"swaps in {SENDS}"),
    "state": (step(states_to_save=pairs((0, 4, RECEIVED))), f"saves a state in {FILLS}"),
    "name": (step(registered_blocks=ids(RECEIVED), block_names=bytes(16)), f"names {FILLS}"),
    "receive twice": (step(blocks_to_receive=(receive(3, 9, RECEIVED),)), "receives blocks of a pending transfer with"),
    "receive two": (step(blocks_to_receive=(receive(3, 9), receive(4, 9))), "receives blocks of a pending transfer"),
    "receive what is sent": (step(blocks_to_receive=(receive(3, SENT),)), "receives blocks of a pending transfer with"),
    "send too early": (step(blocks_to_send=(send(3, RECEIVED),)), "sends blocks that have not arrived with transfer 0"),
    "receive what is read": (
        step(blocks_to_receive=(receive(3, 1),)),
        "receives into a block table's block 1, which a pending transfer fills",
    ),
    "an id twice": (step(blocks_to_send=(send(1, 5),)), "begins transfer 0000000000000001 twice"),
    "too many": (
        step(blocks_to_send=tuple(send(n, n) for n in (3, 4, 5))),
        "begins 3 transfers beside 2 pending ones; the limit is 4",
    ),
    "a short secret": (
        step(blocks_to_send=(send(3, 5, secret=b"x"),)),
        "begins transfer 0000000000000003 with a secret of 1 bytes; a secret has 16",
    ),
    "no block": (step(blocks_to_receive=(receive(3),)), "begins transfer 0000000000000003 without blocks"),
    "outside": (step(blocks_to_receive=(receive(3, 40),)), "with device block 40; there are 40 device blocks"),
    "a block twice": (step(blocks_to_send=(send(3, 5, 5),)), "begins transfer 0000000000000003 with block 5 twice"),
    "no address": (step(blocks_to_send=(send(3, 5, address=""),)), "without the receiver's address and instance_id"),
    "an unknown end": (step(transfers_to_cancel=(2, 3)), "cancels transfer 0000000000000003; there was none"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_step_is_refused_that_touches_blocks_of_a_transfer(what: str) -> None:
    tested, words = REFUSED[what]
    with pytest.raises(InvalidStepError) as refused:
        check(tested)
    assert str(refused.value).startswith("step 9 ")
    assert words in str(refused.value)


@each_row((0, True), (4, False))
def test_entries_that_fell_out_of_the_window_hold_nothing(window: int, is_refused: bool) -> None:
    tested = admitting(sequence(3, 12, RECEIVED, 5, 6, num_computed=8), 4)
    if is_refused:
        with pytest.raises(InvalidStepError):
            check(tested, window=window)
    else:
        check(tested, window=window)


def test_blocks_are_held_until_the_end_is_told_and_an_end_may_be_cancelled_afterwards() -> None:
    transfers = pending()
    transfers.finish(next(iter(transfers)), Outcome.SENT)
    decode = step(delta=TableDelta(released_slots=ids(0)))
    with pytest.raises(InvalidStepError):
        check(decode, transfers)
    assert transfers.take_ended()[Outcome.SENT] == (1,)
    check(decode, transfers)
    check(step(transfers_to_cancel=(1,)), transfers)
    with pytest.raises(InvalidStepError, match="begins transfer 0000000000000001 twice"):
        check(step(blocks_to_send=(send(1, 5),)), transfers)
