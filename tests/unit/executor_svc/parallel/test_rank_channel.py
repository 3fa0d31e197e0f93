"""Frames between ranks: in order, from nobody else, and a peer that is gone is noticed."""

import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from executor_svc.parallel.connection import Connection, FrameKind, send_frame
from executor_svc.parallel.rank_channel import ChannelAddress, RankChannel, accept_ranks, connect
from octavo_shared.errors import ModelLoadError
from tests.support.patience import PATIENCE_S


def never(reason: str) -> None:
    raise AssertionError(reason)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    with listener, ours, theirs:
        yield ours, theirs


class Losses(queue.SimpleQueue[str]):
    """Sentences of `on_loss`, to wait for."""

    def next(self) -> str:
        return self.get(timeout=PATIENCE_S)


def test_frames_come_in_order_and_whole(sockets: tuple[socket.socket, socket.socket]) -> None:
    here, there = (Connection(sock, "the other end", PATIENCE_S, never) for sock in sockets)
    payloads = [b"", b"x", bytes(5_000_000), b"end"]
    for payload in payloads:
        here.send(FrameKind.STEP, payload)
    assert [there.frames.get(timeout=PATIENCE_S) for _ in payloads] == [(FrameKind.STEP, p) for p in payloads]
    here.stop()
    assert there.frames.get(timeout=PATIENCE_S) == (FrameKind.STOP, b"")


def test_a_peer_that_closes_is_lost(sockets: tuple[socket.socket, socket.socket]) -> None:
    losses = Losses()
    here = Connection(sockets[0], "rank 1", PATIENCE_S, losses.put)
    sockets[1].close()
    assert losses.next() == "rank 1 closed the connection"
    here.send(FrameKind.STEP)
    assert losses.empty(), "a loss is told once"


def test_a_peer_that_says_nothing_is_lost_and_one_that_only_waits_is_not(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    losses = Losses()
    silence_limit_s = 1.0
    here = Connection(sockets[0], "rank 1", silence_limit_s, losses.put)
    there = Connection(sockets[1], "rank 0", silence_limit_s, losses.put)
    with pytest.raises(queue.Empty):
        losses.get(timeout=1.5 * silence_limit_s)
    there._ended.set()  # as a frozen process: it sends no sign of life, and its socket stays open
    assert losses.next() == "rank 1 has been silent for 1 s"
    here.close()


def test_a_peer_that_failed_says_why(sockets: tuple[socket.socket, socket.socket]) -> None:
    losses = Losses()
    Connection(sockets[0], "rank 1", PATIENCE_S, losses.put)
    send_frame(sockets[1], FrameKind.FAILED, b"no memory")
    assert losses.next() == "rank 1 failed: no memory"


def test_what_is_no_frame_ends_the_connection(sockets: tuple[socket.socket, socket.socket]) -> None:
    losses = Losses()
    Connection(sockets[0], "rank 1", PATIENCE_S, losses.put)
    sockets[1].sendall(b"\0\0\0\0\x63")
    assert "the connection to rank 1 broke: 99 is not a valid FrameKind" in losses.next()


def test_nothing_is_lost_by_closing(sockets: tuple[socket.socket, socket.socket]) -> None:
    losses = Losses()
    here = Connection(sockets[0], "rank 1", 0.2, losses.put)
    here.close()
    with pytest.raises(queue.Empty):
        losses.get(timeout=0.5)


def test_the_address_survives_the_rendezvous() -> None:
    address = ChannelAddress("fe80::1", 4000, "ab" * 32)
    assert ChannelAddress.from_text(address.to_text()) == address


def test_every_rank_gets_every_frame_and_strangers_none() -> None:
    channel = RankChannel("127.0.0.1", PATIENCE_S, never)
    connections: dict[int, Connection] = {}
    strangers = Losses()

    def join() -> None:
        connect(replace(channel.address, secret="00" * 32), 1, PATIENCE_S, strangers.put)
        connect(channel.address, 7, PATIENCE_S, strangers.put)  # no such rank
        connections[2] = connect(channel.address, 2, PATIENCE_S, never)
        connect(channel.address, 2, PATIENCE_S, strangers.put)  # a rank that is there
        connections[1] = connect(channel.address, 1, PATIENCE_S, never)

    joining = threading.Thread(target=join)
    joining.start()
    accept_ranks([channel], 3, PATIENCE_S)
    joining.join()
    channel.send(FrameKind.STEP, b"first")
    channel.send(FrameKind.RESET)
    for rank in (1, 2):
        frames = [connections[rank].frames.get(timeout=PATIENCE_S) for _ in range(2)]
        assert frames == [(FrameKind.STEP, b"first"), (FrameKind.RESET, b"")]
    for _ in range(3):
        assert "rank 0" in strangers.next()
    channel.close()
    for connection in connections.values():
        assert connection.frames.get(timeout=PATIENCE_S) == (FrameKind.STOP, b"")


def test_a_rank_that_does_not_come_is_named() -> None:
    channel = RankChannel("127.0.0.1", PATIENCE_S, never)
    with pytest.raises(ModelLoadError, match=r"rank 1 of 2 did not connect within 0\.1 s"):
        accept_ranks([channel], 2, 0.1)
    channel.close()


def test_waiting_ends_when_a_rank_cannot_come_any_more() -> None:
    def check() -> None:
        raise ModelLoadError("rank 1 of 2 was killed by SIGKILL")

    channel = RankChannel("127.0.0.1", PATIENCE_S, never)
    with pytest.raises(ModelLoadError, match="SIGKILL"):
        accept_ranks([channel], 2, PATIENCE_S, check)
    channel.close()


def test_a_rank_on_all_channels_waits_for_a_late_one_longer_than_silence_may_last() -> None:
    silence_limit_s = 0.5
    losses = Losses()
    channels = [RankChannel("127.0.0.1", silence_limit_s, losses.put) for _ in range(2)]

    def join(rank: int) -> list[Connection]:
        return [connect(channel.address, rank, silence_limit_s, losses.put) for channel in channels]

    accepting = threading.Thread(target=accept_ranks, args=(channels, 3, PATIENCE_S))
    accepting.start()
    connections = join(1)
    with pytest.raises(queue.Empty):
        losses.get(timeout=3 * silence_limit_s)
    connections += join(2)
    accepting.join(PATIENCE_S)
    assert losses.empty()
    for channel in channels:
        channel.close()
    assert all(connection.frames.get(timeout=PATIENCE_S) == (FrameKind.STOP, b"") for connection in connections)
