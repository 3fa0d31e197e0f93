"""Many clients that ask for streams and hardly read: `python -m tests.support.slow_readers HOST PORT NUMBER FIELDS`.

It prints a line when all have the status of their answer. From then on every second one reads a byte each second, and
the others nothing, until stdin is closed. Then all read what there is, and how many ended how is printed as JSON.
"""

import json
import selectors
import socket
import sys
import time
from collections import Counter
from contextlib import suppress

_STATUS_BYTES = len("HTTP/1.1 200")
_PATIENCE_S = 60


def main(host: str, port: str, number: str, fields: str) -> None:
    """Run them."""
    clients = [_ask((host, int(port)), place, json.loads(fields)) for place in range(int(number))]
    statuses = Counter(client.recv(_STATUS_BYTES, socket.MSG_WAITALL).decode() for client in clients)
    print(json.dumps(statuses), flush=True)
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    while not selector.select(timeout=1):
        for client in clients[::2]:
            with suppress(OSError):
                client.recv(1, socket.MSG_DONTWAIT)
    print(json.dumps(Counter(map(_end_of, clients))), flush=True)


def _ask(address: tuple[str, int], place: int, fields: dict[str, object]) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(_PATIENCE_S)
    client.connect(address)
    prompt = [33 + place % 90, 33 + place // 90 % 90]
    body = json.dumps({"model": "fake", "prompt": prompt, "stream": True, **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    client.sendall(head.encode() + b"%d\r\n\r\n" % len(body) + body)
    if place % 50 == 0:  # a few hundred a second, as many as one scheduler answers
        time.sleep(0.2)
    return client


def _end_of(client: socket.socket) -> str:
    last = b""
    try:
        while piece := client.recv(2**16):
            last = (last + piece)[-64:]
    except OSError as error:
        return type(error).__name__
    return "whole" if b"[DONE]" in last else "cut"


if __name__ == "__main__":
    main(*sys.argv[1:])
