"""Texts to be pooled in a fleet: where they go, whom they pass, and where they are refused."""

from dataclasses import replace

import pytest

from octavo_shared.step_wire.step import PoolingTask
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.demand import Obstacle, Wait
from tests.support.driving import group, max_tokens, small_limits
from tests.support.fleet_driving import FleetBench

EMBED = PoolingTask.EMBED


def pooling(bounds: CoreLimits) -> CoreLimits:
    return replace(bounds, pooling_tasks=(EMBED,), embedding_size=3)


def text(arrival: int, num_tokens: int = 3, tenant: str = "") -> SequenceGroup:
    made = group(arrival, num_tokens, max_tokens(0), tenant=tenant)
    made.pooling = EMBED
    return made


def test_a_text_goes_where_texts_are_pooled_and_its_absence_is_named() -> None:
    bench = FleetBench(small_limits())
    asking = text(0)
    assert not bench.fleet.can_ever_take(asking)
    assert not bench.fleet.offers(asking)
    assert bench.fleet.why_never(asking) == "the model gives no vectors; it generates"
    able = bench.attach(pooling(small_limits()))
    assert bench.fleet.offers(asking)
    assert bench.fleet.place(asking, 0.0) is able.planner
    assert bench.fleet.why_never(text(1, 20)).startswith("the text has 20 tokens"), "the reason of the one that pools"


def test_texts_pass_those_that_wait_for_slots_and_these_come_first_when_one_is_free() -> None:
    bench = FleetBench(pooling(small_limits(max_num_seqs=1)))
    [member] = bench.members
    bench.add(group(0, 2, max_tokens(3)))
    bench.step(member)
    for arrival in range(1, 4):
        bench.add(group(arrival, 2, max_tokens(1)))
    for arrival in range(4, 7):
        bench.add(text(arrival))
    bench.step(member)
    assert [one.arrival for one in member.planner.batch.running] == [0, 4, 5, 6]
    assert [one.arrival for one in bench.queue.in_order()] == [1, 2, 3]
    assert isinstance(bench.fleet.place(next(bench.queue.in_order()), 0.0), Obstacle)
    bench.run()
    assert sorted(bench.values) == [4, 5, 6]
    assert [len(bench.outputs[arrival, 0].token_ids) for arrival in range(4)] == [3, 1, 1, 1]


def test_who_waits_for_slots_keeps_others_out_though_texts_pass() -> None:
    bench = FleetBench(pooling(small_limits(max_num_seqs=3, blocks=20)))
    [member] = bench.members
    bench.add(group(0, 2, max_tokens(9)))
    bench.add(group(1, 2, max_tokens(9)))
    bench.step(member)
    bench.add(group(2, 2, max_tokens(2), num_sequences=2))
    bench.add(text(3))
    bench.add(group(4, 2, max_tokens(2)))
    bench.step(member)
    assert [one.arrival for one in member.planner.batch.running] == [0, 1, 3], "else the wide one never comes"


def test_texts_are_spread_over_executors_by_what_these_have_to_compute() -> None:
    limits = pooling(small_limits())
    bench = FleetBench(limits, limits)
    for arrival in range(6):
        bench.add(text(arrival, 5))
        bench.fleet.dispatch(0.0)
    for member in bench.members:
        bench.step(member)
    assert [len(member.planner.batch.running) for member in bench.members] == [3, 3]


def test_an_executor_that_drains_or_is_in_doubt_gets_as_much_as_any_request() -> None:
    limits = pooling(small_limits())
    bench = FleetBench(limits, limits)
    draining, other = bench.members
    bench.fleet.set_draining(draining.planner, True)
    for arrival in range(2):
        bench.add(text(arrival))
    assert bench.fleet.place(text(2), 0.0) is other.planner
    bench.fleet.set_probing(other.planner, True)
    bench.step(other)
    assert len(other.planner.batch.running) == 1, "until a step has finished"
    waiting = bench.fleet.place(text(3), 0.0)
    assert isinstance(waiting, Obstacle)
    assert waiting.wait is Wait.IN_LINE


def test_a_lost_text_goes_elsewhere_and_is_not_ended_where_none_pools() -> None:
    bench = FleetBench(pooling(small_limits()))
    [first] = bench.members
    moving = text(0)
    bench.add(moving)
    bench.step(first)
    bench.lose(first)
    bench.fleet.note_loss(moving, "first")
    other = bench.attach(small_limits())
    bench.step(other)
    assert moving in bench.queue
    bench.attach(pooling(small_limits()))
    bench.run()
    assert list(bench.values) == [0]


def test_slots_of_a_tenant_do_not_bound_its_texts() -> None:
    bench = FleetBench(pooling(small_limits()), max_num_seqs_per_tenant=1)
    [member] = bench.members
    bench.add(group(0, 2, max_tokens(9), tenant="x"))
    bench.step(member)
    bench.add(text(1, tenant="x"))
    bench.add(text(2, tenant="x"))
    bench.step(member)
    assert len(member.planner.batch.running) == 3


@pytest.mark.parametrize("now_s", [0.0, 5.0])  # in the second row the larger executor hangs
def test_a_text_that_waits_for_one_executor_keeps_that_one_and_no_other(now_s: float) -> None:
    bench = FleetBench(pooling(small_limits()), pooling(small_limits(budget=8)))
    large, small = bench.members
    bench.add(group(0, 10))
    bench.add(text(1, 12))  # longer than what the first prompt leaves
    bench.step(large)
    for waiting in (text(2, 9), text(3), group(4, 2)):
        bench.add(waiting)

    bench.fleet.dispatch(now_s)
    bench.step(small, now_s)

    assert [[one.arrival for one in member.planner.batch.running] for member in bench.members] == [[0], [3, 4]]
    assert not bench.fleet.dispatcher.inboxes[0].assignments
    bench.step(large, now_s)
    assert [one.arrival for one in large.planner.batch.running] == [0, 1], "first come, first served"
