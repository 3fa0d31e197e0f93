"""Whatever comes in: a sentence in OpenAI's shape or a closed connection, and nobody else notices."""

import asyncio
import gc
import json
import logging
import re
import tracemalloc
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import ClientConnectionResetError

from executor_svc.fake.worker import FakeWorker
from scheduler_svc.front.openai import call, set_up
from scheduler_svc.front.openai.sse import EventStream
from scheduler_svc.http.connections import ConnectionTimes
from tests.contract.openai.api import Api, running_api
from tests.contract.openai.hostile_rows import CLOSED, COMPLETIONS, GOOD, ROWS, Row, fields, get, post
from tests.support.patience import PATIENCE_S
from tests.support.stack import until

QUICK = ConnectionTimes(first_request_s=0.3, idle_s=0.3, linger_s=0.05, stall_s=0.5)


async def exchange(address: tuple[str, int], *pieces: bytes) -> bytes:
    """Send bytes as they are; return all that comes until the connection is closed or broken."""
    reader, writer = await asyncio.open_connection(*address)
    answer = b""
    with suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_S):
            writer.writelines(pieces)
            while piece := await reader.read(2**16):
                answer += piece
    writer.transport.abort()
    return answer


def wrong_with(answer: bytes, status: int | None) -> str:
    """Return what is wrong with the end of a row; nothing: it is right."""
    if status is CLOSED or not answer:
        return "" if status is CLOSED and not answer else f"{answer[:100]!r}, and not {status}"
    head, _, content = answer.partition(b"\r\n\r\n")
    first = head.splitlines()[0]
    if int(first.split()[1]) != status:
        return f"{first!r}, and not {status}: {content[:200]!r}"
    if status == 200 or b"\nContent-Length: 0" in head or not content:
        return ""
    error = json.loads(content)["error"]  # alone: nothing is answered behind it
    shape = {"message": str, "type": str, "param": str | None, "code": str | None}
    is_right = error.keys() == shape.keys() and all(isinstance(error[name], shape[name]) for name in shape)
    is_short = len(error["message"]) < 500 and "b'" not in error["message"]  # nothing is repeated
    return "" if is_right and is_short else f"not OpenAI's shape, or long: {error}"


async def wrong_rows(address: tuple[str, int], rows: Mapping[str, Row]) -> dict[str, str]:
    """Send each row by itself; return what was wrong."""
    return {
        name: wrong
        for name, (sent, status) in rows.items()
        if (wrong := wrong_with(await exchange(address, sent), status))
    }


@asynccontextmanager
async def neighbour(api: Api) -> AsyncIterator[list[bytes]]:
    """Stream an answer; the events that came are added to the list."""
    events: list[bytes] = []

    async def stream() -> None:
        values = {"model": "fake", "prompt": [50], "max_tokens": 8000, "stream": True, "ignore_eos": True}
        async with api.session.post(COMPLETIONS, json=values) as response:
            async for line in response.content:
                events.append(line)  # noqa: PERF401 others look at them meanwhile

    task = asyncio.create_task(stream())
    await until(lambda: events)
    yield events
    assert not task.done()
    task.cancel()


async def test_no_bytes_disturb_the_port(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(call, "BODY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(set_up, "TIMES", QUICK)
    async with running_api(FakeWorker(step_ms=5)) as api, neighbour(api) as events:
        bodies = api.stack.front.openai._routes._bodies  # type: ignore[union-attr]
        num_bytes_left, num_before = bodies._num_bytes_left, len(events)
        assert await wrong_rows(api.address, ROWS) == {}
        await until(lambda: len(events) > num_before)
        await until(lambda: len(api.stack.engine.requests) == 1)
        assert bodies._num_bytes_left == num_bytes_left
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info] == []


async def test_a_connection_that_breaks_while_an_answer_is_written_is_no_error(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def break_off(stream: EventStream, events: bytes) -> None:
        assert stream._call.request.transport is not None
        stream._call.request.transport.abort()
        raise ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(EventStream, "send", break_off)
    await exchange(api.address, post(COMPLETIONS, fields(stream=True)))
    await until(lambda: not api.stack.engine.requests)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info] == []


async def test_a_body_that_was_refused_is_freed_without_the_garbage_collector(api: Api) -> None:
    sent = post(COMPLETIONS, b"{" + b" " * 2**20)
    await exchange(api.address, sent)
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(5):
            assert b" 400 " in await exchange(api.address, sent)
        await until(lambda: tracemalloc.get_traced_memory()[0] < 2**19)  # of 5 MB that were sent
    finally:
        tracemalloc.stop()
        gc.enable()


async def test_a_body_is_asked_for_where_its_sender_waits(api: Api) -> None:
    head, content = post(COMPLETIONS, b"", "Expect: 100-continue", length=len(GOOD)), GOOD
    reader, writer = await asyncio.open_connection(*api.address)
    async with asyncio.timeout(PATIENCE_S):
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(content)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_body_that_is_refused_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "TIMES", QUICK)
    async with running_api() as api:
        too_long = post(COMPLETIONS, b"", "Expect: 100-continue", length=2**30)
        assert (await exchange(api.address, too_long)).startswith(b"HTTP/1.1 413")


async def test_a_stream_to_an_old_client_ends_with_its_connection(api: Api) -> None:
    sent = post(COMPLETIONS, fields(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"close", b"keep-alive")
    assert (await exchange(api.address, sent)).endswith(b"data: [DONE]\n\n")


async def test_streams_may_be_asked_for_one_behind_the_other(api: Api) -> None:
    one = post(COMPLETIONS, fields(stream=True)).replace(b"Connection: close\r\n", b"")
    refused = post(COMPLETIONS, b"{").replace(b"Connection: close\r\n", b"")
    answer = await exchange(api.address, one * 3 + refused + one, get("/health"))
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200", b"200", b"200", b"400", b"200", b"200"]
    assert answer.count(b"data: [DONE]") == 4


@pytest.mark.parametrize("sent", [b"", b"GE", b"GET /health HTTP/1.1\r\nX", b"GET /health HTTP/1.1\r\nX: y\r\n"])
async def test_who_never_asks_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(set_up, "TIMES", QUICK)
    async with running_api() as api:
        assert await exchange(api.address, sent) == b""


async def test_who_begins_a_second_request_and_no_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(set_up, "TIMES", QUICK)
    async with running_api() as api:
        one = get("/health").replace(b"Connection: close\r\n", b"")
        assert (await exchange(api.address, one + one[:-2])).count(b"HTTP/1.1 200") == 1
