"""Two connections that are one: all bytes, in order, bounded on their way, and nothing left at the end."""

import asyncio
import os
import select
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from scheduler_svc.admin.listener import tcp_proxy
from scheduler_svc.admin.listener.tcp_proxy import MAX_UNSENT_BYTES, TcpProxy, connect_upstream
from tests.support.patience import PATIENCE_S

# What one read of asyncio brings at most, and what the two sockets of a pair hold in the kernel.
SLACK_BYTES = 2**20


@pytest.fixture
async def proxy() -> AsyncIterator[TcpProxy]:
    yield (proxy := TcpProxy())
    await proxy.stop(0)
    assert proxy.num_connections == 0


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket, socket.socket, socket.socket]]:
    """The client, what was accepted from it, what goes to the server, and the server."""
    with ExitStack() as stack:
        client, accepted = socket.socketpair()
        to_server, server = socket.socketpair()
        for each in (client, accepted, to_server, server):
            each.setblocking(False)
        stack.enter_context(closing(client))
        stack.enter_context(closing(server))
        yield client, accepted, to_server, server


Sockets = tuple[socket.socket, socket.socket, socket.socket, socket.socket]


async def received(connection: socket.socket, num_bytes: int) -> bytes:
    """Return so many bytes, or what came before the end."""
    loop, got = asyncio.get_running_loop(), bytearray()
    async with asyncio.timeout(PATIENCE_S):
        while len(got) < num_bytes and (chunk := await loop.sock_recv(connection, num_bytes - len(got))):
            got += chunk
    return bytes(got)


async def until_closed(proxy: TcpProxy) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while proxy.num_connections:
            await asyncio.sleep(0)


async def test_bytes_pass_both_ways_in_order(proxy: TcpProxy, sockets: Sockets) -> None:
    client, accepted, to_server, server = sockets
    await proxy.forward(accepted, to_server)
    loop = asyncio.get_running_loop()
    question, answer = bytes(range(256)) * 4000, bytes(range(255, -1, -1)) * 16_000
    sending = [
        asyncio.create_task(loop.sock_sendall(client, question)),
        asyncio.create_task(loop.sock_sendall(server, answer)),
    ]
    got = await asyncio.gather(received(server, len(question)), received(client, len(answer)))
    await asyncio.gather(*sending)
    assert list(got) == [question, answer]


async def test_bytes_sent_before_the_pair_is_made_are_not_lost(proxy: TcpProxy, sockets: Sockets) -> None:
    client, accepted, to_server, server = sockets
    client.send(b"early")
    server.send(b"earlier")
    await proxy.forward(accepted, to_server)
    assert await received(server, 5) == b"early"
    assert await received(client, 7) == b"earlier"


async def test_a_side_that_does_not_read_stops_the_other(proxy: TcpProxy, sockets: Sockets) -> None:
    client, accepted, to_server, server = sockets
    await proxy.forward(accepted, to_server)
    content = bytes(range(256)) * 64 * 1024  # 16 MiB
    loop = asyncio.get_running_loop()
    sending = asyncio.create_task(loop.sock_sendall(server, content))
    num_sent = -1
    while not sending.done() and num_sent != (num_sent := await kernel_takes_no_more(server)):
        pass
    assert not sending.done()
    [downstream] = [side for side in proxy._live if side.transport.get_write_buffer_size()]
    assert downstream.transport.get_write_buffer_size() < MAX_UNSENT_BYTES + SLACK_BYTES
    assert await received(client, len(content)) == content
    await sending


async def kernel_takes_no_more(connection: socket.socket) -> int:
    """Return once a socket has been unwritable for many turns of the event loop."""
    turns = 0
    while turns < 200:
        await asyncio.sleep(0)
        _, writable, _ = await asyncio.to_thread(select_now, connection)
        turns = 0 if writable else turns + 1
    return turns


def select_now(connection: socket.socket) -> tuple[list[socket.socket], list[socket.socket], list[socket.socket]]:
    return select.select([], [connection], [], 0)


async def test_a_client_that_sends_no_more_still_gets_its_answer(proxy: TcpProxy, sockets: Sockets) -> None:
    client, accepted, to_server, server = sockets
    await proxy.forward(accepted, to_server)
    client.send(b"question")
    client.shutdown(socket.SHUT_WR)
    assert await received(server, 100) == b"question"
    server.send(b"answer")
    server.close()
    assert await received(client, 100) == b"answer"
    await until_closed(proxy)


async def test_a_server_that_closes_closes_the_client_behind_its_last_word(proxy: TcpProxy, sockets: Sockets) -> None:
    client, accepted, to_server, server = sockets
    await proxy.forward(accepted, to_server)
    last_word = b"goodbye" * 30_000
    await asyncio.get_running_loop().sock_sendall(server, last_word)
    server.close()
    assert await received(client, 2 * len(last_word)) == last_word
    await until_closed(proxy)


async def test_a_client_that_is_gone_closes_the_server(proxy: TcpProxy, sockets: Sockets) -> None:
    client, accepted, to_server, server = sockets
    await proxy.forward(accepted, to_server)
    client.close()
    assert await received(server, 1) == b""
    server.close()
    await until_closed(proxy)


@pytest.mark.parametrize(("limit", "num_bytes"), [("_LINGER_S", 2**17), ("_STALL_S", 2**20)])
async def test_a_client_that_takes_nothing_is_cut_off(
    proxy: TcpProxy, sockets: Sockets, monkeypatch: pytest.MonkeyPatch, limit: str, num_bytes: int
) -> None:
    """Whether the server is seen to have closed, or cannot be seen since its bytes have no place."""
    monkeypatch.setattr(f"scheduler_svc.admin.listener.tcp_proxy.{limit}", 0.05)
    _, accepted, to_server, server = sockets
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    await proxy.forward(accepted, to_server)
    sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(server, bytes(num_bytes)))
    await asyncio.wait([sending], timeout=0.2)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    server.close()
    await until_closed(proxy)


async def test_the_end_waits_and_then_does_not(sockets: Sockets) -> None:
    client, accepted, to_server, server = sockets
    proxy = TcpProxy()
    await proxy.forward(accepted, to_server)
    stopping = asyncio.create_task(proxy.stop(PATIENCE_S))
    await asyncio.sleep(0)
    assert proxy.num_connections == 2
    server.close()
    await stopping
    assert await received(client, 1) == b""

    others = TcpProxy()
    client, accepted = socket.socketpair()
    to_server, server = socket.socketpair()
    for each in (client, accepted, to_server, server):
        each.setblocking(False)
    with client, server:
        await others.forward(accepted, to_server)
        await others.stop(0)
        assert others.num_connections == 0
        assert await received(client, 1) == b""
        assert await received(server, 1) == b""


async def test_a_cancelled_forward_closes_both(proxy: TcpProxy, sockets: Sockets) -> None:
    client, accepted, to_server, server = sockets
    forwarding = asyncio.create_task(proxy.forward(accepted, to_server))
    await asyncio.sleep(0)
    forwarding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forwarding
    assert await received(client, 1) == b""
    assert await received(server, 1) == b""
    await until_closed(proxy)


async def test_the_other_end_sees_the_name_and_no_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with await connect_upstream(path, "ipv4:192.0.2.7:1234"):
            connection, address = listener.accept()
            connection.close()
        assert address == str(tmp_path / "ipv4:192.0.2.7:1234")
        with await connect_upstream(path, "x" * 200):
            connection, address = listener.accept()
            connection.close()
        assert address == ""
    assert os.listdir(tmp_path) == ["socket"]


async def test_a_queue_that_is_full_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as stack:
        listener.bind(str(path))
        listener.listen(0)
        stack.enter_context(await connect_upstream(path, "first"))
        second = asyncio.create_task(connect_upstream(path, "second"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not second.done()
        listener.accept()[0].close()
        async with asyncio.timeout(PATIENCE_S):
            stack.enter_context(await second)


async def test_nobody_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await connect_upstream(tmp_path / "socket", "name")


async def test_beyond_so_many_clients_the_one_that_was_silent_longest_is_closed(
    proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_proxy, "MAX_CLIENTS", 2)
    with ExitStack() as stack:

        async def client() -> tuple[socket.socket, socket.socket]:
            (ours, accepted), (to_server, server) = socket.socketpair(), socket.socketpair()
            for each in (ours, accepted, to_server, server):
                each.setblocking(False)
            stack.enter_context(closing(ours))
            stack.enter_context(closing(server))
            await proxy.forward(accepted, to_server)
            return ours, server

        first, second = await client(), await client()
        await asyncio.get_running_loop().sock_sendall(first[0], b"hello")
        assert await received(first[1], 5) == b"hello"

        third = await client()

        assert await received(second[0], 1) == b""
        assert await received(second[1], 1) == b""
        for ours, server in (first, third):
            await asyncio.get_running_loop().sock_sendall(ours, b"hello")
            assert await received(server, 5) == b"hello"
