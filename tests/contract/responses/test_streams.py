"""Streams of the Responses API: the same answers as without, numbered alike whoever tells them."""

import asyncio
import random

from openai.types.responses import Response

from tests.contract.openai.api import Api, Json, running_api
from tests.contract.openai.shapes import check_shape
from tests.contract.responses.answers import TOOLS, comparable, events_of, put_together, respond
from tests.support.echo_worker import EchoWorker
from tests.support.stack import until

NUM_CASES = 48
NUM_STREAMS = 20

_CALL = '<tool_call>{"name": "read", "arguments": {"path": "ü 🦊", "n": [1, {"a": "b"}]}}</tool_call>'
_SAID = (
    *("Ünd ", "🦊🦊", " \n", "a < b", "END", "<tool", "<tool_call>no call</tool_call>", _CALL, _CALL[:40], _CALL[:60]),
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
)
_THOUGHTS = ("", "<think>", "<think>Let me see… 🦊\n</think>\n\n", "Hm.</think>", "<think></think>")


def random_request(rng: random.Random) -> Json:
    """Return the fields of a request that says anything, and is asked for in any way."""
    said = rng.choice(_THOUGHTS) + "".join(rng.choices(_SAID, k=rng.randrange(6)))
    fields: Json = {
        "said": said,
        "include": rng.sample(("message.output_text.logprobs", "reasoning.encrypted_content"), 1),
    }
    if rng.random() < 0.7:
        fields["tools"] = TOOLS
    if rng.random() < 0.3:
        fields["max_output_tokens"] = rng.randrange(1, 90)
    if rng.random() < 0.3:
        fields["stop"] = rng.choice(["END", "🦊", '"n"', "</tool_call>"])
    if "message.output_text.logprobs" in fields["include"]:
        fields["top_logprobs"] = rng.randrange(3)
    fields["reasoning"] = rng.choice(
        [None, {"effort": "high"}, {"summary": "auto"}, {"effort": "low", "summary": "auto"}]
    )
    return fields


async def test_streams_tell_what_whole_answers_have(api: Api) -> None:
    async def case(number: int) -> str:
        fields = {**random_request(random.Random(number)), "request_id": f"r{number}", "seed": 1}
        whole = await respond(api, **fields)
        assert whole.status == 200, whole.text
        check_shape(whole.json, Response)
        streamed = events_of(await respond(api, **fields, stream=True))
        assert comparable(put_together(streamed)) == comparable(whole.json), fields
        slow = events_of(await respond(api, **fields, stream=True, min_delta_interval_ms=40))
        assert slow[2:-1] == streamed[2:-1], fields
        return " ".join([*(item["type"] for item in whole.json["output"]), whole.json["status"]])

    shapes = set(await asyncio.gather(*map(case, range(NUM_CASES))))
    assert len(shapes) >= 8, "the cases are all alike"


async def test_nobody_notices_a_killed_executor() -> None:
    said = "<think>Hm.</think>Ünd " * 3 + _CALL

    async def streams(api: Api) -> list[list[Json]]:
        asked = [
            respond(api, f"{said}{number}", tools=TOOLS, request_id=f"r{number}", stream=True)
            for number in range(NUM_STREAMS)
        ]
        return [events_of(answer)[2:-1] for answer in await asyncio.gather(*asked)]

    async with running_api(EchoWorker(), EchoWorker()) as api:
        undisturbed = await streams(api)
    async with running_api(EchoWorker(step_ms=5), EchoWorker(step_ms=5), lease_s=1.0) as api:
        running = asyncio.create_task(streams(api))
        victim = api.stack.executors[0]
        await until(lambda: api.stack.num_groups_on(victim) and len(api.stack.engine.requests) == NUM_STREAMS)
        await until(lambda: any(request.num_output_tokens > 5 for request in api.stack.engine.requests.values()))
        await victim.kill()
        disturbed = await running
        assert sum(ended.num_losses for ended in api.stack.engine.ended.values()) > 0
    assert disturbed == undisturbed


async def test_a_request_that_fails_ends_its_stream_with_its_error(api: Api) -> None:
    running = asyncio.create_task(respond(api, "x" * 2000, stream=True, request_id="r"))
    await until(lambda: any(request.num_output_tokens > 5 for request in api.stack.engine.requests.values()))
    assert await api.stack.engine.abort_request("resp_r", None)
    last = events_of(await running)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert "was aborted" in last["response"]["error"]["message"]
