import asyncio
import math
from contextlib import aclosing
from typing import Any

import numpy
import pytest
from google.protobuf.json_format import MessageToDict

from octavo import Client, SamplingParams
from octavo.errors import (
    ClosedError,
    ConnectionOptionsError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NotConnectedError,
    OverloadedError,
    RequestAbortedError,
    RequestExistsError,
    UnavailableError,
)
from octavo.values.outputs import (
    Accepted,
    ChatMessage,
    Delta,
    Finished,
    FinishReason,
    ModelInfo,
    Prompt,
    TokenizedPrompt,
    Usage,
)
from tests.support.each_row import each_row
from tests.unit.octavo.stand_in import WORDS, StandIn


async def test_a_stream_is_accepted_then_deltas_then_finished(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        events = [event async for event in client.stream("Why?")]

    assert events[0] == Accepted("made-by-server", 7)
    assert events[1:-1] == [Delta(0, word, (token_id,), (-0.5,)) for token_id, word in enumerate(WORDS)]
    assert isinstance(events[-1], Finished)


async def test_generate_returns_everything(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        output = await client.generate("Why?", request_id="mine")

    assert (output.request_id, output.prompt) == ("mine", "Why?")
    assert output.usage == Usage(num_prompt_tokens=7, num_output_tokens=4, num_cached_tokens=0)
    [only] = output.outputs
    assert (only.text, only.token_ids, only.logprobs) == ("The sky is blue", (0, 1, 2, 3), (-0.5,) * 4)
    assert (only.finish_reason, only.stopped_by) == (FinishReason.STOP, 3)
    assert (only.cumulative_logprob, only.beam_score) == (None, None)


async def test_a_call_whose_answer_is_whole_is_not_cancelled(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        await client.generate("Why?")
        async for event in client.stream("Why?"):
            if isinstance(event, Finished):
                break
        assert stand_in.num_whole_calls == 2


async def test_several_outputs_are_told_apart_by_their_index(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        events = [event async for event in client.stream("Why?", SamplingParams(n=2))]

    deltas, finished = [event for event in events if isinstance(event, Delta)], events[-1]
    assert [delta.output_index for delta in deltas] == [0, 1] * 4
    assert isinstance(finished, Finished)
    assert [output.output_index for output in finished.outputs] == [0, 1]
    for output in finished.outputs:
        mine = [delta for delta in deltas if delta.output_index == output.output_index]
        assert "".join(delta.text for delta in mine) == output.text
    assert finished.usage == Usage(num_prompt_tokens=7, num_output_tokens=8, num_cached_tokens=2)


async def test_ranked_outputs_say_what_they_were_ranked_by(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        best = await client.generate("Why?", SamplingParams(n=2, best_of=3))
        beams = await client.generate("Why?", SamplingParams(n=2, beam_width=4))

    assert [(output.cumulative_logprob, output.beam_score) for output in best.outputs] == [(-2.0, None), (-3.0, None)]
    assert [(output.cumulative_logprob, output.beam_score) for output in beams.outputs] == [(-2.0, -0.5), (-3.0, -1.5)]


async def test_priority_tenant_and_salt_travel_with_the_request(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        await client.generate(
            "Why?", priority=-2, tenant="red", cache_salt="secret", lora_adapter="poet", speculate=False
        )
        await client.generate("Why?")
    named, plain = stand_in.requests
    assert (named.priority, named.tenant, named.cache_salt, named.speculate) == (-2, "red", "secret", False)
    assert named.lora_adapter == "poet"
    assert {field.name for field, _ in plain.ListFields()} == {
        "text",
        "lean_finished",
        "include_prompt_token_ids",
        "include_provenance",
    }


async def test_the_least_time_between_deltas_travels_with_the_request(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        assert [event async for event in client.stream("a", min_delta_interval_ms=20)]
        assert [event async for event in client.stream_many(["b", "c"], min_delta_interval_ms=30, lora_adapter="a")]
        for wrong in (-1, 0.5, "soon"):
            with pytest.raises(InvalidRequestError, match=r"it must be a whole number from 0 to 10000$"):
                await anext(client.stream("d", min_delta_interval_ms=wrong))  # type: ignore[arg-type]
    assert [request.min_delta_interval_ms for request in stand_in.requests] == [20, 30, 30]
    assert [request.lora_adapter for request in stand_in.requests] == ["", "a", "a"]


@each_row(
    ({"priority": 2**31}, "priority is 2147483648; it must be a whole number from -2^31 to 2^31-1"),
    ({"priority": True}, "priority is True; it must be a whole number from -2^31 to 2^31-1"),
    ({"tenant": 7}, "tenant is 7; it must be a string"),
    ({"speculate": 1}, "speculate is 1; it must be True or False"),
    ({"cache_salt": b"\xff"}, r"cache_salt is b'\xff'; it must be a string"),
    ({"lora_adapter": 7}, "lora_adapter is 7; it must be a string"),
    ({"request_id": 7}, "request_id is 7; it must be a string"),
    ({"timeout_s": "soon"}, "timeout_s is 'soon'; it must be a number of seconds"),
    ({"timeout_s": math.nan}, "timeout_s is nan; it must be a number of seconds"),
)
async def test_an_argument_that_does_not_fit_is_named_before_it_is_sent(
    argument: dict[str, Any], sentence: str, *, stand_in: StandIn
) -> None:
    async with Client(stand_in.address) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await client.generate("Why?", **argument)
    assert (str(caught.value), caught.value.field) == (sentence, next(iter(argument)))
    assert stand_in.requests == []


async def test_sampling_params_are_keywords_too(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        await client.generate("Why?", temperature=0, max_tokens=3)
        events = client.stream("Why?", SamplingParams(temperature=0.5, top_k=2), temperature=0.25)
        assert [event async for event in events]
        with pytest.raises(TypeError, match=r"generate\(\) has no argument 'temprature'; did you mean temperature\?"):
            await client.generate("Why?", temprature=0)
    assert [MessageToDict(request.sampling_params) for request in stand_in.requests] == [
        {"temperature": 0.0, "maxTokens": 3},
        {"temperature": 0.25, "topK": 2},
    ]


@each_row(
    ("localhost", "the address 'localhost' is not HOST:PORT with a port from 1 to 65535"),
    ("http://localhost:50051", "the address 'http://localhost:50051' is not HOST:PORT; leave out http://"),
)
def test_what_is_no_address_is_refused_at_once(address: str, sentence: str) -> None:
    with pytest.raises(ConnectionOptionsError) as caught:
        Client(address)
    assert str(caught.value) == sentence


async def test_each_kind_of_prompt_travels_as_its_own_field(stand_in: StandIn) -> None:
    prompts: list[Prompt] = ["text", [1, 2], [ChatMessage(role="user", content="Hi")], []]
    async with Client(stand_in.address) as client:
        for prompt in prompts:
            await client.generate(prompt, SamplingParams(max_tokens=4))

    text, token_ids, messages, empty = stand_in.requests
    assert text.text == "text"
    assert list(token_ids.token_ids.ids) == [1, 2]
    assert [(turn.role, turn.content) for turn in messages.messages.messages] == [("user", "Hi")]
    assert empty.WhichOneof("prompt") == "token_ids"
    assert text.sampling_params.max_tokens == 4


@each_row([1, "two"], [{"role": "user"}], [2**40], 7)
async def test_a_prompt_of_no_known_kind_is_refused_before_it_is_sent(prompt: Prompt, *, stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await client.generate(prompt)
    assert caught.value.field == "prompt"
    assert stand_in.requests == []


async def test_closing_the_iterator_early_cancels_the_call(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        async with aclosing(client.stream("endless")) as events:
            assert isinstance(await anext(events), Accepted)
        await stand_in.call_ended.wait()


async def test_a_time_limit_of_ages_does_not_end_at_once(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        for timeout_s in (1e18, float("inf")):
            assert (await client.generate("hi", timeout_s=timeout_s)).outputs


async def test_breaking_out_of_the_loop_cancels_the_call(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        async for event in client.stream("endless"):
            if isinstance(event, Delta):
                break
        await stand_in.call_ended.wait()


async def test_cancelling_the_task_cancels_the_call(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        async with aclosing(client.stream("endless")) as events:
            await anext(events)
            task = asyncio.ensure_future(client.generate("endless"))
            while len(stand_in.requests) < 2:
                await anext(events)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await stand_in.call_ended.wait()


async def test_a_bad_field_is_an_invalid_request_with_its_name(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        with pytest.raises(InvalidRequestError, match="top_p is 2; it must be at most 1") as caught:
            await client.generate("refuse")
    assert caught.value.field == "sampling_params.top_p"


async def test_a_full_queue_says_when_to_retry(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        with pytest.raises(OverloadedError, match="queue is full") as caught:
            await client.generate("full")
    assert caught.value.retry_after_s == 2.5


@each_row(
    ("exists", RequestExistsError),
    ("drain", UnavailableError),
    ("aborted", RequestAbortedError),
    ("bug", InternalError),
    ("cut", InternalError),
)
async def test_each_failure_is_one_error_of_the_tree(
    wish: str, expected: type[Exception], *, stand_in: StandIn
) -> None:
    async with Client(stand_in.address, resume_timeout_s=0) as client:
        with pytest.raises(expected) as caught:
            await client.generate(wish)
    assert type(caught.value) is expected


async def test_a_time_limit_ends_the_request(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        with pytest.raises(DeadlineError):
            await client.generate("endless", timeout_s=0.2)
        await stand_in.call_ended.wait()


async def test_nobody_at_the_address_is_said_with_the_address() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(NotConnectedError, match=r"no scheduler is reachable at 127\.0\.0\.1:1"):
            await client.get_model()


async def test_unavailable_without_the_schedulers_word_is_a_lost_connection(stand_in: StandIn) -> None:
    async with Client(stand_in.address, resume_timeout_s=0) as client:
        with pytest.raises(UnavailableError, match="is draining"):
            await client.generate("drain")
        with pytest.raises(UnavailableError) as caught:
            await client.generate("lost")
    assert str(caught.value) == f"the connection to the scheduler at {stand_in.address} was lost"


async def test_abort_tells_whether_the_request_was_live(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        assert [await client.abort("live"), await client.abort("gone")] == [True, False]
    assert stand_in.aborted_ids == ["live", "gone"]


async def test_the_model_is_described(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        described = ModelInfo("tiny", 64, 4, has_chat_template=False, dtype="float32", adapters=("poet",))
        assert await client.get_model() == described


async def test_prompts_become_tokens_and_tokens_text(stand_in: StandIn) -> None:
    async with Client(stand_in.address) as client:
        prompt = await client.tokenize("Hi")
        bare = await client.tokenize("Hi", add_special_tokens=False)
        turns = await client.tokenize([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
        assert prompt == bare == turns == TokenizedPrompt((72, 105), 64)
        array: Any = numpy.array(prompt.token_ids)
        assert await client.detokenize(array) == "Hi"
        assert await client.detokenize([], skip_special_tokens=False) == ""
    asked = [(r.WhichOneof("prompt"), r.HasField("add_special_tokens")) for r in stand_in.tokenize_requests]
    assert asked == [("text", False), ("text", True), ("messages", False)]
    assert [r.HasField("skip_special_tokens") for r in stand_in.detokenize_requests] == [False, True]


async def test_what_is_no_text_or_no_tokens_is_refused_before_it_is_sent(stand_in: StandIn) -> None:
    wrong: Any = ["Hi", 1.5, b"Hi"]
    async with Client(stand_in.address) as client:
        for value in wrong[1:]:
            with pytest.raises(InvalidRequestError, match="prompt is "):
                await client.tokenize(value)
        for value in wrong:
            with pytest.raises(InvalidRequestError, match="token_ids is "):
                await client.detokenize(value)
        with pytest.raises(InvalidRequestError, match="prompt is a list of token ids already"):
            await client.tokenize(wrong[1:1])
        with pytest.raises(InvalidRequestError, match=r"token_ids\[0\] is a str; a token id is a whole number"):
            await client.detokenize(wrong[:1])
        with pytest.raises(InvalidRequestError, match="add_special_tokens is 1; it must be True or False"):
            await client.tokenize("Hi", add_special_tokens=1)  # type: ignore[arg-type]
        with pytest.raises(InternalError, match=r"does not implement this call; give a .* or upgrade that scheduler"):
            await client.tokenize("unknown")
    assert stand_in.detokenize_requests == []


async def test_wait_until_ready_returns_once_readiness_serves(stand_in: StandIn) -> None:
    await stand_in.set_ready(False)
    async with Client(stand_in.address) as client:
        waiting = asyncio.ensure_future(client.wait_until_ready())
        with pytest.raises(DeadlineError, match=r"was not ready within 0\.2 s"):
            await client.wait_until_ready(timeout_s=0.2)
        assert not waiting.done()
        await stand_in.set_ready(True)
        await waiting


async def test_a_closed_client_says_so(stand_in: StandIn) -> None:
    client = Client(stand_in.address)
    async with client:
        await client.get_model()
    await client.close()
    with pytest.raises(ClosedError):
        await client.get_model()
