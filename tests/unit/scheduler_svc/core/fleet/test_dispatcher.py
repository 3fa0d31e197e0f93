"""What was dispatched to a core and is not admitted yet: who may still go before it, and when it goes elsewhere."""

import pytest

from scheduler_svc.core.fleet.dispatcher import MAX_DISPATCHED_GROUPS
from scheduler_svc.core.fleet.inbox import Inbox
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.waiting.policy import PriorityPolicy
from tests.support.call_counts import num_calls
from tests.support.driving import group, max_tokens, small_limits
from tests.support.fleet_driving import FleetBench

ROOMY = small_limits(max_num_seqs=64, budget=1024, blocks=1024)


def dispatched(inbox: Inbox) -> list[str]:
    return [assignment.group.request_id for assignment in inbox.assignments]


def inboxes_of(bench: FleetBench) -> list[list[str]]:
    return [dispatched(inbox) for inbox in bench.fleet.dispatcher.inboxes]


def dispatch(bench: FleetBench, now_s: float = 0.0) -> list[list[str]]:
    bench.fleet.dispatcher.dispatch(now_s)
    return inboxes_of(bench)


# Order -------------------------------------------------------------------------------------------


def test_a_more_urgent_group_takes_the_place_of_one_that_was_dispatched() -> None:
    bench = FleetBench(small_limits(max_num_seqs=2), policy=PriorityPolicy())
    for arrival in range(2):
        bench.add(group(arrival, 2, priority=5))
    assert dispatch(bench) == [["a", "b"]]

    bench.add(group(2, 2, priority=1))

    assert dispatch(bench) == [["c", "a"]]
    assert [waiting.request_id for waiting in bench.queue.in_order()] == ["a", "c", "b"], "the dispatched ones first"
    bench.step(bench.members[0])
    assert [running.request_id for running in bench.members[0].planner.batch.running] == ["c", "a"]


def test_a_tenant_that_had_less_takes_the_place_of_one_that_was_dispatched_more() -> None:
    bench = FleetBench(small_limits(max_num_seqs=3, budget=64, blocks=24), tenant_weights={"x": 1.0, "y": 1.0})
    for arrival in range(3):
        bench.add(group(arrival, 4, tenant="x"))
    assert dispatch(bench) == [["a", "b", "c"]]

    bench.add(group(3, 4, tenant="y"))

    assert dispatch(bench) == [["a", "d", "b"]]


def test_who_makes_way_in_vain_has_its_place_again_and_wakes_nobody() -> None:
    """Or the driver of that core would look again at once, and again, for ever."""
    bench = FleetBench(
        small_limits(max_num_seqs=2, budget=64, blocks=24, long_prefill_threshold=4), policy=PriorityPolicy()
    )
    bench.add(group(0, 12, priority=0))
    bench.add(group(1, 2, priority=5))
    assert bench.fleet.dispatch(0.0) == {bench.members[0].planner}
    assert inboxes_of(bench) == [["a", "b"]]

    bench.add(group(2, 12, priority=1))  # its turn is before that of "b", but one long prefill is enough

    assert bench.fleet.dispatch(0.0) == set()
    assert inboxes_of(bench) == [["a", "b"]]


def test_the_room_of_one_that_made_way_is_for_one_that_was_passed_over_before() -> None:
    bench = FleetBench(small_limits(max_num_seqs=2, budget=8, blocks=24), policy=PriorityPolicy())
    bench.add(group(0, 2))
    bench.step(bench.members[0])
    bench.attach(small_limits(max_num_seqs=2, budget=8, blocks=24, long_prefill_threshold=4))
    bench.add(group(1, 20))
    bench.step(bench.members[1])
    bench.add(group(2, 2, priority=5))
    assert dispatch(bench) == [["c"], []]

    bench.add(group(3, 12, priority=1))  # one core has no slot, and the other one computes a long prompt
    bench.add(group(4, 2, priority=2, num_sequences=2))  # no core has two slots, and "c" makes way in vain

    assert dispatch(bench) == [["d"], []]


# Elsewhere ---------------------------------------------------------------------------------------


def busy_bench() -> FleetBench:
    """Return two cores: the first one is at a step, with two more groups in its inbox; the second one is new."""
    bench = FleetBench(ROOMY)
    [busy] = bench.members
    bench.add(group(0, 20))
    bench.step(busy)
    for arrival in (1, 2):
        bench.add(group(arrival, 8, max_tokens(2)))
    assert dispatch(bench) == [["b", "c"]]
    bench.attach(ROOMY)
    return bench


def test_a_core_leaves_to_another_one_what_has_its_first_token_no_later_there() -> None:
    bench = busy_bench()
    bench.add(group(3, 12))
    bench.step(bench.members[1])

    assert {bench.fleet.planner_of(bench.groups[arrival]) for arrival in (1, 3)} == {bench.members[1].planner}
    assert inboxes_of(bench) == [["c"], []]


def test_a_stalled_core_gives_back_what_was_dispatched_to_it() -> None:
    bench = busy_bench()
    assert dispatch(bench, now_s=0.9 * ROOMY.stall_after_s) == [["b", "c"], []]
    bench.add(group(3, 2))

    assert dispatch(bench, now_s=1.1 * ROOMY.stall_after_s) == [[], ["b", "c", "d"]]


def test_a_leaving_core_gives_back_what_was_dispatched_to_it() -> None:
    bench = busy_bench()
    bench.members[0].planner.takes_groups = False
    bench.add(group(3, 2))

    assert dispatch(bench) == [[], ["b", "c", "d"]]


def test_a_core_that_decides_tells_the_others_what_it_dispatched_to_them() -> None:
    bench = FleetBench(ROOMY, ROOMY)
    for arrival in range(4):
        bench.add(group(arrival, 2))
    first, second = bench.fleet.planners
    _, dispatched_to = bench.fleet.schedule(first, 0.0)

    assert inboxes_of(bench) == [[], ["b", "d"]]
    assert dispatched_to == {second}


# Cost --------------------------------------------------------------------------------------------


def fleet_of(num_planners: int, num_waiting: int, limits: CoreLimits = ROOMY, num_tenants: int = 1) -> FleetBench:
    bench = FleetBench(*[limits] * num_planners)
    bench.checks_integrity = False
    for arrival in range(num_waiting):
        bench.add(group(arrival, 2, tenant=str(arrival % num_tenants)))
    return bench


def test_one_call_dispatches_a_bounded_number_of_groups() -> None:
    bench = fleet_of(4, 2 * MAX_DISPATCHED_GROUPS)
    assert sum(map(len, dispatch(bench))) == MAX_DISPATCHED_GROUPS


def test_dispatching_a_group_costs_the_same_however_many_cores_there_are() -> None:
    costs = {}
    for num_planners in (1, 4, 16, 64):
        bench = fleet_of(num_planners, 64)
        costs[num_planners] = num_calls(lambda: dispatch(bench))  # noqa: B023 (called at once)
    # Each call to dispatch looks once at each core; a group costs some 170 calls.
    assert all(cost <= costs[1] + 60 * num_planners for num_planners, cost in costs.items()), costs


@pytest.mark.parametrize("num_waiting", [10, 1000])
def test_a_step_of_a_full_fleet_costs_the_same_however_many_cores_there_are(num_waiting: int) -> None:
    limits = small_limits(max_num_seqs=8, budget=64, blocks=64)
    costs = {}
    for num_planners in (1, 16):
        bench = fleet_of(num_planners, num_waiting + 8 * num_planners, limits)
        for _ in range(3):
            for member in bench.members:
                bench.step(member)
        assert bench.queue.num_in_line == num_waiting
        [first, *_] = bench.members
        bench.process(first)
        costs[num_planners] = num_calls(lambda planner=first.planner: planner.schedule(0.0))  # type: ignore[misc]
    assert costs[16] <= 1.3 * costs[1], costs


def test_dispatching_costs_the_same_however_many_tenants_wait() -> None:
    costs = []
    for num_tenants in (10, 3000):
        bench = fleet_of(2, 3000, num_tenants=num_tenants)
        bench.fleet.dispatcher.dispatch(0.0)
        costs.append(num_calls(lambda: dispatch(bench)))  # noqa: B023 (called at once)
    assert costs[1] <= 1.3 * costs[0], costs


def test_dispatching_costs_the_same_however_many_wait() -> None:
    costs = []
    for num_waiting in (200, 3000):
        bench = fleet_of(2, num_waiting)
        costs.append(num_calls(lambda: dispatch(bench)))  # noqa: B023
    assert costs[1] <= 1.1 * costs[0], costs
