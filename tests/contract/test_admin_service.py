"""What an operator sees over gRPC, while the executor stands still in the middle of its work.

The executor does a step only when the test lets it, one at a time, so that all that is shown can be
compared with what is: to the block.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.admin.v1 import admin_pb2, admin_service_pb2_grpc
from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.generation.v1.generation_service_pb2 import GenerateRequest
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from tests.support.stack import ExecutorProcess, Stack, running_stack, token_request, until


class Turnstile:
    """Stands for the time that a step takes: each one waits in it until it is let through."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._is_open = False

    def sleep(self, _seconds: float) -> None:
        """Wait; on the executor's thread."""
        if not self._is_open:
            self._permits.acquire()

    def let_one_through(self) -> None:
        """Let one step go on, this one or the next."""
        self._permits.release()

    def open(self) -> None:
        """Let all go on, now and later."""
        self._is_open = True
        self._permits.release()


@dataclass(slots=True)
class StillStack:
    """A stack whose executor does a step at a time, and the calls that run on it."""

    stack: Stack
    turnstile: Turnstile

    @property
    def admin(self) -> "admin_service_pb2_grpc.AdminServiceAsyncStub":
        """The service under test."""
        return self.stack.admin

    @property
    def core(self) -> ExecutorPlanner:
        """The core of the executor."""
        core = self.stack.driver.planner
        assert core is not None
        return core

    async def step_until(self, is_reached: Callable[[ExecutorPlanner], bool]) -> None:
        """Let steps through until `is_reached`; then a step is in flight."""
        core = self.core
        while not is_reached(core):
            num_processed = core.last_processed_step_id
            self.turnstile.let_one_through()
            while core.last_processed_step_id == num_processed or not core.in_flight:
                await asyncio.sleep(0)

    async def explain(self, request_id: str) -> pb.ExplainRequestResponse:
        """Return why a request waits."""
        return await self.admin.ExplainRequest(pb.ExplainRequestRequest(request_id=request_id))

    async def request(self, request_id: str) -> admin_pb2.RequestState:
        """Return a live request."""
        return (await self.admin.GetRequest(pb.GetRequestRequest(request_id=request_id))).request


@asynccontextmanager
async def still_stack(*requests: GenerateRequest, **settings: object) -> AsyncIterator[StillStack]:
    """Run a stack of 16 blocks of 16 tokens, with `requests` accepted in this order."""
    turnstile = Turnstile()
    worker = FakeWorker(num_device_blocks=16, num_host_blocks=24, max_model_len=256, sleep=turnstile.sleep)
    async with running_stack(worker, **{"steps_in_flight": 1, **settings}) as stack:  # type: ignore[arg-type]
        calls = []
        try:
            for request in requests:
                calls.append(stack.generation.Generate(request))
                await calls[-1].read()
            yield StillStack(stack, turnstile)
        finally:
            turnstile.open()
            for call in calls:
                call.cancel()


async def refusal(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


# Why a request waits -----------------------------------------------------------------------------


async def test_a_request_that_waits_for_blocks_is_explained_with_the_true_numbers() -> None:
    head = token_request(190, 10, request_id="head", first_id=9)
    last = token_request(20, 10, request_id="last", first_id=19)
    async with still_stack(token_request(100, 100, request_id="runs"), head, last) as still:
        await still.step_until(lambda core: bool(core.batch.running))
        address = still.stack.executor.address
        # 7 of the 16 blocks are used; 1 is kept for the request that runs.
        explained = await still.explain("head")
        assert explained.status == admin_pb2.REQUEST_STATUS_WAITING
        assert explained.explanation == f"waits: next in the queue; on {address}, needs 12 blocks, 8 free"
        (fit,) = explained.executors
        assert (fit.executor, fit.num_needed_blocks, fit.num_free_blocks) == (address, 12, 8)
        behind = await still.explain("last")
        assert behind.num_requests_ahead == 1
        assert behind.explanation == (
            f"waits: 1 request ahead; on {address}, will fit once the requests ahead of it are admitted"
        )
        running = await still.explain("runs")
        assert running.status == admin_pb2.REQUEST_STATUS_RUNNING
        assert running.explanation.startswith(f"runs on {address}: ")


async def test_a_request_without_an_executor_is_told_why() -> None:
    async with still_stack(token_request(100, 100, request_id="lost"), loses_soon=True) as still:
        await still.step_until(lambda core: bool(core.batch.running))
        await still.stack.executor.kill()
        still.turnstile.open()
        await until(lambda: not still.stack.engine.fleet.planners)
        explained = await still.explain("lost")
        assert explained.explanation.startswith("waits to resume: next in the queue; no executor is attached (")
        assert not explained.executors
        await still.stack.executor.start()


async def test_nobody_is_explained_who_is_not_there() -> None:
    async with still_stack() as still:
        error = await refusal(still.admin.ExplainRequest(pb.ExplainRequestRequest(request_id="nobody")))
        assert error.code() is grpc.StatusCode.NOT_FOUND


# The queue ---------------------------------------------------------------------------------------


async def test_pages_of_the_queue_are_in_the_order_of_admission() -> None:
    waiting = [token_request(190, 10, request_id=f"w{i}", first_id=10 * i) for i in range(1, 6)]
    for i, request in enumerate(waiting):
        request.priority, request.tenant = -i, f"tenant-{i}"
    async with still_stack(token_request(100, 100, request_id="runs"), *waiting, policy="priority") as still:
        await still.step_until(lambda core: bool(core.batch.running))
        queued: list[admin_pb2.QueuedRequest] = []
        token = ""
        while True:
            page = await still.admin.ListQueue(pb.ListQueueRequest(page_size=2, page_token=token))
            assert len(page.requests) <= 2
            queued += page.requests
            token = page.next_page_token
            if not token:
                break
        assert [request.request_id for request in queued] == ["w5", "w4", "w3", "w2", "w1"]
        assert [request.num_requests_ahead for request in queued] == [0, 1, 2, 3, 4]
        assert [request.priority for request in queued] == [-4, -3, -2, -1, 0]
        assert [request.tenant for request in queued] == [f"tenant-{i}" for i in (4, 3, 2, 1, 0)]
        assert queued[0].reason.endswith("needs 12 blocks, 8 free")
        assert {request.reason for request in queued[1:]} == {"queued behind 'w5'"}
        for wrong in ("x", "-1", "9" * 19):
            error = await refusal(still.admin.ListQueue(pb.ListQueueRequest(page_token=wrong)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = await refusal(still.admin.ListQueue(pb.ListQueueRequest(page_size=1001)))
        assert "from 0 to 1000" in (error.details() or "")
        beyond = await still.admin.ListQueue(pb.ListQueueRequest(page_token="9" * 18))
        assert not beyond.requests


# Requests ----------------------------------------------------------------------------------------


async def test_a_swapped_request_is_shown_in_the_host_pool() -> None:
    stays = token_request(100, 150, request_id="stays")
    goes = token_request(90, 100, request_id="goes", first_id=3)
    async with still_stack(stays, goes, preemption_mode="swap") as still:
        await still.step_until(lambda core: len(core.swapped) > 0)
        shown = await still.request("goes")
        assert shown.status == admin_pb2.REQUEST_STATUS_SWAPPED
        assert shown.num_preemptions == 1
        (sequence,) = shown.sequences
        assert sequence.status == admin_pb2.SEQUENCE_STATUS_SWAPPED
        assert not sequence.HasField("slot")
        assert list(sequence.block_table) == [-1] * len(sequence.host_block_table)
        assert len(sequence.host_block_table) * 16 >= sequence.num_computed_tokens > 90
        state = await still.admin.GetSchedulerState(pb.GetSchedulerStateRequest())
        assert (state.num_running_requests, state.num_swapped_requests, state.num_waiting_requests) == (1, 1, 0)
        assert state.num_used_host_blocks == len(sequence.host_block_table)
        assert state.num_host_blocks == state.num_used_host_blocks + state.num_free_host_blocks == 24
        assert state.num_blocks == state.num_used_blocks + state.num_free_blocks == 16
        assert (state.num_swap_preemptions, state.num_recompute_preemptions, state.num_preemptions) == (1, 0, 1)
        explained = await still.explain("goes")
        (fit,) = explained.executors
        assert fit.num_needed_blocks > fit.num_free_blocks
        expected = f"needs {fit.num_needed_blocks} blocks, {fit.num_free_blocks} free"
        assert explained.explanation == f"swapped out of {still.stack.executor.address}: {expected}"


async def test_a_beam_search_is_shown_with_its_beams_and_scores() -> None:
    search = token_request(40, 100, request_id="search", beam_width=3, n=2)
    async with still_stack(search) as still:
        await still.step_until(lambda core: core.last_processed_step_id >= 5)
        shown = await still.request("search")
        group = still.stack.engine.requests["", "search"].group
        assert group.beams is not None
        assert (shown.beam_search.beam_width, shown.beam_search.num_outputs) == (3, 2)
        assert list(shown.beam_search.live_scores) == pytest.approx([beam.score for beam in group.beams.live])
        assert [beam.output_index for beam in shown.sequences] == [0, 1, 2]
        assert {beam.num_tokens for beam in shown.sequences} == {45}
        assert len({beam.slot for beam in shown.sequences}) == 3
        assert shown.num_output_tokens == 15
        assert "beam search of width 3" in (await still.explain("search")).explanation


async def test_outputs_of_a_request_are_listed_with_their_tenant_and_cached_tokens() -> None:
    several = token_request(40, 100, request_id="several", n=3, temperature=1.0)
    several.tenant = "red"
    async with still_stack(several) as still:
        await still.step_until(lambda core: core.last_processed_step_id >= 3)
        (listed,) = (await still.admin.ListRequests(pb.ListRequestsRequest())).requests
        assert (listed.request_id, listed.tenant, listed.num_output_tokens) == ("several", "red", 9)
        assert listed.executor == still.stack.executor.address
        assert [sequence.output_index for sequence in listed.sequences] == [0, 1, 2]
        assert all(sequence.num_tokens == 43 for sequence in listed.sequences)
        assert not any(sequence.block_table for sequence in listed.sequences)


# Steps -------------------------------------------------------------------------------------------


async def test_the_last_steps_are_listed_a_line_each() -> None:
    async with still_stack(token_request(40, 100, n=2, temperature=1.0)) as still:
        await still.step_until(lambda core: core.last_processed_step_id >= 3)
        steps = await still.admin.ListSteps(pb.ListStepsRequest())
        assert (steps.executor, steps.epoch) == (still.stack.executor.address, 1)
        assert [(step.step_id, step.text) for step in steps.steps] == [
            (
                1,
                "1 prefill chunk of 40 tokens, 1 admission with 0 of 40 tokens already computed, 1 fork; "
                "2 tokens sampled",
            ),
            (2, "1 block copied, 2 decodes; 2 tokens sampled"),
            (3, "2 decodes; 2 tokens sampled"),
            (4, "2 decodes; no result yet"),
        ]
        counts = [(s.num_decodes, s.num_prefill_tokens, s.num_admissions, s.num_moved_blocks) for s in steps.steps]
        assert counts == [(0, 40, 1, 0), (2, 0, 0, 1), (2, 0, 0, 0), (2, 0, 0, 0)]
        begins_us = [step.decided_at_us for step in steps.steps]
        assert begins_us == sorted(begins_us)
        assert begins_us[0] > 0
        assert all(step.round_trip_us >= step.execute_duration_us > 0 for step in steps.steps[:3])
        last_two = await still.admin.ListSteps(pb.ListStepsRequest(num_steps=2))
        assert [step.step_id for step in last_two.steps] == [3, 4]
        step = (await still.admin.GetStep(pb.GetStepRequest(step_id=2))).step
        assert (step.text, len(step.blocks_to_copy)) == (steps.steps[1].text, 1)
        error = await refusal(still.admin.ListSteps(pb.ListStepsRequest(num_steps=257)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_with_several_executors_the_step_needs_an_address() -> None:
    async with AsyncExitStack() as exits:
        other = ExecutorProcess(FakeWorker())
        await other.start()
        exits.push_async_callback(other.kill)
        first = ExecutorProcess(FakeWorker())
        await first.start()
        exits.push_async_callback(first.kill)
        stack = await exits.enter_async_context(running_stack(executor=(first.address, other.address)))
        await until(lambda: len(stack.engine.fleet.planners) >= 2)
        for call in (stack.admin.GetStep(pb.GetStepRequest()), stack.admin.ListSteps(pb.ListStepsRequest())):
            error = await refusal(call)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details() == f"there are 2 executors; give one of {first.address}, {other.address}"
        assert not (await stack.admin.ListSteps(pb.ListStepsRequest(executor=other.address))).steps
        error = await refusal(stack.admin.GetStep(pb.GetStepRequest(executor="127.0.0.1:1")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert first.address in (error.details() or "")
        state = await stack.admin.GetSchedulerState(pb.GetSchedulerStateRequest())
        assert [executor.address for executor in state.executors] == [first.address, other.address]
        assert state.num_blocks == sum(executor.num_blocks for executor in state.executors) == 2 * 4096
