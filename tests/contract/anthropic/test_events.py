"""The events of a stream follow from the tokens alone: a client that reads slowly gets the same ones."""

import asyncio
import json

from tests.contract.anthropic.messages import HEADERS, events_of, joined, say, streamed
from tests.contract.openai.api import Api
from tests.support.patience import PATIENCE_S


async def test_each_token_with_text_is_an_event_for_slow_clients_too(api: Api) -> None:
    text = "".join(f"ü{number} " for number in range(400))
    body = {"model": "fake", "max_tokens": 4_000, "messages": say(text), "stream": True}
    async with api.session.post("/v1/messages", json=body, headers=HEADERS) as response:
        await asyncio.sleep(0.5)  # what comes meanwhile lies in buffers, and behind them in the scheduler
        content = await asyncio.wait_for(response.text(), PATIENCE_S)
    events = events_of(content)
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert deltas == list(text), "one byte is a token, and two bytes make one character"
    assert joined(events)["content"] == [{"type": "text", "text": text}]


async def test_the_events_have_the_names_and_the_order_of_anthropics(api: Api) -> None:
    message = await streamed(api, messages=say("Hi"))
    answer = await api.send(
        "POST",
        "/v1/messages",
        json={"model": "fake", "max_tokens": 9, "messages": say("Hi"), "stream": True},
        headers={**HEADERS, "X-Request-Id": "r"},
    )
    start = {
        "type": "message_start",
        "message": {
            "id": "msg_r",
            "type": "message",
            "role": "assistant",
            "model": "fake",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"],
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 0,
            },
        },
    }
    *events, delta, stop = events_of(answer.text)
    assert [json.dumps(event) for event in events] == [
        json.dumps(event)
        for event in (
            start,
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "ping"},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "H"}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "i"}},
            {"type": "content_block_stop", "index": 0},
        )
    ]
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 3
    assert stop == {"type": "message_stop"}
