"""Asks a scheduler for all that a picture of it takes: a bounded number of requests, whatever its load."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.admin_client import MAX_PAGE_SIZE

# Requests that are asked for at a time: the oldest live ones, the head of the queue, the last that ended.
MAX_LISTED_REQUESTS = 200
# The same while the user searches for an id or a tenant.
MAX_SEARCHED_REQUESTS = MAX_PAGE_SIZE


class AdminSource(Protocol):
    """What can be asked: `octavo.admin_client.AdminClient`, or scripted answers of a test."""

    @property
    def address(self) -> str:
        """Where it is, HOST:PORT."""

    def page_url(self, port: int) -> str | None:
        """See AdminClient."""

    async def get_state(self) -> pb.GetSchedulerStateResponse:
        """See AdminClient."""

    async def list_requests(self, limit: int) -> list[admin_pb2.RequestState]:
        """See AdminClient."""

    async def list_ended_requests(self, limit: int) -> list[admin_pb2.RequestState]:
        """See AdminClient."""

    async def list_queue(self, limit: int) -> list[admin_pb2.QueuedRequest]:
        """See AdminClient."""

    async def get_request(self, request_id: str, tenant: str | None = None) -> admin_pb2.RequestState:
        """See AdminClient."""

    async def explain_request(self, request_id: str, tenant: str | None = None) -> pb.ExplainRequestResponse:
        """See AdminClient."""

    async def get_block_map(self, executor: str) -> pb.GetBlockMapResponse:
        """See AdminClient."""

    async def get_block(self, executor: str, block: int) -> pb.GetBlockResponse:
        """See AdminClient."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What a scheduler answered at one moment.

    Attributes:
        at_s: When the state came, monotonic time in seconds.
        state: Of the scheduler.
        live_at_s: When the live requests came, monotonic time in seconds.
        live: The oldest live requests, by age.
        reasons: Why requests of the queue's head wait, by id.
        ended: The last requests that ended, newest first; None: they were not asked for.
    """

    at_s: float
    state: pb.GetSchedulerStateResponse
    live_at_s: float = 0.0
    live: tuple[admin_pb2.RequestState, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    ended: tuple[admin_pb2.RequestState, ...] | None = None

    @property
    def num_live_requests(self) -> int:
        """How many live requests there are in all."""
        state = self.state
        return (
            state.num_waiting_requests
            + state.num_running_requests
            + state.num_swapped_requests
            + state.num_preempted_requests
        )


class Poller:
    """Asks a scheduler again and again.

    Args:
        source: The scheduler.
        clock: Monotonic time in seconds.
    """

    def __init__(self, source: AdminSource, clock: Callable[[], float] = time.monotonic) -> None:
        self.source = source
        self._clock = clock

    async def take(self, *, wants_ended: bool = False, is_searching: bool = False) -> Answers:
        """Ask for one picture: three or four calls.

        Args:
            wants_ended: Ask for the requests that have ended, too.
            is_searching: Ask for MAX_SEARCHED_REQUESTS of each kind, not only MAX_LISTED_REQUESTS.

        Raises: OctavoError: see AdminClient.
        """
        limit = MAX_SEARCHED_REQUESTS if is_searching else MAX_LISTED_REQUESTS
        source = self.source
        state = await source.get_state()
        at_s = self._clock()
        live = await source.list_requests(limit)
        live_at_s = self._clock()
        queue = await source.list_queue(limit) if state.num_waiting_requests else []
        ended = tuple(await source.list_ended_requests(limit)) if wants_ended else None
        return Answers(
            at_s=at_s,
            state=state,
            live_at_s=live_at_s,
            live=tuple(live),
            reasons={queued.request_id: queued.reason for queued in queue},
            ended=ended,
        )
