"""The last event of a client that asks for a lean one, and the same answer for callers of the client."""

import asyncio
from typing import Any

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo import Client, SamplingParams
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.outputs import Event, Finished
from tests.support.stack import running_stack, token_request

ASKED: dict[str, dict[str, Any]] = {
    "one output": {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    "several": {"n": 3, "temperature": 1.0, "seed": 4, "logprobs": 0},
    "ranked": {"n": 2, "best_of": 3, "temperature": 1.0, "seed": 4, "logprobs": 1},
    "beams": {"n": 2, "beam_width": 3, "temperature": 0.0},
    "a prompt of one token": {"temperature": 0.0, "prompt_logprobs": 0},
}


@pytest.mark.parametrize("name", ASKED)
async def test_a_lean_last_event_has_what_no_delta_brought_and_the_client_makes_it_whole(name: str) -> None:
    async def events(client: Client, *, is_lean: bool) -> Finished:
        client._unknown_fields = set() if is_lean else {"lean_finished"}
        params = SamplingParams(max_tokens=6, **ASKED[name])
        found: list[Event] = [event async for event in client.stream(prompt, params)]
        assert isinstance(found[-1], Finished)
        return found[-1]

    prompt = [65] if "one token" in name else [65, 66, 67]
    async with running_stack(FakeWorker(step_ms=1)) as stack, Client(stack.address) as client:
        whole, completed = await asyncio.gather(events(client, is_lean=False), events(client, is_lean=True))
        assert completed.outputs == whole.outputs
        assert completed.prompt_logprobs == whole.prompt_logprobs
        assert whole.outputs[0].token_ids

        request = token_request(len(prompt), 6, **ASKED[name])
        request.lean_finished = True
        *_, last = [event.finished async for event in stack.generation.Generate(request)]
    for lean, output in zip(last.outputs, whole.outputs, strict=True):
        assert (lean.output_index, lean.HasField("cumulative_logprob")) == (
            output.output_index,
            output.cumulative_logprob is not None,
        )
        assert lean.finish_reason
        assert (lean.text, *lean.token_ids, *lean.logprobs, *lean.alternative_token_ids) == ("",)
    assert last.usage.num_output_tokens == whole.usage.num_output_tokens
    assert last.HasField("prompt_logprobs") is (whole.prompt_logprobs is not None)
    assert not last.prompt_logprobs.logprobs


def test_the_client_knows_how_an_older_scheduler_calls_the_field() -> None:
    assert pb.GenerateRequest.DESCRIPTOR.fields_by_name["lean_finished"].number == 10
