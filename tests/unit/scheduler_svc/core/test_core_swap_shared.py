"""Swapped groups beside others: shared blocks, more urgent groups, the prefix cache, and runs with much swapping."""

import pytest

from octavo_shared.step_wire.step import Step
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.demand import Obstacle, Wait
from scheduler_svc.core.waiting.policy import PriorityPolicy
from scheduler_svc.request.parameters import BeamSearchParams
from tests.support.driving import Bench, max_tokens, small_limits
from tests.support.toy_executor import NextToken, count_up, hashed_next_token

SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE


def test_blocks_that_others_use_too_stay_on_the_device() -> None:
    bench = Bench(small_limits(blocks=6, budget=24, host_blocks=8, preemption_mode=SWAP, prefix_caching=True))
    common = list(range(500, 508))
    bench.add(0, [*common, 1, 2, 3, 4], max_tokens(8))
    bench.step()
    bench.add(1, [*common, 5, 6, 7, 8], max_tokens(6))
    bench.step()
    _, b = bench.planner.batch.running
    shared, own = bench.blocks_of(b.sequences[0])[:2], bench.blocks_of(b.sequences[0])[2:]
    while bench.running == "ab":
        step = bench.schedule()
        bench.process()

    assert set(step.blocks_to_swap_out[:, 0].tolist()) >= set(own)
    assert not set(step.blocks_to_swap_out[:, 0].tolist()) & set(shared)
    assert bench.planner.blocks.allocator.ref_counts[shared].tolist() == [2, 2]
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
    while bench.running != "a" or len(bench.planner.swapped) < 2:
        bench.step()
    assert bench.planner.blocks.allocator.num_used_blocks > len(bench.planner.table.blocks_of(0))

    bench.run(depth)

    assert bench.outputs["a"] == list(range(104, 124))
    assert bench.outputs["b"] == list(range(3, 11))
    assert bench.outputs["c"] == list(range(5, 13))


# Beside more urgent groups -----------------------------------------------------------------------


def test_a_swapped_group_waits_for_the_slots_that_more_urgent_ones_took() -> None:
    """There are blocks enough for both outputs of `b` as soon as `a` has ended, and one slot."""
    limits = small_limits(max_num_seqs=4, blocks=8, budget=24, host_blocks=8)
    bench = Bench(limits, policy=PriorityPolicy())
    bench.add(0, 12, max_tokens(3))
    b = bench.add(1, 12, max_tokens(3), num_sequences=2, priority=1)
    while not len(bench.planner.swapped):
        bench.step()
    for arrival in range(2, 5):
        bench.add(arrival, 1, max_tokens(4))
    while bench.running != "cde":
        bench.step()

    admissions = bench.planner.admissions
    obstacle = admissions.obstacle_to_swap_in(admissions.demand_to_swap_in(b))
    assert obstacle == Obstacle(Wait.IN_LINE, "needs 2 slots of the batch, 1 free")
    bench.step()

    assert (bench.running, list(bench.planner.swapped)) == ("cde", [b])
    bench.run()
    assert (bench.outputs["b0"], bench.outputs["b1"]) == ([212, 213, 214], [213, 215, 217])


def test_a_swapped_group_does_not_take_the_room_that_a_preemption_made() -> None:
    """`b` was swapped out for `c`; then `c` needs one block more, and `a` is preempted for it."""
    bench = Bench(small_limits(blocks=9, budget=24, host_blocks=8), policy=PriorityPolicy())
    bench.add(0, 11, max_tokens(13), priority=1)
    b = bench.add(1, 4, max_tokens(5), num_sequences=2, priority=1)
    bench.step()
    bench.add(2, 11, max_tokens(13))
    while bench.running != "c":
        step = bench.schedule()
        bench.process()

    assert (bench.waiting, list(bench.planner.swapped)) == ("a", [b])
    assert bench.planner.admissions.demand_to_swap_in(b).obstacle_of_blocks is None
    assert len(step.delta.admissions) == 0


# The prefix cache --------------------------------------------------------------------------------


def swapping_bench(next_token: NextToken = count_up, num_tokens_of_a: int = 8) -> Bench:
    """`b`, of two outputs and 8 tokens, is swapped out in step 6 with a third full block of each."""
    limits = small_limits(blocks=9, budget=24, host_blocks=8, max_model_len=28, prefix_caching=True)
    bench = Bench(limits, next_token, policy=PriorityPolicy())
    bench.add(0, 12, max_tokens(num_tokens_of_a))
    bench.add(1, 8, max_tokens(10), num_sequences=2, priority=1)
    return bench


def run_until_swapped(bench: Bench, num_steps_in_flight: int = 1) -> SequenceGroup:
    """Go on until a group is swapped out; return it. All but the last results are in if one step is in flight."""
    while not len(bench.planner.swapped):
        while len(bench.results) >= num_steps_in_flight:
            bench.process()
        bench.schedule()
    (swapped,) = bench.planner.swapped
    return swapped


def run_until_back(bench: Bench) -> Step:
    """Go on until the swapped group comes back; return that step."""
    while True:
        while bench.results:
            bench.process()
        step = bench.schedule()
        if not len(bench.planner.swapped):
            return step


@pytest.mark.parametrize("beam_width", [0, 2])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_prompt_of_a_group_that_was_swapped_is_found_again(depth: int, beam_width: int) -> None:
    limits = small_limits(blocks=8, budget=24, host_blocks=8, prefix_caching=True, vocab_size=300)
    bench = Bench(limits, hashed_next_token(limits.vocab_size))
    bench.add(0, 12, max_tokens(12))  # takes the whole pool while b is away, but for two blocks
    search = BeamSearchParams(beam_width) if beam_width else None
    bench.add(1, 12, max_tokens(8), num_sequences=1 if search else 2, beam_search=search)
    bench.run(depth)
    assert bench.planner.preemption.num_preemptions[SWAP]

    again = bench.add(2, [*range(200, 212), 1, 2, 3], max_tokens(1))
    bench.run(depth)

    assert again.num_cached_tokens == 12


@pytest.mark.parametrize(("num_tokens_of_a", "num_moved"), [(8, 0), (13, 1)])
def test_blocks_that_are_still_cached_are_kept_for_the_group_and_not_moved(
    num_tokens_of_a: int, num_moved: int
) -> None:
    """They are the next ones to be evicted when the group comes back, and no other blocks are free."""
    bench = swapping_bench(num_tokens_of_a=num_tokens_of_a)
    run_until_swapped(bench)
    assert sorted(bench.planner.blocks.allocator.cached_block_ids.tolist()) == [3, 4, 6, 7]

    back = run_until_back(bench)

    assert len(back.blocks_to_swap_in) == num_moved
    assert [admission.block_ids[:2].tolist() for admission in back.delta.admissions] == [[3, 4], [3, 4]]
    bench.run()
    assert bench.outputs["b1"] == list(range(209, 229, 2))


def test_outputs_of_equal_tokens_come_back_to_the_same_blocks() -> None:
    bench = swapping_bench(next_token=lambda token_ids, _: token_ids[-1] + 1)
    run_until_swapped(bench)

    back = run_until_back(bench)

    first, second = (admission.block_ids.tolist() for admission in back.delta.admissions)
    assert first[:3] == second[:3]
    assert first[3] != second[3]
    assert len(back.blocks_to_swap_in) == 0


def test_a_block_whose_last_token_is_late_is_registered_on_the_way_back() -> None:
    bench = swapping_bench()
    b = run_until_swapped(bench, num_steps_in_flight=2)  # the one before the last fills the third block
    assert [sequence.num_inflight_rows for sequence in b.sequences] == [1, 1]
    assert sorted(bench.planner.blocks.allocator.cached_block_ids.tolist()) == [3, 4]

    back = run_until_back(bench)

    assert len(back.blocks_to_swap_in) == 2
    bench.run()
    again = bench.add(2, [*range(200, 212), 1, 2, 3], max_tokens(1))
    bench.run()
    assert again.num_cached_tokens == 12


def test_the_way_back_takes_no_room_for_blocks_that_another_request_uses() -> None:
    bench = swapping_bench()
    b = run_until_swapped(bench)
    assert bench.planner.swapped.num_blocks_to_swap_in(b) == [6]  # two of the prompt, one each, and the next ones

    bench.add(2, [*range(200, 208), 1], max_tokens(9))
    bench.step()

    assert bench.planner.swapped.num_blocks_to_swap_in(b) == [4]


def test_a_beam_that_forks_after_it_came_back_has_the_hashes_of_its_parent() -> None:
    """With blocks of one token every output token is hashed on the way out; `check_integrity` compares."""
    limits = small_limits(
        blocks=12, budget=24, host_blocks=30, prefix_caching=True, vocab_size=300, block_size=1, max_model_len=12
    )
    bench = Bench(limits, hashed_next_token(limits.vocab_size))
    bench.add(0, 2, max_tokens(6))
    bench.add(1, 1, max_tokens(8), beam_search=BeamSearchParams(3))

    bench.run()

    assert bench.planner.preemption.num_preemptions[SWAP] == 1
