"""An answer goes on behind what its client has of it: the rest is what the call would have brought that was cut.

Clients cut their calls at every event here, and send what they have.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.calls.streamed_answer import StreamedAnswer
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.output_messages import event_from_proto
from tests.support.stack import Stack, running_stack, token_request, until
from tests.support.step_logs import check_replay

NUM_TOKENS = 10


@dataclass
class Call:
    """What came of a call, whole or cut."""

    events: list[pb.GenerateResponse] = field(default_factory=list)

    @property
    def accepted(self) -> pb.Accepted:
        """The first event."""
        return self.events[0].accepted

    @property
    def finished(self) -> pb.RequestFinished:
        """The last event."""
        return self.events[-1].finished


async def run(stack: Stack, request: pb.GenerateRequest, num_events: int | None = None) -> Call:
    """Take so many events of a call and cut it; None: all."""
    call = stack.generation.Generate(request)
    ran = Call()
    async for event in call:
        ran.events.append(event)
        if len(ran.events) == num_events:
            break
    call.cancel()
    return ran


def cut_behind(ran: Call, num_events: int) -> StreamedAnswer:
    """Return what a client has whose call was cut behind so many events."""
    answer = StreamedAnswer()
    for event in ran.events[:num_events]:
        if not event.HasField("finished"):
            answer.take(event_from_proto(event))
    return answer


def continued(request: pb.GenerateRequest, accepted: pb.Accepted, answer: StreamedAnswer) -> pb.GenerateRequest:
    """Return the request that goes on."""
    again = pb.GenerateRequest()
    again.CopyFrom(request)
    again.request_id = accepted.request_id
    again.token_ids.ids[:] = accepted.prompt_token_ids
    again.sampling_params.CopyFrom(accepted.sampling_params)
    again.continuation.CopyFrom(answer.continuation(1))
    return again


async def go_on_everywhere(stack: Stack, request: pb.GenerateRequest) -> None:
    """Cut a call behind each of its events and continue it: it ends as it did, and nothing comes twice."""
    request.include_prompt_token_ids = True
    whole = await run(stack, request)
    for num_events in range(1, len(whole.events)):
        await until(lambda: not stack.engine.requests)
        answer = cut_behind(whole, num_events)
        rest = await run(stack, continued(request, whole.accepted, answer))
        for event in rest.events[:-1]:
            answer.take(event_from_proto(event))
        assert rest.finished.outputs == whole.finished.outputs, num_events
        assert rest.finished.prompt_logprobs == whole.finished.prompt_logprobs
        assert rest.finished.usage.num_output_tokens == whole.finished.usage.num_output_tokens
        assert rest.accepted.sampling_params == whole.accepted.sampling_params
        for output in whole.finished.outputs:
            assert joined(answer, output.output_index) == (output.text, list(output.token_ids), list(output.logprobs))


def joined(answer: StreamedAnswer, index: int) -> tuple[str, list[int], list[float]]:
    """Return what the deltas of an output bring together, over all calls."""
    deltas = answer._deltas.get(index, [])
    return (
        "".join(delta.text for delta in deltas),
        [token_id for delta in deltas for token_id in delta.token_ids],
        [logprob for delta in deltas for logprob in delta.logprobs],
    )


SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}

CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seed of our choice": {"temperature": 1.0},
    "log-probabilities and alternatives": {"logprobs": 2, "prompt_logprobs": 1},
    "three outputs": {**SAMPLED, "n": 3},
    "best of three": {**SAMPLED, "n": 2, "best_of": 3},
    "beams": {"beam_width": 3, "n": 2},
    "penalties and least tokens": {**SAMPLED, "repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 5},
}


@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
async def test_a_call_that_is_cut_anywhere_goes_on_to_the_same_end(params: dict[str, Any]) -> None:
    async with running_stack() as stack:
        await go_on_everywhere(stack, token_request(6, NUM_TOKENS, **params))


async def test_stops_end_it_where_they_would_have() -> None:
    async with running_stack() as stack:
        full = (await run(stack, token_request(6, NUM_TOKENS, n=2, **SAMPLED))).finished.outputs
        text, token_ids = full[1].text, list(full[1].token_ids)
        for params in (
            {"stop": [text[4:8]]},
            {"stop": [text[3:9]], "include_stop_str_in_output": True},
            {"stop_token_ids": [token_ids[4]]},
            {"stop": [text[-3:] + "never"]},  # held back to the end
        ):
            await go_on_everywhere(stack, token_request(6, NUM_TOKENS, n=2, **SAMPLED, **params))


async def test_outputs_that_came_unevenly_go_on_each_behind_its_own() -> None:
    async with running_stack() as stack:
        request = token_request(6, NUM_TOKENS, n=3, **SAMPLED)
        request.include_prompt_token_ids = True
        whole = await run(stack, request)
        for counts in ([0, 0, 5], [NUM_TOKENS, 1, 0], [3, NUM_TOKENS, NUM_TOKENS], [NUM_TOKENS] * 3):
            await until(lambda: not stack.engine.requests)
            again = continued(request, whole.accepted, StreamedAnswer())
            for output, num in zip(whole.finished.outputs, counts, strict=True):
                again.continuation.outputs.add(token_ids=output.token_ids[:num])
            rest = await run(stack, again)
            assert rest.finished.outputs == whole.finished.outputs
            new = [
                sum(len(event.delta.token_ids) for event in rest.events if event.delta.output_index == index)
                for index in range(3)
            ]
            assert new == [NUM_TOKENS - num for num in counts]


async def test_what_a_client_has_is_not_counted_again() -> None:
    async with running_stack() as stack:
        request = token_request(6, NUM_TOKENS)
        request.include_prompt_token_ids = True
        whole = await run(stack, request)
        meter = stack.engine.meter
        before = (meter.num_prompt_tokens, meter.num_output_tokens, meter.time_to_first_token.num_observed)
        assert before == (6, NUM_TOKENS, 1)
        again = continued(request, whole.accepted, StreamedAnswer())
        again.continuation.outputs.add(token_ids=whole.finished.outputs[0].token_ids[:4])
        await run(stack, again)
        after = (meter.num_prompt_tokens, meter.num_output_tokens, meter.time_to_first_token.num_observed)
        assert after == (6, NUM_TOKENS + NUM_TOKENS - 4, 1)
        assert meter.num_output_tokens_of == {"": meter.num_output_tokens}


@pytest.mark.parametrize("tokens", ["plain", "masked"])
async def test_a_log_with_continuations_is_decided_again(tmp_path: Path, tokens: str) -> None:
    async with running_stack(step_log=tmp_path, step_log_tokens=tokens) as stack:
        await go_on_everywhere(stack, token_request(6, NUM_TOKENS, n=2, **SAMPLED))
        await go_on_everywhere(stack, token_request(6, NUM_TOKENS, prompt_logprobs=1, logprobs=0))
    check_replay(tmp_path)


async def test_the_call_that_still_has_the_request_is_told() -> None:
    async with running_stack(FakeWorker(step_ms=5)) as stack:
        request = token_request(6, 50, request_id="mine")
        request.include_prompt_token_ids = True
        first = stack.generation.Generate(request)
        accepted = (await next_event(first)).accepted
        again = continued(request, accepted, StreamedAnswer())
        second = stack.generation.Generate(again)
        assert (await next_event(second)).accepted.request_id == "mine"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            while True:
                await next_event(first)
        assert error.value.code() is grpc.StatusCode.ABORTED
        assert error.value.details() == "another call has taken over this request"
        await refused(stack, again, grpc.StatusCode.ALREADY_EXISTS, "")  # no later attempt
        while not (event := await next_event(second)).HasField("finished"):
            pass
        assert len(event.finished.outputs[0].token_ids) == 50


async def next_event(call: "grpc.aio.UnaryStreamCall[Any, pb.GenerateResponse]") -> pb.GenerateResponse:
    """Return the next event of a call that goes on."""
    event = await call.read()
    assert isinstance(event, pb.GenerateResponse), "it has ended"
    return event


async def refused(stack: Stack, request: pb.GenerateRequest, code: grpc.StatusCode, sentence: str) -> None:
    """Check that a call is refused, and how."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await run(stack, request)
    assert error.value.code() is code
    assert sentence in (error.value.details() or "")


def spoiled(request: pb.GenerateRequest, **of_output: Any) -> pb.GenerateRequest:
    """Return a continuation with other values in its first output."""
    again = pb.GenerateRequest()
    again.CopyFrom(request)
    output = again.continuation.outputs[0]
    for name, value in of_output.items():
        if isinstance(value, list):
            getattr(output, name)[:] = value
        else:
            setattr(output, name, value)
    return again


async def test_what_no_call_can_have_brought_is_refused() -> None:
    async with running_stack() as stack:
        request = token_request(6, NUM_TOKENS, **SAMPLED, stop_token_ids=[5], stop=["QQ"], logprobs=1)
        request.include_prompt_token_ids = True
        whole = await run(stack, request)
        good = continued(request, whole.accepted, cut_behind(whole, 4))
        ids, logprobs = list(good.continuation.outputs[0].token_ids), list(good.continuation.outputs[0].logprobs)
        assert len(ids) > 1
        first = "continuation.outputs[0]"
        bad: list[tuple[pb.GenerateRequest, str]] = [
            (spoiled(good, token_ids=[-1, *ids[1:]]), f"{first}.token_ids is a list with token id -1"),
            (spoiled(good, token_ids=[5, *ids[1:]]), "the output ends with token 5"),
            (spoiled(good, token_ids=[ord("Q")] * 2 + ids[2:]), "the output ends with the stop string 'QQ'"),
            (spoiled(good, token_ids=ids * NUM_TOKENS), f"at most {NUM_TOKENS} tokens long"),
            (spoiled(good, logprobs=logprobs[1:]), f"{first}.logprobs is {len(ids) - 1} elements long"),
            (spoiled(good, alternative_token_ids=[]), f"{first}.alternative_token_ids is 0 elements long"),
            (spoiled(good, num_characters=1000), f"{first}.num_characters is 1000"),
        ]
        for change, sentence in (
            (lambda m: m.ClearField("token_ids"), "prompt is"),
            (lambda m: setattr(m, "text", "as text"), "a text with a continuation"),
            (lambda m: m.continuation.ClearField("attempt"), "continuation.attempt is 0"),
            (lambda m: m.sampling_params.ClearField("seed"), "sampling_params.seed is unset"),
            (lambda m: m.continuation.outputs.add(), "continuation.outputs is 2 outputs"),
            (
                lambda m: m.continuation.prompt_logprobs.logprobs.append(0.0),
                "continuation.prompt_logprobs.logprobs is 1",
            ),
        ):
            again = pb.GenerateRequest()
            again.CopyFrom(good)
            change(again)
            bad.append((again, sentence))
        for message, sentence in bad:
            await refused(stack, message, grpc.StatusCode.INVALID_ARGUMENT, sentence)
        assert (await run(stack, good)).finished.outputs == whole.finished.outputs
