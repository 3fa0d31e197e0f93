"""Texts to be pooled through both services: beside generation, on executors that are lost, refused by name."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest

from executor_svc.fake.pooling import fake_values
from executor_svc.fake.worker import FakeWorker
from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as admin
from octavo_shared.errors import CallerError, OctavoServiceError, PooledNotFiniteError
from octavo_shared.step_wire.step import PoolingTask, SamplingRow
from scheduler_svc.request.continuation import Continuation
from scheduler_svc.request.engine_client import EngineClient
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.life import EndedRequest, EventKind
from scheduler_svc.request.parameters import StopConditions
from scheduler_svc.telemetry.metrics import scheduler_families
from tests.support.live_requests import RecordingSink
from tests.support.stack import Stack, collect, running_stack, token_request, until

EMBED, SCORE = PoolingTask.EMBED, PoolingTask.SCORE
NAN = 7


@dataclass
class Answered(RecordingSink):
    """A sink that knows when its request has ended."""

    done: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        super().__init__()

    def end(self, ended: EndedRequest, error: OctavoServiceError | None) -> None:
        super().end(ended, error)
        self.done.set()

    def so_far(self) -> Continuation:
        raise AssertionError("a text begins anew")


def text(number: int, length: int = 20, task: PoolingTask = EMBED, types: bytes = b"") -> EngineRequest:
    """Return a text of its own."""
    token_ids = np.array([(40 + number + index) % 200 for index in range(length)], np.int32)
    return EngineRequest(
        f"text {number}", token_ids, SamplingRow(), StopConditions(), pooling=task, token_type_ids=types
    )


async def submit(engine: EngineClient, request: EngineRequest) -> Answered:
    """Submit a text; it may be answered later."""
    sink = Answered()
    with engine.checking(request.request_id, request.tenant) as model:
        pass
    await engine.submit(request, sink, model)
    return sink


async def answer_to(engine: EngineClient, request: EngineRequest) -> Answered:
    """Return what a text is answered with."""
    sink = await submit(engine, request)
    await asyncio.wait_for(sink.done.wait(), 20)
    return sink


def values(request: EngineRequest) -> list[float]:
    """Return what a text has to be answered with."""
    assert request.pooling is not None
    found: list[float] = fake_values(
        request.pooling, request.prompt_token_ids.tolist(), request.token_type_ids
    ).tolist()
    return found


def workers(num: int = 1, **options: object) -> list[FakeWorker]:
    """Return workers that pool."""
    shared = {"has_pooling": True, "max_num_seqs": 16, "max_num_batched_tokens": 64, "nan_token_id": NAN}
    return [FakeWorker(**{**shared, **options}) for _ in range(num)]  # type: ignore[arg-type]


def engine_of(stack: Stack) -> EngineClient:
    """Return the engine as a front has it."""
    return stack.engine if stack.fronts is None else next(iter(stack.fronts.fronts[0].service.cells.values()))


async def test_texts_are_answered_beside_generation_and_share_steps() -> None:
    requests = [
        text(number, 5 + number % 40, SCORE if number % 3 else EMBED, bytes(5 + number % 40)) for number in range(60)
    ]
    async with running_stack(*workers(step_ms=2)) as stack:
        beside = asyncio.create_task(collect(stack, token_request(6, 40)))
        sinks = await asyncio.gather(*(answer_to(stack.engine, request) for request in requests))
        assert [sink.values for sink in sinks] == [values(request) for request in requests]
        assert len((await beside).token_ids) == 40
        ended = sinks[0].ended
        assert ended is not None
        assert (ended.num_output_tokens, ended.outcome) == (0, "stop")
        assert EventKind.ADMITTED in {event.kind for event in ended.events}
        steps = [step for step in stack.driver.recent_steps.last(256) if step.step.pooling_inputs]
        assert max(len(step.step.pooling_inputs) for step in steps) > 1
        counted = {
            (sample.name, *sample.labels.values()): sample.value
            for family in scheduler_families(stack.engine)
            for sample in family.samples
        }
        assert counted["octavo_pooling_requests_total", "embed"] == 20
        assert counted["octavo_pooling_tokens_total",] == sum(len(one.prompt_token_ids) for one in requests)
        assert not len(stack.engine.queue)


@pytest.mark.parametrize("fronts", [0, 1])
async def test_what_no_step_computes_is_refused_with_the_numbers(fronts: int) -> None:
    async with running_stack(*workers(), fronts=fronts) as stack:
        with pytest.raises(CallerError, match="the text has 65 tokens; a step computes it whole, and has 64 "):
            await submit(engine_of(stack), text(0, 65))
        at_most = text(1, 64)
        assert (await answer_to(engine_of(stack), at_most)).values == values(at_most)


async def test_where_none_pools_a_text_is_refused_by_name() -> None:
    async with running_stack() as stack:
        with pytest.raises(CallerError, match="the model gives no vectors; it generates"):
            await submit(stack.engine, text(0))


async def test_an_executor_without_a_cache_pools_and_is_asked_for_nothing_else() -> None:
    [encoder] = workers(is_generative=False, max_model_len=40)
    async with running_stack(encoder) as stack:
        assert stack.engine.load.num_cache_tokens == 0
        answers = await asyncio.gather(*(answer_to(stack.engine, text(number)) for number in range(9)))
        assert [sink.values for sink in answers] == [values(text(number)) for number in range(9)]
        plain = EngineRequest("plain", np.array([40, 41], np.int32), SamplingRow(), StopConditions(4))
        with pytest.raises(CallerError, match="the model generates nothing; it gives vectors and scores"):
            await submit(stack.engine, plain)
        with pytest.raises(CallerError, match=r"the text has 41 tokens; the model takes 40 \(max_model_len\)"):
            await submit(stack.engine, text(0, 41))
        state = await stack.admin.GetSchedulerState(admin.GetSchedulerStateRequest())
        assert state.executors[0].num_blocks == 0


async def test_numbers_that_are_not_finite_end_one_text_with_a_sentence() -> None:
    bad = EngineRequest("bad", np.array([40, NAN], np.int32), SamplingRow(), StopConditions(), pooling=EMBED)
    async with running_stack(*workers()) as stack:
        found, beside = await asyncio.gather(answer_to(stack.engine, bad), answer_to(stack.engine, text(1)))
        assert isinstance(found.error, PooledNotFiniteError)
        assert str(found.error) == "the model's numbers are not finite in the vector of the text (NaN or infinity)"
        assert (found.values, beside.values) == (None, values(text(1)))
        assert stack.driver.num_losses == 0


async def test_texts_of_a_lost_executor_are_computed_again_elsewhere_and_answered_once() -> None:
    requests = [text(number) for number in range(30)]
    async with running_stack(*workers(2, step_ms=20), loses_soon=True) as stack:
        sinks = await asyncio.gather(*(submit(stack.engine, request) for request in requests))
        lost = stack.executor
        await until(lambda: stack.num_groups_on(lost))
        await lost.kill()
        await asyncio.wait_for(asyncio.gather(*(sink.done.wait() for sink in sinks)), 20)
        assert [sink.values for sink in sinks] == [values(request) for request in requests]
        assert sum(sink.ended.num_losses for sink in sinks if sink.ended is not None) > 0


async def test_a_text_waits_in_words_and_numbers_while_its_executor_is_gone() -> None:
    async with running_stack(*workers(step_ms=30)) as stack:
        sinks = [await submit(stack.engine, text(number, 60)) for number in range(4)]
        explained = await stack.admin.ExplainRequest(admin.ExplainRequestRequest(request_id="text 3"))
        assert explained.status == admin_pb2.REQUEST_STATUS_WAITING
        assert "waits" in explained.explanation
        await until(lambda: stack.num_groups_on(stack.executor))
        running = next(group.request_id for group in stack.driver.planner.batch.running)  # type: ignore[union-attr]
        explained = await stack.admin.ExplainRequest(admin.ExplainRequestRequest(request_id=running))
        assert explained.explanation.endswith("a step computes all its 60 tokens")
        await stack.engine.abort_request("text 3", None)
        await asyncio.gather(*(sink.done.wait() for sink in sinks))
        assert [sink.values is None for sink in sinks] == [False, False, False, True]


async def test_beside_streams_no_gap_grows_by_more_than_a_step() -> None:
    async with running_stack(*workers(max_num_batched_tokens=40, max_model_len=400, step_ms=1)) as stack:
        async with stack.together(10):
            streams = asyncio.gather(*(collect(stack, token_request(4, 60, first_id=number)) for number in range(10)))
        await until(lambda: len(stack.driver.planner.batch.running) == 10)  # type: ignore[union-attr]
        requests = [text(number, 1 + 13 * number % 40) for number in range(40)]
        sinks = await asyncio.gather(*(answer_to(stack.engine, request) for request in requests))
        assert [sink.values for sink in sinks] == [values(request) for request in requests]
        await streams
        decodes = [step.layout.num_decodes > 0 for step in stack.driver.recent_steps.last(256)]
        first, last = decodes.index(True), len(decodes) - decodes[::-1].index(True)
        pairs = list(zip(decodes[first:last], decodes[first + 1 : last], strict=False))
        assert (False, False) not in pairs, "two steps in a row are without decodes"
