"""What headers of a call over HTTP mean, and how connections and calls end."""

import asyncio
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest

from octavo.admin.v1 import admin_service_pb2 as pb
from scheduler_svc.admin.http import page_server
from scheduler_svc.admin.servicer import AdminServicer
from tests.support.each_row import each_row
from tests.support.patience import PATIENCE_S
from tests.support.stack import until
from tests.tls.services import Scheduler, running_scheduler

PATH = "/octavo.admin.v1.AdminService"


@pytest.fixture
async def scheduler() -> AsyncIterator[Scheduler]:
    async with running_scheduler() as running:
        yield running


@pytest.fixture
async def http(scheduler: Scheduler) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(f"http://{scheduler.page_address}", timeout=timeout) as session:
        yield session


@each_row(
    ({}, 200, None),
    ({"Connect-Protocol-Version": "1", "Connect-Timeout-Ms": "9999999999"}, 200, None),
    ({"Content-Type": "application/json; charset=utf-8"}, 200, None),
    ({"Content-Encoding": "identity"}, 200, None),
    ({"Sec-Fetch-Site": "same-origin"}, 200, None),
    ({"Connect-Timeout-Ms": "0"}, 504, "deadline_exceeded"),
    ({"Connect-Timeout-Ms": "-1"}, 400, "invalid_argument"),
    ({"Connect-Timeout-Ms": "12345678901"}, 400, "invalid_argument"),
    ({"Content-Encoding": "gzip"}, 501, "unimplemented"),
)
async def test_headers_mean_what_the_protocol_says(
    headers: dict[str, str], status: int, code: str | None, *, http: aiohttp.ClientSession
) -> None:
    headers = {"Content-Type": "application/json"} | headers
    async with http.post(f"{PATH}/GetSchedulerState", data=b"{}", headers=headers) as response:
        answer = await response.json()
    assert response.status == status, answer
    assert answer.get("code") == code


@each_row("localhost:50055", "127.0.0.1", "[::1]:50055", "octavo.localhost")
async def test_local_names_are_answered(host: str, *, http: aiohttp.ClientSession) -> None:
    async with http.get("/", headers={"Host": host}) as response:
        assert response.status == 200


async def test_a_connection_is_used_again_also_after_a_refusal(scheduler: Scheduler) -> None:
    host, _, port = scheduler.page_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for path, last in (("nowhere", "keep-alive"), ("", "keep-alive"), ("nowhere", "close")):
        writer.write(f"GET /{path} HTTP/1.1\r\nHost: localhost\r\nConnection: {last}\r\n\r\n".encode())
    async with asyncio.timeout(PATIENCE_S):
        answers = await reader.read()
    writer.close()
    assert [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]] == [b"404", b"200", b"404"]


async def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "_STALL_S", 0.2)
    async with running_scheduler() as scheduler:
        host, _, port = scheduler.page_address.rpartition(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
            client.connect((host, int(port)))
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
            connections = scheduler.service._ports._others["page"]._connections._server  # type: ignore[attr-defined]
            await until(lambda: connections.connections)
            await until(lambda: not connections.connections)


async def test_a_client_that_leaves_ends_its_call(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def wait(*_: object) -> pb.GetStepResponse:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return pb.GetStepResponse()

    monkeypatch.setattr(AdminServicer, "GetStep", wait)
    async with running_scheduler() as waiting:
        host, _, port = waiting.page_address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"POST {PATH}/GetStep HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            "Content-Length: 2\r\n\r\n{}".encode()
        )
        async with asyncio.timeout(PATIENCE_S):
            await began.wait()
            writer.transport.abort()
            await ended.wait()
