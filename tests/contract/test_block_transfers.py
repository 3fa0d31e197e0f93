"""Blocks go from one executor to another whole and unchanged, or the transfer is cancelled; no peer brings others."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import grpc
import numpy as np
import pytest
import pytest_asyncio

from executor_svc.fake.worker import FakeWorker
from executor_svc.transfers import messages, sender
from executor_svc.transfers.messages import BlockFormat, message_of
from octavo.execution.v1 import block_transfer_service_pb2 as pb
from octavo.execution.v1 import step_pb2
from octavo_shared.step_wire.step import Int32Array
from tests.contract.execution_harness import refusal
from tests.support.transfer_executors import SECRET, TransferExecutor

pytestmark = pytest.mark.timeout(60)

Request = pb.SendBlocksRequest


def fake(**settings: object) -> FakeWorker:
    """Return a worker whose blocks all hold something else."""
    worker = FakeWorker(max_transfers=4, num_device_blocks=32, has_states=True, num_device_states=8, **settings)  # type: ignore[arg-type]
    worker.reset(uses_groups=True)
    for group in range(2):
        count = worker.info.cache_groups[group].num_device_blocks
        ids = np.arange(count, dtype=np.int32) + (32 if group else 0)
        content = np.random.default_rng(group + len(worker.info.instance_id)).bytes(count * worker.block_bytes[group])
        worker.write_blocks(ids, content)
    return worker


@pytest_asyncio.fixture
async def two() -> AsyncIterator[tuple[TransferExecutor, TransferExecutor]]:
    async with (
        TransferExecutor(fake(instance_id="sender")) as one,
        TransferExecutor(fake(instance_id="other")) as other,
    ):
        yield one, other


Two = tuple[TransferExecutor, TransferExecutor]


@pytest.mark.parametrize("block_ids", [[3, 1, 30, 2], [0, 33, 32, 5]])
async def test_blocks_arrive_in_their_order_and_nothing_else_is_written(
    block_ids: list[int], two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "PIECE_BYTES", 100)  # a block of histories travels in two pieces, states together
    source, target = two
    into = [7, 36, 39, 4] if 33 in block_ids else [9, 8, 4, 6]
    before = {block_id: target.content([block_id]) for block_id in range(40)}
    await target.receive(into)
    await source.send(target, block_ids)
    assert (await source.end(), await target.end()) == ("sent", "arrived")
    for from_id, to_id in zip(block_ids, into, strict=True):
        assert target.content([to_id]) == source.content([from_id])
    assert all(target.content([other]) == before[other] for other in range(40) if other not in into)


async def test_a_sender_waits_until_the_receiver_is_told(two: Two) -> None:
    source, target = two
    await source.send(target, [3])
    await asyncio.sleep(0.2)
    await target.receive([4])
    assert (await source.end(), await target.end()) == ("sent", "arrived")
    assert target.content([4]) == source.content([3])


async def test_a_receiver_that_is_never_told_cancels_at_the_sender_alone(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "UNKNOWN_S", 0.1)
    source, target = two
    await source.send(target, [3])
    assert await source.end() == "cancelled"


@pytest.mark.parametrize("why", ["the scheduler", "an attach", "silence"])
async def test_who_waits_in_vain_is_told_that_it_is_cancelled(
    why: str, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "silence":
        monkeypatch.setattr("executor_svc.transfers.transfers.SILENCE_S", 0.1)
    _, target = two
    await target.receive([4, 5])
    if why == "an attach":
        await target.attach()
        await target.receive([4, 5])  # of the last epoch nothing is pending and nothing is told
    if why != "silence":
        await target.run(transfers_to_cancel=[7])
        await target.receive([5], transfer_id=8)  # its blocks are free at once
        return
    assert await target.end() == "cancelled"
    await target.run(transfers_to_cancel=[7])  # it has ended: no fault


# What the other end may be


def header_of(target: TransferExecutor, **changes: object) -> bytes:
    """Return the header of two blocks, as an honest sender makes it, but for some changes."""
    info = target.worker.info
    block_format = BlockFormat(info, info.pools(agreed=True), target.worker.block_bytes)
    header = block_format.header(np.array([1, 2], np.int32), info.instance_id)
    for name, value in changes.items():
        setattr(header, name, value)
    return header.SerializeToString()


def honest(target: TransferExecutor) -> list[Request]:
    content = bytes(2 * target.worker.block_bytes[0])
    return [message_of(SECRET, 7, 0, header_of(target)), message_of(SECRET, 7, 1, content)]


def changed(place: int, /, **changes: object) -> Callable[[TransferExecutor], list[Request]]:
    """Return the messages of an honest sender, one of them changed on its way."""

    def make(target: TransferExecutor) -> list[Request]:
        made = honest(target)
        for name, value in changes.items():
            setattr(made[place], name, value)
        return made

    return make


def with_header(**changes: object) -> Callable[[TransferExecutor], list[Request]]:
    """Return the messages of a sender that knows the secret and has something else."""
    return lambda target: [message_of(SECRET, 7, 0, header_of(target, **changes)), honest(target)[1]]


def longer(target: TransferExecutor) -> list[Request]:
    return [*honest(target), message_of(SECRET, 7, 2, b"more")]


def without_secret(target: TransferExecutor) -> list[Request]:
    return [message_of(bytes(16), 7, 0, header_of(target))]


CANCELLED = True
STAYS = False
Row = tuple[Callable[[TransferExecutor], list[Request]], grpc.StatusCode, str, bool]

HOSTILE: dict[str, Row] = {
    "nothing": (lambda _: [], grpc.StatusCode.NOT_FOUND, "no such transfer waits", STAYS),
    "another id": (changed(0, transfer_id=8), grpc.StatusCode.NOT_FOUND, "no such transfer waits", STAYS),
    "no secret": (without_secret, grpc.StatusCode.PERMISSION_DENIED, "message 0 of transfer 00", STAYS),
    "no code": (changed(0, code=b""), grpc.StatusCode.PERMISSION_DENIED, "has a wrong code", STAYS),
    "a chunk first": (lambda t: honest(t)[1:], grpc.StatusCode.INVALID_ARGUMENT, "index is 1; it must be 0", STAYS),
    "a huge header": (
        changed(0, content=bytes(3 * 2**20)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "content is 3145728 bytes; it must be at most 2097152 bytes",
        STAYS,
    ),
    "no header": (
        lambda _: [message_of(SECRET, 7, 0, b"\xff\xff")],
        grpc.StatusCode.INVALID_ARGUMENT,
        "content is no header",
        CANCELLED,
    ),
    "another instance": (
        with_header(instance_id="x"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "the blocks are for instance 'x'; this is 'other'",
        CANCELLED,
    ),
    "other numerics": (
        with_header(numerics_id="x"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "the sender's numerics_id is 'x'; the receiver's is 'fake-",
        CANCELLED,
    ),
    "unknown weights": (
        with_header(weights_digest=""),
        grpc.StatusCode.FAILED_PRECONDITION,
        "the sender's weights_digest is ''; ",
        CANCELLED,
    ),
    "another format": (
        with_header(format="int8"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "the sender's format is 'int8'; the receiver's is 'float32: FULL of 16 tokens in 128 bytes, layers 0; STATE",
        CANCELLED,
    ),
    "states for blocks": (
        with_header(groups=b"\0\1"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "a block comes for a block of another cache group",
        CANCELLED,
    ),
    "too few blocks": (
        with_header(groups=b"\0"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "1 blocks come; 2 wait for their content",
        CANCELLED,
    ),
    "other content": (
        changed(1, content=bytes(255) + b"\1"),
        grpc.StatusCode.PERMISSION_DENIED,
        "message 1 of transfer",
        CANCELLED,
    ),
    "less content": (
        changed(1, content=bytes(255)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "content is 255 bytes; it must be 256 bytes here",
        CANCELLED,
    ),
    "another order": (
        changed(1, index=2),
        grpc.StatusCode.INVALID_ARGUMENT,
        "index is 2; it must be 1, of the same transfer",
        CANCELLED,
    ),
    "cut off": (lambda t: honest(t)[:1], grpc.StatusCode.INVALID_ARGUMENT, "blocks are missing", CANCELLED),
    "too many": (longer, grpc.StatusCode.INVALID_ARGUMENT, "all blocks have come", CANCELLED),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_peer_that_is_not_the_sender_ends_its_own_call_and_a_broken_one_the_transfer(
    what: str, two: Two
) -> None:
    make, code, words, is_cancelled = HOSTILE[what]
    _, target = two
    await target.receive([4, 5])
    before = target.content([4, 5])

    async def requests() -> AsyncIterator[Request]:
        for message in make(target):
            yield message

    found, details = await refusal(target.transfers.SendBlocks(requests()))
    assert (found, words in details) == (code, True), details
    if is_cancelled:
        assert await target.end() == "cancelled"
    else:
        assert not (await target.run()).cancelled_transfers
        await target.transfers.SendBlocks(iter_of(honest(target)))
        assert await target.end() == "arrived"
    if what != "too many" and is_cancelled:
        assert target.content([4, 5]) == before, "something was written that no sender vouched for"


async def iter_of(made: list[Request]) -> AsyncIterator[Request]:
    for message in made:
        yield message


async def test_a_second_call_for_a_transfer_is_refused_and_the_first_goes_on(two: Two) -> None:
    _, target = two
    await target.receive([4, 5])
    made = honest(target)
    first = target.transfers.SendBlocks()
    await first.write(made[0])
    await first.initial_metadata()
    code, details = await refusal(target.transfers.SendBlocks(iter_of(made)))
    assert (code, "is being received already" in details) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    await first.write(made[1])
    await first.done_writing()
    await first
    assert await target.end() == "arrived"


@pytest.mark.parametrize("how", ["breaks off", "falls silent", "is cancelled", "meets an attach"])
async def test_a_sender_that_stops_in_the_middle(how: str, two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "SILENCE_S", 0.2 if how == "falls silent" else 30.0)
    _, target = two
    await target.receive([4, 5])
    call = target.transfers.SendBlocks()
    await call.write(honest(target)[0])
    await call.initial_metadata()
    if how == "breaks off":
        call.cancel()
    elif how == "is cancelled":
        assert 7 in (await target.run(transfers_to_cancel=[7])).cancelled_transfers
    elif how == "meets an attach":
        await target.attach()
    if how in ("breaks off", "falls silent"):
        assert await target.end() == "cancelled"
    if how != "breaks off":
        async with asyncio.timeout(10):  # far less than a silence
            code, _ = await refusal(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION


async def test_executors_that_differ_cancel_at_both_ends() -> None:
    other = fake(instance_id="other", weights_digest="another")
    async with TransferExecutor(fake()) as source, TransferExecutor(other) as target:
        await target.receive([4])
        await source.send(target, [3])
        assert (await source.end(), await target.end()) == ("cancelled", "cancelled")


async def test_no_receiver_at_the_address_cancels(two: Two) -> None:
    source, _ = two
    send = step_pb2.BlockSend(transfer_id=9, address="127.0.0.1:1", instance_id="x", block_ids=[1], secret=SECRET)
    await source.run(blocks_to_send=[send])
    assert await source.end(9) == "cancelled"


class SlowWorker(FakeWorker):
    """A worker whose blocks take a while to be written."""

    is_writing = False

    def write_blocks(self, block_ids: Int32Array, content: object) -> None:
        self.is_writing = True
        time.sleep(0.2)
        self.is_writing = False
        super().write_blocks(block_ids, content)  # type: ignore[arg-type]


async def test_an_attach_waits_until_nothing_is_written_any_more() -> None:
    async with TransferExecutor(SlowWorker(max_transfers=1)) as target:
        await target.receive([4, 5])
        call = target.transfers.SendBlocks(iter_of(honest_single(target)))
        while not target.worker.is_writing:  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)
        await target.attach()
        assert not target.worker.is_writing  # type: ignore[attr-defined]
        code, _ = await refusal(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION


def honest_single(target: TransferExecutor) -> list[Request]:
    """Return the messages of an honest sender to an executor whose layers are alike."""
    info = target.worker.info
    block_format = BlockFormat(info, info.pools(agreed=False), target.worker.block_bytes)
    header = block_format.header(np.array([1, 2], np.int32), info.instance_id).SerializeToString()
    return [message_of(SECRET, 7, 0, header), message_of(SECRET, 7, 1, bytes(2 * target.worker.block_bytes[0]))]


async def test_a_received_block_loses_its_name() -> None:
    async with TransferExecutor(fake()) as target:
        await target.run(registered_blocks=step_pb2.RegisteredBlocks(block_ids=[4, 6], names=bytes(32)))
        await target.receive([4])
        names = target.servicer._runner._names
        assert list(names._names) == [6]
