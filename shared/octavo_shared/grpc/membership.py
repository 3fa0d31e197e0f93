"""The peers that there should be, executors or engines: a list of addresses, and DNS names for several addresses each.

A target is `host:port`, taken as it is, or `dns:///name:port`, which is looked up again and again: every
address that the name has is a peer (a headless Service of Kubernetes names its pods so). A name
that cannot be looked up keeps its addresses: a failing name server must not end working peers.
Nor does one look-up that misses a peer that answers: each name server has a cache of its own, so one
may name a peer that the next one does not know yet.
"""

import asyncio
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Sequence

from octavo_shared.process.clock import monotonic_s
from octavo_shared.process.events import Event

log = logging.getLogger(__name__)

DNS_SCHEME = "dns:///"

# How long known addresses wait for a name server, in seconds; it is waited for beside them.
LOOK_UP_S = 1.0

# How long a peer that answers stays one while no look-up names it, in seconds: the DNS of Kubernetes is right about a
# headless Service for 30 s, a cache may keep the answer 30 s more, and some room.
FORGET_AFTER_S = 90.0

# How long an announced peer has to answer, in seconds, if look-ups do not name it yet.
ANNOUNCED_S = 10.0

Resolve = Callable[[str, int], Awaitable[set[str]]]


async def resolve(name: str, port: int) -> set[str]:
    """Return the addresses, host:port, that a name has now. Raises OSError: it cannot be looked up."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = {str(address[0]) for _, _, _, _, address in found}
    return {f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts}


def host_of_name(targets: Sequence[str]) -> str | None:
    """Return the first name among targets without its port; None: there is no name.

    Certificates have names, and peers are dialled by address.
    """
    names = (target.removeprefix(DNS_SCHEME) for target in targets if target.startswith(DNS_SCHEME))
    return next((name.rpartition(":")[0] for name in names), None)


class Membership:
    """The addresses of the peers.

    Args:
        targets: `host:port` or `dns:///name:port`.
        interval_s: How often names are looked up.
        forget_after_s: See FORGET_AFTER_S.

    Attributes:
        troubles: A sentence for each name that cannot be looked up, by name.
    """

    def __init__(
        self,
        targets: Sequence[str],
        interval_s: float,
        resolve: Resolve = resolve,
        forget_after_s: float = FORGET_AFTER_S,
    ) -> None:
        self._static = tuple(target for target in targets if not target.startswith(DNS_SCHEME))
        self._names = tuple(target.removeprefix(DNS_SCHEME) for target in targets if target.startswith(DNS_SCHEME))
        self._interval_s = interval_s
        self._resolve = resolve
        self._forget_after_s = forget_after_s
        self._changed = asyncio.Event()  # by an announcement
        self._announced_at_s: dict[str, float] = {}  # by address: an announced peer has a moment to answer
        self._answers: Callable[[str], bool] = lambda _: False
        # By name and address: since when look-ups miss it; None: the last one named it.
        self._missed_since_s: dict[str, dict[str, float | None]] = {name: {} for name in self._names}
        self.troubles: dict[str, str] = {}

    @property
    def addresses(self) -> list[str]:
        """The addresses as last seen, without repetition: the list first, in its order, then those of the names."""
        named = sorted(set().union(*self._missed_since_s.values()) - set(self._static))
        return [*dict.fromkeys(self._static), *named]

    async def watch(
        self, on_change: Callable[[list[str]], Awaitable[None]], answers: Callable[[str], bool] = lambda _: False
    ) -> None:
        """Await `on_change` with the addresses now and whenever they change.

        `answers` says whether the peer at an address answers: then it is kept for `forget_after_s`.
        Returns at once if there is no name to look up, since nothing can change; else until cancelled.
        """
        self._answers = answers
        last: list[str] | None = None
        under_way: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                for name in self._names:
                    if name not in under_way:
                        under_way[name] = asyncio.create_task(self._look_up(name), name="look-up")
                if under_way:
                    done, _ = await asyncio.wait(under_way.values(), timeout=LOOK_UP_S)
                    for task in done:
                        task.result()
                    under_way = {name: task for name, task in under_way.items() if task not in done}
                looks_again_at_s = asyncio.get_running_loop().time() + self._interval_s
                is_due = False
                while not is_due:
                    self._changed.clear()
                    if self.addresses != last:
                        last = self.addresses
                        await on_change(last)
                    if not self._names:
                        return
                    try:
                        async with asyncio.timeout_at(looks_again_at_s):
                            await self._changed.wait()
                    except TimeoutError:
                        is_due = True
        finally:
            for task in under_way.values():
                task.cancel()

    async def look_for(self, host: str) -> None:
        """Add the peer that announced itself from this IP address, if DNS has it under a name; else look the names up.

        `10-0-0-5.NAME` is looked up: the DNS of Kubernetes answers it for each endpoint of a headless Service, and no
        cache has it yet.
        """
        if any(address.rpartition(":")[0].strip("[]") == host for address in self.addresses):
            return  # it is dialled again soon anyway
        for name in self._names:
            service, _, port = name.rpartition(":")
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            try:
                found = await self._resolve(f"{host.replace('.', '-').replace(':', '-')}.{service}", int(port))
            except OSError:
                found = set()
            if found == {address}:
                self._missed_since_s[name][address] = None
                self._announced_at_s[address] = monotonic_s()
            else:
                await self._look_up(name)
        self._changed.set()

    async def _look_up(self, name: str) -> None:
        host, _, port = name.rpartition(":")
        try:
            self._take(name, await self._resolve(host, int(port)))
            self.troubles.pop(name, None)
        except OSError as error:
            if name not in self.troubles:
                log.warning(Event("name_not_resolved", name=name, cause=str(error)))
            self.troubles[name] = f"{name} cannot be looked up: {error}"

    def _take(self, name: str, found: set[str]) -> None:
        """Take the addresses that a look-up of a name has found."""
        now_s, known = monotonic_s(), self._missed_since_s[name]
        for address in known.keys() - found:
            since_s = known[address]
            since_s = known[address] = now_s if since_s is None else since_s
            is_new = now_s - self._announced_at_s.get(address, -math.inf) < ANNOUNCED_S
            if now_s - since_s >= self._forget_after_s or not (is_new or self._answers(address)):
                del known[address]
                self._announced_at_s.pop(address, None)
        known.update(dict.fromkeys(found))
