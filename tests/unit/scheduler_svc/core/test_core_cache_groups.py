"""Layers with a window beside layers that see all tokens: two pools, and one prefix."""

from dataclasses import replace

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo_shared.step_wire.cache_group import CacheGroup, CacheKind
from octavo_shared.step_wire.step import Step
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.limits import CoreLimits, PoolLimits, PreemptionMode
from scheduler_svc.executors.client import ExecutorRefusedError
from scheduler_svc.executors.serving_limits import PlannerSettings, serving_limits
from tests.support.driving import Bench, check_pools_are_free, group, max_tokens, small_limits

WINDOW, BLOCK = 6, 4


def two_groups(*, blocks: int = 12, window_blocks: int = 8, budget: int = 4, max_num_seqs: int = 4) -> CoreLimits:
    limits = small_limits(
        blocks=blocks, budget=budget, max_model_len=24, max_num_seqs=max_num_seqs, prefix_caching=True
    )
    return replace(limits, more_groups=(PoolLimits(window_blocks, WINDOW),))


def keep_going(bench: Bench) -> list[Step]:
    """Run another request, whose steps tell the names of what the ones before registered last."""
    bench.add(1, 3, max_tokens(2))
    return bench.run()


def test_a_prefix_ends_where_both_groups_have_it() -> None:
    bench = Bench(two_groups())
    bench.add(0, 14, max_tokens(1))
    bench.run()
    whole, of_window = bench.planner.blocks.groups
    newcomer = group(0, 14)
    assert bench.planner.blocks.plan_admission(newcomer).sequences[0].num_cached == 3

    # Of the window the last block is given to somebody else.
    assert of_window.prefix_cache is not None
    [last] = of_window.prefix_cache.blocks_of(newcomer.sequences[0].block_hashes[2:3])
    order = of_window.allocator.cached_block_ids.tolist()
    of_window.allocator.allocate(of_window.allocator.num_free_blocks - len(order) + order.index(last) + 1)

    planned = bench.planner.blocks.plan_admission(newcomer).sequences[0]
    assert planned.num_cached < 3
    assert len(planned.parts[0].found.blocks) == planned.num_cached
    assert whole.allocator.num_cached_blocks == 3, "it is there, and of no use"


def test_names_are_given_in_both_groups_and_told_as_on_the_wire() -> None:
    bench = Bench(replace(two_groups(), names_blocks=True))
    bench.add(0, 14, max_tokens(4))
    names: dict[int, bytes] = {}
    for step in [*bench.run(), *keep_going(bench)]:
        pairs = zip(step.registered_blocks.tolist(), range(0, len(step.block_names), 16), strict=True)
        names |= {block: step.block_names[begin : begin + 16] for block, begin in pairs}

    of_first = {name for block, name in names.items() if block < 12}
    of_second = {name for block, name in names.items() if block >= 12}
    assert len(of_first) >= 3
    assert of_first == of_second


def test_a_group_without_a_free_block_is_an_obstacle_of_its_own() -> None:
    bench = Bench(two_groups(blocks=24, window_blocks=6, budget=8))
    bench.add(0, 8, max_tokens(12))
    bench.step()
    window = bench.planner.blocks.groups[1].allocator
    window.allocate(window.num_free_blocks)

    plan = bench.planner.blocks.plan_admission(group(1, 8))

    assert plan.scarcest == (2, 0, " of cache group 1 (window of 6 tokens)")
    demand = bench.planner.admissions.demand_of(late := group(1, 8), late.requires)
    assert demand.obstacle_of_blocks is not None
    assert demand.obstacle_of_blocks.reason == "needs 2 blocks of cache group 1 (window of 6 tokens), 0 free"


def test_a_chunk_takes_no_block_of_one_group_while_the_other_one_has_none() -> None:
    """The step that would tell of it computes nothing, and is not sent."""
    limits = replace(two_groups(blocks=6), sliding_window=12, more_groups=(PoolLimits(4, 4),))
    bench = Bench(limits)
    bench.add(0, 23, max_tokens(1))

    bench.run(num_steps_in_flight=4)

    assert bench.outputs == {"a": [123]}


# Swaps -------------------------------------------------------------------------------------------


def swapping(host_blocks: int = 20, window_host_blocks: int = 6) -> Bench:
    """Return two requests, of which one has to make room for the other."""
    limits = replace(two_groups(blocks=10, budget=8), num_host_blocks=host_blocks, names_blocks=True)
    pools = (PoolLimits(8, WINDOW, window_host_blocks),)
    bench = Bench(replace(limits, more_groups=pools, preemption_mode=PreemptionMode.SWAP))
    bench.add(0, 14, max_tokens(9))
    bench.add(1, 14, max_tokens(9))
    return bench


def run_checked(bench: Bench) -> list[Step]:
    steps = []
    while bench.planner.groups or len(bench.queue):
        steps.append(bench.schedule())
        check_integrity(bench.planner)
        bench.process()
        check_integrity(bench.planner)
    check_pools_are_free(bench.planner)
    assert bench.outputs == {"a": list(range(114, 123)), "b": list(range(214, 223))}
    return steps


def test_of_each_cache_group_what_it_holds_leaves_and_comes_back() -> None:
    steps = run_checked(swapping())

    [out] = [step.blocks_to_swap_out for step in steps if len(step.blocks_to_swap_out)]
    [back] = [step.blocks_to_swap_in for step in steps if len(step.blocks_to_swap_in)]
    # 10 device and 20 host blocks are the first group's. Of 20 tokens the next one sees the last two blocks.
    of_window = (out[:, 0] >= 10).tolist()
    assert (out[:, 1] >= 20).tolist() == of_window
    assert (of_window.count(False), of_window.count(True)) == (5, 2)
    assert ((back[:, 0] >= 20) == (back[:, 1] >= 10)).all()
    assert set(back[:, 0].tolist()) <= set(out[:, 1].tolist())


@pytest.mark.parametrize("pools", [(20, 1), (4, 6), (20, 0)])
def test_nothing_is_swapped_if_one_of_the_host_pools_is_too_small(pools: tuple[int, int]) -> None:
    bench = swapping(*pools)

    steps = run_checked(bench)

    assert not any(len(step.blocks_to_swap_out) for step in steps)
    assert bench.planner.preemption.num_preemptions[PreemptionMode.RECOMPUTE] > 0


def test_blocks_that_come_back_are_named_after_the_step_that_brings_them() -> None:
    bench = swapping()
    while not bench.planner.swapped.groups:
        bench.step()
    for of in bench.planner.blocks.groups:  # nothing is found on the device
        of.allocator.free(of.allocator.allocate(of.allocator.num_free_blocks))

    steps = [*run_checked(bench), *keep_going(bench)]

    [index] = [index for index, step in enumerate(steps) if len(step.blocks_to_swap_in)]
    brought = set(steps[index].blocks_to_swap_in[:, 1].tolist())
    assert not brought & set(steps[index].registered_blocks.tolist())
    assert {block >= 10 for block in brought & set(steps[index + 1].registered_blocks.tolist())} == {False, True}


def test_a_swapped_group_waits_for_blocks_of_each_cache_group() -> None:
    bench = swapping()
    while not (swapped := bench.planner.swapped.groups):
        bench.step()
    admissions = bench.planner.admissions
    bench.planner.finish(bench.planner.batch.running[0].sequences[0])
    assert admissions.demand_to_swap_in(swapped[0]).obstacle_of_blocks is None

    window = bench.planner.blocks.groups[1].allocator
    window.allocate(window.num_free_blocks)

    obstacle = admissions.demand_to_swap_in(swapped[0]).obstacle_of_blocks
    assert obstacle is not None
    assert "blocks of cache group 1 (window of 6 tokens), 0 free" in obstacle.reason


def test_the_fullest_pool_is_the_one_that_lacks_a_block_first() -> None:
    bench = Bench(two_groups(blocks=24, window_blocks=6, budget=8))
    bench.add(0, 8, max_tokens(2))
    bench.step()

    blocks = bench.planner.blocks
    assert blocks.fullest is blocks.groups[1].allocator
    blocks.allocator.allocate(blocks.allocator.num_free_blocks)
    assert blocks.fullest is blocks.allocator


def test_windows_at_the_ends_of_prompts_outlast_what_decodes_beside_them() -> None:
    """Ten sequences whose outputs take the pool of the window twice; if unused blocks go by age, nothing is found."""
    limits = small_limits(
        blocks=4000, budget=256, block_size=16, max_model_len=1024, max_num_seqs=10, prefix_caching=True
    )
    bench = Bench(replace(limits, more_groups=(PoolLimits(80, 64),)))
    rounds = []
    for _ in range(2):
        rounds.append([bench.add(number, 60, max_tokens(120)) for number in range(10)])
        bench.run()

    assert [request.num_cached_tokens for request in rounds[1]] == [48] * 10


FULL = CacheGroup(CacheKind.FULL, (0,), 16, 1000, 50)
OF_WINDOW = CacheGroup(CacheKind.WINDOW, (1,), 16, 300, 15, window_tokens=64)


def test_limits_come_from_what_the_executor_tells() -> None:
    info = FakeWorker(num_host_blocks=60, max_num_batched_tokens=512, cache_groups=(FULL, OF_WINDOW)).info

    limits = serving_limits(info, PlannerSettings())

    assert limits.groups == (PoolLimits(1000, 0, 50), PoolLimits(300, 64, 15))
    assert limits.num_host_blocks == 50


def test_blocks_of_several_sizes_are_refused() -> None:
    info = FakeWorker(cache_groups=(FULL, replace(OF_WINDOW, block_size_tokens=8))).info

    with pytest.raises(ExecutorRefusedError, match="blocks of several sizes"):
        serving_limits(info, PlannerSettings())
