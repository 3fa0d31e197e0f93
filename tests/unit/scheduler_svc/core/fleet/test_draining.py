"""A core that is emptied: its groups go where room is, in order; the rest runs on, and newcomers wait behind it."""

import pytest

from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting.policy import PriorityPolicy
from scheduler_svc.request.parameters import BeamSearchParams
from scheduler_svc.request.provenance import Numerics
from tests.support.driving import group, max_tokens, small_limits
from tests.support.fleet import Member
from tests.support.fleet_driving import FleetBench


def drain(bench: FleetBench, member: Member, *, is_draining: bool = True) -> None:
    bench.fleet.set_takes_groups(member.planner, not is_draining)
    bench.fleet.set_draining(member.planner, is_draining)


def turn(bench: FleetBench, *members: Member) -> None:
    """Let members decide and take what comes of it."""
    for member in members:
        bench.step(member)
        while member.results:
            bench.process(member)


def running(member: Member) -> str:
    return "".join(group.request_id for group in member.planner.batch.running)


def two(first_slots: int = 4, second_slots: int = 4, **limits: int) -> tuple[FleetBench, Member, Member]:
    """Return a fleet whose second member has other slots; groups are placed on the first one."""
    bench = FleetBench(small_limits(max_num_seqs=first_slots, **limits), small_limits(max_num_seqs=second_slots))  # type: ignore[arg-type]
    first, second = bench.members
    return bench, first, second


def fill(bench: FleetBench, member: Member, *groups: SequenceGroup) -> None:
    """Let groups run on one member."""
    others = [other for other in bench.members if other is not member]
    for other in others:
        bench.fleet.set_takes_groups(other.planner, False)
    for each in groups:
        bench.add(each)
    turn(bench, member)
    for other in others:
        bench.fleet.set_takes_groups(other.planner, True)


def test_as_many_go_as_others_have_room_for_and_the_rest_runs_on() -> None:
    bench, first, second = two(second_slots=2)
    fill(bench, first, *(group(arrival, 3, max_tokens(5 + arrival)) for arrival in range(4)))
    drain(bench, first)
    turn(bench, first, second)
    assert (running(first), running(second)) == ("cd", "ab")
    bench.run()
    assert [len(tokens) for _, tokens in sorted(bench.tokens.items())] == [5, 6, 7, 8]
    assert not first.planner.groups


def test_newcomers_wait_until_those_have_moved_who_ran_before_them() -> None:
    bench, first, second = two(second_slots=2)
    fill(bench, second, group(0, 3, max_tokens(3)), group(1, 3, max_tokens(3)))
    fill(bench, first, group(2, 3, max_tokens(20)), group(3, 3, max_tokens(20)), group(4, 3, max_tokens(20)))
    drain(bench, first)
    bench.add(group(5, 3))
    turn(bench, second, first, second, first, second, first, second)
    assert (running(first), running(second)) == ("e", "cd"), "the newcomer took a place"


def test_a_large_one_that_finds_no_room_keeps_newcomers_back_and_not_those_of_a_more_urgent_level() -> None:
    bench = FleetBench(small_limits(), small_limits(max_num_seqs=3), policy=PriorityPolicy())
    first, second = bench.members
    fill(bench, first, group(0, 3, max_tokens(20), num_sequences=3, priority=5))
    fill(bench, second, group(1, 3, max_tokens(20), priority=5))
    drain(bench, first)
    bench.add(group(2, 3, priority=5))
    bench.add(group(3, 3, priority=1))
    turn(bench, first, second, first, second)
    assert (running(first), running(second)) == ("a", "db")


@pytest.mark.parametrize("kind", ["lone", "several", "beams"])
def test_a_group_goes_whole_after_the_results_of_its_steps(kind: str) -> None:
    bench, first, second = two(host_blocks=8)
    moving = {
        "lone": group(0, 3, max_tokens(8)),
        "several": group(0, 3, max_tokens(8), num_sequences=3),
        "beams": group(0, 3, max_tokens(8), beam_search=BeamSearchParams(2)),
    }[kind]
    fill(bench, first, moving)
    bench.step(first)
    if kind != "beams":
        bench.step(first)  # two are in flight
    drain(bench, first)
    bench.step(first)
    bench.fleet.dispatch(0.0)
    assert moving not in bench.queue, "a token of it is in flight"
    while first.results:
        bench.process(first)
    turn(bench, first, second)
    assert (moving in first.planner.groups, moving in second.planner.groups) == (False, True)
    bench.run()
    bench.check_all_is_free()


def test_the_blocks_of_a_swapped_group_are_given_back() -> None:
    limits = small_limits(blocks=6, host_blocks=6, preemption_mode=PreemptionMode.SWAP)
    bench = FleetBench(limits, small_limits())
    first, second = bench.members
    fill(bench, first, group(0, 11, max_tokens(9)), group(1, 4, max_tokens(9)))
    bench.fleet.set_takes_groups(second.planner, False)
    while not first.planner.swapped.groups:
        turn(bench, first)
    bench.fleet.set_takes_groups(second.planner, True)
    drain(bench, first)
    turn(bench, first, second, first, second)
    assert (len(first.planner.groups), running(second)) == (0, "ab")
    assert first.planner.swapped.host.num_used_blocks == 0


def test_what_no_other_core_may_take_comes_back_to_the_core_that_is_emptied() -> None:
    bench = FleetBench(small_limits(blocks=6))
    [first] = bench.members
    bound = [group(0, 11, max_tokens(9)), group(1, 4, max_tokens(9))]
    for each in bound:
        each.requires_same_numerics = True
        bench.add(each)
    turn(bench, first)
    other = bench.attach(small_limits(), Numerics("another"))
    drain(bench, first)
    bench.add(group(2, 3, max_tokens(2)))
    bench.run()
    assert sum(first.planner.preemption.num_preemptions.values()) == 1, "one had to make room"
    assert {len(tokens) for tokens in bench.tokens.values()} == {9, 2}
    assert other.planner.last_processed_step_id


@pytest.mark.parametrize("runs_alone", [False, True])
def test_what_was_dispatched_to_a_core_before_the_other_was_lost_and_it_is_emptied_stays_in_line(
    runs_alone: bool,
) -> None:
    bench, first, second = two(first_slots=1)
    fill(bench, first, group(0, 3, max_tokens(9)))
    newcomer = bench.add(group(1, 3, max_tokens(2)))
    bench.fleet.set_runs_alone(newcomer, runs_alone)
    assert bench.dispatch(0.0) == {second.planner}
    bench.lose(first)
    drain(bench, second)
    turn(bench, second)
    assert newcomer in bench.queue


def test_with_one_core_nothing_moves_and_newcomers_wait_until_it_takes_groups_again() -> None:
    bench = FleetBench(small_limits())
    [only] = bench.members
    fill(bench, only, group(0, 3, max_tokens(4)))
    drain(bench, only)
    newcomer = bench.add(group(1, 3, max_tokens(2)))
    bench.run()
    assert (only.planner.batch.running, newcomer in bench.queue) == ([], True)
    assert len(bench.tokens["a"]) == 4
    drain(bench, only, is_draining=False)
    bench.run()
    assert len(bench.tokens["b"]) == 2
