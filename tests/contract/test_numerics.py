"""Executors of several kinds behind one scheduler: what it prefers, and what clients and operators are told."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.admin.v1 import admin_service_pb2 as admin
from octavo.client import Client
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.outputs import Provenance
from tests.support.stack import ExecutorProcess, Stack, collect, running_stack, token_request, until

DIGEST = FakeWorker().info.weights_digest


def worker(numerics_id: str, **options: object) -> FakeWorker:
    """Return a fake executor of a kind whose steps take a moment."""
    return FakeWorker(numerics_id=numerics_id, step_ms=2, **options)  # type: ignore[arg-type]


@asynccontextmanager
async def moved_request(*others: str, **params: object) -> AsyncIterator[tuple[Stack, pb.RequestFinished]]:
    """Lose the executor of the kind "one" while a request runs there, beside executors of these kinds.

    Gives what the request ended with.
    """
    async with running_stack(worker("one"), *map(worker, others), loses_soon=True) as stack:
        first, *rest = stack.executors
        for executor in rest:  # nothing goes there until the first one is lost
            core = stack.driver_of(executor).core
            assert core is not None
            core.takes_groups = False
        request = token_request(20, 120, **params)  # type: ignore[arg-type]
        request.include_provenance = True
        call = asyncio.ensure_future(last_event(stack, request))
        await until(lambda: stack.driver_of(first).num_output_tokens > 10)
        for executor in rest:
            core = stack.driver_of(executor).core
            assert core is not None
            core.takes_groups = True
        await first.kill()
        yield stack, await call


async def last_event(stack: Stack, request: pb.GenerateRequest) -> pb.RequestFinished:
    async for event in stack.generation.Generate(request):
        if event.HasField("finished"):
            return event.finished
    raise AssertionError("it ended without a last event")


async def state_of(stack: Stack) -> admin.GetSchedulerStateResponse:
    return await stack.admin.GetSchedulerState(admin.GetSchedulerStateRequest())


async def model_of(stack: Stack) -> pb.GetModelResponse:
    return await stack.generation.GetModel(pb.GetModelRequest())


async def test_a_moved_request_goes_on_at_an_equal_executor() -> None:
    async with moved_request("two", "one", "two") as (stack, finished):
        [output] = finished.outputs
        spans = [(span.first_token, span.numerics_id, span.weights_digest) for span in output.provenance]
        assert spans == [(0, "one", DIGEST)]
        assert not finished.continued_on_other_numerics
        alike = stack.driver_of(stack.executors[2])
        assert alike.num_output_tokens > 0
        assert (await state_of(stack)).has_mixed_numerics


@pytest.mark.parametrize(
    "params",
    [{}, {"n": 2, "temperature": 1.0, "seed": 7}, {"n": 2, "best_of": 3, "temperature": 1.0, "seed": 7},
     {"beam_width": 2}],
    ids=["one output", "two outputs", "ranked", "beams"],
)  # fmt: skip
async def test_a_request_that_goes_on_at_another_kind_says_where(params: dict[str, object]) -> None:
    async with moved_request("two", **params) as (_, finished):
        assert finished.continued_on_other_numerics
        for output in finished.outputs:
            before, after = output.provenance
            assert (before.first_token, before.numerics_id, after.numerics_id) == (0, "one", "two")
            assert 0 < after.first_token < len(output.token_ids)


async def test_a_request_that_is_not_asked_says_only_that_it_was_continued() -> None:
    async with running_stack(worker("one"), loses_soon=True) as stack:
        call = asyncio.ensure_future(last_event(stack, token_request(20, 120)))
        await until(lambda: stack.driver.num_output_tokens > 10)
        await stack.executor.kill()
        successor = ExecutorProcess(worker("two"), listen=stack.executor.address)
        await until(lambda: stack.driver.core is None)
        await successor.start()
        try:
            finished = await call
        finally:
            await successor.kill()

    assert finished.continued_on_other_numerics
    assert not finished.outputs[0].provenance


async def test_who_was_never_moved_is_of_one_kind() -> None:
    async with running_stack(worker("one")) as stack:
        answer = await collect(stack, token_request(20, 5))
        assert answer.finished is not None
        assert not answer.finished.continued_on_other_numerics
        assert not answer.finished.outputs[0].provenance


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
    assert model.why_not_reproducible == "the executors are of 2 kinds: their numerics ids differ"
    assert list(model.numerics_ids) == ["one", "two"]
    assert len([line for line in caplog.messages if "event=mixed_numerics" in line]) == 1


@pytest.mark.parametrize(
    ("said", "told"), [("", ""), ("torch does it,\nas set", ": torch does it, as set"), ("x" * 999, ": " + "x" * 256)]
)
async def test_an_executor_that_is_not_invariant_is_not_reproducible(said: str, told: str) -> None:
    async with running_stack(worker("one", is_invariant=False, why_not_invariant=said)) as stack:
        model = await model_of(stack)

        assert not model.is_reproducible
        assert model.why_not_reproducible == (
            f"the executor at {stack.executor.address} does not promise outputs that are equal to the bit{told}"
        )


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
