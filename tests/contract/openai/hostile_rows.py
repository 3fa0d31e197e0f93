"""What strangers may send to the port, as bytes, and how it must end: a status, or a connection that is closed.

Each is one exchange: it ends with the connection. Those of `LARGE` take up to a second each.
"""

import gzip
import json
from collections.abc import Mapping

COMPLETIONS = "/v1/completions"
CLOSED = None

Row = tuple[bytes, int | None]


def post(path: str, body: bytes, *headers: str, length: object = None, kind: str = "application/json") -> bytes:
    """Return a request whose connection is closed after it; `length` "" leaves out Content-Length."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Type: {kind}", *headers]
    if length != "":
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def get(path: str, *headers: str, method: str = "GET", version: str = "HTTP/1.1") -> bytes:
    """Return a request without a body."""
    lines = [f"{method} {path} {version}", "Host: localhost", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def fields(**values: object) -> bytes:
    """Return a body for `COMPLETIONS`."""
    return json.dumps({"model": "fake", "prompt": "a", "max_tokens": 1, **values}).encode()


def with_field(name: str, value: bytes) -> Row:
    """Return a body with a field as it is written, which is wrong."""
    return post(COMPLETIONS, b'{"model":"fake","prompt":"a","%s":%s}' % (name.encode(), value)), 400


def chunked(body: bytes, *headers: str) -> bytes:
    """Return a request whose body is in chunks, given as they are written."""
    return post(COMPLETIONS, body, "Transfer-Encoding: chunked", *headers, length="")


def in_one_chunk(body: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    """Return a body as chunks."""
    return b"%x\r\n%s\r\n%s" % (len(body), body, end)


GOOD = fields()
# Behind a request that lies about its length; it must not be answered.
SMUGGLED = get("/v1/models")

BODIES: Mapping[str, Row] = {
    **{
        f"body {body[:12]!r}": (post(COMPLETIONS, body), 400)
        for body in (b"", b"{", b"null", b"[]", b'"a"', b"{'model': 'fake'}", GOOD + b"x", b"\xef\xbb\xbf" + GOOD)
    },
    "UTF-16": (post(COMPLETIONS, GOOD.decode().encode("utf-16"), kind="application/json; charset=utf-16"), 400),
    "Latin-1": with_field("user", b'"\xe9"'),
    "NaN": with_field("temperature", b"NaN"),
    "Infinity": with_field("temperature", b"-Infinity"),
    "above floats": with_field("temperature", b"1e999"),
    "above ints": with_field("seed", b"9" * 5000),
    "surrogate": with_field("stop", b'"\\ud800"'),
    "control": with_field("user", b'"\x01"'),
    "deep": with_field("prompt", b"[" * 10_000),
    "deep, closed": with_field("prompt", b"[" * 10_000 + b"]" * 10_000),
    "deep objects": (post(COMPLETIONS, b'{"a":' * 10_000 + b"1" + b"}" * 10_000), 400),
    "long name": (post(COMPLETIONS, b'{"' + b"k" * 100_000 + b'":1}'), 400),
    "name twice, the last one wrong": with_field("model", b'"fake","max_tokens":1,"max_tokens":-1'),
    "name twice, the last one right": (post(COMPLETIONS, fields()[:-1] + b',"max_tokens":2}'), 200),
    **{
        f"type {kind}": (post(COMPLETIONS, GOOD, kind=kind), 415)
        for kind in ("", "text/plain", "application/json, text/plain", "application/x-www-form-urlencoded", "\xff")
    },
    "two types": (post(COMPLETIONS, GOOD, "Content-Type: text/plain"), 400),
    "gzip": (post(COMPLETIONS, gzip.compress(GOOD), "Content-Encoding: gzip"), 415),
    "gzip behind identity": (
        post(COMPLETIONS, gzip.compress(GOOD), "Content-Encoding: identity", "Content-Encoding: GZIP"),
        415,
    ),
    "gzip as a transfer": (post(COMPLETIONS, in_one_chunk(GOOD), "Transfer-Encoding: gzip, chunked", length=""), 415),
}

LENGTHS: Mapping[str, Row] = {
    "longer than the body": (post(COMPLETIONS, GOOD, length=len(GOOD) + 10), 408),
    "shorter than the body": (post(COMPLETIONS, GOOD, length=len(GOOD) - 5), 400),
    "one byte above the limit": (post(COMPLETIONS, b"", length=2**22 + 1), 413),
    "2^63": (post(COMPLETIONS, b"", length=2**63), 413),
    **{
        f"length {length}": (post(COMPLETIONS, GOOD, length=length), 400)
        for length in (-1, "+5", "0x5", "1_0", "5, 5", "many", 2**64)
    },
    "two lengths": (post(COMPLETIONS, GOOD, f"Content-Length: {len(GOOD)}"), 400),
    "two unequal lengths": (post(COMPLETIONS, GOOD, "Content-Length: 3"), 400),
    "length and chunks": (
        post(COMPLETIONS, b"0\r\n\r\n" + SMUGGLED, "Transfer-Encoding: chunked", length=5),
        400,
    ),
    **{
        f"coding {coding!r}": (post(COMPLETIONS, b"0\r\n\r\n" + SMUGGLED, coding, length=""), 400)
        for coding in (
            *("Transfer-Encoding : chunked", "Transfer-Encoding: xchunked", "Transfer-Encoding: identity"),
            *(
                "Transfer-Encoding: chunked, chunked",
                "Transfer-Encoding:\r\n chunked",
                "Transfer-Encoding: \x0bchunked",
            ),
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
        )
    },
    "chunks without an end": (chunked(b"5\r\n     \r\n" * 3), 408),
    "a chunk of 2^64 - 1": (chunked(b"f" * 16 + b"\r\nabc"), 408),
    **{
        f"chunk {chunk!r}": (chunked(chunk), 400)
        for chunk in (b"zz\r\nabc\r\n", b"-1\r\nabc\r\n", b"f" * 17 + b"\r\nabc", b"5\r\nabcdefgh\r\n0\r\n\r\n")
    },
    "a length in the trailer": (chunked(in_one_chunk(GOOD, b"0\r\nContent-Length: 5\r\n\r\n")), 400),
    "a long trailer": (chunked(in_one_chunk(GOOD, b"0\r\nX: " + b"y" * 20_000 + b"\r\n\r\n")), 400),
    "bytes behind the last request": (post(COMPLETIONS, GOOD) + b"\x00\xff\r\n\r\n" * 100, 400),
}

HEADS: Mapping[str, Row] = {
    "no Host": (b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", 400),
    "two Hosts": (get("/health", "Host: evil"), 400),
    "foreign Host": (get("/health").replace(b"localhost", b"evil.com"), 403),
    **{
        f"header {header!r}": (get("/health", header), 400)
        for header in ("X: a\0b", "X: a\rb", "X y: a", ": a", "X", "X: " + "x" * 9000, "x" * 9000 + ": y")
    },
    "many headers": (get("/health", *["X: y"] * 200), 400),
    "odd headers": (get("/health", "X-Request-Id: \xc3\xa9\xff", "Authorization: Bearer \xff"), 200),
    "long path": (get("/" + "x" * 9000), 400),
    **{
        f"path {path!r}": (get(path), 404)
        for path in ("/../health", "/v1/../health", "/v1/%2e%2e/health", "/%00", "/health%00", "//health", "/%zz", "//")
    },
    **{f"target {path!r}": (get(path), 400) for path in ("health", "\xff", "http://[::1/health", "http://a:999999/")},
    "model with a line end": (get("/v1/models/%00%0d%0aX:y"), 404),
    **{
        f"method {method}": (get(COMPLETIONS, method=method), 405)
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND")
    },
    "method HEAD": (get(COMPLETIONS, method="HEAD"), 405),
    **{f"method {method}": (get("/health", method=method), 400) for method in ("FOO", "EHLO")},
    "CONNECT": (get("localhost:80", method="CONNECT"), 404),
    "HTTP/0.9": (b"GET /health\r\n\r\n", 505),
    "HTTP/2.0": (get("/health", version="HTTP/2.0"), 505),
    **{f"{version}": (get("/health", version=version), 400) for version in ("HTTP/1.2", "HTTP/9.9", "HTCPCP/1.0", "x")},
    "HTTP/1.0": (get("/health", version="HTTP/1.0"), 200),
    "websocket": (get("/health", "Upgrade: websocket").replace(b"close", b"close, Upgrade") + b"\x82" * 100, 200),
    "h2c": (get("/health", "Upgrade: h2c", "HTTP2-Settings: AAA").replace(b"close", b"close, Upgrade"), 200),
    "another expectation": (post(COMPLETIONS, GOOD, "Expect: a miracle"), 417),
}

OTHER_PROTOCOLS: Mapping[str, Row] = {
    name: (sent, CLOSED if name == "line ends" else 400)
    for name, sent in {
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
        "TLS": bytes.fromhex("16030102000100") + b"a" * 600,
        "zeros": bytes(100),
        "all bytes": bytes(range(256)),
        "SSH": b"SSH-2.0-x\r\n",
        "an answer": b"HTTP/1.1 200 OK\r\n\r\n",
        "small letters": b"get /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "line ends": b"\r\n" * 1000,
        "a long method": b"G" * 2**16,
    }.items()
}

ROWS: Mapping[str, Row] = {**BODIES, **LENGTHS, **HEADS, **OTHER_PROTOCOLS}

LARGE: Mapping[str, Row] = {
    "4 MiB and a byte": (post(COMPLETIONS, b" " * (2**22 + 1)), 413),
    "40 MiB": (post(COMPLETIONS, b" " * (40 * 2**20)), 413),
    "40 MiB in chunks": (chunked(in_one_chunk(b" " * (40 * 2**20))), 413),
    "a bomb": (post(COMPLETIONS, gzip.compress(bytes(100 * 2**20)), "Content-Encoding: gzip"), 415),
    "100,000 chunks": (chunked(b"1\r\n \r\n" * 10**5 + b"0\r\n\r\n"), 400),
    "a chunk with a long name": (chunked(b"5;" + b"x" * 2**20 + b"\r\n     \r\n0\r\n\r\n"), 400),
    "many trailers": (chunked(in_one_chunk(GOOD, b"0\r\n" + b"X: y\r\n" * 100_000 + b"\r\n")), 400),
    "a header of 1 MiB": (get("/health", "X: " + "x" * 2**20), 400),
    "a name of 1 MiB": (get("/health", "x" * 2**20 + ": y"), 400),
    "10,000 headers": (get("/health", *["X: y"] * 10_000), 400),
    "a path of 1 MiB": (get("/" + "x" * 2**20), 400),
    "a head without an end": (b"GET /health HTTP/1.1\r\nX: " + b"x" * 2**20, 400),
    "1,000 requests at once": (get("/health").replace(b"Connection: close\r\n", b"") * 1000 + SMUGGLED, 200),
    "100 streams at once": (
        post(COMPLETIONS, fields(stream=True)).replace(b"Connection: close\r\n", b"") * 100 + SMUGGLED,
        200,
    ),
}
