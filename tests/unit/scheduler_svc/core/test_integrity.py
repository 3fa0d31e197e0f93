"""Each invariant bites: a scheduler whose books are wrong does not pass the check."""

from collections.abc import Callable

import pytest

from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.prefills import Prefill
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceStatus
from shared.step import no_slots
from tests.support.driving import Bench, small_limits


def bench_in_full_swing() -> Bench:
    """`a` has two outputs in slots 0 and 1; `b` runs in slot 2; `c` and `d` are swapped out."""
    limits = small_limits(
        blocks=10, budget=40, host_blocks=8, preemption_mode=PreemptionMode.SWAP, prefix_caching=True, max_num_seqs=5
    )
    bench = Bench(limits)
    bench.add(0, 9, num_sequences=2)
    for arrival in range(1, 4):
        bench.add(arrival, 7 - arrival)
    while len(bench.scheduler.swapped) < 2:
        bench.step()
    bench.scheduler.check_integrity()
    return bench


def take_a_block(scheduler: Scheduler) -> None:
    scheduler.blocks.allocator.allocate(1)


def name_a_block_twice(scheduler: Scheduler) -> None:
    scheduler.table.block_tables[2, 0] = scheduler.table.block_tables[0, 0]


def free_a_block_twice(scheduler: Scheduler) -> None:
    allocator = scheduler.blocks.allocator
    allocator._free_blocks[0] = allocator._free_blocks[1] if allocator._num_uncached_free_blocks > 1 else 0
    allocator.ref_counts[int(allocator._free_blocks[0])] += 1


def take_a_host_block(scheduler: Scheduler) -> None:
    scheduler.swapped.host.allocate(1)


def lose_a_slot(scheduler: Scheduler) -> None:
    scheduler.batch.free_slots.pop()


def share_a_slot(scheduler: Scheduler) -> None:
    first, second = scheduler.batch.running[0].sequences
    second.slot = first.slot


def forget_the_owner_of_a_slot(scheduler: Scheduler) -> None:
    scheduler.batch.sequence_in_slot[2] = None


def age_a_slot(scheduler: Scheduler) -> None:
    scheduler.table.generation[2] += 1


def release_a_slot(scheduler: Scheduler) -> None:
    scheduler.table.live[2] = False


def compute_beyond_the_blocks(scheduler: Scheduler) -> None:
    scheduler.table.num_scheduled_tokens[2] = scheduler.table.num_blocks[2] * 4 + 1


def grow_beyond_the_limit(scheduler: Scheduler) -> None:
    scheduler.table.num_tokens[2] = scheduler.limits.max_model_len + 1


def register_under_a_wrong_hash(scheduler: Scheduler) -> None:
    scheduler.table.token_ids[0, 1] += 1


def run_out_of_order(scheduler: Scheduler) -> None:
    scheduler.batch.running.reverse()


def change_the_order_of_a_group(scheduler: Scheduler) -> None:
    scheduler.batch.running[0].order = (-1, 0)


def keep_a_prefill_that_is_over(scheduler: Scheduler) -> None:
    sequence = scheduler.batch.running[0].sequences[0]
    scheduler.prefills.running.append(Prefill(sequence, 9, 9, no_slots(), is_long=False))


def write_a_block_for_ever(scheduler: Scheduler) -> None:
    assert scheduler.blocks.prefix_cache is not None
    scheduler.blocks.prefix_cache._being_written.add(b"block")


def swap_out_of_order(scheduler: Scheduler) -> None:
    scheduler.swapped.groups.reverse()


def wake_a_swapped_sequence(scheduler: Scheduler) -> None:
    scheduler.swapped.groups[0].sequences[0].status = SequenceStatus.WAITING


FAULTS: list[Callable[[Scheduler], None]] = [
    take_a_block,
    name_a_block_twice,
    free_a_block_twice,
    take_a_host_block,
    lose_a_slot,
    share_a_slot,
    forget_the_owner_of_a_slot,
    age_a_slot,
    release_a_slot,
    compute_beyond_the_blocks,
    grow_beyond_the_limit,
    register_under_a_wrong_hash,
    run_out_of_order,
    change_the_order_of_a_group,
    keep_a_prefill_that_is_over,
    write_a_block_for_ever,
    swap_out_of_order,
    wake_a_swapped_sequence,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_noticed(fault: Callable[[Scheduler], None]) -> None:
    bench = bench_in_full_swing()

    fault(bench.scheduler)

    with pytest.raises(AssertionError):
        bench.scheduler.check_integrity()
