"""What the first bytes of a connection say, and that looking at them takes none away."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from scheduler_svc.http.protocol_detection import MAX_PEEKED_BYTES, Protocol, detect_protocol, protocol_of
from tests.support.each_row import each_row
from tests.support.patience import PATIENCE_S
from tests.unit.scheduler_svc.http.test_client_hello import client_hello, in_records

GRPC, HTTP, HTTPS = Protocol.GRPC, Protocol.HTTP, Protocol.HTTPS
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection: what its client holds, and what was accepted."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted, _ = listener.accept()
    accepted.setblocking(False)
    with client, accepted:
        yield client, accepted


@each_row(
    *(
        (*row, speaks_tls)
        for row in [
            (b"", 1),
            (b"P", 2),
            (b"PRI", 4),
            (PREFACE, GRPC),
            (b"GET", 4),
            (b"GET ", HTTP),
            (b"POST / HTTP/1.1\r\n", HTTP),
            (b"OPTIONS * HTTP/1.1\r\n", HTTP),
            (b"VERSION-CONTROL", 16),
            (b"VERSION-CONTROL /", HTTP),
            (b"A" * 17, GRPC),
            (b"get / HTTP/1.1", GRPC),
            (b" ", GRPC),
            (b"\r\n", GRPC),
            (b"\x00\x01", GRPC),
            (b"SSH-2.0-OpenSSH_9\r\n", GRPC),
            (b"\xff" * 100, GRPC),
        ]
        for speaks_tls in [False, True]
    )
)
def test_the_first_bytes_say_the_protocol(head: bytes, expected: Protocol | int, speaks_tls: bool) -> None:
    assert protocol_of(head, speaks_tls=speaks_tls) == expected


@each_row(
    (["h2"], GRPC),
    (["grpc-exp", "h2"], GRPC),
    (["http/1.1"], HTTPS),
    (["h2", "http/1.1"], HTTPS),
    (["http/1.1", "h2"], HTTPS),
    (None, HTTPS),
    (["spdy/3"], GRPC),
)
def test_a_tls_client_is_http_if_it_offers_that_or_nothing(alpn: list[str] | None, expected: Protocol) -> None:
    hello = client_hello(alpn)
    assert protocol_of(hello, speaks_tls=True) is expected
    assert protocol_of(hello, speaks_tls=False) is GRPC


def test_what_only_looks_like_tls_is_left_to_grpc() -> None:
    assert protocol_of(b"\x16\x03\x01\x00\x00", speaks_tls=True) is GRPC
    assert protocol_of(b"\x16garbage", speaks_tls=True) is GRPC


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (PREFACE, GRPC),
        (b"GET / HTTP/1.1\r\n\r\n", HTTP),
        (client_hello(["h2"]), GRPC),
        (client_hello(["h2", "http/1.1"], "localhost"), HTTPS),
        (in_records(client_hello(["http/1.1"]), 50), HTTPS),
    ],
    ids=["preface", "request", "h2", "browser", "records"],
)
async def test_the_protocol_is_detected_byte_by_byte_and_nothing_is_taken(
    pair: tuple[socket.socket, socket.socket], sent: bytes, expected: Protocol
) -> None:
    client, accepted = pair
    detecting = asyncio.create_task(detect_protocol(accepted, speaks_tls=True))
    for byte in sent:
        client.send(bytes([byte]))
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        assert await detecting is expected
    assert accepted.recv(len(sent)) == sent
    client.send(b"!")
    async with asyncio.timeout(PATIENCE_S):  # one byte wakes its reader again
        assert await asyncio.get_running_loop().sock_recv(accepted, 10) == b"!"


async def test_who_waits_for_more_does_not_spin(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, accepted = pair
    looks = []
    monkeypatch.setattr(
        "scheduler_svc.http.protocol_detection.protocol_of",
        lambda head, **_: looks.append(len(head)) or protocol_of(head, speaks_tls=True),  # type: ignore[func-returns-value]
    )
    hello = client_hello(["h2"])
    detecting = asyncio.create_task(detect_protocol(accepted, speaks_tls=True))
    client.send(hello[:5])
    while not looks:
        await asyncio.sleep(0)
    for byte in hello[5:]:
        client.send(bytes([byte]))
        await asyncio.sleep(0)
    assert await detecting is GRPC
    assert looks == [5, len(hello)]


@pytest.mark.parametrize("sent", [b"PR", b"GE", client_hello(["http/1.1"])[:40]], ids=["preface", "method", "hello"])
async def test_who_stops_in_the_middle_is_left_to_grpc(pair: tuple[socket.socket, socket.socket], sent: bytes) -> None:
    client, accepted = pair
    client.send(sent)
    client.shutdown(socket.SHUT_WR)
    async with asyncio.timeout(PATIENCE_S):
        assert await detect_protocol(accepted, speaks_tls=True) is GRPC
    assert accepted.recv(100) == sent


async def test_who_leaves_without_a_word_speaks_nothing(pair: tuple[socket.socket, socket.socket]) -> None:
    client, accepted = pair
    client.close()
    async with asyncio.timeout(PATIENCE_S):
        assert await detect_protocol(accepted, speaks_tls=False) is None


async def test_a_hello_without_end_is_not_read_to_its_end(pair: tuple[socket.socket, socket.socket]) -> None:
    client, accepted = pair
    head = b"\x01\xff\xff\xff"
    client.send(b"\x16\x03\x01\x00\x04" + head + (b"\x16\x03\x01\x20\x00" + bytes(2**13)) * 3)
    async with asyncio.timeout(PATIENCE_S):
        assert await detect_protocol(accepted, speaks_tls=True) is GRPC
    assert len(accepted.recv(MAX_PEEKED_BYTES, socket.MSG_PEEK)) == MAX_PEEKED_BYTES


async def test_who_is_not_waited_for_any_more_leaves_no_reader_behind(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    _, accepted = pair
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await detect_protocol(accepted, speaks_tls=False)
    assert not asyncio.get_running_loop().remove_reader(accepted)
