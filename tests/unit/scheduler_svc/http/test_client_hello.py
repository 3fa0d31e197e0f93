"""What a ClientHello offers: real ones of OpenSSL, in pieces and in records of any size, and bytes that are none."""

import ssl
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduler_svc.http.client_hello import MAX_RECORDS, ClientHello, NotAClientHelloError, read_client_hello
from tests.support.each_row import each_row

ALPN = [None, ["h2"], ["http/1.1"], ["h2", "http/1.1"], ["grpc-exp", "h2"], ["x" * 255, "y"]]


def client_hello(
    alpn: list[str] | None, name: str | None = None, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
) -> bytes:
    """Return the first bytes that OpenSSL sends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = version
    if alpn is not None:
        context.set_alpn_protocols(alpn)
    outgoing = ssl.MemoryBIO()
    connection = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


def in_records(hello: bytes, size: int) -> bytes:
    """Return the same message in records of `size` bytes each."""
    message = hello[5:]
    parts = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(hello[:3] + len(part).to_bytes(2) + part for part in parts)


def reading(data: bytes) -> ClientHello | int | None:
    """Return what is read; None: it is no ClientHello."""
    try:
        return read_client_hello(data)
    except NotAClientHelloError:
        return None


@each_row(*product([ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], [None, "scheduler.octavo.svc"], ALPN))
def test_a_real_hello_says_what_it_offers(version: ssl.TLSVersion, name: str | None, alpn: list[str] | None) -> None:
    expected = None if alpn is None else tuple(protocol.encode() for protocol in alpn)
    assert read_client_hello(client_hello(alpn, name, version)) == ClientHello(expected)


@each_row(1, 2, 3, 31, 32)
def test_a_hello_may_come_in_several_records(num_records: int) -> None:
    hello = client_hello(["h2", "http/1.1"])
    hello = in_records(hello, -(-(len(hello) - 5) // num_records))
    assert read_client_hello(hello) == ClientHello((b"h2", b"http/1.1"))
    assert read_client_hello(hello + b"what follows") == ClientHello((b"h2", b"http/1.1"))


def test_a_hello_in_tiny_records_is_refused_early() -> None:
    hello = in_records(client_hello(["http/1.1"]), 1)
    assert isinstance(read_client_hello(hello[: 6 * MAX_RECORDS - 1]), int)
    with pytest.raises(NotAClientHelloError):
        read_client_hello(hello[: 6 * MAX_RECORDS])


@each_row(60, 2**14)
def test_a_part_of_a_hello_asks_for_more_but_never_for_too_much(size: int) -> None:
    hello = in_records(client_hello(["h2"]), size)
    for length in range(len(hello)):
        wanted = read_client_hello(hello[:length])
        assert isinstance(wanted, int), length
        assert length < wanted <= len(hello)


@given(st.binary(max_size=600))
@example(b"")
@example(b"\x16\x03\x01\x00\x00")
@example(b"\x16\x03\x01\xff\xff")
@example(b"\x16\x03\x01\x00\x04\x01\x00\x00\x00")
@example(b"\x16\x02")
def test_any_bytes_are_a_hello_or_none_or_need_more(data: bytes) -> None:
    found = reading(data)
    assert found is None or isinstance(found, ClientHello) or found > len(data)


@given(st.data())
def test_a_damaged_hello_raises_nothing_but_the_declared_error(data: st.DataObject) -> None:
    hello = bytearray(client_hello(["h2", "http/1.1"], "localhost"))
    for _ in range(data.draw(st.integers(1, 4))):
        hello[data.draw(st.integers(0, len(hello) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(hello)))
    found = reading(bytes(hello[:cut]))
    assert found is None or isinstance(found, ClientHello) or found > cut


@each_row(
    b"\x17\x03\x03\x00\x01\x01",  # not a handshake
    b"\x16\x02\x00\x00\x01\x01",  # not TLS
    b"\x16\x03\x01\x00\x00\x01",  # an empty record
    b"\x16\x03\x01\x40\x01\x01",  # longer than a record may be
    b"\x16\x03\x01\x00\x01\x02",  # another message first
    b"\x16\x03\x01\x00\x06\x01\x00\x00\x02\x03\x03",  # a hello without its fields
)
def test_what_is_no_hello_is_refused(data: bytes) -> None:
    with pytest.raises(NotAClientHelloError):
        read_client_hello(data)
