"""A block in a group is the shares of its ranks, read and written behind the steps before its transfer alone."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from executor_svc.fake.worker import FakeWorker
from executor_svc.worker.interface import Buffer, RunningStep, execute
from executor_svc.worker.rank_blocks import ShareError
from executor_svc.worker.rank_worker import LeaderWorker
from octavo_shared.step_wire.step import Int32Array, Step, TableDelta
from tests.support.joined_ranks import joined
from tests.support.patience import PATIENCE_S

BLOCKS = np.array([3, 1], np.int32)


class HeldWorker(FakeWorker):
    """Launches no step until the test lets it, and may have no memory for blocks."""

    def __init__(self, rank: int) -> None:
        super().__init__(max_num_seqs=2, num_device_blocks=8, max_transfers=4)
        self.may_launch = threading.Event()
        self.may_launch.set()
        self.has_memory = True
        content = np.random.default_rng(rank).bytes(8 * self.block_bytes[0])
        super().write_blocks(np.arange(8, dtype=np.int32), content)

    def launch(self, step: Step) -> RunningStep:
        assert self.may_launch.wait(PATIENCE_S)
        return super().launch(step)

    def read_blocks(self, block_ids: Int32Array) -> Buffer:
        if not self.has_memory:
            raise MemoryError("no room")
        return super().read_blocks(block_ids)


@pytest.fixture
def workers() -> list[HeldWorker]:
    return [HeldWorker(rank) for rank in range(3)]


@pytest.fixture
def leader(workers: list[HeldWorker]) -> Iterator[LeaderWorker]:
    with joined(workers) as leader:
        leader.begin_transfers()
        yield leader
        for worker in workers:
            worker.may_launch.set()


def shares(workers: list[HeldWorker], block_ids: Int32Array = BLOCKS) -> bytes:
    """Return block after block, each with the shares in the order of the ranks."""
    each = [np.frombuffer(worker.read_blocks(block_ids), np.uint8).reshape(len(block_ids), -1) for worker in workers]
    return np.concatenate(each, axis=1).tobytes()


def read(leader: LeaderWorker, block_ids: Int32Array = BLOCKS) -> bytes:
    return np.frombuffer(leader.read_blocks(block_ids), np.uint8).tobytes()


def test_every_rank_reads_and_writes_its_share(leader: LeaderWorker, workers: list[HeldWorker]) -> None:
    assert leader.block_bytes == (3 * workers[0].block_bytes[0],)
    assert read(leader) == shares(workers)

    content, others = np.random.default_rng(9).bytes(2 * leader.block_bytes[0]), np.array([0, 2, 4], np.int32)
    before = shares(workers, others)
    leader.write_blocks(BLOCKS, content)
    assert read(leader) == shares(workers) == content
    assert shares(workers, others) == before


def test_blocks_wait_for_the_steps_before_their_transfer_and_for_no_later_ones(
    leader: LeaderWorker, workers: list[HeldWorker]
) -> None:
    held = workers[2]
    held.may_launch.clear()
    execute(leader, Step(1, 1, TableDelta()))
    assert read(leader) == shares(workers), "the transfer has begun before"

    leader.begin_transfers()
    found: list[bytes] = []
    reading = threading.Thread(target=lambda: found.append(read(leader)))
    reading.start()
    reading.join(0.2)
    assert not found
    execute(leader, Step(1, 2, TableDelta()))  # no step waits for the blocks
    held.may_launch.set()
    reading.join(PATIENCE_S)
    assert found == [shares(workers)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_read_its_share_fails_this_transfer_alone(
    rank: int, leader: LeaderWorker, workers: list[HeldWorker]
) -> None:
    workers[rank].has_memory = False
    with pytest.raises(
        ShareError if rank else MemoryError, match="rank 1: MemoryError: no room" if rank else "no room"
    ):
        read(leader)
    workers[rank].has_memory = True
    others = np.array([5, 0], np.int32)
    assert read(leader, others) == shares(workers, others)
