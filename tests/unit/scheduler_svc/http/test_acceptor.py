"""Who is let in, who is put out, and that no connection is left behind."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from scheduler_svc.http.acceptor import Acceptor, peer_name
from scheduler_svc.http.listeners import open_listeners
from scheduler_svc.http.protocol_detection import Protocol
from tests.support.each_row import each_row
from tests.support.patience import PATIENCE_S


@dataclass(slots=True)
class Passed:
    """What a acceptor has passed on."""

    address: tuple[str, int]
    acceptor: Acceptor
    connections: list[tuple[socket.socket, Protocol, str]] = field(default_factory=list)

    async def connect(self, words: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        writer.write(words)
        return reader, writer

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0)


@asynccontextmanager
async def running(error: Exception | None = None, **settings: float) -> AsyncIterator[Passed]:
    listeners = open_listeners("127.0.0.1:0", "--admin-listen")

    async def dispatch(connection: socket.socket, protocol: Protocol, peer: str) -> None:
        passed.connections.append((connection, protocol, peer))
        if error is not None:
            raise error

    acceptor = Acceptor(listeners, dispatch, speaks_tls=False, **settings)  # type: ignore[arg-type]
    passed = Passed(listeners[0].getsockname(), acceptor)
    acceptor.start()
    try:
        yield passed
    finally:
        await acceptor.stop()
        assert all(listener.fileno() == -1 for listener in listeners)
        for connection, _, _ in passed.connections:
            connection.close()


async def test_a_connection_is_passed_on_with_its_protocol_and_its_peer() -> None:
    async with running() as passed:
        for words, protocol in ((b"GET / HTTP/1.1\r\n", Protocol.HTTP), (b"PRI * HTTP/2.0", Protocol.GRPC)):
            _, writer = await passed.connect(words)
            await passed.until(lambda: bool(passed.connections))
            connection, found, peer = passed.connections.pop()
            assert found is protocol
            assert peer == "ipv4:{}:{}".format(*writer.get_extra_info("sockname"))
            assert connection.recv(100) == words
            connection.close()
            writer.close()


async def test_who_says_nothing_is_closed_after_a_while() -> None:
    async with running(timeout_s=0.05) as passed:
        for words in (b"", b"GE"):
            reader, writer = await passed.connect(words)
            async with asyncio.timeout(PATIENCE_S):
                with suppress(ConnectionResetError):
                    assert await reader.read() == b""
            writer.close()
        assert passed.connections == []


async def test_the_longest_silent_makes_room_for_the_next() -> None:
    async with running(max_pending=3) as passed:
        silent = [await passed.connect() for _ in range(4)]
        async with asyncio.timeout(PATIENCE_S):
            assert await silent[0][0].read() == b""
        silent[1][1].write(b"GET / HTTP/1.1\r\n")
        await passed.until(lambda: len(passed.connections) == 1)
        assert passed.connections[0][2].endswith(str(silent[1][1].get_extra_info("sockname")[1]))
        for _, writer in silent:
            writer.close()


async def test_the_end_closes_who_has_said_nothing() -> None:
    async with running() as passed:
        reader, writer = await passed.connect()
        await passed.until(lambda: bool(passed.acceptor._pending))
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""
    writer.close()


async def test_the_end_closes_who_has_just_come() -> None:
    listeners = open_listeners("127.0.0.1:0", "--admin-listen")

    async def dispatch(*_: object) -> None:
        raise AssertionError("nobody said anything")

    acceptor = Acceptor(listeners, dispatch, speaks_tls=False)
    with socket.create_connection(listeners[0].getsockname()) as client:
        acceptor.start()
        while not acceptor._pending:
            await asyncio.sleep(0)
        await acceptor.stop()
        assert not acceptor._pending
        client.settimeout(PATIENCE_S)
        assert client.recv(1) == b""


@pytest.mark.parametrize("error", [OSError("the handshake failed"), ConnectionResetError(), TimeoutError()])
async def test_a_connection_that_breaks_later_is_no_news(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async with running(error) as passed:
        _, writer = await passed.connect(b"GET / HTTP/1.1\r\n")
        await passed.until(lambda: bool(passed.connections))
        writer.close()
    assert caplog.messages == []


async def test_a_bug_is_logged_and_others_are_served(caplog: pytest.LogCaptureFixture) -> None:
    async with running(KeyError("a bug")) as passed:
        for number in (1, 2):
            _, writer = await passed.connect(b"GET / HTTP/1.1\r\n")
            await passed.until(lambda number=number: len(passed.connections) == number)  # type: ignore[misc]
            writer.close()
    assert caplog.messages == ["event=connection_failed cause=\"KeyError('a bug')\""] * 2


async def test_a_process_without_files_waits_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("scheduler_svc.http.acceptor._PAUSE_S", 0.0)
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, [errno.EMFILE, errno.ECONNABORTED]

    async def failing(listener: socket.socket) -> object:
        if failures:
            code = failures.pop()
            raise OSError(code, "planted")
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", failing)
    async with running() as passed:
        _, writer = await passed.connect(b"GET / HTTP/1.1\r\n")
        await passed.until(lambda: bool(passed.connections))
        writer.close()
    assert caplog.messages == ["event=cannot_accept cause='[Errno 24] planted'"]


@each_row(
    (("192.0.2.7", 80), "ipv4:192.0.2.7:80"),
    (("2001:db8::7", 80, 0, 0), "ipv6:[2001:db8::7]:80"),
    (("::ffff:192.0.2.7", 80, 0, 0), "ipv4:192.0.2.7:80"),
    (("::ffff:1", 80, 0, 0), "ipv6:[::ffff:1]:80"),
)
def test_a_peer_is_named_as_grpc_names_it(address: tuple[str, int], expected: str) -> None:
    assert peer_name(address) == expected
