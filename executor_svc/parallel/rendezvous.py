"""How the ranks of a group find each other, and how the group ends.

They meet at a key-value store of torch.distributed: a launcher's, or one that rank 0
opens on this machine before it starts the others. There rank 0 leaves the addresses of its two channels.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NoReturn

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from executor_svc.parallel.connection import Connection
from executor_svc.parallel.group import DistributedGroup
from executor_svc.parallel.rank_channel import ChannelAddress, RankChannel, accept_ranks, connect
from executor_svc.parallel.ranks import LocalRanks, RankAssignment
from octavo_shared.errors import ModelLoadError
from octavo_shared.process.events import Event

# A rank that says nothing for so long is frozen or cut off: its signs of life come every 2 s, from a
# thread that needs the interpreter for microseconds.
SILENCE_LIMIT_S = 10.0
# Longest time between the first rank that arrives and the last; models are loaded after that.
JOIN_TIMEOUT_S = 300.0
# Longest wait in a collective. Within a step ranks differ by the noise of their machines.
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
REAP_TIMEOUT_S = 1.0
STOP_TIMEOUT_S = 5.0
_STEPS_KEY, _BLOCKS_KEY = "steps", "blocks"

_logger = logging.getLogger(__name__)


class LeadingRank:
    """Rank 0 of a group of several, with all others connected.

    Args:
        assignment: A launcher's; None: start the other ranks on this machine.
        size: How many ranks there are.
        argv, environ: Of this process, for the ranks that it starts.
        device: Where the tensors are.

    Raises: ModelLoadError: the others do not come.
    """

    def __init__(
        self,
        assignment: RankAssignment | None,
        size: int,
        argv: Sequence[str],
        environ: Mapping[str, str],
        device: torch.device,
    ) -> None:
        self._local_ranks: LocalRanks | None = None
        if assignment is None:
            host = "127.0.0.1"
            own_store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
            store: Store = own_store
            self._local_ranks = LocalRanks("executor_svc", argv, environ, size, own_store.port)
        else:
            host, store = assignment.master_address, _store_of(assignment)
        self._losing = threading.Lock()
        self.steps = RankChannel(host, SILENCE_LIMIT_S, self._lose)
        self.blocks = RankChannel(host, SILENCE_LIMIT_S, self._lose)
        try:
            store = PrefixStore("octavo", store)
            store.set(_STEPS_KEY, self.steps.address.to_text())
            store.set(_BLOCKS_KEY, self.blocks.address.to_text())
            accept_ranks([self.steps, self.blocks], size, JOIN_TIMEOUT_S, self._check_local_ranks)
            self.group = DistributedGroup(store, 0, size, device, COLLECTIVE_TIMEOUT)
        except ModelLoadError:
            if self._local_ranks is not None:
                self._local_ranks.kill()
            raise
        _logger.info(Event("group_joined", rank=0, size=size))

    def close(self) -> None:
        """Let the other ranks end in order, and wait for those on this machine."""
        self.blocks.close()  # first: a rank ends with its steps
        self.steps.close()
        self.group.close()
        if self._local_ranks is not None:
            self._local_ranks.wait(STOP_TIMEOUT_S)

    def end(self, reason: str) -> NoReturn:
        """End this process at once, and the ranks that it started, even if they are frozen."""
        if self._local_ranks is not None:
            self._local_ranks.kill()
        end_group(reason)

    def _check_local_ranks(self) -> None:
        if self._local_ranks is not None:
            self._local_ranks.check()

    def _lose(self, reason: str) -> None:
        self._losing.acquire()  # both connections to a rank are lost; one of them is told, and the process ends
        exit_causes: list[str] = []
        deadline_s = time.monotonic() + REAP_TIMEOUT_S
        while self._local_ranks is not None and not exit_causes and time.monotonic() < deadline_s:
            exit_causes = self._local_ranks.exit_causes()
        self.end("; ".join([reason, *exit_causes]))


class FollowingRank:
    """Any other rank, connected to rank 0. Raises: ModelLoadError: rank 0 does not answer."""

    def __init__(self, assignment: RankAssignment, device: torch.device) -> None:
        store = PrefixStore("octavo", _store_of(assignment))
        try:
            steps, blocks = (ChannelAddress.from_text(store.get(key).decode()) for key in (_STEPS_KEY, _BLOCKS_KEY))
            self.steps: Connection = connect(steps, assignment.rank, SILENCE_LIMIT_S, end_group)
            # Rank 0 finds a loss of it and ends the group.
            self.blocks: Connection = connect(blocks, assignment.rank, SILENCE_LIMIT_S, lambda _: None)
        except (RuntimeError, OSError) as error:
            raise ModelLoadError(f"rank {assignment.rank} does not reach rank 0: {error}") from error
        self.group = DistributedGroup(store, assignment.rank, assignment.size, device, COLLECTIVE_TIMEOUT)
        _logger.info(Event("group_joined", rank=assignment.rank, size=assignment.size))


def end_group(reason: str) -> NoReturn:
    """End this process at once, from any thread, since it waits for what will never come.

    The other ranks see their connection close, and end as well. A scheduler sees UNAVAILABLE.
    """
    print(f"octavo executor: {reason}; all ranks of the group exit", file=sys.stderr, flush=True)
    os._exit(1)


def _store_of(assignment: RankAssignment) -> Store:
    """Return the store of the launcher, or of rank 0 if that started this process."""
    try:
        store: Store
        store, _, _ = next(
            rendezvous("env://", assignment.rank, assignment.size, timeout=timedelta(seconds=JOIN_TIMEOUT_S))
        )
    except (RuntimeError, ValueError) as error:
        where = f"{assignment.master_address}:{assignment.master_port}"
        raise ModelLoadError(f"rank {assignment.rank} cannot reach the rendezvous at {where}: {error}") from error
    return store
