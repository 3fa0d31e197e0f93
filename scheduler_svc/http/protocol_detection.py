"""Detects the protocol of a new connection from its first bytes. It only peeks: whoever gets the connection reads them.

What is neither HTTP/1.1 nor a TLS client that wants it is left to gRPC, which refuses what it does not speak.
"""

import asyncio
import re
import socket
from enum import Enum, auto

from scheduler_svc.http.client_hello import HANDSHAKE_RECORD, NotAClientHelloError, read_client_hello

# More is not looked at: a ClientHello has a few hundred bytes, one with post-quantum keys about 2,000.
MAX_PEEKED_BYTES = 16 * 2**10

# How HTTP/2 begins (RFC 9113, section 3.4): a request line of HTTP/1 with a method that nobody else uses.
_HTTP2_PREFACE = b"PRI "

# Methods of HTTP/1.1 are capital letters, all that are registered; MKREDIRECTREF and VERSION-CONTROL are the longest.
_METHOD = re.compile(rb"[A-Z-]{1,16}")


class Protocol(Enum):
    """What becomes of a connection."""

    GRPC = auto()
    HTTP = auto()
    HTTPS = auto()


def protocol_of(head: bytes, *, speaks_tls: bool) -> Protocol | int:
    """Return what a connection speaks that begins with `head`, or how many bytes it takes to know more.

    Args:
        head: The first bytes of the connection, as far as they have come.
        speaks_tls: Whether the port wants TLS.
    """
    if not head:
        return 1
    if head[0] == HANDSHAKE_RECORD:
        return _protocol_over_tls(head) if speaks_tls else Protocol.GRPC
    if head.startswith(_HTTP2_PREFACE):
        return Protocol.GRPC
    method, space, _ = head.partition(b" ")
    if not _METHOD.fullmatch(method):
        return Protocol.GRPC
    if not space:
        return len(head) + 1
    return Protocol.HTTP


def _protocol_over_tls(head: bytes) -> Protocol | int:
    try:
        hello = read_client_hello(head)
    except NotAClientHelloError:
        return Protocol.GRPC
    if isinstance(hello, int):
        return hello
    # Clients of gRPC offer h2 alone. Who offers nothing cannot mean gRPC, whose servers insist on h2.
    is_http = hello.protocols is None or b"http/1.1" in hello.protocols
    return Protocol.HTTPS if is_http else Protocol.GRPC


async def detect_protocol(connection: socket.socket, *, speaks_tls: bool) -> Protocol | None:
    """Wait for the first bytes of a connection and return what it speaks; None: it was closed without any.

    Args:
        connection: Accepted, not blocking, read by nobody else.
        speaks_tls: Whether the port wants TLS.

    Raises: OSError: the connection is broken.
    """
    num_seen = 0
    while True:
        if num_seen:
            await _readable(connection)
        head = await _peek(connection)
        if not head:
            return None
        found = protocol_of(head, speaks_tls=speaks_tls)
        # Woken for nothing new: the client will send no more.
        if isinstance(found, int) and (found > MAX_PEEKED_BYTES or len(head) <= num_seen):
            found = Protocol.GRPC
        if isinstance(found, Protocol):
            _wake_at(connection, 1)
            return found
        num_seen = len(head)
        _wake_at(connection, found)


def _wake_at(connection: socket.socket, num_bytes: int) -> None:
    """Let the connection be readable when so many bytes have come: those that were looked at stay in it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)


async def _peek(connection: socket.socket) -> bytes:
    """Return what has come so far, at least a byte unless it was closed, and leave it there."""
    while True:
        try:
            return connection.recv(MAX_PEEKED_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            await _readable(connection)


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = loop.create_future()

    def wake() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(connection, wake)
    try:
        await readable
    finally:
        loop.remove_reader(connection)
