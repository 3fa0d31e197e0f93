"""The trace of a request in one process: who is whose child, which time is whose, what is said and what is not."""

import asyncio
import logging

import aiohttp
import pytest

from executor_svc.fake.worker import FakeWorker
from executor_svc.service.traced_worker import TracedWorker
from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.step_wire.step import Step
from tests.support.stack import token_request, until
from tests.tracing.conftest import Recorder, TracedStack, executed, run
from tests.tracing.spans import (
    CALLER_SPAN_ID,
    CALLER_TRACE_ID,
    NOT_SAMPLED,
    SAMPLED,
    names,
    one,
)

SECRET = "the walrus sings at noon"


async def test_a_request_is_a_child_of_its_caller_and_its_phases_fill_it(
    recorder: Recorder, traced_stack: TracedStack
) -> None:
    async with traced_stack() as stack:
        await run(stack, token_request(30, 8, request_id="r", temperature=0.5, seed=1, top_p=0.75), SAMPLED)
        await executed(recorder)

    trace = recorder.trace("r")
    assert (trace.request.trace_id, trace.request.parent_id) == (CALLER_TRACE_ID, CALLER_SPAN_ID)
    assert names(trace) == ["tokenize", "queue", "prefill", "decode"]
    [execution] = trace.executions
    prefill = trace.phases[2]
    assert prefill.begin_ns < execution.begin_ns < prefill.end_ns
    assert trace.request.name == "text_completion fake"
    first_chunk_s = trace.request.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert first_chunk_s == pytest.approx((prefill.end_ns - trace.request.begin_ns) * 1e-9, abs=1e-6)
    assert trace.request.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "octavo.request_id": "r",
        "octavo.tenant": "",
        "octavo.num_preemptions": 0,
        "octavo.num_losses": 0,
    }
    assert not trace.request.is_error


async def test_a_chat_and_its_outputs_are_named_as_such(recorder: Recorder, traced_stack: TracedStack) -> None:
    request = pb.GenerateRequest(
        request_id="r",
        tenant="alice",
        messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=SECRET)]),
        sampling_params=generation_pb2.SamplingParams(max_tokens=3, temperature=1.0, n=2),
    )
    async with traced_stack() as stack:
        await run(stack, request)

    span = recorder.trace("r").request
    assert span.name == "chat fake"
    assert span.parent_id == ""
    assert span.attributes["octavo.tenant"] == "alice"
    assert span.attributes["gen_ai.request.choice.count"] == 2
    assert span.attributes["gen_ai.response.finish_reasons"] == ("length", "length")


async def test_a_request_over_http_is_a_child_of_its_caller_too(recorder: Recorder, traced_stack: TracedStack) -> None:
    async with (
        traced_stack(openai_listen="127.0.0.1:0") as stack,
        aiohttp.ClientSession(f"http://{stack.service.other_addresses['openai']}") as session,
        session.post(
            "/v1/completions",
            json={"model": "fake", "prompt": SECRET, "request_id": "r", "max_tokens": 2},
            headers={"traceparent": SAMPLED},
        ) as response,
    ):
        assert response.status == 200

    span = recorder.trace("cmpl-r").request
    assert (span.trace_id, span.parent_id) == (CALLER_TRACE_ID, CALLER_SPAN_ID)
    assert span.name == "text_completion fake"


async def test_a_call_for_vectors_is_one_span_however_many_inputs_it_has(
    recorder: Recorder, traced_stack: TracedStack
) -> None:
    worker = recorder.worker(FakeWorker(has_pooling=True))
    async with (
        traced_stack(worker, openai_listen="127.0.0.1:0") as stack,
        aiohttp.ClientSession(f"http://{stack.service.other_addresses['openai']}") as session,
    ):
        body = {"model": "fake", "input": [SECRET, SECRET], "request_id": "r"}
        async with session.post("/v1/embeddings", json=body, headers={"traceparent": SAMPLED}) as response:
            assert response.status == 200
        async with session.post("/v1/embeddings", json=body | {"dimensions": 3}) as response:
            assert response.status == 400
    [span, refused] = [span for span in recorder.spans if span.name.startswith("embeddings")]
    assert (span.trace_id, span.parent_id) == (CALLER_TRACE_ID, CALLER_SPAN_ID)
    assert (span.name, span.is_error) == ("embeddings fake", False)
    assert span.attributes["octavo.request_id"] == "embd-r"
    assert (span.attributes["octavo.num_inputs"], span.attributes["gen_ai.usage.input_tokens"]) == (2, 2 * len(SECRET))
    assert refused.is_error


async def test_a_request_of_one_token_has_no_decode(recorder: Recorder, traced_stack: TracedStack) -> None:
    async with traced_stack() as stack:
        await run(stack, token_request(30, 1, request_id="r"))

    assert names(recorder.trace("r")) == ["tokenize", "queue", "prefill"]


@pytest.mark.parametrize(
    "traceparent", ["", "00-1-2-01", f"00-{'0' * 32}-{CALLER_SPAN_ID}-01", f"ff-{CALLER_TRACE_ID}-{CALLER_SPAN_ID}-01"]
)
async def test_a_malformed_traceparent_counts_as_none(
    recorder: Recorder, traced_stack: TracedStack, traceparent: str
) -> None:
    async with traced_stack() as stack:
        await run(stack, token_request(30, 2, request_id="r"), traceparent)

    span = recorder.trace("r").request
    assert span.parent_id == ""
    assert span.trace_id not in ("0" * 32, CALLER_TRACE_ID)


class WatchedWorker(FakeWorker):
    """A fake executor that remembers the traceparents of its admissions."""

    def __init__(self) -> None:
        super().__init__()
        self.traceparents: list[str | None] = []

    def execute(self, step: Step):  # type: ignore[no-untyped-def]  # as the base says
        self.traceparents += [admission.traceparent for admission in step.delta.admissions]
        return super().execute(step)


async def test_what_the_caller_does_not_sample_is_recorded_nowhere(
    recorder: Recorder, traced_stack: TracedStack
) -> None:
    watched = WatchedWorker()
    async with traced_stack(recorder.worker(watched)) as stack:
        await run(stack, token_request(30, 2, request_id="quiet"), NOT_SAMPLED)
        await run(stack, token_request(30, 2, request_id="loud", first_id=5), SAMPLED)

    span = recorder.trace("loud").request
    assert watched.traceparents == [None, f"00-{CALLER_TRACE_ID}-{span.span_id}-01"]
    assert {span.attributes.get("octavo.request_id") for span in recorder.spans} == {None, "loud"}


async def test_a_preempted_request_is_executed_several_times_by_its_trace(
    recorder: Recorder, traced_stack: TracedStack
) -> None:
    workers = FakeWorker(num_device_blocks=40, max_model_len=512)  # too few blocks for all
    async with traced_stack(recorder.worker(workers)) as stack:
        requests = [token_request(100, 150, first_id=first, request_id=f"r{first}") for first in range(1, 6)]
        await asyncio.gather(*(run(stack, request) for request in requests))
        num_preemptions = sum(stack.engine.fleet.num_preemptions.values())
        await executed(recorder, len(requests) + num_preemptions)

    assert num_preemptions > 0
    traces = [recorder.trace(request.request_id) for request in requests]
    assert sum(trace.request.attributes["octavo.num_preemptions"] for trace in traces) == num_preemptions
    for trace in traces:
        assert len(trace.executions) == 1 + trace.request.attributes["octavo.num_preemptions"]
        for earlier, later in zip(trace.executions, trace.executions[1:], strict=False):
            assert earlier.end_ns <= later.begin_ns


async def test_a_request_that_lost_its_executor_says_so_and_has_spans_of_both(
    recorder: Recorder, traced_stack: TracedStack
) -> None:
    first, second = recorder.worker(FakeWorker(step_ms=1)), recorder.worker(FakeWorker(step_ms=1))
    async with traced_stack(first) as stack:
        call = asyncio.create_task(run(stack, token_request(30, 100, request_id="r")))
        await until(lambda: any(request.num_output_tokens > 3 for request in stack.engine.requests.values()))
        await stack.executor.kill()
        first.end_all("the executor shut down")
        stack.executor.worker = second
        await stack.executor.start()
        await call
        await executed(recorder, 2)

    trace = recorder.trace("r")
    assert trace.request.attributes["octavo.num_losses"] == 1
    assert trace.request.event_names == ("admitted", "executor_lost", "admitted")
    assert not trace.request.is_error
    instance_ids = [span.attributes["octavo.instance_id"] for span in trace.executions]
    assert instance_ids == [first.info.instance_id, second.info.instance_id]
    lost, other = trace.executions
    assert (lost.is_error, lost.description, other.is_error) == (True, "the executor shut down", False)
    assert other.attributes["octavo.num_known_tokens"] > 30


async def test_no_span_has_a_word_of_prompt_or_output(recorder: Recorder, traced_stack: TracedStack) -> None:
    request = pb.GenerateRequest(
        request_id="r",
        text=SECRET,
        sampling_params=generation_pb2.SamplingParams(
            max_tokens=40, stop=["walrus", "zz"], banned_words=["noon"], temperature=1.0, seed=3
        ),
    )
    async with traced_stack() as stack:
        output = [event async for event in stack.generation.Generate(request)][-1].finished.outputs[0]
        await executed(recorder)

    assert len(output.text) > 5
    trace = recorder.trace("r")
    for span in (trace.request, *trace.phases, *trace.executions):
        for secret in ("walrus", "noon", "zz", output.text, str(output.token_ids)):
            assert secret not in span.all_text


@pytest.mark.parametrize("traceparent", [SAMPLED, NOT_SAMPLED])
async def test_the_log_line_of_a_request_names_its_trace(
    traced_stack: TracedStack, caplog: pytest.LogCaptureFixture, traceparent: str
) -> None:
    caplog.set_level(logging.INFO)
    async with traced_stack() as stack:
        await run(stack, token_request(3, 1, request_id="r"), traceparent)

    [line] = [record.getMessage() for record in caplog.records if "event=request_ended" in record.getMessage()]
    assert f"trace_id={CALLER_TRACE_ID}" in line


async def test_the_callers_tracestate_is_kept(recorder: Recorder, traced_stack: TracedStack) -> None:
    metadata = (("traceparent", SAMPLED), ("tracestate", "a=1"), ("tracestate", "b=2"))
    async with traced_stack() as stack:
        async for _ in stack.generation.Generate(token_request(3, 1, request_id="r"), metadata=metadata):
            pass

    span = one(recorder.spans, lambda span: span.attributes.get("octavo.request_id") == "r")
    finished = [entry for entry in recorder.exporter.get_finished_spans() if entry.name == span.name]
    assert finished[0].context is not None
    assert dict(finished[0].context.trace_state) == {"a": "1", "b": "2"}


def test_a_traced_worker_is_a_worker(recorder: Recorder) -> None:
    worker = FakeWorker()
    traced = TracedWorker(worker, recorder.tracing.tracer)

    assert (traced.info, traced.table) == (worker.info, worker.table)
    assert traced.tokenizer_files() == worker.tokenizer_files()
