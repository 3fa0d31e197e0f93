"""A socket between rank 0 and another rank: frames in order, both ways; silence means death.

A frame is its length and kind, 5 bytes, then the payload. Each end says that it is alive several times
within the time after which the other gives it up, from a thread of its own, so that a long step is no
silence, and a frozen process is.
"""

import contextlib
import enum
import math
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable

_HEADER = struct.Struct("<IB")
SIGNS_OF_LIFE = 5  # within the time that counts as silence


class FrameKind(enum.IntEnum):
    """What a frame is."""

    HELLO = 1
    """The first of a connection: the secret of the group, and the rank that connects."""
    STEP = 2
    """An encoded `Step`."""
    RESET = 3
    """A scheduler has attached: empty the batch table."""
    STOP = 4
    """The group ends in order."""
    ALIVE = 5
    FAILED = 6
    """The sender cannot go on; the payload says why."""
    BEGIN_TRANSFERS = 7
    """Among steps: transfers begin here; see `Worker.begin_transfers`."""
    READ_BLOCKS = 8
    WRITE_BLOCKS = 9
    BLOCKS = 10
    """The answer: what was read, or nothing."""
    UNDONE = 11
    """The answer if that failed; the payload says why."""
    UPDATE_WEIGHTS = 12
    """Among steps: check the weights of the folder in the payload."""
    WEIGHTS_CHECKED = 13
    """The answer: nothing is wrong with them; the payload is their model_hash."""
    WEIGHTS_REFUSED = 14
    """The answer if they are refused; the payload says why."""
    LOAD_WEIGHTS = 15
    """All ranks have checked them: load them."""
    KEEP_WEIGHTS = 16
    """A rank refuses them: keep the old ones."""
    WEIGHTS_LOADED = 17
    """The answer to LOAD_WEIGHTS."""
    SLEEP = 18
    """Among steps, with the level; see `Worker.sleep`."""
    WAKE = 19


Frame = tuple[FrameKind, bytes]


class ConnectionLostError(Exception):
    """The connection to the other end is lost; the message says how."""


class Connection:
    """One end, in use by one process until it is closed or lost.

    Args:
        sock: Connected.
        peer: What the other end is called in messages.
        silence_limit_s: A peer that says nothing for so long is lost.
        on_loss: Called once, on any thread, with a sentence; not after `close`.
    """

    def __init__(self, sock: socket.socket, peer: str, silence_limit_s: float, on_loss: Callable[[str], None]) -> None:
        self.peer = peer
        self.frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()  # None: see `nudge`
        self._socket = sock
        self._silence_limit_s = silence_limit_s
        self._on_loss = on_loss
        self._sign_interval_s = silence_limit_s / SIGNS_OF_LIFE
        self._last_sign_s = time.monotonic()
        self._thawed_s = -math.inf
        self._ended = threading.Event()
        self._ending = threading.Lock()
        self._sending = threading.Lock()
        sock.settimeout(silence_limit_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, run in (("receive", self._receive), ("alive", self._say_alive)):
            threading.Thread(target=run, name=f"{name} {peer}", daemon=True).start()

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Send a frame; a lost connection takes it silently: `on_loss` tells of the loss."""
        try:
            with self._sending:
                send_frame(self._socket, kind, payload)
        except OSError as error:
            self._lose(f"the connection to {self.peer} broke: {error}")

    def nudge(self) -> None:
        """Wake the thread that waits for a frame: it gets None. Any thread may call this."""
        self.frames.put(None)

    def stop(self) -> None:
        """End the connection in order: the peer gets STOP, and no loss is told."""
        self._end()
        self.send(FrameKind.STOP)
        self._shut()

    def close(self) -> None:
        """End the connection; to the peer it is lost."""
        self._end()
        self._shut()

    def _receive(self) -> None:
        try:
            while True:
                self._wait_for_frame()
                kind, payload = receive_frame(self._socket, self.peer)
                if kind is FrameKind.FAILED:
                    raise ConnectionLostError(f"{self.peer} failed: {payload.decode(errors='replace')}")
                if kind is not FrameKind.ALIVE:
                    self.frames.put((kind, payload))
                if kind is FrameKind.STOP:
                    self.close()
                    return
        except TimeoutError:
            self._lose(f"{self.peer} has been silent for {self._silence_limit_s:g} s")
        except ConnectionLostError as error:
            self._lose(str(error))
        except (OSError, ValueError) as error:
            self._lose(f"the connection to {self.peer} broke: {error}")
        finally:
            self._socket.close()

    def _wait_for_frame(self) -> None:
        """Wait until a frame begins or the connection ends.

        Raises:
            TimeoutError: the peer has been silent for too long.
            OSError: the connection broke.
        """
        while True:
            try:
                self._socket.recv(1, socket.MSG_PEEK)
                return
            except TimeoutError:
                if not self._was_frozen():
                    raise

    def _was_frozen(self) -> bool:
        """Whether this process stood still in the last wait, as when a machine sleeps: the peers may have, too."""
        now_s = time.monotonic()
        is_late = now_s - self._last_sign_s > 2 * self._sign_interval_s
        return is_late or now_s - self._thawed_s < self._silence_limit_s

    def _say_alive(self) -> None:
        while not self._ended.wait(self._sign_interval_s):
            now_s = time.monotonic()
            if now_s - self._last_sign_s > 2 * self._sign_interval_s:
                self._thawed_s = now_s
            self._last_sign_s = now_s
            self.send(FrameKind.ALIVE)

    def _lose(self, reason: str) -> None:
        if self._end():
            self._on_loss(reason)

    def _end(self) -> bool:
        """Return whether it was in use until now; that is so only once."""
        with self._ending:
            was_in_use = not self._ended.is_set()
            self._ended.set()
        return was_in_use

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # the thread that receives wakes up and closes it


def send_frame(sock: socket.socket, kind: FrameKind, payload: bytes) -> None:
    """Send one frame. Raises: OSError."""
    sock.sendall(_HEADER.pack(len(payload), kind) + payload)


def receive_frame(sock: socket.socket, peer: str) -> Frame:
    """Wait for one frame.

    Raises:
        ConnectionLostError: the peer closed the connection.
        TimeoutError: nothing came within the socket's timeout.
        OSError: it broke.
        ValueError: what came is no frame.
    """
    length, kind = _HEADER.unpack(_receive_bytes(sock, _HEADER.size, peer))
    return FrameKind(kind), _receive_bytes(sock, length, peer)


def _receive_bytes(sock: socket.socket, num_bytes: int, peer: str) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        part = sock.recv(min(num_bytes - len(data), 2**20))
        if not part:
            raise ConnectionLostError(f"{peer} closed the connection")
        data += part
    return bytes(data)
