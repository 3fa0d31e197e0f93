"""What /metrics serves about queue, batch and cache is what the executor sees."""

import asyncio
import threading

from executor_svc.fake.worker import FakeWorker
from octavo_shared.step_wire.step import Step, StepResult
from tests.monitoring.live import scrape, value_of
from tests.support.each_row import each_row
from tests.support.patience import PATIENCE_S
from tests.support.stack import Stack, collect, running_stack, token_request

BLOCK = 16


async def page_of(stack: Stack) -> str:
    return await scrape(stack.service.other_addresses["metrics"])


def blocks(page: str) -> dict[str, float]:
    return {state: value_of(page, "octavo_kv_cache_blocks", state=state) for state in ("used", "cached", "free")}


class HeldWorker(FakeWorker):
    """Holds its second step until `may_go_on` is set: what the scheduler says stands still meanwhile."""

    def __init__(self, **limits: int) -> None:
        super().__init__(**limits)  # type: ignore[arg-type]
        self.holds, self.may_go_on = threading.Event(), threading.Event()

    def execute(self, step: Step) -> StepResult:
        if step.step_id == 2:
            self.holds.set()
            assert self.may_go_on.wait(PATIENCE_S)
        return super().execute(step)


async def test_cached_blocks_are_free_and_prefix_hits_are_tokens() -> None:
    async with running_stack(FakeWorker(num_device_blocks=32), metrics_listen="127.0.0.1:0") as stack:
        request = token_request(4 * BLOCK, 1)
        await collect(stack, request)
        first = await page_of(stack)
        await collect(stack, request)
        second = await page_of(stack)

    assert blocks(first) == {"used": 0, "cached": 4, "free": 28}
    assert value_of(first, "octavo_kv_cache_usage_ratio") == 0
    assert value_of(first, "vllm:kv_cache_usage_perc") == 0
    hits = [value_of(page, "octavo_prefix_cache_hit_tokens_total") for page in (first, second)]
    assert hits == [0, 3 * BLOCK], "one token at least is computed again"
    queried = [value_of(page, "octavo_prefix_cache_queried_tokens_total") for page in (first, second)]
    assert queried == [4 * BLOCK, 8 * BLOCK]


async def test_who_runs_and_who_waits_is_told_while_it_is_so() -> None:
    worker = HeldWorker(num_device_blocks=32, max_num_seqs=2)
    async with running_stack(worker, metrics_listen="127.0.0.1:0") as stack:
        answers = [
            asyncio.create_task(collect(stack, token_request(2 * BLOCK + 2, 20, first_id=100 * number)))
            for number in range(5)
        ]
        await asyncio.to_thread(worker.holds.wait, 30)
        while len(stack.engine.requests) < 5 or stack.engine.load.num_running < 2:
            await asyncio.sleep(0.001)
        page = await page_of(stack)
        worker.may_go_on.set()
        await asyncio.gather(*answers)
        last = await page_of(stack)

    assert [value_of(page, name) for name in ("octavo_requests_running", "vllm:num_requests_running")] == [2, 2]
    assert [value_of(page, name) for name in ("octavo_requests_waiting", "vllm:num_requests_waiting")] == [3, 3]
    assert blocks(page)["used"] == 2 * 3, "two sequences of three blocks"
    assert sum(blocks(page).values()) == 32
    assert value_of(page, "octavo_kv_cache_usage_ratio") == value_of(page, "vllm:kv_cache_usage_perc") == 6 / 32
    assert value_of(last, "octavo_requests_waiting") == value_of(last, "octavo_requests_running") == 0


class CountingWorker(FakeWorker):
    """Counts the sequences that came in."""

    num_admissions = 0

    def execute(self, step: Step) -> StepResult:
        self.num_admissions += len(step.delta.admissions)
        return super().execute(step)


@each_row("recompute", "swap")
async def test_preemptions_are_counted_by_what_became_of_their_blocks(mode: str) -> None:
    worker = CountingWorker(num_device_blocks=8, max_model_len=8 * BLOCK, num_host_blocks=64)
    async with running_stack(worker, metrics_listen="127.0.0.1:0", preemption_mode=mode, prefix_caching=False) as stack:
        requests = [token_request(BLOCK, 4 * BLOCK, first_id=100 * number) for number in range(4)]
        await asyncio.gather(*(collect(stack, request) for request in requests))
        page = await page_of(stack)

    counted = {name: value_of(page, "octavo_preemptions_total", mode=name) for name in ("recompute", "swap")}
    assert counted[mode] == worker.num_admissions - len(requests) > 0, "who was preempted came in once more"
    assert sum(counted.values()) == counted[mode]
    assert value_of(page, "octavo_requests_swapped") == 0


async def test_a_busy_event_loop_is_told() -> None:
    async with running_stack(metrics_listen="127.0.0.1:0") as stack:
        stack.service._loop_lag.note(1.5)
        assert value_of(await page_of(stack), "octavo_event_loop_lag_max_seconds") == 1.5
