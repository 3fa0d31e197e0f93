"""Which connections a port that speaks HTTP keeps, which it closes, and what it says.

All that the port needs of aiohttp: to allow another version, run this with it.
"""

import asyncio
import errno
import gc
import ssl
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import web

from scheduler_svc.http import connections
from scheduler_svc.http.connections import ConnectionTimes
from scheduler_svc.http.http_port import HttpPort
from scheduler_svc.http.http_tls import HttpTls
from tests.support.certificates import Authority
from tests.support.patience import PATIENCE_S
from tests.support.stack import until

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def answer(request: web.BaseRequest) -> web.StreamResponse:
    if request.path == "/bug":
        raise KeyError("a bug")
    if request.path == "/stream":
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write_eof(b"in pieces")
        return stream
    return web.Response(text="over TLS" if request.secure else "in plaintext")


def refuse(status: int, what: str) -> web.Response:
    return web.Response(status=status, text=f"refused: {what}")


@asynccontextmanager
async def running(first_request_s: float = PATIENCE_S, tls: HttpTls | None = None) -> AsyncIterator[HttpPort]:
    times = ConnectionTimes(first_request_s=first_request_s, idle_s=PATIENCE_S, linger_s=0.1, stall_s=PATIENCE_S)
    port = HttpPort("127.0.0.1:0", "--page-listen", answer, tls, times, refuse)
    port.address = await port.start()  # type: ignore[attr-defined]
    try:
        yield port
    finally:
        await port.stop(0)
        assert not port._connections._silent
        assert all(listener.fileno() == -1 for listener in port._listeners)


async def connect(
    port: HttpPort, words: bytes = b"", context: ssl.SSLContext | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, number = port.address.rpartition(":")  # type: ignore[attr-defined]
    name = None if context is None else "localhost"
    reader, writer = await asyncio.open_connection(host, int(number), ssl=context, server_hostname=name)
    writer.write(words)
    return reader, writer


async def end_of(reader: asyncio.StreamReader) -> bytes:
    """Return all that comes until the connection is closed."""
    async with asyncio.timeout(PATIENCE_S):
        with suppress(ConnectionResetError):
            return await reader.read()
    return b""


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def tls(authority: Authority, tmp_path: Path) -> HttpTls:
    files = authority.issue("localhost").write(tmp_path)
    return HttpTls(files.cert, files.key, None)


@pytest.mark.parametrize("words", [b"", b"GE", b"GET / HTTP/1.1\r\nHost:", b"\x16\x03\x01"])
@pytest.mark.parametrize("is_tls", [False, True])
async def test_who_never_asks_is_closed_after_a_while(words: bytes, is_tls: bool, tls: HttpTls) -> None:
    async with running(first_request_s=0.05, tls=tls if is_tls else None) as port:
        reader, writer = await connect(port, words)
        assert b"200 OK" not in await end_of(reader)
        writer.close()


@pytest.mark.parametrize("is_tls", [False, True])
async def test_beyond_so_many_silent_connections_the_oldest_one_is_closed(
    is_tls: bool, tls: HttpTls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_SILENT", 3)
    async with running(tls=tls if is_tls else None) as port:
        asks = await connect(port, REQUEST)
        assert await asks[0].readline() == b"HTTP/1.1 200 OK\r\n"
        silent = []
        for number in range(1, 4):
            silent.append(await connect(port))
            await until(lambda number=number: len(port._connections._silent) == number)  # type: ignore[misc]
        silent.append(await connect(port))
        assert await end_of(silent[0][0]) == b""
        for reader, writer in (silent[1], asks):  # who has asked does not count
            writer.write(REQUEST)
            async with asyncio.timeout(PATIENCE_S):
                await reader.readuntil(b"in plaintext")
        for _, writer in (*silent, asks):
            writer.close()


async def test_who_leaves_without_a_word_makes_room() -> None:
    async with running() as port:
        _, writer = await connect(port)
        await until(lambda: port._connections._silent)
        writer.close()
        await until(lambda: not port._connections._silent)


@pytest.mark.parametrize("is_tls", [False, True])
async def test_the_end_closes_who_has_said_nothing(is_tls: bool, tls: HttpTls) -> None:
    async with running(tls=tls if is_tls else None) as port:
        ends = [await connect(port) for _ in range(3)]
        await until(lambda: port._connections._silent)
    for reader, writer in ends:
        assert await end_of(reader) == b""
        writer.close()


async def test_a_port_that_speaks_tls_hears_plaintext_too(authority: Authority, tls: HttpTls) -> None:
    context = ssl.create_default_context(cadata=authority.pem.decode())
    async with running(tls=tls) as port:
        for answered, reader_writer in (
            (b"over TLS", await connect(port, REQUEST, context)),
            (b"in plaintext", await connect(port, REQUEST)),
        ):
            reader, writer = reader_writer
            async with asyncio.timeout(PATIENCE_S):
                await reader.readuntil(answered)
            writer.transport.abort()


@pytest.mark.parametrize("path", [b"/", b"/stream"])
async def test_who_leaves_says_so_in_the_next_answer(path: bytes) -> None:
    async with running() as port:
        reader, writer = await connect(port, REQUEST)
        assert b"Connection: close" not in await reader.readuntil(b"\r\n\r\n")
        port.leave()
        writer.write(REQUEST.replace(b"/", path, 1) + REQUEST)
        answered = await end_of(reader)
        writer.close()
    assert answered.count(b"HTTP/1.1 200 OK\r\n") == answered.count(b"\r\nConnection: close\r\n") == 1


@pytest.mark.parametrize(
    ("sent", "what"),
    [
        (b"\x00", b"Invalid method encountered"),
        (b"GET / HTTP/1.1\r\nX y: z\r\n\r\n", b"Invalid header token"),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 9000, b"Got more than 8190 bytes when reading"),
        (b"GET http://[::1/ HTTP/1.1\r\nHost: a\r\n\r\n", b"its path is no path of a URL"),
    ],
)
async def test_what_is_no_request_is_refused_in_the_words_of_the_port(
    sent: bytes, what: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as port:
        reader, writer = await connect(port, sent)
        head, _, said = (await end_of(reader)).partition(b"\r\n\r\n")
        writer.close()
    assert (head.splitlines()[0], said) == (b"HTTP/1.0 400 Bad Request", b"refused: " + what)
    assert caplog.messages == []


async def test_what_was_refused_is_freed_without_the_garbage_collector() -> None:
    async def send_too_much() -> None:
        reader, writer = await connect(port, b"GET / HTTP/1.1\r\nX: " + b"x" * 2**20)
        await end_of(reader)
        writer.close()

    async with running() as port:
        await send_too_much()
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(5):
                await send_too_much()
            await until(lambda: tracemalloc.get_traced_memory()[0] < 2**19)  # of 5 MB that were sent
        finally:
            tracemalloc.stop()
            gc.enable()


async def test_a_bug_in_an_answer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as port:
        reader, writer = await connect(port, REQUEST.replace(b"/", b"/bug", 1))
        assert (await end_of(reader)).startswith(b"HTTP/1.1 500 ")
        writer.close()
    [record] = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)


async def test_a_bug_is_logged_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit, failures = connections._limit_unsent, [KeyError("a bug"), OSError("broken")]

    def failing(*arguments: object) -> None:
        if failures:
            raise failures.pop()
        limit(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(connections, "_limit_unsent", failing)
    async with running() as port:
        for expected in (b"", b"", b"HTTP/1.1 200 OK\r\n"):
            reader, writer = await connect(port, REQUEST)
            async with asyncio.timeout(PATIENCE_S):
                with suppress(ConnectionResetError):
                    assert await reader.readline() == expected
            writer.close()
    assert caplog.messages == ["event=connection_failed cause=\"KeyError('a bug')\""]


async def test_a_process_without_files_waits_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("scheduler_svc.http.http_port._PAUSE_S", 0.0)
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, [errno.EMFILE, errno.ECONNABORTED]

    async def failing(listener: object) -> object:
        if failures:
            raise OSError(failures.pop(), "planted")
        return await accept(listener)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "sock_accept", failing)
    async with running() as port:
        reader, writer = await connect(port, REQUEST)
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.close()
    assert caplog.messages == ["event=cannot_accept cause='[Errno 24] planted'"]
