"""The port of the live page: what it answers, as AdminService does over gRPC, and what it refuses."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import aiohttp
import grpc
import grpc.aio
import pytest

from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.admin.v1 import admin_service_pb2_grpc
from scheduler_svc.admin.http import page_server
from scheduler_svc.admin.servicer import AdminServicer
from tests.support.patience import PATIENCE_S
from tests.tls.services import Scheduler, running_pair, running_scheduler

SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"]
CHANGES = ("Drain", "LoadAdapter", "UnloadAdapter", "Pause", "Resume", "UpdateWeights", "Reset", "Sleep", "WakeUp")
PATH = f"/{SERVICE.full_name}"
JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def scheduler() -> AsyncIterator[Scheduler]:
    async with running_pair(max_message_bytes=2**24) as running:
        yield running


@pytest.fixture
async def http(scheduler: Scheduler) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        f"http://{scheduler.page_address}", timeout=timeout, connector=connector
    ) as session:
        yield session


async def exchange(address: str, *pieces: bytes) -> bytes:
    """Send bytes as they are, each piece by itself; return all that comes until the connection is closed."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(PATIENCE_S):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        answer = await reader.read()
    writer.close()
    return answer


async def state_over_grpc(address: str) -> pb.GetSchedulerStateResponse:
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        return await stub.GetSchedulerState(pb.GetSchedulerStateRequest(), timeout=PATIENCE_S)


async def test_json_and_grpc_tell_the_same(scheduler: Scheduler, http: aiohttp.ClientSession) -> None:
    state = await state_over_grpc(scheduler.admin_address)
    async with http.post(f"{PATH}/GetSchedulerState", data="{}", headers=JSON) as response:
        assert response.status == 200
        assert response.content_type == "application/json"
        told = await response.json()
    assert told["numBlocks"] == state.num_blocks > 0
    assert told["executors"][0]["address"] == state.executors[0].address


async def test_two_hundred_calls_at_once(http: aiohttp.ClientSession) -> None:
    async def call() -> int:
        async with http.post(f"{PATH}/GetSchedulerState", data="{}", headers=JSON) as response:
            return int((await response.json())["numBlocks"])

    answers = await asyncio.gather(*(call() for _ in range(200)))
    assert answers == [answers[0]] * 200


@pytest.mark.parametrize("method", [method.name for method in SERVICE.methods if not method.name.startswith(CHANGES)])
async def test_every_method_that_looks_is_reached_with_json(http: aiohttp.ClientSession, method: str) -> None:
    async with http.post(f"{PATH}/{method}", data="{}", headers=JSON) as response:
        answer = await response.json()
    assert response.status in (200, 400, 404), answer
    if response.status != 200:  # its own word about an empty request
        assert answer["code"] in ("invalid_argument", "not_found")
        assert answer["message"]


async def test_an_error_has_the_words_of_grpc(scheduler: Scheduler, http: aiohttp.ClientSession) -> None:
    async with http.post(f"{PATH}/GetRequest", json={"requestId": "nobody"}) as response:
        answer = await response.json()
    async with grpc.aio.insecure_channel(scheduler.admin_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin_service_pb2_grpc.AdminServiceStub(channel).GetRequest(pb.GetRequestRequest(request_id="nobody"))
    assert response.status == 404
    assert answer == {"code": "not_found", "message": caught.value.details()}


async def test_nothing_is_drained_over_http(scheduler: Scheduler, http: aiohttp.ClientSession) -> None:
    async with http.post(f"{PATH}/Drain", data="{}", headers=JSON) as response:
        answer = await response.json()
    assert response.status == 403
    assert answer["code"] == "permission_denied"
    assert not scheduler.service.engine.readiness.is_draining


async def test_the_page_needs_nothing_and_allows_itself_alone(http: aiohttp.ClientSession) -> None:
    async with http.get("/") as response:
        text = await response.text()
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "<title>Octavo</title>" in text
    policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src ")
    assert policy.endswith("frame-ancestors 'none'")
    assert (response.headers["X-Content-Type-Options"], response.headers["Cache-Control"]) == ("nosniff", "no-store")
    assert response.headers["Referrer-Policy"] == "no-referrer"
    async with http.head("/") as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status", "sentence"),
    [
        ("GET", "/nowhere", {}, b"", 404, f"there is a page at /, and methods at {PATH}/METHOD, and nothing else"),
        ("POST", f"{PATH}/Nothing", JSON, b"{}", 404, f"there is a page at /, and methods at {PATH}/METHOD, and"),
        ("POST", f"{PATH}/", JSON, b"{}", 404, "there is a page at /"),
        ("POST", "/octavo.generation.v1.GenerationService/GetModel", JSON, b"{}", 404, "there is a page at /"),
        ("POST", "/", {}, b"", 405, "read the page with GET"),
        ("GET", f"{PATH}/GetSchedulerState", {}, b"", 405, "call methods with POST and a JSON body"),
        ("POST", f"{PATH}/GetSchedulerState", {}, b"{}", 415, "methods take JSON; send the header Content-Type:"),
        ("POST", f"{PATH}/GetSchedulerState", {"Content-Type": "text/plain"}, b"{}", 415, "methods take JSON"),
        ("POST", f"{PATH}/GetRequest", JSON, b" " * (2**16 + 1), 413, "the body is longer than 65536 bytes"),
        ("GET", "/", {"Host": "rebound.example.com:50055"}, b"", 403, "without --tokens-file this port answers to an"),
        ("POST", f"{PATH}/GetSchedulerState", JSON | {"Host": "rebound.example.com"}, b"{}", 403, "without --tokens-"),
        ("POST", f"{PATH}/GetSchedulerState", JSON | {"Sec-Fetch-Site": "cross-site"}, b"{}", 403, "other web sites"),
    ],
)
async def test_what_is_refused_is_told_in_one_sentence(
    http: aiohttp.ClientSession,
    method: str,
    path: str,
    headers: dict[str, str],
    body: bytes,
    status: int,
    sentence: str,
) -> None:
    async with http.request(method, path, headers=headers, data=body) as response:
        text = await response.text()
    assert response.status == status
    assert response.content_type == "text/plain"
    assert text.startswith(sentence)
    assert text.count("\n") == 1
    assert response.headers["X-Content-Type-Options"] == "nosniff"


async def test_no_other_site_is_ever_allowed_to_call(http: aiohttp.ClientSession) -> None:
    asks = {
        "Origin": "https://example.com",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    for path in ("/", f"{PATH}/GetSchedulerState"):
        async with http.options(path, headers=asks) as response:
            assert response.status == 405
            assert not [name for name in response.headers if name.lower().startswith("access-control-")]


async def test_a_request_is_understood_byte_by_byte_and_without_host_refused(scheduler: Scheduler) -> None:
    request = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = await exchange(scheduler.page_address, *(bytes([byte]) for byte in request))
    assert answer.startswith(b"HTTP/1.1 404 ")
    answer = await exchange(scheduler.page_address, b"GET / HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.0 400 ")
    assert answer.endswith(b"a request needs one Host header\n")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost\x00: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n" + b"\xff" * 100,
        b"\x16\x03\x01\x00\x05hello",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5_000 + b"\r\n",
    ],
    ids=["zeros", "version", "header", "preface", "tls", "line", "headers"],
)
async def test_garbage_is_answered_or_closed_and_leaves_no_line_in_the_log(
    scheduler: Scheduler, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        answer = await exchange(scheduler.page_address, garbage)
    except ConnectionError:
        answer = b""
    assert b"HTTP/1.1 200" not in answer
    assert caplog.messages == []
    assert (await state_over_grpc(scheduler.admin_address)).num_blocks > 0


@pytest.mark.parametrize(
    ("limit", "words", "answer"),
    [
        ("IDLE_S", b"GET / HTTP/1.1\r\nHost: loc", b""),
        ("IDLE_S", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT", b"HTTP/1.1 200 OK"),
        (
            "_BODY_TIMEOUT_S",
            f"POST {PATH}/GetRequest HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            "Content-Length: 9\r\n\r\n{".encode(),
            b"HTTP/1.1 408 Request Timeout",
        ),
    ],
    ids=["head", "second head", "body"],
)
async def test_who_is_slow_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, limit: str, words: bytes, answer: bytes
) -> None:
    monkeypatch.setattr(page_server, "_LINGER_S", 0.1)
    monkeypatch.setattr(page_server, limit, 0.1)
    async with running_scheduler() as scheduler:
        got = await exchange(scheduler.page_address, words)
    assert got.partition(b"\r\n")[0] == answer


async def test_a_large_answer_gets_through_to_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    explanation = "x" * (4 * 2**20)

    async def explain(*_: object) -> pb.ExplainRequestResponse:
        return pb.ExplainRequestResponse(explanation=explanation)

    monkeypatch.setattr(AdminServicer, "ExplainRequest", explain)
    async with running_scheduler(max_message_bytes=2**24) as large:
        body = f"POST {PATH}/ExplainRequest HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        host, _, port = large.page_address.rpartition(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
            slow.sendall(f"{body}Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{{}}".encode())
            slow.setblocking(False)
            got = bytearray()
            async with asyncio.timeout(PATIENCE_S):
                while chunk := await asyncio.get_running_loop().sock_recv(slow, 2**16):
                    got += chunk
    assert json.loads(got.partition(b"\r\n\r\n")[2]) == {"explanation": explanation}


async def test_the_end_closes_every_connection() -> None:
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        async with running_scheduler() as scheduler:
            host, _, port = scheduler.page_address.rpartition(":")
            ends = []
            for words in (b"", b"GE", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
                reader, writer = await asyncio.open_connection(host, int(port))
                stack.callback(writer.close)
                writer.write(words)
                ends.append(reader)
            await ends[-1].readline()
            begin_s = loop.time()
        assert loop.time() - begin_s < 10
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(reader.read() for reader in ends), return_exceptions=True)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, int(port))


async def test_without_a_setting_there_is_no_page_and_the_admin_port_speaks_grpc_alone() -> None:
    async with running_scheduler(page_listen=None) as scheduler:
        assert "page" not in scheduler.service.other_addresses
        assert (await state_over_grpc(scheduler.admin_address)).page_port == 0
        answer = await exchange(scheduler.admin_address, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP/1.1" not in answer


async def test_operators_are_told_the_port_of_the_page(scheduler: Scheduler) -> None:
    state = await state_over_grpc(scheduler.admin_address)
    assert scheduler.page_address == f"127.0.0.1:{state.page_port}"
