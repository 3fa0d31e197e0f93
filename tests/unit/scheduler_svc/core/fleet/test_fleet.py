"""Several cores, one queue: who is placed where."""

import gc
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.step import Adapter
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.step.admission import MAX_PASSED_GROUPS
from scheduler_svc.core.step.demand import Obstacle, Wait
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from tests.support.driving import group, max_tokens, small_limits
from tests.support.each_row import each_row
from tests.support.fleet_driving import FleetBench, two_planners

# Placement ---------------------------------------------------------------------------------------


def test_a_group_goes_where_its_prefix_is_cached() -> None:
    bench, first, second = two_planners(prefix_caching=True)
    common = list(range(500, 508))
    bench.add(group(0, 3, max_tokens(2)))
    bench.step(first)
    bench.add(group(1, [*common, 1], max_tokens(1)))
    bench.step(second)
    bench.run()  # now the first core is the better place for everything else

    assert bench.fleet.place(group(2, [*common, 2]), now_s=0.0) is second.planner
    assert bench.fleet.place(group(3, [7, *common, 2]), now_s=0.0) is first.planner


@each_row(Fleet.lose_blocks, Fleet.reset_prefixes)
def test_blocks_of_a_scheduler_before_it_are_given_up_too(give_up: Callable[[Fleet], None]) -> None:
    """An executor kept them, and their names have the key that names have from now on: both schedulers gave up once."""
    lives = [FleetBench(small_limits(prefix_caching=True)) for _ in range(2)]
    give_up(lives[0].fleet)
    lives[0].add(group(0, list(range(500, 509)), max_tokens(1)))
    lives[0].run()
    [former], [member] = lives[0].members, lives[1].members
    cache = former.planner.blocks.prefix_cache
    assert cache is not None
    kept = cache.is_registered.nonzero()[0].astype(np.int32)
    names = [cache.hash_of(block) or b"" for block in kept.tolist()]
    lives[1].fleet.adopt_blocks(member.planner, kept, b"".join(names))
    assert len(kept) == 2

    give_up(lives[1].fleet)

    check_integrity(member.planner)
    lives[1].add(group(0, list(range(500, 509)), max_tokens(1)))
    lives[1].run()
    assert lives[1].groups[0].num_cached_tokens == 0


def test_a_chunk_in_flight_counts_though_its_request_has_ended() -> None:
    bench, first, second = two_planners()
    bench.add(group(0, 20))
    bench.step(first)  # 16 of its 20 tokens
    bench.abort(bench.groups[0])

    assert bench.fleet.place(group(1, 2), now_s=0.0) is second.planner

    bench.process(first)
    assert (first.planner.load, second.planner.load) == (0, 0)


@each_row(1, 2, 3, 4)
def test_a_burst_is_dispatched_in_a_few_steps_of_each_core(num_planners: int) -> None:
    bench = FleetBench(*[small_limits(max_num_seqs=64, budget=512, blocks=256)] * num_planners)
    for arrival in range(48):
        bench.add(group(arrival, 3))
    bench.step(bench.members[0])
    assert len(bench.members[0].planner.batch.running) == 48 // num_planners
    for member in [*bench.members[1:], *bench.members]:
        bench.step(member)

    nums_taken = [len(member.planner.batch.running) for member in bench.members]
    assert sum(nums_taken) >= 40
    assert max(nums_taken) <= 2 * min(nums_taken)


def test_what_exceeds_the_slots_of_another_core_is_not_left_to_it() -> None:
    bench = FleetBench(
        small_limits(max_num_seqs=64, budget=512, blocks=256), small_limits(max_num_seqs=4, budget=512, blocks=256)
    )
    for arrival in range(40):
        bench.add(group(arrival, 3))
    bench.step(bench.members[0])

    assert len(bench.members[0].planner.batch.running) == 36


def test_a_core_that_cannot_take_it_now_is_passed_over() -> None:
    bench = FleetBench(small_limits(blocks=6), small_limits(blocks=12))
    small, large = bench.members
    for arrival, member in enumerate([large, small, large]):
        bench.add(group(arrival, 12))
        bench.step(member)
        bench.process(member)

    assert small.planner.load < large.planner.load
    assert bench.fleet.place(group(3, 16), now_s=0.0) is large.planner
    assert bench.fleet.place(group(3, 8), now_s=0.0) is small.planner


def test_a_stalled_core_gets_nothing_while_another_one_can_take_it() -> None:
    bench, first, second = two_planners()
    bench.add(group(0, 2))
    bench.step(first, now_s=0.0)
    bench.add(group(1, 20))
    bench.step(second, now_s=5.0)  # the first one has not answered for 5 s

    assert bench.fleet.place(group(2, 2), now_s=0.5) is first.planner
    assert bench.fleet.place(group(2, 2), now_s=5.0) is second.planner

    waiting = bench.add(group(2, 2))
    bench.step(second, now_s=5.0)
    assert bench.fleet.planner_of(waiting) is second.planner


def test_one_that_waits_for_its_prefix_lets_others_pass() -> None:
    roomy = small_limits(prefix_caching=True)
    bench = FleetBench(roomy, small_limits(prefix_caching=True, max_num_seqs=1, blocks=12))
    first, full = bench.members
    for arrival, member in enumerate((full, first)):
        bench.add(group(arrival, [1, 2, 3, 4, arrival]))
        bench.step(member)
    waiting, passing = bench.add(group(2, [1, 2, 3, 4, 5])), bench.add(group(3, 2))

    bench.step(first)

    assert bench.fleet.planner_of(waiting) is None
    assert bench.fleet.planner_of(passing) is first.planner


@pytest.mark.parametrize(
    "needs",
    [
        {"num_sequences": 3},
        {"num_sequences": 2, "grammar": Grammar(b"one")},
        {"num_sequences": 2, "adapter": Adapter("one")},
    ],
)
def test_who_waits_for_room_on_one_core_keeps_that_one_and_no_other(needs: dict[str, Any]) -> None:
    bench = FleetBench(
        small_limits(max_num_seqs=3, grammar_slots=1, adapter_slots=1), small_limits(max_num_seqs=2)
    )  # the second one can never take what is needed
    first, second = bench.members
    bench.add(group(0, 2, max_tokens(9), num_sequences=2))
    bench.step(first)
    bench.add(group(1, 2, **needs))
    for arrival in (2, 3, 4):
        bench.add(group(arrival, 2))

    for member in (second, first, second):
        bench.step(member)

    running = ["".join(g.request_id for g in member.planner.batch.running) for member in (first, second)]
    assert running == ["a", "cd"]


def test_what_fits_nowhere_waits_for_another_core_and_keeps_nobody_waiting() -> None:
    bench, _, _ = two_planners()
    too_long = [bench.add(group(arrival, 24)) for arrival in range(MAX_PASSED_GROUPS + 1)]
    after = bench.add(group(100, 2, max_tokens(1)))

    bench.run()

    assert not bench.is_live(after)
    assert bench.fleet.dispatcher.unplaceable == set(too_long)
    place = bench.fleet.place(too_long[0], now_s=0.0)
    assert isinstance(place, Obstacle)
    assert place.wait is Wait.SKIPPED

    bench.attach(small_limits(max_model_len=48, blocks=60))
    bench.run()
    assert not bench.fleet.dispatcher.unplaceable
    assert not any(bench.is_live(waiting) for waiting in too_long)


def test_each_core_says_what_keeps_a_group_from_it() -> None:
    bench, first, second = two_planners()
    bench.add(group(0, 16))
    bench.step(first)

    obstacles = dict(bench.fleet.obstacles(group(1, 20), now_s=0.0))

    assert obstacles == {first.planner: Obstacle(Wait.IN_LINE, "needs 5 blocks, 4 free"), second.planner: None}


# Tenants -----------------------------------------------------------------------------------------


def test_a_core_that_is_lost_is_free_at_once_without_the_garbage_collector() -> None:
    limits = small_limits(prefix_caching=True)
    fleet = Fleet(WaitingQueue(FcfsPolicy()), FcfsPolicy())
    kept, lost = fleet.join(limits, epoch=1), fleet.join(limits, epoch=1)
    fleet.add(group(0, 20))
    fleet.add(group(1, 20))
    for planner in (kept, lost):
        assert fleet.schedule(planner, 0.0)[0].step is not None
    table = weakref.ref(lost.table)
    gc.disable()
    try:
        groups = fleet.leave(lost)
        del planner, lost
        assert (len(groups), table()) == (1, None)
    finally:
        gc.enable()


# Stop strings -------------------------------------------------------------------------------------


@each_row(*product([False, True], [1, 2]))
def test_a_stop_string_ends_a_sequence_that_has_gone_to_another_core_since(
    is_admitted: bool, num_sequences: int
) -> None:
    bench = FleetBench(small_limits(blocks=6), small_limits(blocks=6))
    first, second = bench.members
    bench.fleet.set_takes_groups(second.planner, False)
    bench.add(group(0, 12, max_tokens(8)))
    stopped = bench.add(group(1, 3, max_tokens(8), num_sequences=num_sequences))
    step, updates = bench.schedule(first, 0.0), None
    while updates is None or stopped not in bench.queue:
        assert step is not None
        bench.execute(first, step)
        updates = bench.fleet.process(first.planner, first.results.popleft())
        step = bench.schedule(first, 0.0)  # decided before what was processed is delivered
    assert stopped.sequences[0] in updates.sequences
    bench.fleet.set_takes_groups(second.planner, True)
    bench.fleet.set_takes_groups(first.planner, False)
    bench.fleet.dispatch(0.0)
    if is_admitted:
        bench.step(second)
    assert (stopped in second.planner.groups) is is_admitted

    bench.fleet.finish(first.planner, stopped.sequences[0])

    bench.step(second)
    assert len(stopped.live_sequences) == num_sequences - 1
    assert (stopped in bench.queue) + (stopped in second.planner.groups) == num_sequences - 1
    check_integrity(second.planner)
