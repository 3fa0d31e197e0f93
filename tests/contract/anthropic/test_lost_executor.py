"""An executor dies under many streams: nobody who reads them can tell."""

import asyncio

from tests.contract.anthropic.messages import WEATHER, events_of, post, say
from tests.contract.openai.api import Api, Json, running_api
from tests.support.echo_worker import EchoWorker
from tests.support.stack import until

NUM_STREAMS = 20
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich 🦊"}}</tool_call>'


async def streams(api: Api) -> list[list[Json]]:
    """Return the events of each stream; what was in the prefix cache is not among them."""

    async def one(number: int) -> list[Json]:
        said = f"Thought {number}, ü.</think>Answer {number}: {CALL}"
        thinking = {"type": "enabled", "budget_tokens": 1024}
        answer = await post(api, messages=say(said), tools=[WEATHER], thinking=thinking, stream=True, max_tokens=300)
        start, *events = events_of(answer.text)
        start["message"]["id"] = ""
        for event in events:
            if event["type"] == "message_delta":
                event["usage"] = event["usage"]["output_tokens"]
            elif event.get("content_block", {}).get("type") == "tool_use":
                event["content_block"]["id"] = ""
        return [start, *events]

    return await asyncio.gather(*map(one, range(NUM_STREAMS)))


async def test_streams_go_on_elsewhere_event_by_event() -> None:
    async with running_api(EchoWorker(), EchoWorker()) as api:
        undisturbed = await streams(api)
    async with running_api(EchoWorker(step_ms=5), EchoWorker(step_ms=5), lease_s=1.0) as api:
        running = asyncio.create_task(streams(api))
        victim = api.stack.executors[0]
        await until(lambda: api.stack.num_groups_on(victim) and len(api.stack.engine.requests) == NUM_STREAMS)
        await until(lambda: any(request.num_output_tokens > 5 for request in api.stack.engine.requests.values()))
        await victim.kill()
        disturbed = await running
        num_lost = sum(ended.num_losses for ended in api.stack.engine.ended.values())
    assert num_lost > 0
    assert disturbed == undisturbed
    assert all(events[-1]["type"] == "message_stop" and len(events) > 20 for events in disturbed)
