"""No body keeps the event loop, and so the streams of the others, waiting; and not many of them are held at once."""

import asyncio
import io
from collections.abc import AsyncIterator

import pytest

from executor_svc.fake.worker import FakeWorker
from scheduler_svc.front.openai import call
from tests.contract.openai.api import Api, running_api
from tests.support.loop_gap import loop_gaps
from tests.support.stack import until

BODY_BYTES = 4 * 2**20 - 64

# In CPU time, so that other work on the machine does not count: the longest gap is 30 ms, and if bodies are parsed on
# the event loop 120 ms.
GAP_S = 0.08


def filled(begin: bytes, element: bytes, end: bytes) -> bytes:
    """Return a body that is full of elements."""
    number = (BODY_BYTES - len(begin) - len(end)) // len(element)
    return begin + element * number + end


CHAT = b'{"model":"fake","messages":['
PROMPT = b'{"model":"fake","prompt":'
BODIES = {
    "token ids": filled(PROMPT + b"[", b"1,", b"1]}"),
    "prompts": filled(PROMPT + b"[", b'"",', b'""]}'),
    "lists": filled(PROMPT + b"[", b"[],", b"[]]}"),
    "one text": filled(PROMPT + b'"', b"word and ", b'"}'),
    "escapes": filled(PROMPT + b'"', b"\\u00e9", b'"}'),
    "messages": filled(CHAT, b'{"role":"user","content":""},', b'{"role":"user","content":""}]}'),
    "no messages": filled(CHAT, b"0,", b"0]}"),
    "parts": filled(CHAT + b'{"role":"user","content":[', b"{},", b"{}]}]}"),
    "stops": filled(PROMPT + b'"a","stop":[', b'"a",', b'"a"]}'),
    "wrong stops": filled(PROMPT + b'"a","stop":[', b"1,", b"1]}"),
    "biases": PROMPT + b'"a","logit_bias":{' + b",".join(b'"%d":1' % n for n in range(60_000)) + b"}}",
    "names": PROMPT + b'"a",' + b",".join(b'"x%d":1' % n for n in range(60_000)) + b"}",
    "many names": PROMPT + b'"a",' + b",".join(b'"x%d":1' % n for n in range(300_000)) + b"}",
    "no end of a text": PROMPT + b'"' + b'\\"' * 1_900_000 + b"[" * 300_000,
    "half an escape": PROMPT + b'"' + b'\\"' * 1_900_000 + b"[" * 300_000 + b"\\",
    "tools": filled(CHAT + b'{"role":"user","content":"a"}],"tools":[', b"{},", b"{}]}"),
}


async def longest_gap_s(api: Api, content: bytes) -> tuple[float, int]:
    """Send a body; return how long the loop was kept at most until it was answered, and how."""
    path = "/v1/chat/completions" if content.startswith(CHAT) else "/v1/completions"
    headers = {"Content-Type": "application/json"}
    async with loop_gaps() as gaps_s:
        answer = await api.send("POST", path, data=io.BytesIO(content), headers=headers)
    assert answer.error["message"]
    return max(gaps_s), answer.status


async def test_no_body_of_any_shape_stops_the_event_loop() -> None:
    slow = {}
    async with running_api(FakeWorker(max_model_len=32_768, num_device_blocks=2100)) as api:
        for name, content in BODIES.items():
            gap_s, status = await longest_gap_s(api, content)
            assert status == 400, name
            if gap_s > GAP_S:  # a busy machine is late once, not twice
                gap_s = min(gap_s, (await longest_gap_s(api, content))[0])
            if gap_s > GAP_S:
                slow[name] = gap_s
    assert slow == {}


async def test_bodies_that_are_on_their_way_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "MAX_BODIES", 2)
    is_over = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b" " * 60_000
        await is_over.wait()
        yield b"{}"

    async with running_api(max_request_bytes=2**16) as api:
        headers = {"Content-Type": "application/json"}
        slow_ones = [asyncio.create_task(api.send("POST", "/tokenize", data=slow(), headers=headers)) for _ in range(2)]
        [bodies] = [api.stack.front.openai._routes._bodies]  # type: ignore[union-attr]
        await until(lambda: bodies._num_bytes_left == 2 * (2**16 - 60_000))
        refused = await api.complete(prompt="x" * 20_000)
        small = await api.complete(max_tokens=1)
        is_over.set()
        statuses = [(await task).status for task in slow_ones]
        assert bodies._num_bytes_left == 2 * 2**16
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert (small.status, statuses) == (200, [400, 400])
