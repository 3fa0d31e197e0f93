"""Clients that leave or do not read; and the official one. What is no proper request: test_hostile_http.py."""

import asyncio
import fcntl
import json
import socket
import sys
import termios
from dataclasses import replace
from typing import cast

import openai
import pytest
from aiohttp import web
from openai.types.chat import ChatCompletionMessageParam

from executor_svc.fake.worker import FakeWorker
from octavo.local.taken_ports import is_octavos_openai_port
from scheduler_svc.front.openai import set_up
from tests.contract.openai.api import Api, running_api
from tests.support.patience import PATIENCE_S
from tests.support.stack import until

ENDLESS = 8000

# Of an answer of 1 MB that a client does not take, in the process and in the kernel each.
MAX_KEPT_BYTES = 32 * 2**10

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


def request_bytes(path: str, body: dict[str, object], *headers: str) -> bytes:
    content = json.dumps({"model": "fake", **body}).encode()
    head = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
    ]
    return "\r\n".join([*head, *headers, "", ""]).encode() + content


STREAM = request_bytes("/v1/completions", {"prompt": "a", "max_tokens": ENDLESS, "stream": True, "ignore_eos": True})
WHOLE = request_bytes("/v1/completions", {"prompt": "a", "max_tokens": ENDLESS, "ignore_eos": True})


@pytest.mark.parametrize("sent", [STREAM, WHOLE], ids=["stream", "whole"])
@pytest.mark.parametrize("is_half", [False, True], ids=["closed", "half-closed"])
async def test_a_client_that_leaves_ends_its_request(sent: bytes, is_half: bool) -> None:
    async with running_api(FakeWorker(step_ms=1)) as api:
        _, writer = await asyncio.open_connection(*api.address)
        writer.write(sent)
        await until(lambda: api.stack.engine.load.num_running)
        if is_half:
            writer.write_eof()
        else:
            writer.transport.abort()
        await until(lambda: not api.stack.engine.requests)
        [ended] = api.stack.engine.ended.values()
        writer.close()
    assert ended.error_message == "the client cancelled the call or disconnected"


@pytest.mark.slow  # test_request_stream_limits.py has it of the other port
async def test_who_does_not_read_holds_up_nobody_and_little_is_kept_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    transports: list[asyncio.Transport] = []
    made = web.RequestHandler.connection_made

    def connection_made(handler: web.RequestHandler, transport: asyncio.BaseTransport) -> None:
        transports.append(cast("asyncio.Transport", transport))
        made(handler, transport)

    monkeypatch.setattr(web.RequestHandler, "connection_made", connection_made)
    async with running_api(FakeWorker(max_model_len=4096, num_device_blocks=4096)) as api:
        slow = []
        for number in range(4):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
            client.connect(api.address)
            fields = {"prompt": [65 + number], "max_tokens": 1500, "stream": True, "ignore_eos": True, "logprobs": 5}
            client.sendall(request_bytes("/v1/completions", fields))
            slow.append(client)
        await until(lambda: len(api.stack.engine.ended) == 4)
        for transport in transports:
            assert transport.get_write_buffer_size() < MAX_KEPT_BYTES
            assert unsent_bytes(transport.get_extra_info("socket")) < MAX_KEPT_BYTES
        for client in slow:
            client.settimeout(PATIENCE_S)
        answers = await asyncio.gather(*(asyncio.to_thread(read_stream, client) for client in slow))
    for answer in answers:
        assert answer.count(b'"finish_reason":"length"') == 1
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_who_takes_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "TIMES", replace(set_up.TIMES, stall_s=0.5))
    async with running_api(FakeWorker(step_ms=1)) as api:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
            client.connect(api.address)
            client.sendall(STREAM)
            await until(lambda: api.stack.engine.ended)
            [ended] = api.stack.engine.ended.values()
            assert ended.error_message == "the client cancelled the call or disconnected"
            with pytest.raises(ConnectionResetError):
                await asyncio.to_thread(read_stream, client)


def unsent_bytes(connection: socket.socket) -> int:
    """Return what the kernel keeps for the peer (tcp(7), SIOCOUTQ)."""
    answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


def read_stream(client: socket.socket) -> bytes:
    answer = b""
    with client:
        while not answer.endswith(b"0\r\n\r\n"):
            answer += client.recv(2**16)
    return answer


async def test_an_error_in_the_middle_of_a_stream_is_an_event() -> None:
    async with running_api(FakeWorker(step_ms=1)) as api:
        client = openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)
        chunks = await client.completions.create(model="fake", prompt="a", max_tokens=ENDLESS, stream=True)
        await anext(chunks)
        [(_, request_id)] = api.stack.engine.requests
        await api.stack.engine.abort_request(request_id, None)
        with pytest.raises(openai.APIError, match=f"request '{request_id}' was aborted"):
            async for _ in chunks:
                pass
        await client.close()


async def test_octavo_up_tells_this_port_from_those_of_other_programs(api: Api) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other_address = f"127.0.0.1:{other.getsockname()[1]}"
        other.close()
        assert await asyncio.to_thread(is_octavos_openai_port, api.url.removeprefix("http://"))
        assert not await asyncio.to_thread(is_octavos_openai_port, other_address)
