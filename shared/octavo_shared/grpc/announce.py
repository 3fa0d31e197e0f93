"""Processes announce themselves to the peers that look for them by name, which then need not wait for a DNS cache.

    executor ── Announce ──> scheduler ── Announce ──> front

Nothing is trusted: the message is empty, the address is the connection's, and `Membership.look_for` believes DNS
alone. Calls that come too often cost nothing and are answered all the same.
"""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc
import grpc.aio

from octavo.discovery.v1 import discovery_service_pb2 as pb
from octavo.discovery.v1 import discovery_service_pb2_grpc as pb_grpc
from octavo_shared.grpc.interceptor import peer_address
from octavo_shared.grpc.membership import DNS_SCHEME, LOOK_UP_S, Membership, Resolve, resolve
from octavo_shared.process.clock import monotonic_s
from octavo_shared.process.events import Event

log = logging.getLogger(__name__)

# Time between two announcements of a process that no peer uses, and of one that is used, in seconds.
UNUSED_INTERVAL_S = 2.0
USED_INTERVAL_S = 30.0
# How soon a process announces that it is no longer used, in seconds.
LOOK_INTERVAL_S = 0.5
CALL_TIMEOUT_S = 1.0

# Limits of look-ups for announcements: how many at a time, seconds between two for one IP address, and for how many
# addresses the last time is remembered.
MAX_LOOK_UPS = 8
ONE_IN_S = 1.0
MAX_HOSTS = 256


class Announcements(pb_grpc.DiscoveryServiceServicer):
    """Takes announcements, and has memberships look for the peers."""

    def __init__(self, memberships: Callable[[], Iterable[Membership]]) -> None:
        self._memberships = memberships
        self._looked_at_s: OrderedDict[str, float] = OrderedDict()  # by host, the oldest first
        self._under_way: dict[str, asyncio.Task[None]] = {}  # by host

    async def Announce(  # noqa: N802
        self, request: pb.AnnounceRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> pb.AnnounceResponse:
        """Look for the caller, unless too many look-ups run."""
        host = peer_address(context).rpartition(":")[0].strip("[]").removeprefix("::ffff:")
        if self._may_look_for(host):
            task = self._under_way[host] = asyncio.create_task(self._look_for(host), name="announced")
            task.add_done_callback(lambda _: self._under_way.pop(host))
        return pb.AnnounceResponse()

    def _may_look_for(self, host: str) -> bool:
        now_s, seen = monotonic_s(), self._looked_at_s
        while seen and now_s - next(iter(seen.values())) >= ONE_IN_S:
            seen.popitem(last=False)
        if not host or host in seen or host in self._under_way:
            return False
        if len(seen) >= MAX_HOSTS or len(self._under_way) >= MAX_LOOK_UPS:
            return False
        seen[host] = now_s
        return True

    async def _look_for(self, host: str) -> None:
        for membership in self._memberships():
            await membership.look_for(host)


class Announcer:
    """Announces to peers that this process is ready.

    Args:
        targets: Where peers take announcements: `host:port`, or `dns:///name:port` for every address of the name.
    """

    def __init__(self, targets: Sequence[str], is_used: Callable[[], bool], resolve: Resolve = resolve) -> None:
        self._targets = targets
        self._is_used = is_used
        self._resolve = resolve

    async def run(self) -> None:
        """Announce at once, again and again, and soon after the last peer stops using this process; until cancelled."""
        said_at_s, was_used = -math.inf, False
        while self._targets:
            is_used, now_s = self._is_used(), monotonic_s()
            interval_s = USED_INTERVAL_S if is_used else UNUSED_INTERVAL_S
            if now_s - said_at_s >= interval_s or (was_used and not is_used):
                said_at_s = now_s
                await asyncio.gather(*map(self._announce_to, self._targets))
            was_used = is_used
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _announce_to(self, target: str) -> None:
        try:
            addresses = {target}
            if target.startswith(DNS_SCHEME):
                name, _, port = target.removeprefix(DNS_SCHEME).rpartition(":")
                async with asyncio.timeout(LOOK_UP_S):
                    addresses = await self._resolve(name, int(port))
        except (OSError, TimeoutError) as error:
            log.debug(Event("not_announced", target=target, cause=str(error)))
            return
        await asyncio.gather(*map(self._call, addresses))

    async def _call(self, address: str) -> None:
        try:
            async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
                stub: Any = pb_grpc.DiscoveryServiceStub(channel)
                await stub.Announce(pb.AnnounceRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.debug(Event("not_announced", target=address, cause=str(error.details())))
