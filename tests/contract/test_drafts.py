"""Outputs that end inside tokens of one step: what lies behind the end is not streamed, counted, billed or charged."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from executor_svc.fake.worker import FakeWorker
from scheduler_svc.engine.token_quotas import TokenQuotas
from tests.contract.openai.api import Api, Json, running_api
from tests.support.stack import collect, token_request

NUMBERS = range(6)
MOST_TOKENS = 17
ENDS: tuple[Json, ...] = (
    {"stop": ["e", "q", "xx"]},
    {"stop": ["a"], "stop_token_ids": [*b"nt"], "n": 2},
    {},  # the end of sequence or the length
)


async def streamed(api: Api, number: int, ends: Json) -> object:
    """Return all that a stream of gRPC brings."""
    params = {name: value for name, value in ends.items() if name != "n"}
    request = token_request(5, MOST_TOKENS, first_id=number, temperature=1.0, seed=number, logprobs=1, **params)
    answer = await collect(api.stack, request)
    assert answer.finished is not None
    return answer.text, answer.token_ids, answer.logprobs, answer.alternative_token_ids, answer.finished.usage


async def chatted(api: Api, number: int, ends: Json) -> object:
    """Return what a chat of OpenAI's API brings, and its usage."""
    turns = [{"role": "user", "content": f"chat {number}"}]
    answer = (await api.chat(messages=turns, max_tokens=MOST_TOKENS, seed=number, logprobs=True, **ends)).json
    return answer["choices"], answer["usage"]


async def chatted_in_pieces(api: Api, number: int, ends: Json) -> object:
    """Return what a streamed chat brings, joined, and its usage."""
    turns, last = [{"role": "user", "content": f"pieces {number}"}], {"include_usage": True}
    fields = {"messages": turns, "max_tokens": MOST_TOKENS, "seed": number, "stream": True, "stream_options": last}
    *events, usage = (await api.chat(**fields, **ends)).events
    joined: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            joined[choice["index"]] = joined.get(choice["index"], "") + (choice["delta"].get("content") or "")
            reasons[choice["index"]] = choice["finish_reason"]
    return joined, reasons, usage["usage"]


DOORS = (streamed, chatted, chatted_in_pieces)


async def told(speculate: str, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return what each door tells of each request, what is counted of all, and the number of steps."""
    charged = Counter[str]()
    monkeypatch.setattr(TokenQuotas, "are_there", True)
    monkeypatch.setattr(
        TokenQuotas, "take", lambda _, tenant, num_tokens, __, adapter: charged.update({tenant: num_tokens})
    )
    worker = FakeWorker(eos_probability=0.02, max_allowance=8)
    async with running_api(worker, speculate=speculate, fronts=0) as api:
        answers = {
            f"{door.__name__}, {ends}": await asyncio.gather(*(door(api, number, ends) for number in NUMBERS))
            for door in DOORS
            for ends in ENDS
        }
        meter = api.stack.engine.meter
        num_steps = meter.step_durations["execute"].num_observed
        counted = {"output tokens": meter.num_output_tokens, "ends": meter.num_finished, "charged": charged}
        counted |= {"of tenants": meter.num_output_tokens_of}
    return answers, counted, num_steps


async def test_what_lies_behind_an_end_inside_a_step_is_not_streamed_counted_billed_or_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, counted_alone, num_steps_alone = await told("off", monkeypatch)
    drafted, counted, num_steps = await told("on", monkeypatch)

    assert drafted == alone
    assert counted == counted_alone
    assert num_steps < 0.85 * num_steps_alone
