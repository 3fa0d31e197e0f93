"""The workers of a group in one process, joined by the sockets that ranks have between processes."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from executor_svc.parallel.rank_channel import RankChannel, accept_ranks, connect
from executor_svc.worker.rank_weights import RankWorker
from executor_svc.worker.rank_worker import LeaderWorker, follow
from tests.support.patience import PATIENCE_S


def never(reason: str) -> NoReturn:
    raise AssertionError(reason)


@contextmanager
def joined(workers: Sequence[RankWorker]) -> Iterator[LeaderWorker]:
    """Run every rank but the first in a thread; yield rank 0's worker as the service sees it."""
    channels = [RankChannel("127.0.0.1", PATIENCE_S, never) for _ in range(2)]

    def run(rank: int) -> None:
        follow(workers[rank], *(connect(channel.address, rank, PATIENCE_S, never) for channel in channels))

    following = [threading.Thread(target=run, args=(rank,)) for rank in range(1, len(workers))]
    for thread in following:
        thread.start()
    accept_ranks(channels, len(workers), PATIENCE_S)
    steps, blocks = channels
    try:
        yield LeaderWorker(workers[0], steps, blocks, never)
    finally:
        blocks.close()
        steps.close()
        for thread in following:
            thread.join(PATIENCE_S)
