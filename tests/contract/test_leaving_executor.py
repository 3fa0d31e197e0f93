"""An executor that is going to end says so, works on for its scheduler, and ends when it has nothing left to do."""

import asyncio
import time

from executor_svc.fake.worker import FakeWorker
from octavo.admin.v1 import admin_service_pb2 as admin
from scheduler_svc.executors.session import LONGEST_HEARTBEAT_INTERVAL_S
from tests.support.patience import PATIENCE_S
from tests.support.processes import running_service
from tests.support.stack import collect, running_scheduler, running_stack, token_request, until


async def test_an_executor_that_leaves_ends_its_requests_gets_no_others_and_is_left_soon() -> None:
    async with running_stack(FakeWorker(step_ms=5), FakeWorker(step_ms=5)) as stack:
        staying, leaving = stack.executors
        driver = stack.driver_of(leaving)
        running = [asyncio.create_task(collect(stack, token_request(9, 400, first_id=i))) for i in range(4)]
        await until(lambda: stack.num_groups_on(leaving) == stack.num_groups_on(staying) == 2)
        leaving.servicer.leave()
        told_at_s = time.monotonic()
        await until(lambda: driver.is_leaving)
        assert time.monotonic() - told_at_s < 3 * LONGEST_HEARTBEAT_INTERVAL_S
        state = await stack.admin.GetSchedulerState(admin.GetSchedulerStateRequest())
        assert {executor.address: executor.is_retired for executor in state.executors}[leaving.address]

        later = [asyncio.create_task(collect(stack, token_request(4, 300, first_id=i))) for i in range(10, 16)]
        await until(lambda: stack.num_groups_on(staying) > 6)
        assert stack.num_groups_on(leaving) <= 2
        assert [len((await answer).token_ids) for answer in running] == [400] * 4
        await leaving.servicer.wait_until_unused()
        await until(lambda: "shutting down" in driver.last_trouble)
        assert (driver.planner, driver.num_losses, driver.is_retired) == (None, 0, False)
        assert [len((await answer).token_ids) for answer in later] == [300] * 6


async def test_what_waits_for_the_only_executor_when_it_leaves_runs_on_the_next_one_at_its_address() -> None:
    async with running_stack(FakeWorker(step_ms=2, num_device_blocks=16)) as stack:
        executor, driver = stack.executor, stack.driver
        requests = [asyncio.create_task(collect(stack, token_request(60, 150, first_id=i))) for i in range(6)]
        await until(lambda: stack.engine.has_waiting)
        executor.servicer.leave()
        await until(lambda: driver.is_leaving)
        await executor.servicer.drain()  # the delay is over
        await executor.kill()
        executor.worker = FakeWorker(num_device_blocks=16)
        await executor.start()
        assert [len((await request).token_ids) for request in requests] == [150] * 6


async def test_after_sigterm_with_a_delay_a_process_ends_its_requests_and_then_at_once() -> None:
    flags = ("--shutdown-delay-s", "600", "--step-ms", "10")
    async with (
        running_service("executor_svc.fake", *flags) as service,
        running_scheduler(executor=(service.address,)) as stack,
    ):
        request = asyncio.create_task(collect(stack, token_request(10, 300)))
        driver = stack.engine.drivers[service.address]
        await until(lambda: driver.recent_steps.kept_ids[1] > 2)
        code = asyncio.create_task(service.terminate())
        assert len((await request).token_ids) == 300
        async with asyncio.timeout(PATIENCE_S):
            assert await code == 0
        assert driver.num_losses == 0


async def test_a_process_that_nobody_uses_ends_at_once_whatever_the_delay() -> None:
    async with running_service("executor_svc.fake", "--shutdown-delay-s", "600") as service:
        async with running_scheduler(executor=(service.address,)):
            pass  # it has loaded, and is released
        async with asyncio.timeout(PATIENCE_S):
            assert await service.terminate() == 0
