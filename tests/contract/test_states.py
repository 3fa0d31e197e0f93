"""A model with states, whatever befalls its requests: they get what they get of a model without states.

The fake executor refuses a step that would go on from a state of other tokens.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.admin.v1 import admin_service_pb2 as admin
from octavo.commands.command_line import run
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.step_wire.cache_group import CacheGroup, CacheKind
from scheduler_svc.core.limits import PreemptionMode
from tests.support.stack import ExecutorProcess, Stack, running_scheduler, running_stack, token_request, until
from tests.support.step_logs import check_replay

REQUESTS = [
    token_request(30, 40, first_id=1),
    token_request(44, 40, first_id=3, temperature=1.0, seed=12),
    token_request(21, 24, first_id=11, beam_width=3, n=2),
    token_request(20, 40, first_id=13, temperature=1.0, seed=15, n=3),
]
WINDOWS = (CacheGroup(CacheKind.FULL, (0,), 8, 24, 20), CacheGroup(CacheKind.WINDOW, (1,), 8, 24, 20, window_tokens=32))


def worker(**options: Any) -> FakeWorker:
    """An executor so small that requests preempt each other."""
    sizes: dict[str, Any] = {"num_device_blocks": 24, "num_host_blocks": 20, "block_size_tokens": 8}
    return FakeWorker(**{**sizes, "max_model_len": 128, "max_num_seqs": 16, "has_states": True, **options})


@asynccontextmanager
async def executor_with(**options: Any) -> AsyncIterator[ExecutorProcess]:
    executor = ExecutorProcess(worker(**options))
    await executor.start()
    try:
        yield executor
    finally:
        await executor.kill()


async def outputs_of(stack: Stack, request: pb.GenerateRequest) -> list[list[int]]:
    outputs, num_cached_tokens = await answer_to(stack, request)
    assert num_cached_tokens == 0
    return outputs


async def answer_to(stack: Stack, request: pb.GenerateRequest) -> tuple[list[list[int]], int]:
    events = [event async for event in stack.generation.Generate(request)]
    finished = events[-1].finished
    return [list(output.token_ids) for output in finished.outputs], finished.usage.num_cached_tokens


async def all_outputs(stack: Stack) -> list[list[list[int]]]:
    return await asyncio.gather(*(outputs_of(stack, request) for request in REQUESTS))


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    """What a model without states answers, one request after the other."""

    async def ask() -> list[list[list[int]]]:
        async with running_stack(worker(has_states=False)) as stack:
            return [await outputs_of(stack, request) for request in REQUESTS]

    return asyncio.run(ask())


@pytest.mark.parametrize("groups", [(), WINDOWS], ids=["all tokens", "windows too"])
async def test_preempted_requests_are_computed_again_and_the_steps_run_again_from_their_log(
    groups: tuple[CacheGroup, ...], expected: list[list[list[int]]], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"preemption_mode": "swap", "step_log": tmp_path, "max_num_batched_tokens": 64}
    async with running_stack(worker(cache_groups=groups), **options) as stack:
        assert await all_outputs(stack) == await all_outputs(stack) == expected
        [planner] = stack.engine.fleet.planners
        assert planner.preemption.num_preemptions[PreemptionMode.RECOMPUTE] > 0
        assert planner.preemption.num_preemptions[PreemptionMode.SWAP] == 0

    assert check_replay(tmp_path).counts.num_steps > 30
    async with executor_with(cache_groups=groups) as executor:
        assert await asyncio.to_thread(run, ["replay", str(tmp_path), "--executor", executor.address]) == 0


@pytest.mark.parametrize("groups", [(), WINDOWS], ids=["all tokens", "windows too"])
async def test_saved_states_are_found_again_and_swapped_and_the_steps_run_again_from_their_log(
    groups: tuple[CacheGroup, ...],
    expected: list[list[list[int]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Steps of 2 ms: so the requests meet also where the machine is busy.
    saved: dict[str, Any] = {"cache_groups": groups, "num_device_states": 12, "num_host_states": 8, "step_ms": 2}
    options: dict[str, Any] = {"preemption_mode": "swap", "step_log": tmp_path, "max_num_batched_tokens": 64}
    async with running_stack(worker(**saved), **options) as stack:
        first = await asyncio.gather(*(answer_to(stack, request) for request in REQUESTS))
        again = [await answer_to(stack, REQUESTS[1]) for _ in range(2)]
        assert [outputs for outputs, _ in first] == expected
        assert [outputs for outputs, _ in again] == [expected[1]] * 2
        if not groups:  # a pool of a window may have evicted the prompt's first blocks meanwhile
            assert again[1][1] >= 32, "a state was saved behind the prompt, or where blocks of it were evicted"
        assert stack.engine.fleet.planners[0].preemption.num_preemptions[PreemptionMode.SWAP] > 0

    assert check_replay(tmp_path).counts.num_steps > 30
    for states, code in ((12, 0), (11, 1)):
        async with executor_with(**{**saved, "num_device_states": states}) as executor:
            assert await asyncio.to_thread(run, ["replay", str(tmp_path), "--executor", executor.address]) == code
    sentence = "it saves 11 states and 8 on the host, the log needs 12 and 8"
    assert f"cannot be run: {sentence}" in capsys.readouterr().out


async def test_at_another_executor_requests_are_computed_again(expected: list[list[list[int]]]) -> None:
    async with running_stack(worker(step_ms=2), worker(step_ms=2), loses_soon=True) as stack:
        answers = asyncio.gather(*(outputs_of(stack, request) for request in REQUESTS))
        first = stack.executors[0]
        await until(lambda: (core := stack.driver_of(first).planner) and core.last_processed_step_id > 15)
        await first.kill()
        assert await answers == expected


async def test_a_scheduler_that_starts_again_finds_no_prefix_and_says_why(
    expected: list[list[list[int]]], tmp_path: Path
) -> None:
    (tmp_path / "prefix.key").write_bytes(bytes(range(32)))
    own: dict[str, Any] = {"scheduler_id": "one", "prefix_key_file": tmp_path / "prefix.key"}
    async with executor_with(step_ms=2) as executor:
        async with running_scheduler(executor, **own) as stack:
            assert await all_outputs(stack) == expected
        async with running_scheduler(executor, **own) as stack:
            request = token_request(30, 40, first_id=1, request_id="again")
            answer = asyncio.ensure_future(outputs_of(stack, request))
            await until(lambda: stack.engine.fleet.planners[0].batch.running)
            explained = await stack.admin.ExplainRequest(admin.ExplainRequestRequest(request_id="again"))
            state = await stack.admin.GetSchedulerState(admin.GetSchedulerStateRequest())
            assert await answer == expected[0]
    assert explained.explanation.endswith("; the executor saves no states of this model, so no prefix is found again")
    assert state.executors[0].has_states
