"""What an operator can learn over gRPC of one request: all that happened to it, also after its end."""

import asyncio
import itertools

import grpc

from executor_svc.fake.worker import FakeWorker
from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as pb
from tests.contract.test_admin_service import refusal, still_stack
from tests.support.stack import Stack, collect, running_stack, token_request, until

Kinds = list[str]


async def life_of(stack: Stack, request_id: str) -> admin_pb2.RequestState:
    return (await stack.admin.GetRequest(pb.GetRequestRequest(request_id=request_id))).request


def kinds(state: admin_pb2.RequestState) -> Kinds:
    """Return what happened, in order, without the words that all kinds share."""
    names = [admin_pb2.RequestEventKind.Name(event.kind) for event in state.events]
    return [name.removeprefix("REQUEST_EVENT_KIND_") for name in names]


def assert_in_order(state: admin_pb2.RequestState) -> None:
    times = [event.since_arrival_us for event in state.events]
    assert times == sorted(times)
    assert times[0] == 0


async def test_a_request_is_remembered_after_its_end_with_its_times() -> None:
    async with running_stack() as stack:
        await collect(stack, token_request(20, 5, request_id="done"))
        state = await life_of(stack, "done")
        assert kinds(state) == ["ARRIVED", "ADMITTED", "FIRST_TOKEN", "FINISHED"]
        assert_in_order(state)
        admitted = state.events[1]
        assert (admitted.executor, admitted.step_id) == (stack.executor.address, 1)
        assert admitted.text == "admitted; of 20 tokens, 0 came from the prefix cache"
        assert (state.status, state.outcome) == (admin_pb2.REQUEST_STATUS_ENDED, "length")
        assert (state.num_prompt_tokens, state.num_output_tokens) == (20, 5)
        assert state.queue_ms <= state.time_to_first_token_ms <= state.age_ms
        explained = await stack.admin.ExplainRequest(pb.ExplainRequestRequest(request_id="done"))
        assert explained.status == admin_pb2.REQUEST_STATUS_ENDED
        assert "finished with 5 output tokens" in explained.explanation


async def test_the_last_ones_that_ended_are_listed_newest_first() -> None:
    async with running_stack() as stack:
        for request_id in ("first", "second", "third"):
            await collect(stack, token_request(20, 2, request_id=request_id))
        listed = (await stack.admin.ListEndedRequests(pb.ListEndedRequestsRequest(num_requests=2))).requests
        assert [state.request_id for state in listed] == ["third", "second"]
        assert not any(state.events for state in listed)
        assert len((await stack.admin.ListEndedRequests(pb.ListEndedRequestsRequest())).requests) == 3
        error = await refusal(stack.admin.ListEndedRequests(pb.ListEndedRequestsRequest(num_requests=1001)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_id_that_nobody_has_says_how_far_back_was_looked() -> None:
    async with running_stack() as stack:
        for call in (
            stack.admin.GetRequest(pb.GetRequestRequest(request_id="nobody")),
            stack.admin.ExplainRequest(pb.ExplainRequestRequest(request_id="nobody")),
        ):
            error = await refusal(call)
            assert error.code() is grpc.StatusCode.NOT_FOUND
            assert error.details() == (
                "no live request has request_id 'nobody', and none of the last 1,000 that ended; "
                "rejected requests are not kept"
            )


async def test_a_swap_and_an_abort_are_part_of_a_life() -> None:
    stays = token_request(100, 150, request_id="stays")
    goes = token_request(90, 100, request_id="goes", first_id=3)
    async with still_stack(stays, goes, preemption_mode="swap") as still:
        await still.step_until(lambda core: len(core.swapped) > 0)
        live = await still.request("goes")
        assert kinds(live) == ["ARRIVED", "ADMITTED", "FIRST_TOKEN", "SWAPPED_OUT"]
        assert live.HasField("last_token_age_ms")
        assert not live.outcome
        assert "the host cache" in live.events[3].text
        await still.stack.engine.abort_request("goes", None)
        ended = await still.request("goes")
        assert kinds(ended) == ["ARRIVED", "ADMITTED", "FIRST_TOKEN", "SWAPPED_OUT", "FAILED"]
        assert ended.outcome == "ABORTED: request 'goes' was aborted"
        assert (await still.admin.GetSchedulerState(pb.GetSchedulerStateRequest())).num_failed_requests == 1


async def test_a_lost_executor_is_part_of_a_life() -> None:
    async with running_stack(FakeWorker(step_ms=2), FakeWorker(step_ms=2), loses_soon=True) as stack:
        call = stack.generation.Generate(token_request(10, 300, request_id="moves"))
        await until(lambda: sum(map(stack.num_groups_on, stack.executors)) == 1)
        await until(lambda: stack.engine.requests["", "moves"].num_output_tokens > 3)
        lost = next(executor for executor in stack.executors if stack.num_groups_on(executor))
        other = next(executor for executor in stack.executors if executor is not lost)
        await lost.kill()
        await until(lambda: stack.num_groups_on(other) == 1)
        state = await life_of(stack, "moves")
        assert kinds(state) == ["ARRIVED", "ADMITTED", "FIRST_TOKEN", "EXECUTOR_LOST", "ADMITTED"]
        assert_in_order(state)
        executors = [event.executor for event in state.events if event.executor]
        assert executors == [lost.address, lost.address, other.address]
        call.cancel()


async def test_the_totals_are_those_of_the_answers() -> None:
    async with running_stack() as stack:
        requests = [token_request(20, 5, first_id=1), token_request(30, 7, first_id=2, n=2, temperature=1.0)]
        await asyncio.gather(*(stack_answer(stack, request) for request in requests))
        state = await stack.admin.GetSchedulerState(pb.GetSchedulerStateRequest())
        assert (state.num_prompt_tokens, state.num_output_tokens) == (50, 5 + 2 * 7)
        assert [executor.num_output_tokens for executor in state.executors] == [5 + 2 * 7]
        assert (state.num_finished_requests, state.num_failed_requests) == (2, 0)
        assert state.num_queried_tokens == 50
        assert state.version


async def stack_answer(stack: Stack, request: object) -> None:
    async for _ in stack.generation.Generate(request):  # type: ignore[arg-type]
        pass


# Blocks ------------------------------------------------------------------------------------------


async def test_the_block_map_shows_what_the_requests_hold() -> None:
    several = token_request(40, 100, request_id="several", n=3, temperature=1.0)
    async with still_stack(several) as still:
        await still.step_until(lambda core: core.last_processed_step_id >= 3)
        shown = await still.request("several")
        tables = [list(sequence.block_table) for sequence in shown.sequences]
        answer = await still.admin.GetBlockMap(pb.GetBlockMapRequest())
        assert (answer.executor, answer.block_size_tokens) == (still.stack.executor.address, 16)
        assert (len(answer.states), len(answer.host_states)) == (16, 24)
        held = list(itertools.chain(*tables))
        for block, state in enumerate(answer.states):
            num_tables = held.count(block)
            if num_tables:
                expected = admin_pb2.BLOCK_STATE_USED if num_tables == 1 else admin_pb2.BLOCK_STATE_SHARED
                assert state == expected
            else:
                assert state in (admin_pb2.BLOCK_STATE_FREE, admin_pb2.BLOCK_STATE_CACHED)
        shared = tables[0][0]
        described = await still.admin.GetBlock(pb.GetBlockRequest(block=shared))
        assert described.state == admin_pb2.BLOCK_STATE_SHARED
        assert [(h.request_id, h.output_index, h.logical_block) for h in described.holders] == [
            ("several", index, 0) for index in range(3)
        ]
        summary = await still.admin.GetSchedulerState(pb.GetSchedulerStateRequest())
        assert summary.num_shared_blocks == list(answer.states).count(admin_pb2.BLOCK_STATE_SHARED) > 0


async def test_what_is_no_block_or_has_no_executor_is_said() -> None:
    async with running_stack(loses_soon=True) as stack:
        error = await refusal(stack.admin.GetBlock(pb.GetBlockRequest(block=4096)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "from 0 to 4095" in (error.details() or "")
        error = await refusal(stack.admin.GetBlockMap(pb.GetBlockMapRequest(executor="127.0.0.1:1")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        await stack.executor.kill()
        await until(lambda: stack.driver.planner is None)
        for call in (
            stack.admin.GetBlockMap(pb.GetBlockMapRequest()),
            stack.admin.GetBlock(pb.GetBlockRequest()),
        ):
            error = await refusal(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert f"the executor at {stack.executor.address} is not attached" in (error.details() or "")
