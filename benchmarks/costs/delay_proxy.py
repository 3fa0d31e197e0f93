"""A TCP proxy that holds back what it forwards: each direction by half of a round trip.

    python -m benchmarks.costs.delay_proxy --target HOST:PORT --round-trip-ms 5

It adds latency and limits no rate: what was received while earlier bytes are held back is held back from its own
arrival on. Two threads for each direction: one receives, one sleeps until bytes are due. An event loop would round
its timers up to whole milliseconds.
"""

import argparse
import queue
import socket
import threading
import time

CHUNK_BYTES = 1 << 20


def serve(listener: socket.socket, target: tuple[str, int], delay_s: float) -> None:
    """Forward every connection, until the listener is closed."""
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        server = socket.create_connection(target)
        threading.Thread(target=_forward, args=(client, server, delay_s), daemon=True).start()


def _forward(client: socket.socket, server: socket.socket, delay_s: float) -> None:
    """Forward a connection both ways, until both have ended."""
    threads = []
    with client, server:
        for source, sink in ((client, server), (server, client)):
            sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            held: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            threads.append(threading.Thread(target=_receive, args=(source, held, delay_s), daemon=True))
            threads.append(threading.Thread(target=_send, args=(sink, held), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _receive(source: socket.socket, held: "queue.SimpleQueue[tuple[float, bytes]]", delay_s: float) -> None:
    while True:
        try:
            content = source.recv(CHUNK_BYTES)
        except OSError:
            content = b""
        held.put((time.perf_counter() + delay_s, content))
        if not content:
            return


def _send(sink: socket.socket, held: "queue.SimpleQueue[tuple[float, bytes]]") -> None:
    while True:
        due_s, content = held.get()
        time.sleep(max(0.0, due_s - time.perf_counter()))
        try:
            if not content:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(content)
        except OSError:
            return


def main() -> None:
    """Print the address, in the words of a service, and forward until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--round-trip-ms", type=float, required=True)
    parser.add_argument("--listen", required=True)
    arguments, _ = parser.parse_known_args()
    host, _, port = arguments.target.rpartition(":")
    listener = socket.create_server((arguments.listen.rpartition(":")[0], 0))
    print(f"octavo proxy serving on {arguments.listen.rpartition(':')[0]}:{listener.getsockname()[1]}", flush=True)
    serve(listener, (host, int(port)), arguments.round_trip_ms / 2000)


if __name__ == "__main__":
    main()
