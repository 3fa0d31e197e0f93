"""Reads which protocols a TLS client offers, from the first message that it sends (RFC 8446, section 4.1.2).

Pure: bytes in, a value out. Nothing is checked that the question does not need; TLS itself follows later.
"""

from dataclasses import dataclass

HANDSHAKE_RECORD = 0x16
_CLIENT_HELLO = 1
_ALPN_EXTENSION = 16  # RFC 7301

_RECORD_HEADER_BYTES = 5
_MESSAGE_HEADER_BYTES = 4
_MAX_FRAGMENT_BYTES = 2**14
_RANDOM_BYTES = 32

# Clients send one or two. Whoever sends a byte in each would have us begin anew a thousand times.
MAX_RECORDS = 32


class NotAClientHelloError(ValueError):
    """The bytes do not begin a TLS connection."""


@dataclass(frozen=True, slots=True)
class ClientHello:
    """What a client begins a TLS connection with.

    Attributes:
        protocols: What it offers by ALPN, in its order of preference; None: it offers nothing by ALPN.
    """

    protocols: tuple[bytes, ...] | None


def read_client_hello(data: bytes) -> ClientHello | int:
    """Return the ClientHello at the beginning of a connection, or how many bytes it takes to know more.

    The number is above len(data). A ClientHello may come in several records.

    Raises: NotAClientHelloError: no TLS client sends this.
    """
    message = bytearray()
    at = 0
    for _ in range(MAX_RECORDS):
        if len(data) < at + _RECORD_HEADER_BYTES:
            _check_record_header(data[at:])
            return at + _RECORD_HEADER_BYTES
        header = data[at : at + _RECORD_HEADER_BYTES]
        _check_record_header(header)
        fragment_bytes = int.from_bytes(header[3:])
        if not 0 < fragment_bytes <= _MAX_FRAGMENT_BYTES:
            raise NotAClientHelloError(f"a record of {fragment_bytes} bytes")
        at += _RECORD_HEADER_BYTES + fragment_bytes
        message += data[at - fragment_bytes : at]
        if message and message[0] != _CLIENT_HELLO:
            raise NotAClientHelloError(f"a handshake that begins with message {message[0]}")
        if len(data) < at:
            return at
        if len(message) >= _MESSAGE_HEADER_BYTES:
            end = _MESSAGE_HEADER_BYTES + int.from_bytes(message[1:_MESSAGE_HEADER_BYTES])
            if len(message) >= end:
                return ClientHello(_offered_protocols(bytes(message[_MESSAGE_HEADER_BYTES:end])))
    raise NotAClientHelloError(f"more than {MAX_RECORDS} records")


def _check_record_header(header: bytes) -> None:
    if header[:1] not in (b"", bytes([HANDSHAKE_RECORD])):
        raise NotAClientHelloError(f"a record of type {header[0]}")
    if header[1:2] not in (b"", b"\x03"):
        raise NotAClientHelloError(f"a record of version {header[1]}")


def _offered_protocols(body: bytes) -> tuple[bytes, ...] | None:
    fields = _Fields(body)
    fields.take(2)  # version
    fields.take(_RANDOM_BYTES)
    fields.vector(1)  # session id
    fields.vector(2)  # cipher suites
    fields.vector(1)  # compression methods
    if fields.is_empty:
        return None
    extensions = _Fields(fields.vector(2))
    while not extensions.is_empty:
        kind, content = int.from_bytes(extensions.take(2)), extensions.vector(2)
        if kind == _ALPN_EXTENSION:
            names = _Fields(_Fields(content).vector(2))
            offered = []
            while not names.is_empty:
                offered.append(names.vector(1))
            return tuple(offered)
    return None


class _Fields:
    """Takes one field after the other from the front of some bytes.

    Raises: NotAClientHelloError: there are not as many bytes as a field has.
    """

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    @property
    def is_empty(self) -> bool:
        return self._at == len(self._content)

    def take(self, num_bytes: int) -> bytes:
        """Return the next bytes."""
        taken = self._content[self._at : self._at + num_bytes]
        if len(taken) < num_bytes:
            raise NotAClientHelloError(f"a field of {num_bytes} bytes of which {len(taken)} are there")
        self._at += num_bytes
        return taken

    def vector(self, num_length_bytes: int) -> bytes:
        """Return the next bytes, whose number is in front of them."""
        return self.take(int.from_bytes(self.take(num_length_bytes)))
