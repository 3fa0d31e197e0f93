"""Swapped groups that share blocks with others, and whole runs with much swapping."""

import pytest

from scheduler_svc.core.limits import PreemptionMode
from tests.support.driving import Bench, max_tokens, small_limits

SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE


def test_blocks_that_others_use_too_stay_on_the_device() -> None:
    bench = Bench(small_limits(blocks=6, budget=24, host_blocks=8, preemption_mode=SWAP, prefix_caching=True))
    common = list(range(500, 508))
    bench.add(0, [*common, 1, 2, 3, 4], max_tokens(8))
    bench.step()
    bench.add(1, [*common, 5, 6, 7, 8], max_tokens(6))
    bench.step()
    _, b = bench.scheduler.batch.running
    shared, own = bench.blocks_of(b.sequences[0])[:2], bench.blocks_of(b.sequences[0])[2:]
    while bench.running == "ab":
        step = bench.schedule()
        bench.process()

    assert set(step.blocks_to_swap_out[:, 0].tolist()) >= set(own)
    assert not set(step.blocks_to_swap_out[:, 0].tolist()) & set(shared)
    assert bench.scheduler.blocks.allocator.ref_counts[shared].tolist() == [2, 2]
    bench.run()
    assert bench.outputs["b"] == [9, 10, 11, 12, 13, 14]


@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_that_swapped_groups_share_on_the_device_are_given_up_for_one_that_lacks_them(depth: int) -> None:
    """b and c share a block that stays on the device when both are swapped out; a needs the whole pool."""
    limits = small_limits(blocks=6, host_blocks=8, preemption_mode=SWAP, prefix_caching=True)
    bench = Bench(limits)
    common = list(range(500, 504))
    bench.add(0, 4, max_tokens(20))
    bench.add(1, [*common, 1, 2], max_tokens(8))
    bench.step()
    bench.add(2, [*common, 3, 4], max_tokens(8))
    while bench.running != "a" or len(bench.scheduler.swapped) < 2:
        bench.step()
    assert bench.scheduler.blocks.allocator.num_used_blocks > len(bench.scheduler.table.blocks_of(0))

    bench.run(depth)

    assert bench.outputs["a"] == list(range(104, 124))
    assert bench.outputs["b"] == list(range(3, 11))
    assert bench.outputs["c"] == list(range(5, 13))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_outputs_are_the_same_whatever_was_swapped(depth: int) -> None:
    bench = Bench(small_limits(blocks=7, budget=28, host_blocks=20, preemption_mode=SWAP))
    for arrival in range(4):
        bench.add(arrival, 5 + arrival, max_tokens(9), num_sequences=1 + arrival % 2)

    bench.run(depth)

    assert bench.scheduler.preemption.num_preemptions[SWAP] > 1
    assert bench.outputs["a"] == list(range(105, 114))
    assert bench.outputs["b1"] == list(range(207, 225, 2))
    assert bench.outputs["d0"] == list(range(408, 417))
