"""A model with states finds a prefix again where its blocks and a saved state are, and saves states where it will.

The toy executor fails a test whose sequence goes on from a state of other tokens, or whose saved state is of another
position than the step says.
"""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from octavo_shared.step_wire.step import Step
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.limits import CoreLimits, PreemptionMode, PrefillMode
from scheduler_svc.core.sequence import SequenceStatus
from scheduler_svc.request.parameters import BeamSearchParams
from tests.support.driving import Bench, check_pools_are_free, group, max_tokens, names_of, only_admission, small_limits

BLOCK = 4
SHARED = list(range(1, 41))  # 10 blocks


def limits_with_states(
    *, saved: int = 16, blocks: int = 80, host_blocks: int = 0, host_states: int = 0, budget: int = 64, slots: int = 4
) -> CoreLimits:
    limits = small_limits(
        blocks=blocks,
        budget=budget,
        max_model_len=min(160, 4 * blocks),
        max_num_seqs=slots,
        host_blocks=host_blocks,
        prefix_caching=True,
    )
    return replace(limits, has_states=True, num_state_blocks=saved, num_host_state_blocks=host_states)


def saves(steps: list[Step]) -> list[int]:
    """Return behind how many tokens states were saved."""
    return [count for step in steps for _, count, _ in step.states_to_save.tolist()]


def computed(steps: list[Step]) -> list[int]:
    """Return at which position each sequence was admitted."""
    return [admission.num_computed_tokens for step in steps for admission in step.delta.admissions]


def test_a_prompt_is_saved_at_its_last_full_block_and_found_again() -> None:
    bench = Bench(limits_with_states())
    bench.add(0, SHARED, max_tokens(2))
    steps = bench.run()
    assert saves(steps) == [36]
    assert [dict(step.delta.prefill_chunks.tolist()).popitem()[1] for step in steps[:2]] == [36, 4]

    bench.add(1, SHARED, max_tokens(2))
    again = bench.run()
    assert computed(again) == [36]
    assert saves(again) == [], "it is there"
    assert bench.outputs["a"] == bench.outputs["b"]
    check_pools_are_free(bench.planner)


def test_a_request_that_leaves_a_cached_prefix_saves_the_state_there_for_the_others() -> None:
    bench = Bench(limits_with_states())
    for arrival in range(4):
        bench.add(arrival, [*SHARED, *range(1000 * (arrival + 1), 1000 * (arrival + 1) + 6)], max_tokens(1))
        steps = bench.run()
        # The first one computes, the second one computes it again and saves the branch, the others find it.
        assert (computed(steps), saves(steps)) == (([0], [44]), ([0], [40]), ([40], []), ([40], []))[arrival]


@pytest.mark.parametrize("mode", PrefillMode)
@pytest.mark.parametrize(("budget", "threshold"), [(3, 0), (64, 3), (64, 1)])
def test_chunks_shorter_than_a_block_end_where_a_state_is_saved(budget: int, threshold: int, mode: PrefillMode) -> None:
    limits = limits_with_states(budget=budget, slots=3)
    bench = Bench(replace(limits, long_prefill_threshold=threshold, prefill_mode=mode))
    bench.add(0, SHARED, max_tokens(2))
    assert saves(bench.run(num_steps_in_flight=2)) == [36]
    bench.add(1, SHARED, max_tokens(2))
    assert computed(bench.run(num_steps_in_flight=2)) == [36]


def test_a_state_is_found_although_its_request_was_aborted_while_it_was_saved() -> None:
    bench = Bench(limits_with_states(budget=36))
    first = bench.add(0, SHARED, max_tokens(8))
    bench.step()
    assert bench.schedule().states_to_save.tolist()
    bench.planner.abort(first)
    bench.process()
    bench.add(1, SHARED, max_tokens(8))
    assert computed(bench.run()) == [36]
    check_pools_are_free(bench.planner)


def test_a_sequence_that_is_preempted_while_its_state_is_saved_begins_with_it_again() -> None:
    bench = Bench(limits_with_states(blocks=14, budget=16))
    bench.add(0, 18, max_tokens(8))
    second, were_saved = bench.add(1, 31, max_tokens(4)), []
    steps = [bench.schedule()]
    while not second.num_preemptions:
        states = bench.planner.blocks.states
        assert states is not None
        were_saved = [save.num_tokens for save in states.saves.get(second.sequences[0].slot, ())]
        if len(bench.results) == 3:
            bench.process()
        steps.append(bench.schedule())
    assert were_saved == [28]
    assert computed(steps + bench.run(num_steps_in_flight=3)) == [0, 0, 28]
    check_pools_are_free(bench.planner)


def test_a_lost_executor_gives_its_groups_back_while_states_are_saved_and_swapped_out() -> None:
    limits = limits_with_states(blocks=14, host_blocks=40, host_states=6, slots=6, saved=6)
    bench = Bench(replace(limits, preemption_mode=PreemptionMode.SWAP, max_model_len=48))
    groups = [bench.add(0, 10, max_tokens(24)), bench.add(1, 9, max_tokens(20), num_sequences=2)]
    states = bench.planner.blocks.states
    assert states is not None
    while not (bench.planner.swapped.groups and states.saves):
        bench.schedule()
        if not states.saves:
            bench.process()
    assert bench.planner.evacuate() == groups
    assert not states.saves
    assert not any(sequence.has_slot for group in groups for sequence in group.sequences)


def test_requests_that_come_together_wait_for_the_state_that_one_of_them_saves() -> None:
    bench = Bench(limits_with_states(slots=8, blocks=120, budget=32))
    bench.add(0, [*SHARED, *range(900, 906)], max_tokens(1))
    bench.run()
    for arrival in range(1, 7):
        bench.add(arrival, [*SHARED, *range(1000 * arrival, 1000 * arrival + 6)], max_tokens(1))
    assert sorted(computed(bench.run(num_steps_in_flight=2))) == [0, 40, 40, 40, 40, 40]


def test_an_output_keeps_one_state_which_the_next_turn_begins_with() -> None:
    bench = Bench(limits_with_states())
    bench.add(0, [1, 2, 3], max_tokens(60))
    steps = bench.run(num_steps_in_flight=2)
    assert saves(steps) == [16, 32, 48]
    states = bench.planner.blocks.states
    assert states is not None
    assert states.allocator.num_cached_blocks == 1, "one takes the place of the other"

    bench.add(1, [1, 2, 3, *bench.outputs["a"], 9, 9, 9], max_tokens(2))
    assert computed(bench.run()) == [48]


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_spans_of_drafts_end_where_the_state_of_an_output_is_saved(in_flight: int) -> None:
    bench = Bench(replace(limits_with_states(), max_allowance=6, max_sample_rows=64))
    for arrival in range(2):
        bench.add(arrival, 3 + arrival, max_tokens(60))
    steps = bench.run(in_flight)
    assert sorted(saves(steps)) == [16, 16, 32, 32, 48, 48]
    assert max(len(bench.outputs[name]) for name in "ab") == 60
    assert len(steps) < 60, "several tokens came in a step"
    check_pools_are_free(bench.planner)
    bench.add(2, [*range(100, 103), *bench.outputs["a"], 9, 9], max_tokens(2))
    assert computed(bench.run()) == [48]


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_sequences_with_drafts_in_flight_are_computed_again_and_those_without_are_swapped(in_flight: int) -> None:
    limits = limits_with_states(blocks=14, host_blocks=40, host_states=6, slots=6, saved=6)
    limits = replace(limits, preemption_mode=PreemptionMode.SWAP, max_model_len=48, max_allowance=4, max_sample_rows=64)
    bench = Bench(limits)
    bench.add(0, 10, max_tokens(24))
    bench.add(1, 9, max_tokens(20), num_sequences=2)
    bench.run(in_flight)
    assert sum(bench.planner.preemption.num_preemptions.values()) > 0
    assert [len(bench.outputs[name]) for name in ("a", "b0", "b1")] == [24, 20, 20]
    check_pools_are_free(bench.planner)


def test_many_outputs_beside_a_small_pool_save_nothing_of_themselves() -> None:
    bench = Bench(limits_with_states(saved=3))
    for arrival in range(2):
        bench.add(arrival, 3, max_tokens(40))
    assert saves(bench.run()) == []


def test_a_long_prompt_leaves_states_at_ends_of_chunks_which_go_first() -> None:
    limits = replace(limits_with_states(blocks=400, budget=90, saved=4), max_model_len=1600)
    bench = Bench(limits)
    bench.add(0, 1100, max_tokens(1))
    steps = bench.run()
    # Chunks of 90 end at full blocks, 88; a state is saved behind every 64 blocks at the next one of these ends.
    assert saves(steps) == [264, 528, 792, 1056, 1096]
    states = bench.planner.blocks.states
    assert states is not None
    first = states.prefix_cache.hash_of(int(states.allocator.cached_block_ids[0]))
    assert first != names_of(bench.planner.blocks, bench.planner.table.token_ids[0, :1096])[-1]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_state_is_found_after_the_answer_and_not_before(depth: int) -> None:
    """With steps in flight, nothing begins with a state whose step has no answer."""
    bench = Bench(limits_with_states(budget=36))
    bench.add(0, SHARED, max_tokens(8))
    bench.schedule()
    bench.schedule()  # saves, and computes the rest
    bench.add(1, SHARED, max_tokens(8))
    for _ in range(depth - 1):
        assert not bench.schedule().delta.admissions
    bench.process()
    assert not bench.schedule().delta.admissions, "the first step's blocks are answered, its state is not"
    bench.process()
    assert only_admission(bench.schedule()).num_computed_tokens == 36
    bench.run()


def test_a_state_goes_with_the_block_that_has_its_name() -> None:
    bench = Bench(limits_with_states(blocks=14))
    bench.add(0, SHARED, max_tokens(1))
    bench.run()
    states = bench.planner.blocks.states
    assert states is not None
    assert states.allocator.num_cached_blocks == 1
    bench.add(1, 30, max_tokens(1))  # evicts blocks from the end of the first prompt
    bench.run()
    assert states.longest(names_of(bench.planner.blocks, bench.planner.table.token_ids[0, :28])) == 7
    assert states.allocator.num_cached_blocks == 1


def test_a_prefix_that_is_computed_again_is_as_new_as_its_state() -> None:
    bench = Bench(limits_with_states(blocks=24, saved=1))
    bench.add(0, SHARED, max_tokens(1))
    bench.run()
    bench.add(1, 20, max_tokens(1))  # its state takes the place of the first one
    bench.run()
    bench.add(2, SHARED, max_tokens(1))
    assert (saves(again := bench.run()), computed(again)) == ([36], [0])
    for arrival in range(3, 8):  # 15 blocks of others, without a state
        bench.add(arrival, 12, max_tokens(1))
        bench.run()
    bench.add(8, SHARED, max_tokens(1))
    assert computed(bench.run()) == [36]


def test_another_salt_finds_no_state() -> None:
    bench = Bench(limits_with_states())
    bench.add(0, SHARED, max_tokens(1), cache_salt=1)
    bench.run()
    bench.add(1, SHARED, max_tokens(1), cache_salt=2)
    assert computed(bench.run()) == [0]


def test_a_pool_without_room_saves_nothing_and_nobody_waits() -> None:
    bench = Bench(limits_with_states(saved=1, slots=4))
    for arrival in range(4):
        bench.add(arrival, [*SHARED, arrival, 9], max_tokens(20))
    bench.run(num_steps_in_flight=2)
    check_pools_are_free(bench.planner)


def test_a_sequence_that_ends_before_its_save_is_answered_is_named_all_the_same() -> None:
    bench = Bench(limits_with_states())
    first = bench.add(0, [1, 2, 3], max_tokens(60))
    while len(bench.outputs["a"]) < 14:
        bench.step()
    assert bench.schedule().states_to_save.tolist()
    bench.planner.finish(first.sequences[0])  # a stop string
    bench.process()
    bench.add(1, [1, 2, 3, *bench.outputs["a"], 5, 5], max_tokens(1))
    assert computed(bench.run()) == [16]


@pytest.mark.parametrize("beams", [False, True])
def test_swapped_sequences_take_their_states_along(beams: bool) -> None:
    limits = limits_with_states(blocks=14, host_blocks=40, host_states=6, slots=6, saved=6)
    bench = Bench(replace(limits, preemption_mode=PreemptionMode.SWAP, max_model_len=48))
    search = BeamSearchParams(beam_width=3) if beams else None
    bench.add(0, 10, max_tokens(24))
    bench.add(1, 9, max_tokens(20), num_sequences=1 if beams else 2, beam_search=search)
    steps = bench.run(num_steps_in_flight=1 if beams else 2)
    moved = [step for step in steps if len(step.blocks_to_swap_out)]
    assert moved
    assert all(len(step.states_to_save) for step in moved)
    assert bench.planner.preemption.num_preemptions[PreemptionMode.SWAP] > 0
    check_pools_are_free(bench.planner)


def test_without_room_on_the_host_preempted_sequences_are_computed_again() -> None:
    limits = limits_with_states(blocks=14, host_blocks=40, host_states=1, slots=6, saved=6)
    bench = Bench(replace(limits, preemption_mode=PreemptionMode.SWAP, max_model_len=48))
    bench.add(0, 10, max_tokens(24))
    bench.add(1, 9, max_tokens(20), num_sequences=2)
    bench.run()
    assert bench.planner.preemption.num_preemptions[PreemptionMode.SWAP] == 0
    assert bench.planner.preemption.num_preemptions[PreemptionMode.RECOMPUTE] > 0


def busy_limits() -> CoreLimits:
    limits = replace(limits_with_states(saved=160, blocks=6000, budget=2048, slots=64), block_size=16)
    return replace(limits, max_model_len=2000)


@pytest.mark.parametrize("shift", [0, 100])
def test_of_64_requests_with_a_common_beginning_62_find_it(shift: int) -> None:
    """The second wave is the first one, or has its tokens at other places: 100 of the common ones are left out."""
    bench = Bench(busy_limits())
    common = list(range(1, 561))
    for begin in (0, shift):
        for number in range(64):
            own = list(range(10_000 + 100 * number, 10_100 + 100 * number))
            bench.add(number + begin, [*common[begin:], *own], max_tokens(1))
        found = computed(bench.run(num_steps_in_flight=2))
        assert len(found) == 64
        assert sum(count >= (560 - begin) // 16 * 16 for count in found) >= 62


def test_a_tree_of_branches_is_found_at_every_branch_the_second_time() -> None:
    """A prefix of 1,000 tokens, 5 continuations of 100, and 5 of 100 of each of them, one request after the other."""
    bench, arrivals = Bench(busy_limits()), count()
    prefix = list(range(1, 1001))
    branches = [[*prefix, *range(2000 + 100 * i, 2100 + 100 * i)] for i in range(5)]
    own = [list(range(3000 + 100 * i, 3100 + 100 * i)) for i in range(25)]
    prompts = [[*branches[i // 5], *tokens] for i, tokens in enumerate(own)]
    for _ in range(2):
        found = []
        for prompt in prompts:
            bench.add(next(arrivals), prompt, max_tokens(1))
            found += computed(bench.run())
    assert found == [1184] * 25, "each goes on behind its last full block"
    for begin, end in ((branches[3], 1088), (prefix, 992)):
        bench.add(next(arrivals), [*begin, *range(9000, 9100)], max_tokens(1))
        assert computed(bench.run()) == [end], "another continuation begins at the branch"


@pytest.mark.parametrize("has_room", [True, False])
def test_a_state_from_the_host_evicts_none_that_another_output_of_its_group_begins_with(has_room: bool) -> None:
    limits = limits_with_states(saved=1 + has_room, host_blocks=16, host_states=2)
    blocks = BlockManager(replace(limits, host_prefixes=True))
    returning = group(0, SHARED, max_tokens(20), num_sequences=2)
    for number, sequence in enumerate(returning.sequences):
        sequence.token_ids, sequence.status = np.array([*SHARED, number + 1], np.int32), SequenceStatus.WAITING
    returning.sequences[1].token_ids = np.array([*range(101, 142)], np.int32)
    on_host, on_device = (blocks.hash_blocks(sequence) for sequence in returning.sequences)
    states = blocks.states
    assert states is not None
    assert states.host.names is not None
    of = blocks.groups[0].allocator
    for names in (on_host, on_device):
        cached = of.allocate(len(names))
        of.register(names, cached.tolist())
        of.free(cached)
    for pool, name in ((states.host.allocator, on_host[-1]), (states.allocator, on_device[-1])):
        block = pool.allocate(1)
        pool.register([name], block.tolist())
        pool.free(block)

    plan = blocks.plan_admission(returning)
    taken = blocks.allocate(plan)

    assert [planned.num_cached for planned in plan.sequences] == [10 * has_room, 10]
    assert len(set(taken.held)) == len(taken.held) == 1 + has_room
