"""A connection works however many files the process has open."""

import fcntl
import queue
import resource
import socket
from collections.abc import Iterator

import pytest

from executor_svc.parallel.connection import Connection, FrameKind
from tests.support.patience import PATIENCE_S

FIRST_DESCRIPTOR = 1024  # select(2) knows none from here on


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection whose descriptors are large numbers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FIRST_DESCRIPTOR + 64), hard))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pair = (socket.create_connection(listener.getsockname()), listener.accept()[0])
    moved = tuple(
        socket.socket(fileno=fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)) for sock in pair
    )
    for sock in pair:
        sock.close()
    with moved[0], moved[1]:
        yield moved[0], moved[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_frames_come_through_descriptors_that_select_does_not_know(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    losses: queue.SimpleQueue[str] = queue.SimpleQueue()
    here, there = (Connection(sock, "the other end", PATIENCE_S, losses.put) for sock in sockets)

    here.send(FrameKind.STEP, b"payload")

    assert there.frames.get(timeout=PATIENCE_S) == (FrameKind.STEP, b"payload")
    there.close()
    assert losses.get(timeout=PATIENCE_S) == "the other end closed the connection"
