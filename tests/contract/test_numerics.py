"""Executors of several kinds behind one scheduler: what it prefers, and what clients and operators are told."""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.admin.v1 import admin_service_pb2 as admin
from octavo.client import Client
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.generation.v1.generation_pb2 import Provenance as Span
from octavo.values.outputs import Delta, Provenance
from tests.contract.openai.api import running_api
from tests.support.stack import ExecutorProcess, Stack, collect, running_stack, token_request, until

DIGEST = FakeWorker().info.weights_digest


def worker(numerics_id: str, **options: object) -> FakeWorker:
    """Return a fake executor of a kind whose steps take a moment."""
    return FakeWorker(numerics_id=numerics_id, step_ms=2, **options)  # type: ignore[arg-type]


Spans = list[tuple[int, str, str]]


@dataclass
class Told:
    """What a client was told of one request.

    Attributes:
        finished: The last event.
        begun: Of each output, the spans that its deltas named: first token, kind, and the weights.
    """

    finished: pb.RequestFinished = field(default_factory=pb.RequestFinished)
    begun: dict[int, Spans] = field(default_factory=lambda: defaultdict(list))

    def take(self, delta: pb.OutputDelta, num_tokens: int) -> None:
        """Take the spans of a delta behind so many tokens of its output."""
        for span in spans_of(delta.provenance):
            assert num_tokens <= span[0] < num_tokens + len(delta.token_ids), "it begins with one of these tokens"
            self.begun[delta.output_index].append(span)


def spans_of(message: Iterable[Span]) -> Spans:
    return [(span.first_token, span.numerics_id, span.weights_digest) for span in message]


@asynccontextmanager
async def moved_request(
    *others: str, settings: dict[str, Any] | None = None, is_strict: bool = False, **params: Any
) -> AsyncIterator[tuple[Stack, Told]]:
    """Lose the executor of the kind "one" while a request runs there, beside executors of these kinds.

    `is_strict`: it requires one kind. Gives what its client was told.
    """
    async with running_stack(worker("one"), *map(worker, others), loses_soon=True, **(settings or {})) as stack:
        first, *rest = stack.executors
        for executor in rest:  # nothing goes there until the first one is lost
            core = stack.driver_of(executor).planner
            assert core is not None
            core.takes_groups = False
        request = token_request(20, 120, **params)
        request.include_provenance, request.require_same_numerics = True, is_strict
        call = asyncio.ensure_future(told(stack, request))
        await until(lambda: stack.driver_of(first).num_output_tokens > 10)
        for executor in rest:
            core = stack.driver_of(executor).planner
            assert core is not None
            core.takes_groups = True
        await first.kill()
        yield stack, await call


async def told(stack: Stack, request: pb.GenerateRequest) -> Told:
    """Run a request to its last event."""
    answer, counts = Told(), Counter[int]()
    async for event in stack.generation.Generate(request):
        if event.HasField("delta"):
            answer.take(event.delta, counts[event.delta.output_index])
            counts[event.delta.output_index] += len(event.delta.token_ids)
        elif event.HasField("finished"):
            answer.finished = event.finished
            return answer
    raise AssertionError("it ended without a last event")


async def state_of(stack: Stack) -> admin.GetSchedulerStateResponse:
    return await stack.admin.GetSchedulerState(admin.GetSchedulerStateRequest())


async def model_of(stack: Stack) -> pb.GetModelResponse:
    return await stack.generation.GetModel(pb.GetModelRequest())


async def test_a_moved_request_goes_on_at_an_equal_executor() -> None:
    async with moved_request("two", "one", "two") as (stack, answer):
        [output] = answer.finished.outputs
        assert spans_of(output.provenance) == answer.begun[0] == [(0, "one", DIGEST)]
        assert not answer.finished.continued_on_other_numerics
        alike = stack.driver_of(stack.executors[2])
        assert alike.num_output_tokens > 0
        assert (await state_of(stack)).has_mixed_numerics


@pytest.mark.parametrize(
    "params",
    [{}, {"n": 2, "temperature": 1.0, "seed": 7}, {"n": 2, "best_of": 3, "temperature": 1.0, "seed": 7},
     {"beam_width": 2}],
    ids=["one output", "two outputs", "ranked", "beams"],
)  # fmt: skip
async def test_a_request_that_goes_on_at_another_kind_says_where(params: dict[str, Any]) -> None:
    async with moved_request("two", **params) as (_, answer):
        assert answer.finished.continued_on_other_numerics
        for output in answer.finished.outputs:
            assert answer.begun[output.output_index] == spans_of(output.provenance)
            before, after = output.provenance
            assert (before.first_token, before.numerics_id, after.numerics_id) == (0, "one", "two")
            assert 0 < after.first_token < len(output.token_ids)


async def test_a_request_that_is_not_asked_says_only_that_it_was_continued() -> None:
    async with running_stack(worker("one"), loses_soon=True) as stack:
        call = asyncio.ensure_future(told(stack, token_request(20, 120)))
        await until(lambda: stack.driver.num_output_tokens > 10)
        await stack.executor.kill()
        successor = ExecutorProcess(worker("two"), listen=stack.executor.address)
        await until(lambda: stack.driver.planner is None)
        await successor.start()
        try:
            answer = await call
        finally:
            await successor.kill()

    assert answer.finished.continued_on_other_numerics
    assert not answer.finished.outputs[0].provenance
    assert not answer.begun


async def test_who_was_never_moved_is_of_one_kind() -> None:
    async with running_stack(worker("one")) as stack:
        answer = await collect(stack, token_request(20, 5))
        assert answer.finished is not None
        assert not answer.finished.continued_on_other_numerics
        assert not answer.finished.outputs[0].provenance


# One kind only --------------------------------------------------------------------------------------


async def test_who_requires_one_kind_goes_on_at_an_equal_executor() -> None:
    async with moved_request("two", "one", is_strict=True) as (_, answer):
        assert answer.begun[0] == [(0, "one", DIGEST)]
        assert not answer.finished.continued_on_other_numerics


async def test_who_requires_one_kind_ends_where_none_of_it_comes() -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with moved_request("two", is_strict=True, settings={"orphan_timeout_s": 0.2}):
            pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (caught.value.details() or "").startswith(
        f"an executor of numerics one, weights {DIGEST[:12]}… computed its tokens so far, this one is an executor of "
        f"numerics two, weights {DIGEST[:12]}…, and the request requires the same numerics (require_same_numerics); "
        "no such executor was attached within 0.2 s"
    )


def cut_answer(num_tokens: int, numerics_id: str, weights_digest: str = "") -> pb.GenerateRequest:
    """Return a request for the rest of an answer that requires one kind."""
    request = token_request(3, 8, temperature=0.0)
    request.require_same_numerics = True
    request.include_provenance = True
    request.continuation.attempt = 1
    request.continuation.numerics_id, request.continuation.weights_digest = numerics_id, weights_digest
    request.continuation.outputs.add(token_ids=range(40, 40 + num_tokens))
    return request


async def test_a_continuation_goes_on_at_the_kind_that_it_names_or_nowhere() -> None:
    async with running_stack(worker("one"), worker("two"), orphan_timeout_s=0.2) as stack:
        assert (await told(stack, cut_answer(2, "two", DIGEST))).begun == {}, "its client knows it"
        first = await told(stack, cut_answer(0, "three", DIGEST))
        assert [span[0] for span in first.begun[0]] == [0], "there is nothing to agree with"
        for message, code, sentence in (
            (cut_answer(2, "three", DIGEST), grpc.StatusCode.UNAVAILABLE, "an executor of numerics three, "),
            (
                cut_answer(2, "one", "abc"),
                grpc.StatusCode.UNAVAILABLE,
                "the answer was started with different weights (abc…)",
            ),
            (cut_answer(2, ""), grpc.StatusCode.INVALID_ARGUMENT, "continuation.numerics_id is empty; "),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await told(stack, message)
            assert caught.value.code() is code
            assert (caught.value.details() or "").startswith(sentence)


async def test_requests_on_a_stream_name_their_spans_too() -> None:
    async with running_stack(worker("one")) as stack:
        call = stack.generation.StreamRequests()
        for number, asks in enumerate((True, False), 1):
            submitted = token_request(3, 5, first_id=10 * number, n=2, temperature=1.0)
            submitted.include_provenance = asks
            await call.write(pb.StreamRequestsRequest(number=number, submit=submitted))
        await call.done_writing()
        begun = [each async for response in call for each in response.provenance]
    assert {(each.number, each.output_index) for each in begun} == {(1, 0), (1, 1)}
    assert spans_of(each.provenance for each in begun) == [(0, "one", DIGEST)] * 2


async def test_the_client_says_who_began_an_answer_that_it_continues() -> None:
    async with running_stack(worker("one"), worker("two")) as stack, Client(stack.address) as client:
        async with client.request_stream() as stream:
            await stream.submit([40, 41], max_tokens=3, include_provenance=True)
            await stream.close_submissions()
            deltas = [event async for _, event in stream if isinstance(event, Delta)]
            streamed = [span for delta in deltas for span in delta.provenance]
        single = client.stream([40, 41], max_tokens=3, include_provenance=True)
        assert [span async for event in single if isinstance(event, Delta) for span in event.provenance] == streamed
        hidden = client.stream([40, 41], max_tokens=3)
        assert not [event async for event in hidden if isinstance(event, Delta) and event.provenance]


# What clients are told ------------------------------------------------------------------------------


async def test_one_kind_of_invariant_executors_is_reproducible() -> None:
    async with running_stack(worker("one"), worker("one")) as stack:
        model, state = await model_of(stack), await state_of(stack)

        assert (model.is_reproducible, model.why_not_reproducible) == (True, "")
        assert (list(model.numerics_ids), model.weights_digest) == (["one"], DIGEST)
        kinds = {(e.numerics_id, e.is_invariant, e.weights_digest) for e in state.executors}
        assert kinds == {("one", True, DIGEST)}
        assert not state.has_mixed_numerics


async def test_mixed_kinds_are_not_reproducible_and_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with running_stack(worker("one"), worker("two"), worker("two")) as stack:
        model = await model_of(stack)

    assert not model.is_reproducible
    assert model.why_not_reproducible == "the executors have 2 different numerics ids"
    assert list(model.numerics_ids) == ["one", "two"]
    assert len([line for line in caplog.messages if "event=mixed_numerics" in line]) == 1


async def test_a_fleet_whose_caches_have_several_formats_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    caches = [("one", "float32"), ("two", "int8"), ("three", "no format;\n")]
    workers = [worker(kind, kv_cache_dtype=kv_cache_dtype) for kind, kv_cache_dtype in caches]
    async with running_stack(*workers) as stack:
        model, state = await model_of(stack), await state_of(stack)

    said = "the executors have 3 different numerics ids: their KV caches are in unknown formats and float32 and int8"
    assert model.why_not_reproducible == said
    assert [executor.kv_cache_dtype for executor in state.executors] == ["float32", "int8", ""]
    lines = [line for line in caplog.messages if "event=mixed_numerics" in line]
    assert len(lines) == 2
    assert all(" kv_cache_dtype=" in line and " others_kv_cache_dtype=" in line for line in lines)


@pytest.mark.parametrize(
    ("said", "told"), [("", ""), ("torch does it,\nas set", ": torch does it, as set"), ("x" * 999, ": " + "x" * 512)]
)
async def test_an_executor_that_is_not_invariant_is_not_reproducible(said: str, told: str) -> None:
    async with running_api(worker("one", is_invariant=False, why_not_invariant=said)) as api:
        stack = api.stack
        model, [entry] = await model_of(stack), (await api.get("/v1/models")).json["data"]

        assert not model.is_reproducible
        assert model.why_not_reproducible == (f"the executor at {stack.executor.address} is not batch-invariant{told}")
        assert entry["why_not_reproducible"] == model.why_not_reproducible


async def test_what_an_executor_warns_of_is_shown_to_operators() -> None:
    async with running_stack(worker("one", warning="the cache\nis closed")) as stack:
        assert [executor.warning for executor in (await state_of(stack)).executors] == ["the cache is closed"]


async def test_an_executor_of_wire_version_1_is_not_reproducible() -> None:
    async with running_stack(worker("", weights_digest="")) as stack:
        model = await model_of(stack)

        assert not model.is_reproducible
        assert (list(model.numerics_ids), model.weights_digest) == ([], "")


async def test_the_client_has_it_all() -> None:
    async with running_stack(worker("one")) as stack, Client(stack.address) as client:
        model = await client.get_model()
        output = await client.generate([40, 41, 42], max_tokens=3, include_provenance=True)

    assert (model.is_reproducible, model.numerics_ids, model.weights_digest) == (True, ("one",), DIGEST)
    assert output.outputs[0].provenance == (Provenance(0, "one", DIGEST),)
    assert not output.continued_on_other_numerics
