"""What callers of the Python client have of a request beside its tokens, at its end and when it fails."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo import Client
from octavo.errors import DeadlineError, OctavoError, RequestAbortedError
from octavo.values.outputs import Delta, FailedRequest, Finished, FinishReason, RequestOutput
from tests.support.stack import Stack, running_stack, until

PROMPT = "Twelve words"
IDS = tuple(PROMPT.encode())


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(FakeWorker(step_ms=1)) as running:
        yield running


@pytest.mark.parametrize("prompt", [PROMPT, list(IDS)], ids=["text", "token ids"])
@pytest.mark.parametrize("resume_timeout_s", [0, 30])
async def test_an_answer_has_the_tokens_of_its_prompt_and_those_of_their_log_probabilities(
    prompt: str | list[int], resume_timeout_s: float, stack: Stack
) -> None:
    async with Client(stack.address, resume_timeout_s=resume_timeout_s) as client:
        alone = await client.generate(prompt, max_tokens=2, prompt_logprobs=1)
        whole = [alone]
        async with aclosing(client.stream_many([prompt] * 2, max_tokens=2, prompt_logprobs=1)) as events:
            seen = [event async for _, event in events]
    assert [
        event.prompt_logprobs.token_ids for event in seen if isinstance(event, Finished) and event.prompt_logprobs
    ] == [IDS[1:]] * 2
    for output in whole:
        assert output.prompt_token_ids == IDS
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs.token_ids == IDS[1:]
        assert len(output.prompt_logprobs.logprobs) == len(IDS) - 1


async def _aborted(client: Client, stack: Stack) -> RequestOutput | FailedRequest:
    running = asyncio.create_task(client.generate(PROMPT, request_id="mine", max_tokens=100_000, ignore_eos=True))
    await until(lambda: any(request.num_output_tokens >= 10 for request in stack.engine.requests.values()))
    assert await client.abort("mine")
    return await running


async def _late(client: Client, stack: Stack) -> RequestOutput | FailedRequest:
    return await client.generate(PROMPT, max_tokens=100_000, timeout_s=1.0)


async def _aborted_among_many(client: Client, stack: Stack) -> RequestOutput | FailedRequest:
    async with client.request_stream() as stream:
        number = await stream.submit(PROMPT, max_tokens=100_000, ignore_eos=True)
        async for _, event in stream:
            if isinstance(event, Delta) and event.text:
                await stream.abort(number)
            elif isinstance(event, FailedRequest):
                raise event.error
    raise AssertionError("it has a last event")


@pytest.mark.parametrize(
    ("run", "error"),
    [(_aborted, RequestAbortedError), (_late, DeadlineError), (_aborted_among_many, RequestAbortedError)],
)
async def test_an_answer_that_breaks_off_raises_with_what_had_come(
    run: Callable[[Client, Stack], Awaitable[RequestOutput | FailedRequest]], error: type[OctavoError], stack: Stack
) -> None:
    async with Client(stack.address) as client:
        with pytest.raises(error) as raised:
            await run(client, stack)
        [output] = raised.value.outputs
        again = await client.generate(PROMPT, max_tokens=len(output.token_ids), ignore_eos=True, temperature=1.0)
    assert output.finish_reason is FinishReason.ABORT
    assert len(output.token_ids) == len(again.outputs[0].token_ids) > 0
    assert output.text


async def test_a_failure_before_the_first_token_has_no_outputs(stack: Stack) -> None:
    async with Client(stack.address) as client:
        with pytest.raises(OctavoError) as raised:
            await client.generate(PROMPT, temperature=-1)
    assert raised.value.outputs == ()
