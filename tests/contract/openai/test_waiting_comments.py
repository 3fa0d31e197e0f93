"""What a stream says while its request waits."""

import re
from collections.abc import AsyncGenerator

import pytest

from executor_svc.fake.worker import FakeWorker
from tests.contract.openai.api import HELLO, Api, Json, running_api
from tests.support.stack import until

LONG: Json = {"model": "fake", "messages": HELLO, "stream": True, "max_tokens": 4000}


async def comments(api: Api) -> AsyncGenerator[str]:
    """Yield the comments of a stream, whose answer never begins."""
    async with api.session.post("/v1/chat/completions", json=LONG) as response:
        assert len(response.headers["x-request-id"]) == 32
        async for line in response.content:
            if line.startswith(b":"):
                yield line.decode().strip()


@pytest.mark.parametrize("num_fronts", [0, 1])
async def test_comments_say_why_a_request_waits(num_fronts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.front.openai.sse.FIRST_SILENCE_S", 0.05)
    monkeypatch.setattr("scheduler_svc.front.openai.sse.SILENCE_S", 0.05)
    places = [r": waiting, 1st in line(, about \d+ s)?", r": waiting, 2nd in line(, about \d+ s)?"]
    if num_fronts:  # they know how many wait, and not who
        places = [r": waiting, \d in line"] * 2
    worker = FakeWorker(max_num_seqs=1, max_num_batched_tokens=64, step_ms=20)
    async with running_api(worker, fronts=num_fronts) as api, api.session.post("/v1/chat/completions", json=LONG):
        await until(lambda: api.stack.engine.load.num_running == 1)
        waiting = []
        for place in places:
            waiting.append(comments(api))
            first = await anext(waiting[-1])
            while "next token" in first:  # it has not been queued yet
                first = await anext(waiting[-1])
            assert re.fullmatch(place, first)
        for stream in waiting:
            await stream.aclose()
