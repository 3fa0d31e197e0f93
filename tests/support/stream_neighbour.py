"""Somebody who streams one answer after the other: `python -m tests.support.stream_neighbour HOST PORT`.

It prints a line when tokens come. When stdin is closed it prints as JSON how long it waited for the next event of a
stream: the 99th percentile and the longest time, in seconds. The wait for the first event is in none.
"""

import http.client
import json
import statistics
import sys
import threading
import time

_BODY = {"model": "fake", "prompt": [120, 121], "max_tokens": 8000, "stream": True, "ignore_eos": True}
_NUM_FIRST = 100


def main(host: str, port: str) -> None:
    """Stream until stdin is closed."""
    gaps_s: list[float] = []
    has_begun = threading.Event()
    thread = threading.Thread(target=_stream, args=(host, int(port), gaps_s, has_begun), daemon=True)
    thread.start()
    has_begun.wait()
    print("begun", flush=True)
    sys.stdin.read()
    assert thread.is_alive(), "a stream has failed"
    print(json.dumps([statistics.quantiles(gaps_s, n=100)[-1], max(gaps_s)]), flush=True)


def _stream(host: str, port: int, gaps_s: list[float], has_begun: threading.Event) -> None:
    connection = http.client.HTTPConnection(host, port)
    while True:
        connection.request("POST", "/v1/completions", json.dumps(_BODY), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == http.HTTPStatus.OK, response.read()
        before_s: float | None = None
        while line := response.readline():
            now_s = time.monotonic()
            if before_s is not None:
                gaps_s.append(now_s - before_s)
            before_s = now_s
            if len(gaps_s) == _NUM_FIRST:
                has_begun.set()
        assert line == b""


if __name__ == "__main__":
    main(*sys.argv[1:])
