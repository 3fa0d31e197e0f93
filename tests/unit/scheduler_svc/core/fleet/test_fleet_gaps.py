"""A fleet in which executors are slow, away for a moment, or leaving."""

from dataclasses import replace

import pytest

from octavo_shared.grammar.grammar import Grammar
from scheduler_svc.core.step.admission import MAX_PASSED_GROUPS
from scheduler_svc.core.step.demand import Obstacle, Wait
from scheduler_svc.request.parameters import StopConditions
from tests.support.driving import group, max_tokens, small_limits
from tests.support.fleet_driving import FleetBench, two_planners

STALL_AFTER_S = small_limits().stall_after_s


def test_a_step_is_overdue_only_from_the_moment_it_is_the_oldest() -> None:
    bench, first, second = two_planners()
    bench.add(group(0, 4, max_tokens(8)))
    bench.step(first, now_s=0.0)
    bench.step(first, now_s=0.1)
    begin_s = 10 * STALL_AFTER_S  # the first result took that long
    bench.process(first)

    bench.step(first, now_s=begin_s)
    assert first.planner.obstacle(group(1, 2), begin_s) is None
    assert first.planner.obstacle(group(1, 2), begin_s + 0.9 * STALL_AFTER_S) is None
    obstacle = first.planner.obstacle(group(1, 2), begin_s + 1.1 * STALL_AFTER_S)
    assert obstacle is not None
    assert "has been running for " in obstacle.reason
    assert bench.fleet.place(group(1, 2), begin_s + 1.1 * STALL_AFTER_S) is second.planner


def test_slow_steps_do_not_keep_a_fleet_from_batching() -> None:
    limits = small_limits(max_num_seqs=8, blocks=200, max_model_len=200, budget=64)
    bench = FleetBench(limits, limits)
    for arrival in range(8):
        bench.add(group(arrival, 5, max_tokens(20)))
    now_s, most_running = 0.0, 0
    for _ in range(8):
        for member in bench.members:
            while len(member.planner.in_flight) < 2:
                bench.step(member, now_s)
        most_running = max(most_running, sum(len(member.planner.batch.running) for member in bench.members))
        now_s += 1.5 * STALL_AFTER_S
        for member in bench.members:
            bench.process(member)
    assert most_running == 8


def test_a_group_that_only_an_absent_executor_holds_waits_for_it() -> None:
    bench = FleetBench(small_limits(max_num_seqs=2))
    wide = bench.add(group(0, 4, max_tokens(4), num_sequences=3))
    narrow = bench.add(group(1, 4, max_tokens(4)))

    bench.run()
    assert bench.is_live(wide)
    assert not bench.is_live(narrow), "others pass it"
    obstacle = bench.fleet.place(wide, 0.0)
    assert isinstance(obstacle, Obstacle)
    assert obstacle.wait is Wait.SKIPPED
    assert obstacle.reason == (
        "the request needs 3 slots of the batch, which has 2; waiting for an executor that can hold it"
    )

    bench.attach(small_limits(max_num_seqs=4))
    bench.run()
    assert len(bench.tokens["a0"]) == 4


def test_a_group_that_has_outgrown_the_fleet_fails_once_it_is_complete() -> None:
    bench = FleetBench(small_limits(max_num_seqs=2))
    away = [True]
    bench.fleet.is_complete = lambda: not away[0]
    bench.add(group(0, 4, num_sequences=3)).has_run = True
    bench.run()
    assert not bench.failures
    away[0] = False
    bench.run()
    assert bench.failures == {0: "the request needs 3 slots of the batch, which has 2"}


def test_a_group_that_has_run_waits_for_an_executor_that_follows_its_grammar() -> None:
    """As when the one that followed it was drained: another one may come."""
    bench = FleetBench(small_limits())
    guided = group(0, 4, StopConditions(8), grammar=Grammar(b"one"))
    bench.add(guided).has_run = True
    bench.run()
    assert (bench.failures, bench.fleet.dispatcher.unplaceable) == ({}, {guided})
    obstacle = bench.fleet.place(guided, 0.0)
    assert isinstance(obstacle, Obstacle)
    assert obstacle.reason.endswith("GRAMMARS); waiting for an executor that can hold it")

    bench.attach(small_limits(grammar_slots=2))
    bench.run()
    assert len(bench.tokens["a"]) == 8


@pytest.mark.parametrize("is_complete", [True, False])
def test_nothing_is_cut_short_by_a_smaller_core_and_those_behind_pass(is_complete: bool) -> None:
    bench = FleetBench(small_limits(max_model_len=12))
    bench.fleet.is_complete = lambda: is_complete
    bench.checks_integrity = False  # of so many groups that takes a while
    long_ones = [group(arrival, 4, StopConditions(100).accept(4, 20)) for arrival in range(MAX_PASSED_GROUPS + 6)]
    for each in long_ones:
        bench.add(each)
    short = bench.add(group(100, 4, StopConditions(8).accept(4, 20)))
    bench.run()
    assert list(map(len, bench.tokens.values())) == [8]
    assert not bench.is_live(short)
    assert list(bench.queue) == long_ones

    bench.attach(small_limits(max_model_len=24))
    bench.run()
    assert not bench.failures
    assert {len(bench.tokens[each.request_id]) for each in long_ones} == {16}, (
        "as accepted, where there is room for more"
    )


def test_cores_that_all_leave_still_end_what_they_preempted_and_take_nothing_new() -> None:
    bench = FleetBench(small_limits(blocks=6))
    [member] = bench.members
    for arrival in range(2):
        bench.add(group(arrival, 8, max_tokens(12)))
    bench.step(member)
    member.planner.takes_groups = False
    newcomer = bench.add(group(2, 4))
    bench.run()
    assert bench.num_preemptions + sum(member.planner.preemption.num_preemptions.values()) > 0
    assert [len(bench.tokens[name]) for name in "ab"] == [12, 12]
    assert newcomer in bench.queue


def test_a_walk_passes_a_bounded_number_of_groups() -> None:
    limits = small_limits(long_prefill_threshold=2, budget=4)
    for bench in (FleetBench(limits), FleetBench(replace(limits, max_num_seqs=1), limits)):
        for arrival in range(MAX_PASSED_GROUPS + 2):
            bench.add(group(arrival, 8))
        last = bench.add(group(MAX_PASSED_GROUPS + 2, 2))
        for member in bench.members:
            bench.step(member)
        assert last in bench.queue, "it stands behind too many"
