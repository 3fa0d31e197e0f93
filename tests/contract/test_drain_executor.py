"""An executor is emptied while it works: its requests go on elsewhere, with every token, and it can be ended."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2

from executor_svc.fake.worker import FakeWorker
from octavo.admin.v1 import admin_service_pb2 as admin
from octavo.admin_client import AdminClient, NotFoundError
from octavo.commands.drain import NotDrainingError, drain_executor
from tests.contract.test_fleet import Expected, assert_same, finished
from tests.support.stack import ExecutorProcess, Stack, collect, readiness, running_stack, token_request, until

LONE = [token_request(30, 90, first_id=first_id, temperature=0.8, seed=first_id, logprobs=0) for first_id in range(4)]
SEVERAL = [
    token_request(21, 60, first_id=11, beam_width=3, n=2, logprobs=0),
    token_request(12, 60, first_id=12, temperature=1.0, seed=15, n=3, logprobs=0),
    token_request(9, 60, first_id=13, temperature=1.0, seed=14, n=2, best_of=4, logprobs=0),
]


def tight() -> FakeWorker:
    """A fake executor whose cache is too small for all requests at once: it swaps."""
    return FakeWorker(step_ms=2, num_device_blocks=40, num_host_blocks=60, max_model_len=512)


def roomy(**options: str) -> FakeWorker:
    return FakeWorker(step_ms=2, max_model_len=512, **options)  # type: ignore[arg-type]


async def drain(stack: Stack, executor: ExecutorProcess, *, undo: bool = False) -> admin.DrainExecutorResponse:
    return await stack.admin.DrainExecutor(admin.DrainExecutorRequest(executor=executor.address, undo=undo))


async def is_empty(stack: Stack, executor: ExecutorProcess) -> None:
    """Return once an executor has nothing left, in no pool."""
    core = stack.driver_of(executor).planner
    assert core is not None
    await until(lambda: not (len(core.groups) or core.in_flight))
    assert core.blocks.allocator.num_used_blocks == core.swapped.host.num_used_blocks == 0


async def all_answers(stack: Stack) -> Expected:
    lone = asyncio.gather(*(collect(stack, request) for request in LONE))
    several = asyncio.gather(*(finished(stack, request) for request in SEVERAL))
    return list(await lone), list(await several)


async def test_everything_goes_on_elsewhere_also_what_is_swapped_out() -> None:
    async with running_stack(roomy()) as stack:
        expected = await all_answers(stack)
    async with running_stack(tight(), roomy()) as stack:
        first, second = stack.executors
        await drain(stack, second)
        answers = asyncio.create_task(all_answers(stack))
        driver = stack.driver_of(first)
        assert driver.planner is not None
        swapped = driver.planner.swapped
        await until(lambda: any(not group.has_inflight_rows for group in swapped))
        assert (await drain(stack, second, undo=True)).num_requests == 0
        await until(lambda: any(not group.has_inflight_rows for group in swapped))
        await stack.engine.drain_executor(driver, is_draining=True)
        await is_empty(stack, first)
        assert not answers.done()
        assert stack.num_groups_on(second)
        events = [event for request in stack.engine.requests.values() for event in request.life.events]
        assert "its executor is draining" in {event.cause for event in events}
        assert_same(await answers, expected)
        assert stack.engine.meter.num_executor_losses == 0
        state = (await stack.admin.GetSchedulerState(admin.GetSchedulerStateRequest())).executors[0]
        assert (state.is_draining, state.num_losses, state.epoch) == (True, 0, 1)


async def test_what_requires_its_kind_stays_until_it_ends() -> None:
    stays = token_request(10, 60, first_id=1, request_id="stays")
    stays.require_same_numerics = True
    moves = token_request(10, 60, first_id=2, request_id="moves")
    async with running_stack(roomy(numerics_id="a"), roomy(numerics_id="b")) as stack:
        first, second = stack.executors
        await drain(stack, second)
        async with stack.together(2):
            answers = asyncio.gather(collect(stack, stays), collect(stack, moves))
        await until(lambda: stack.engine.requests and all(r.num_output_tokens for r in stack.engine.requests.values()))
        await drain(stack, second, undo=True)
        assert (await drain(stack, first)).num_requests == 2
        await until(lambda: stack.num_groups_on(second))
        core = stack.driver_of(first).planner
        assert core is not None
        assert [group.request_id for group in core.batch.running] == ["stays"]
        explained = await stack.admin.ExplainRequest(admin.ExplainRequestRequest(request_id="stays"))
        assert explained.explanation.endswith(
            "; its executor is draining: it moves to another executor once one has capacity"
        )
        assert [len(answer.token_ids) for answer in await answers] == [60, 60]
        await is_empty(stack, first)


async def test_the_only_executor_ends_what_it_has_and_new_requests_are_refused() -> None:
    async with running_stack(roomy()) as stack:
        running = asyncio.create_task(collect(stack, token_request(10, 60)))
        await until(lambda: stack.num_groups_on(stack.executor))
        await drain(stack, stack.executor)
        assert await readiness(stack) == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stack, token_request(10, 5, first_id=2))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "every executor is draining; retry in a moment"
        assert len((await running).token_ids) == 60
        await drain(stack, stack.executor, undo=True)
        assert len((await collect(stack, token_request(10, 5, first_id=2))).token_ids) == 5


async def test_what_waits_for_an_executor_that_drains_waits_no_longer_than_an_orphan() -> None:
    worker = FakeWorker(step_ms=2, max_num_seqs=1)
    async with running_stack(worker, orphan_timeout_s=0.2) as stack:
        running = asyncio.create_task(collect(stack, token_request(10, 400)))
        await until(lambda: stack.num_groups_on(stack.executor))
        waiting = asyncio.create_task(collect(stack, token_request(10, 5, first_id=2)))
        await until(lambda: stack.engine.has_waiting)
        await drain(stack, stack.executor)
        with pytest.raises(
            grpc.aio.AioRpcError, match="that can hold the request is draining or leaving the fleet; no"
        ):
            await waiting
        assert len((await running).token_ids) == 400


async def test_it_drains_until_its_process_ends() -> None:
    async with running_stack(roomy(), loses_soon=True) as stack:
        await drain(stack, stack.executor)
        for worker, is_draining in (
            (stack.executor.worker, True),
            (roomy(), False),
        ):  # a cut network, and another process
            await stack.executor.kill()
            await until(lambda: stack.driver.planner is None)
            stack.executor.worker = worker
            await stack.executor.start()
            await until(lambda: stack.driver.planner is not None)
            assert stack.driver.is_draining is is_draining
            assert stack.driver.planner is not None
            assert stack.driver.planner.takes_groups is not is_draining


async def test_the_command_waits_until_the_executor_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    async with running_stack(roomy(), roomy()) as stack:
        first, second = stack.executors

        def client() -> AdminClient:
            return AdminClient(stack.service.other_addresses["admin"])

        await drain_executor(client(), second.address, waits=False)
        answers = asyncio.gather(*(collect(stack, request) for request in LONE))
        await until(lambda: stack.num_groups_on(first) == len(LONE))
        waiting = asyncio.create_task(drain_executor(client(), first.address))
        await until(lambda: stack.driver_of(first).is_draining)
        await drain_executor(client(), second.address, undo=True)
        await waiting
        await is_empty(stack, first)
        assert [len(answer.token_ids) for answer in await answers] == [90] * len(LONE)
        assert capsys.readouterr().out == (
            f"{second.address} is draining: 0 requests left\n"
            f"{second.address} takes requests\n"
            f"{first.address} is empty; it is safe to stop\n"
        )
        with pytest.raises(NotFoundError, match="no executor has the address 'nowhere:1'"):
            await drain_executor(client(), "nowhere:1")


async def test_the_command_fails_if_somebody_else_undoes_it() -> None:
    async with running_stack(roomy()) as stack:
        call = stack.generation.Generate(token_request(10, 400))
        await until(lambda: stack.num_groups_on(stack.executor))
        client = AdminClient(stack.service.other_addresses["admin"])
        waiting = asyncio.create_task(drain_executor(client, stack.executor.address))
        await until(lambda: stack.driver.is_draining)
        await drain(stack, stack.executor, undo=True)
        with pytest.raises(NotDrainingError, match="takes requests again"):
            await waiting
        call.cancel()
