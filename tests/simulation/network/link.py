"""Connections between processes, and what becomes of them: delays, cuts, silence.

A `Link` is one connection of a client process to a server process. Each side learns by itself that it is broken: at
once when the other machine says so (the process was killed, and its kernel resets what it had open), and only by
keepalive when there is silence (a cut cable, a machine without power).
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.loop import SimulationLoop
from tests.simulation.processes import SimulatedProcess

if TYPE_CHECKING:
    from tests.simulation.network.client import ClientCall, SimulatedChannel
    from tests.simulation.network.server import ServerCall, SimulatedServer

# As the servers ask for it in shared/octavo_shared/grpc/grpc_server.py: keepalive_time and keepalive_timeout.
SERVER_KEEPALIVE_S = 30.0

# Of messages that one side of a call sends at the same time, such as a request and the end of the requests.
SHARE_OF_JOINED_PACKETS = 0.8

CONNECTION_RESET = "recvmsg:Connection reset by peer"


@dataclass(frozen=True, slots=True)
class Weather:
    """How good the network is on an ordinary day.

    Attributes:
        latency_s: One way, at least.
        jitter_s: What a message may take longer, at most.
        rare_delay_s: What one in `rare_one_in` takes longer, at most.
        rare_one_in: See above; 0: none.
        window_bytes: What one direction of a call may have under way and unread.
    """

    latency_s: float = 0.0005
    jitter_s: float = 0.0005
    rare_delay_s: float = 0.0
    rare_one_in: int = 0
    window_bytes: int = 65_536


class Network:
    """All connections, and the addresses where servers listen.

    Args:
        loop: Carries the messages.
        seed: Of the delays.
        weather: How long messages take.

    Attributes:
        counts: How often something rare happened, by name.
        chance: Draws from 0 to 1.
    """

    def __init__(self, loop: SimulationLoop, seed: str, weather: Weather) -> None:
        self.weather = weather
        self.loop = loop
        self._random = random.Random(f"network {seed}")
        self.chance = self._random.random
        self._carrier_context = SimulatedProcess("network", loop).context()
        self._servers: dict[str, list[SimulatedServer]] = {}
        self._links: dict[Link, None] = {}
        self.counts: Counter[str] = Counter()
        self._cuts: set[frozenset[str]] = set()
        self._dark: set[str] = set()  # names of processes whose machine lost its power

    def cuts_at(self, machine: str) -> list[frozenset[str]]:
        """Return the cuts that part a machine from others."""
        return [cut for cut in self._cuts if machine in cut]

    def listen(self, server: "SimulatedServer", *, is_shared: bool = False) -> None:
        """Let a server be found at its address; `is_shared`: others that run there are too (SO_REUSEPORT)."""
        others = self._servers.get(server.address, []) if is_shared else []
        self._servers[server.address] = [
            *(other for other in others if other.process.is_running or other.process.machine != server.process.machine),
            server,
        ]
        server.network = self

    def stop_listening(self, server: "SimulatedServer") -> list["Link"]:
        """Let a server be found no more; return the connections that it has."""
        if self.is_listening(server):
            self._servers[server.address].remove(server)
        return [link for link in self._links if link.server is server and link.is_open_at_server]

    def server_at(self, address: str) -> "SimulatedServer | None":
        """Return who listens at an address: also a stalled process, and one that is dead and whose kernel is not.

        Of several that share it, one is drawn for each connection.
        """
        servers = self._servers.get(address)
        if not servers:
            return None
        return servers[0] if len(servers) == 1 else servers[int(self._random.random() * len(servers))]

    def is_listening(self, server: "SimulatedServer") -> bool:
        """Return whether a server is found at its address."""
        return server in self._servers.get(server.address, ())

    def delay_s(self) -> float:
        """Draw how long a message takes."""
        weather = self.weather
        delay_s = weather.latency_s + self._random.random() * weather.jitter_s
        if weather.rare_one_in and self._random.random() * weather.rare_one_in < 1:
            delay_s += self._random.random() * weather.rare_delay_s
        return delay_s

    def at(self, when_s: float, callback: Callable[[], object]) -> None:
        """Call something later, whatever becomes of the processes meanwhile."""
        self.loop.call_at(when_s, callback, context=self._carrier_context)

    # Faults ------------------------------------------------------------------------------------------

    def connect(self, channel: "SimulatedChannel", server: "SimulatedServer") -> "Link":
        """Return a new connection."""
        link = Link(self, channel, server)
        self._links[link] = None
        return link

    def forget(self, link: "Link") -> None:
        """Both sides have given a connection up."""
        self._links.pop(link, None)

    def num_calls_at(self, process: SimulatedProcess) -> int:
        """Return how many calls a server process has that have not ended."""
        return sum(len(link.server_calls) for link in self._links if link.server.process is process)

    def links_of(self, process: SimulatedProcess) -> list["Link"]:
        """Return the connections of a process."""
        return [link for link in self._links if process in (link.client, link.server.process)]

    def reaches(self, one: SimulatedProcess, other: SimulatedProcess) -> bool:
        """Return whether a message between two processes would arrive."""
        if one.name in self._dark or other.name in self._dark:
            return False
        return not self._cuts or frozenset((one.machine, other.machine)) not in self._cuts

    def cut(self, one: str, other: str) -> None:
        """Let nothing pass between two machines: what is under way waits until `heal`."""
        self._cuts.add(frozenset((one, other)))
        self._await_keepalive(link for link in self._links if link.joins(one, other))

    def heal(self, one: str, other: str) -> None:
        """End a cut."""
        self._cuts.discard(frozenset((one, other)))
        for link in list(self._links):
            link.go_on()

    def heal_all(self) -> None:
        """End all cuts; whoever still believes in a connection with a process that is gone learns that it is."""
        self._cuts.clear()
        for link in list(self._links):
            if link.client.is_dead or link.server.process.is_dead:
                link.break_both()
            link.go_on()

    def reset(self, one: str, other: str) -> None:
        """Break all connections between two machines, as a middlebox does that forgets them."""
        for link in list(self._links):
            if link.joins(one, other):
                link.break_both()

    def close(self, process: SimulatedProcess) -> None:
        """A process was killed on a machine that lives: nobody listens any more, and its connections are reset."""
        for servers in self._servers.values():
            servers[:] = [server for server in servers if server.process is not process]
        for link in self.links_of(process):
            link.break_both()

    def darken(self, process: SimulatedProcess) -> None:
        """The machine of a process has lost its power: there is silence."""
        self._dark.add(process.name)
        self._await_keepalive(self.links_of(process))

    def _await_keepalive(self, links: Iterable["Link"]) -> None:
        for link in links:
            if (keepalive_s := link.channel.keepalive_s) is not None:
                self.at(self.loop.time() + keepalive_s, partial(link.time_out_client, link.num_silences))
            self.at(self.loop.time() + SERVER_KEEPALIVE_S, partial(link.time_out_server, link.num_silences))


class Link:
    """One connection; made by `Network.connect`.

    Attributes:
        loop: Carries the messages.
        channel: The client's end.
        server: The other end.
        is_going_away: Whether the client knows that the server takes no new calls.
        server_calls: The calls that have not ended there.
        num_silences: How often the way may have been closed, and was open again.
    """

    def __init__(self, network: Network, channel: "SimulatedChannel", server: "SimulatedServer") -> None:
        self.channel = channel
        self.server = server
        self.client = channel.process
        self.is_open_at_client = True
        self.is_open_at_server = True
        self.num_silences = 0
        self.is_going_away = False
        self.loop = network.loop
        self._network = network
        self._held: list[tuple[Callable[[], None], bool]] = []
        self._last_arrivals_s = {True: 0.0, False: 0.0}  # by `is_up`
        self._client_calls: dict[ClientCall, None] = {}
        self.server_calls: dict[ServerCall, None] = {}

    def joins(self, one: str, other: str) -> bool:
        """Return whether it is between two machines."""
        return {one, other} == {self.client.machine, self.server.process.machine}

    def add(self, client_call: "ClientCall") -> None:
        """A call begins."""
        self._client_calls[client_call] = None

    def remove(self, client_call: "ClientCall") -> None:
        """A call has ended, as the client sees it."""
        self._client_calls.pop(client_call, None)

    def add_server_call(self, call: "ServerCall") -> None:
        """A call has arrived."""
        self.server_calls[call] = None

    def remove_server_call(self, call: "ServerCall") -> None:
        """A call has ended, as the server sees it."""
        self.server_calls.pop(call, None)

    def arrival_s(self) -> float:
        """Draw when a message arrives that is sent now."""
        return self.loop.time() + self._network.delay_s()

    def joins_packets(self) -> bool:
        """Draw whether a message goes in one packet with the one that was sent at the same time."""
        return self._network.chance() < SHARE_OF_JOINED_PACKETS

    def at(self, when_s: float, callback: Callable[[], object], *, is_up: bool) -> None:
        """Call something, mostly `pass_on`; `is_up`: the client sends it. Whose own end is broken sends nothing."""
        if self.is_open_at_client if is_up else self.is_open_at_server:
            if when_s > self._last_arrivals_s[is_up]:
                self._last_arrivals_s[is_up] = when_s
            self._network.at(when_s, callback)

    def pass_on(self, callback: Callable[[], None], is_up: bool) -> None:
        """Let something arrive, if the way is open."""
        if self._held or not self._network.reaches(self.client, self.server.process):
            self._held.append((callback, is_up))
        elif self.is_open_at_server if is_up else self.is_open_at_client:
            callback()
        else:  # the receiver's kernel knows no such connection, and says so
            self._network.at(self.arrival_s(), self._break_client if is_up else self._break_server)

    def go_on(self) -> None:
        """The way may be open again: let pass what has waited, in its order."""
        if self._network.reaches(self.client, self.server.process):
            self.num_silences += 1
            held, self._held = self._held, []
            for callback, is_up in held:
                self.pass_on(callback, is_up)

    def time_out_client(self, num_silences: int) -> None:
        """The client's keepalive has had no answer, unless the way was open again since."""
        if self.num_silences == num_silences and not self._network.reaches(self.client, self.server.process):
            self._network.counts["keepalive failed"] += self.is_open_at_client
            self._break_client("ping timeout")

    def time_out_server(self, num_silences: int) -> None:
        """The server's keepalive has had no answer, unless the way was open again since."""
        if self.num_silences == num_silences and not self._network.reaches(self.client, self.server.process):
            self._break_server()

    def close_by_client(self) -> None:
        """The client closes it; the server learns it after all that was sent."""
        self._send_last(self._break_server, is_up=True)
        self.is_open_at_client = False

    def close_by_server(self) -> None:
        """The server ends what runs and closes it; the client learns it after all that was sent."""
        self._send_last(lambda: self._break_client("Cancelling all calls"), is_up=False)
        self._break_server()

    def go_away(self) -> None:
        """The server says that it takes no new calls."""

        def take_notice() -> None:
            self.is_going_away = True

        self.at(self.arrival_s(), partial(self.pass_on, take_notice, False), is_up=False)

    def _send_last(self, callback: Callable[[], None], *, is_up: bool) -> None:
        when_s = max(self._last_arrivals_s[is_up], self.arrival_s())
        self.at(when_s, partial(self.pass_on, callback, is_up), is_up=is_up)

    def note_full_window(self) -> None:
        """A writer has to wait until the other side reads."""
        self._network.counts["window full"] += 1

    def break_both(self) -> None:
        """Both kernels are told that it is broken."""
        for tell in (self._break_client, self._break_server):
            self._network.at(self.arrival_s(), tell)

    def _break_client(self, details: str = CONNECTION_RESET) -> None:
        if self.is_open_at_client:
            self.is_open_at_client = False
            calls, self._client_calls = self._client_calls, {}
            for call in calls:
                call.connection_lost(details)
        self._forget_if_over()

    def _break_server(self) -> None:
        if self.is_open_at_server:
            self.is_open_at_server = False
            calls, self.server_calls = self.server_calls, {}
            for call in calls:
                call.cancel()
        self._forget_if_over()

    def _forget_if_over(self) -> None:
        if not (self.is_open_at_client or self.is_open_at_server):
            self._network.forget(self)
