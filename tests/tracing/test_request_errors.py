"""What a refused or an aborted request leaves: a span with the reason, and not a word of its prompt."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from tests.support.stack import Stack, token_request, until
from tests.tracing.conftest import Recorder, TracedStack, executed, run
from tests.tracing.spans import CALLER_SPAN_ID, CALLER_TRACE_ID, SAMPLED, names

SECRET = "the walrus sings at noon"


REFUSED: dict[str, tuple[pb.GenerateRequest, str, str]] = {
    "field": (
        pb.GenerateRequest(request_id="r", text=SECRET, sampling_params=generation_pb2.SamplingParams(stop=[""])),
        "INVALID_ARGUMENT",
        "sampling_params.stop is invalid",
    ),
    "prompt": (pb.GenerateRequest(request_id="r"), "INVALID_ARGUMENT", "prompt is invalid"),
    "long": (pb.GenerateRequest(request_id="r", text=SECRET * 1000), "INVALID_ARGUMENT", "text is invalid"),
    "cache": (token_request(30, 100, request_id="r", beam_width=16), "RESOURCE_EXHAUSTED", "the request needs"),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_refused_request_is_a_span_with_an_error(
    recorder: Recorder, traced_stack: TracedStack, kind: str
) -> None:
    request, error_type, description = REFUSED[kind]
    async with traced_stack(recorder.worker(FakeWorker(num_device_blocks=10, max_model_len=128))) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await run(stack, request, SAMPLED)

    assert error.value.code().name == error_type
    [span] = recorder.spans
    assert (span.trace_id, span.parent_id) == (CALLER_TRACE_ID, CALLER_SPAN_ID)
    assert (span.is_error, span.attributes["error.type"]) == (True, error_type)
    assert span.description.startswith(description)
    assert SECRET not in span.all_text


async def test_a_request_that_no_executor_takes_is_refused_with_a_span(
    recorder: Recorder, traced_stack: TracedStack
) -> None:
    async with traced_stack() as stack:
        await stack.engine.start_draining()
        with pytest.raises(grpc.aio.AioRpcError):
            await run(stack, token_request(30, 2, request_id="r"))

    [span] = recorder.spans
    assert (span.name, span.attributes["error.type"]) == ("text_completion", "UNAVAILABLE")
    assert span.description == "the scheduler is draining; retry with another scheduler"


async def abort_by_id(stack: Stack, call: Awaitable[None]) -> None:
    await stack.generation.Abort(pb.AbortRequest(request_id="r"))
    with pytest.raises(grpc.aio.AioRpcError, match="was aborted"):
        await call


async def abort_by_cancelling(stack: Stack, call: "asyncio.Task[None]") -> None:
    call.cancel()
    await asyncio.wait([call])


@pytest.mark.parametrize("abort", [abort_by_id, abort_by_cancelling])
async def test_an_aborted_request_ends_its_spans_at_once(
    recorder: Recorder,
    traced_stack: TracedStack,
    abort: Callable[[Stack, "asyncio.Task[None]"], Awaitable[None]],
) -> None:
    async with traced_stack(recorder.worker(FakeWorker(step_ms=1))) as stack:
        call = asyncio.create_task(run(stack, token_request(30, 2000, request_id="r")))
        await until(lambda: any(request.num_output_tokens for request in stack.engine.requests.values()))
        await abort(stack, call)
        await stack.engine.requests.wait_until_all_ended()
        await executed(recorder)

    trace = recorder.trace("r")
    assert (trace.request.is_error, trace.request.attributes["error.type"]) == (True, "ABORTED")
    assert "gen_ai.response.finish_reasons" not in trace.request.attributes
    assert names(trace)[-1] == "decode"
    [execution] = trace.executions
    assert not execution.is_error
