"""Rank 0 to all other ranks, over sockets: one channel for steps, each once and in order, and one for blocks.

Never a collective: it must not wait for longer than a forward pass takes, and an idle group waits for ever. A rank that
connects must know the secret that rank 0 made; it reaches the other ranks with the address, through the rendezvous of
the group.
"""

import hmac
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from executor_svc.parallel.connection import Connection, ConnectionLostError, FrameKind, receive_frame, send_frame
from octavo_shared.errors import ModelLoadError

SECRET_BYTES = 32
HELLO_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.2
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Where rank 0 waits for the other ranks, and what they must say."""

    host: str
    port: int
    secret: str  # hexadecimal

    def to_text(self) -> str:
        """Return it as one line."""
        return f"{self.secret} {self.port} {self.host}"

    @classmethod
    def from_text(cls, text: str) -> "ChannelAddress":
        """Return what `to_text` wrote."""
        secret, port, host = text.split(" ", 2)
        return cls(host, int(port), secret)


class RankChannel:
    """Rank 0's end.

    Args:
        host: The address of this machine that the other ranks know; loopback is not opened to others.
        silence_limit_s, on_loss: See `Connection`.
    """

    def __init__(self, host: str, silence_limit_s: float, on_loss: Callable[[str], None]) -> None:
        self._silence_limit_s = silence_limit_s
        self._on_loss = on_loss
        self._connections: dict[int, Connection] = {}
        self._listener = socket.create_server(("127.0.0.1" if host in _LOOPBACK else "", 0))
        self._listener.settimeout(POLL_INTERVAL_S)
        self.address = ChannelAddress(host, self._listener.getsockname()[1], secrets.token_hex(SECRET_BYTES))

    def accept(self, num_ranks: int) -> None:
        """Take another rank of `num_ranks` if one connects within POLL_INTERVAL_S; after the last one nobody can."""
        try:
            sock, _ = self._listener.accept()
        except TimeoutError:
            return
        self._greet(sock, num_ranks)
        if not self.missing(num_ranks):
            self._listener.close()

    def missing(self, num_ranks: int) -> list[int]:
        """Return the ranks of `num_ranks` that are not connected."""
        return [rank for rank in range(1, num_ranks) if rank not in self._connections]

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Send a frame to all."""
        for connection in self._connections.values():
            connection.send(kind, payload)

    @property
    def connections(self) -> list[Connection]:
        """Those to ranks 1, 2 and so on, once they are accepted."""
        return [connection for _, connection in sorted(self._connections.items())]

    def close(self) -> None:
        """Let all others end in order."""
        self._listener.close()
        for connection in self._connections.values():
            connection.stop()

    def _greet(self, sock: socket.socket, num_ranks: int) -> None:
        """Take a connection of another rank; any other connection is closed."""
        sock.settimeout(HELLO_TIMEOUT_S)
        try:
            kind, payload = receive_frame(sock, "a new connection")
        except (OSError, ValueError, ConnectionLostError):
            sock.close()
            return
        secret, _, rank_text = payload.decode(errors="replace").partition(" ")
        rank = int(rank_text) if rank_text.isdecimal() else 0
        is_ours = kind is FrameKind.HELLO and hmac.compare_digest(secret.encode(), self.address.secret.encode())
        if not is_ours or not 1 <= rank < num_ranks or rank in self._connections:
            sock.close()
            return
        self._connections[rank] = Connection(sock, f"rank {rank}", self._silence_limit_s, self._on_loss)


def accept_ranks(
    channels: Sequence[RankChannel], num_ranks: int, timeout_s: float, check: Callable[[], None] = lambda: None
) -> None:
    """Wait until ranks 1 to `num_ranks` - 1 are connected to all channels.

    Each is taken as it comes, on any channel: a rank that has connected is lost if it hears nothing.

    Args:
        channels: Whose addresses the other ranks have.
        num_ranks: Size of the group.
        timeout_s: How long they may take.
        check: Called while waiting; raises if they cannot come any more.

    Raises: ModelLoadError: they do not come.
    """
    deadline_s = time.monotonic() + timeout_s
    while missing := [(channel, ranks) for channel in channels if (ranks := channel.missing(num_ranks))]:
        check()
        if time.monotonic() > deadline_s:
            raise ModelLoadError(f"rank {missing[0][1][0]} of {num_ranks} did not connect within {timeout_s:g} s")
        for channel, _ in missing:
            channel.accept(num_ranks)


def connect(address: ChannelAddress, rank: int, silence_limit_s: float, on_loss: Callable[[str], None]) -> Connection:
    """Connect a rank to rank 0. Raises: OSError: it does not answer."""
    sock = socket.create_connection((address.host, address.port), timeout=HELLO_TIMEOUT_S)
    send_frame(sock, FrameKind.HELLO, f"{address.secret} {rank}".encode())
    return Connection(sock, "rank 0", silence_limit_s, on_loss)
