"""Each invariant bites: a core whose books are wrong does not pass the check, and it says why."""

from collections.abc import Callable

import numpy as np
import pytest

from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.step import no_slots
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.prefills import Prefill
from scheduler_svc.core.step.slot_pool import SlotState
from tests.support.driving import Bench, small_limits
from tests.support.each_row import each_row

Fault = Callable[[ExecutorPlanner], None]


def bench_in_full_swing() -> Bench:
    """`a` has two outputs in slots 0 and 1; `b` runs in slot 2; `c` and `d` are swapped out. A step is in flight."""
    limits = small_limits(
        blocks=10, budget=40, host_blocks=8, preemption_mode=PreemptionMode.SWAP, prefix_caching=True, max_num_seqs=5
    )
    bench = Bench(limits)
    bench.add(0, 9, num_sequences=2)
    for arrival in range(1, 4):
        bench.add(arrival, 7 - arrival)
    while len(bench.planner.swapped) < 2:
        bench.step()
    bench.schedule()
    return bench


# 1: blocks -----------------------------------------------------------------------------------------


def take_a_block(planner: ExecutorPlanner) -> None:
    planner.blocks.allocator.allocate(1)


def name_a_block_twice(planner: ExecutorPlanner) -> None:
    planner.table.block_tables[2, 0] = planner.table.block_tables[0, 0]


def free_a_block_that_is_used(planner: ExecutorPlanner) -> None:
    planner.blocks.allocator._push(planner.table.block_tables[0, :1].astype(np.intp))


def take_a_host_block(planner: ExecutorPlanner) -> None:
    planner.swapped.host.allocate(1)


def free_a_host_block_twice(planner: ExecutorPlanner) -> None:
    host = planner.swapped.host
    host._push(host._free_blocks[:1])


# 2: slots ------------------------------------------------------------------------------------------


def lose_a_slot(planner: ExecutorPlanner) -> None:
    planner.batch.free_slots.pop()


def share_a_slot(planner: ExecutorPlanner) -> None:
    first, second = planner.batch.running[0].sequences
    second.slot = first.slot


def forget_the_owner_of_a_slot(planner: ExecutorPlanner) -> None:
    planner.batch.sequence_in_slot[2] = None


def age_a_slot(planner: ExecutorPlanner) -> None:
    planner.table.generation[2] += 1


def release_a_slot(planner: ExecutorPlanner) -> None:
    planner.table.live[2] = False


def vacate_a_slot_by_half(planner: ExecutorPlanner) -> None:
    planner.batch.is_vacated[2] = True


def miscount_the_claims(planner: ExecutorPlanner) -> None:
    planner.batch.num_claimed_slots += 1


def promise_too_many_slots(planner: ExecutorPlanner) -> None:
    group = planner.batch.running[0]
    group.sequences += [Sequence(group, index, group.prompt_token_ids) for index in range(2, 9)]
    planner.batch.num_claimed_slots += 7


# 3, 4 and 5: lengths ---------------------------------------------------------------------------------


def compute_beyond_the_blocks(planner: ExecutorPlanner) -> None:
    planner.table.num_scheduled_tokens[2] = planner.table.num_blocks[2] * 4 + 1


def compute_beyond_the_budget(planner: ExecutorPlanner) -> None:
    planner.in_flight[0].layout.lengths[0] = planner.limits.max_num_batched_tokens


def grow_beyond_the_limit(planner: ExecutorPlanner) -> None:
    planner.table.num_tokens[2] = planner.limits.max_model_len + 1


# 7 and 8: contents -----------------------------------------------------------------------------------


def share_the_block_that_is_written_next(planner: ExecutorPlanner) -> None:
    table, allocator = planner.table, planner.blocks.allocator
    index = int(table.num_scheduled_tokens[0]) // 4
    shared, own = table.block_tables[0, index], table.block_tables[1, index]
    allocator.acquire(np.array([shared], np.int32))
    allocator.free(np.array([own], np.int32))
    table.block_tables[1, index] = shared


def register_under_a_wrong_hash(planner: ExecutorPlanner) -> None:
    planner.table.token_ids[0, 1] += 1


def register_a_block_that_fills(planner: ExecutorPlanner) -> None:
    table, cache = planner.table, planner.blocks.prefix_cache
    assert cache is not None
    cache.register([b"block"], [int(table.block_tables[0, table.num_scheduled_tokens[0] // 4])])


def carry_the_hashes_of_another(planner: ExecutorPlanner) -> None:
    planner.batch.running[1].sequences[0].block_hashes = planner.batch.running[0].sequences[0].block_hashes


def write_a_block_for_ever(planner: ExecutorPlanner) -> None:
    assert planner.blocks.prefix_cache is not None
    planner.blocks.prefix_cache._being_written.add(b"block")


# Order -----------------------------------------------------------------------------------------------


def run_out_of_order(planner: ExecutorPlanner) -> None:
    planner.batch.running.reverse()


def swap_out_of_order(planner: ExecutorPlanner) -> None:
    planner.swapped.groups.reverse()


def change_the_order_of_a_group(planner: ExecutorPlanner) -> None:
    planner.batch.running[0].order = (-1, 0)


def keep_a_prefill_that_is_over(planner: ExecutorPlanner) -> None:
    sequence = planner.batch.running[0].sequences[0]
    planner.prefills.running.append(Prefill(sequence, 9, 9, [no_slots()], is_long=False))


def wake_a_swapped_sequence(planner: ExecutorPlanner) -> None:
    planner.swapped.groups[0].sequences[0].status = SequenceStatus.WAITING


def forget_a_swapped_sequence(planner: ExecutorPlanner) -> None:
    planner.swapped.drop_sequence(planner.swapped.groups[0].sequences[0])


def go_on_with_a_search_that_is_swapped_out(planner: ExecutorPlanner) -> None:
    planner.beam_batch.ready[planner.swapped.groups[0]] = []


FAULTS: dict[Fault, str] = {
    take_a_block: "block tables name",
    name_a_block_twice: "block tables name",
    free_a_block_that_is_used: "a block is free and used",
    take_a_host_block: "swapped groups name",
    free_a_host_block_twice: "a block is free twice",
    lose_a_slot: "a slot got lost",
    share_a_slot: "two running sequences share a slot",
    forget_the_owner_of_a_slot: "a slot belongs to another sequence",
    age_a_slot: "a slot has another generation",
    release_a_slot: "a running sequence has no live slot",
    vacate_a_slot_by_half: "the list of vacated slots and its column differ",
    miscount_the_claims: "the slots that running groups have a claim to are miscounted",
    promise_too_many_slots: "more slots are promised",
    compute_beyond_the_blocks: "tokens have no block",
    compute_beyond_the_budget: "a step is over its budget",
    grow_beyond_the_limit: "a sequence is too long",
    share_the_block_that_is_written_next: "a shared block would be written",
    register_under_a_wrong_hash: "a registered block is not full, or holds something else",
    register_a_block_that_fills: "a registered block is not full, or holds something else",
    carry_the_hashes_of_another: "a sequence carries hashes of other tokens",
    write_a_block_for_ever: "a writer got lost, or stays for ever",
    run_out_of_order: "groups are out of order",
    swap_out_of_order: "groups are out of order",
    change_the_order_of_a_group: "the order of a group has changed",
    keep_a_prefill_that_is_over: "a prefill that is over goes on",
    wake_a_swapped_sequence: "a sequence of a swapped group is somewhere else",
    forget_a_swapped_sequence: "a swapped sequence has no table",
    go_on_with_a_search_that_is_swapped_out: "a search is ready that does not run",
}


@each_row(*FAULTS)
def test_a_fault_is_noticed(fault: Fault) -> None:
    bench = bench_in_full_swing()
    check_integrity(bench.planner)

    fault(bench.planner)

    with pytest.raises(AssertionError, match=FAULTS[fault]):
        check_integrity(bench.planner)


# 9: slotted things -----------------------------------------------------------------------------------


def begin_its_load_again(planner: ExecutorPlanner) -> None:
    planner.batch.things.grammars.states[0] = SlotState.LOADING
    planner.batch.things.grammars.num_loading += 1


def give_its_slot_away(planner: ExecutorPlanner) -> None:
    planner.batch.things.grammars._unused[0] = None
    planner.batch.things.grammars.take(Grammar(b"two"))


def count_a_follower_twice(planner: ExecutorPlanner) -> None:
    planner.batch.things.grammars.num_followers[0] += 1


FAULTS_OF_SLOTS: dict[Fault, str] = {
    begin_its_load_again: "a sequence uses a thing that is not loaded yet",
    give_its_slot_away: "a sequence uses a thing that its group did not ask for",
    count_a_follower_twice: "followers are miscounted",
}


@each_row(*FAULTS_OF_SLOTS)
def test_a_fault_of_a_slot_that_a_running_row_names_is_noticed(fault: Fault) -> None:
    bench = Bench(small_limits(grammar_slots=1))
    bench.add(0, 2, grammar=Grammar(b"one"))
    bench.step()
    check_integrity(bench.planner)

    fault(bench.planner)

    with pytest.raises(AssertionError, match=FAULTS_OF_SLOTS[fault]):
        check_integrity(bench.planner)
