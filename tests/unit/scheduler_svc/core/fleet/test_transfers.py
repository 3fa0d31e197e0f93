"""A prefix goes where its group is best computed, and blocks go ahead of a group; whatever fails is computed."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo_shared.errors import ExecutorFaultError
from octavo_shared.step_wire.step import Step, TableDelta
from scheduler_svc.core.fleet.transfers import exchange
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.limits import PoolLimits
from scheduler_svc.request.provenance import Numerics
from tests.support.driving import group, max_tokens, names_of, small_limits
from tests.support.each_row import each_row
from tests.support.fleet import Member
from tests.support.fleet_driving import ALIKE, FleetBench
from tests.support.toy_executor import ToyNetwork

PREFIX = list(range(500, 540))  # ten blocks of 4 tokens


def fleet_of(num_members: int = 2, fails: Callable[[int], bool] = lambda number: False, **options: Any) -> FleetBench:
    """Return a fleet whose first member has computed the prefix, and where each transfer of a block pays."""
    sizes: dict[str, Any] = {"blocks": 40, "budget": 64, "max_model_len": 80, "prefix_caching": True}
    limits = replace(small_limits(**(sizes | options)), max_transfers=4)
    bench = FleetBench(*[limits] * num_members, network=ToyNetwork(fails))
    bench.fleet.dispatcher.transfers.least_tokens = bench.fleet.dispatcher.transfers.fixed_tokens = 4
    only(bench, 0)
    bench.add(group(0, PREFIX, max_tokens(1)))
    bench.run()
    only(bench, *range(num_members))
    return bench


def only(bench: FleetBench, *places: int) -> None:
    """Let new groups go to these members only."""
    for place, member in enumerate(bench.members):
        bench.fleet.set_takes_groups(member.planner, place in places)


def drain(bench: FleetBench, place: int) -> None:
    planner = bench.members[place].planner
    bench.fleet.set_takes_groups(planner, False)
    bench.fleet.set_draining(planner, True)


def turns(bench: FleetBench, until: Callable[[], bool], now_s: float = 0.0) -> float:
    """Let all members go on until something holds; return the time."""
    for _ in range(60):
        if until():
            return now_s
        now_s += 0.05
        bench.turn(now_s)
        bench.fleet.dispatch(now_s)
    raise AssertionError("it does not come")


def computed_by(member: Member) -> int:
    """Return how many prompt tokens a member was given to compute."""
    return sum(int(length) for step in member.steps for length in step.delta.prefill_chunks[:, 1])


def names_of_prefix(member: Member) -> list[bytes]:
    return names_of(member.planner.blocks, np.array(PREFIX, np.int32))


def finished(bench: FleetBench, arrival: int) -> bool:
    return not bench.is_live(bench.groups[arrival])


def test_a_prefix_is_sent_to_the_executor_that_takes_the_group() -> None:
    bench = fleet_of()
    only(bench, 1)
    asked = bench.add(group(1, [*PREFIX, 7], max_tokens(2)))

    turns(bench, lambda: finished(bench, 1))

    assert computed_by(bench.members[1]) == 1
    assert (asked.num_cached_tokens, asked.num_pulled_tokens) == (40, 40)
    [admitted] = [event for event in bench.events if event.group is asked]
    assert admitted.cause.startswith("40 tokens were pulled from executor 0 in ")
    assert bench.fleet.dispatcher.transfers.num_arrived == 1
    bench.run()
    bench.check_all_is_free()


def test_a_group_waits_for_its_prefix_and_others_pass_it() -> None:
    bench = fleet_of(fails=lambda number: False)
    only(bench, 1)
    bench.add(group(1, [*PREFIX, 7], max_tokens(2)))
    bench.add(group(2, 3, max_tokens(2)))
    bench.fleet.dispatch(0.0)

    bench.step(bench.members[1])

    assert [each.request_id for each in bench.members[1].planner.batch.running] == ["c"]


@each_row(0, 1)
def test_what_fails_at_either_end_is_computed(end: int) -> None:
    bench = fleet_of(fails=lambda number: True)
    only(bench, 1)
    asked = bench.add(group(1, [*PREFIX, 7], max_tokens(2)))

    turns(bench, lambda: finished(bench, 1))

    assert (computed_by(bench.members[1]), asked.num_pulled_tokens) == (41, 0)
    transfers = bench.fleet.dispatcher.transfers
    assert (transfers.num_arrived, transfers.num_cancelled) == (0, 1)
    assert not transfers.can_send(bench.members[0].planner, bench.members[1].planner, 1.0), "it is tried again at once"
    assert transfers.can_send(bench.members[0].planner, bench.members[1].planner, 100.0)


@each_row(0, 1)
def test_a_lost_executor_cancels_what_it_sent_or_received(lost: int) -> None:
    bench = fleet_of(num_members=3)
    only(bench, 1)
    bench.add(group(1, [*PREFIX, 7], max_tokens(2)))
    bench.fleet.dispatch(0.0)
    bench.step(bench.members[0])
    bench.network.contents.clear()  # nothing has come yet
    bench.step(bench.members[1])
    only(bench, 1, 2)

    bench.lose(bench.members[lost])
    turns(bench, lambda: finished(bench, 1), 1.0)

    assert not bench.fleet.dispatcher.transfers
    bench.run()
    bench.check_all_is_free()


def test_a_transfer_beyond_its_deadline_is_given_up() -> None:
    bench = fleet_of()
    only(bench, 1)
    bench.add(group(1, [*PREFIX, 7], max_tokens(2)))
    bench.fleet.dispatch(0.0)
    bench.step(bench.members[1])  # the sender does nothing

    bench.fleet.dispatch(20.0)
    for _ in range(4):
        bench.step(bench.members[1], 20.0)
        while bench.members[1].results:
            bench.process(bench.members[1])

    assert finished(bench, 1)
    assert computed_by(bench.members[1]) == 41


def test_a_group_that_ends_frees_both_sides() -> None:
    bench = fleet_of()
    only(bench, 1)
    asked = bench.add(group(1, [*PREFIX, 7], max_tokens(2)))
    bench.fleet.dispatch(0.0)
    bench.step(bench.members[1])

    bench.abort(asked)
    turns(bench, lambda: not bench.fleet.dispatcher.transfers)

    bench.run()
    bench.check_all_is_free()


def test_blocks_go_ahead_of_a_group_that_leaves_a_draining_executor() -> None:
    bench = fleet_of()
    only(bench, 0)
    bench.add(group(1, [*PREFIX, 7], max_tokens(20)))
    turns(bench, lambda: len(bench.outputs[1, 0].token_ids) == 3)
    only(bench, 0, 1)

    drain(bench, 0)
    turns(bench, lambda: not bench.members[0].planner.groups, 5.0)
    turns(bench, lambda: finished(bench, 1), 10.0)

    assert bench.outputs[1, 0].token_ids == [*range(8, 28)]
    assert computed_by(bench.members[1]) <= 8, "more was computed again than it had got on the way"


def test_a_hot_prefix_spreads_and_is_computed_once() -> None:
    bench = fleet_of(num_members=4)
    for arrival in range(1, 13):
        bench.add(group(arrival, [*PREFIX, arrival], max_tokens(30)))

    turns(bench, lambda: not len(bench.queue))

    running = [len(member.planner.batch.running) for member in bench.members]
    assert max(running) <= 4
    assert sum(map(computed_by, bench.members[1:])) <= 12
    assert bench.fleet.dispatcher.transfers.num_arrived == 3


def test_a_window_and_all_tokens_come_together() -> None:
    bench = fleet_of(sliding_window=0)
    limits = replace(bench.members[0].planner.limits, more_groups=(PoolLimits(40, 6),))
    bench = FleetBench(limits, limits)
    bench.fleet.dispatcher.transfers.least_tokens = bench.fleet.dispatcher.transfers.fixed_tokens = 4
    only(bench, 0)
    bench.add(group(0, PREFIX, max_tokens(1)))
    bench.run()
    only(bench, 1)
    bench.add(group(1, [*PREFIX, 7], max_tokens(2)))

    turns(bench, lambda: finished(bench, 1))

    assert computed_by(bench.members[1]) == 1
    assert len(next(iter(bench.network.contents.values()))) == 10 + 2


def test_what_a_step_swaps_in_is_sent_by_the_next_one() -> None:
    bench = fleet_of(host_blocks=24, host_prefixes=True)
    holder = bench.members[0]
    bench.run()  # the prefix is on the host, too
    of = holder.planner.blocks.groups[0]
    of.allocator.free(of.allocator.allocate(of.allocator.num_blocks))
    only(bench, 0)
    bench.add(group(1, [*PREFIX, 7], max_tokens(30)))
    bench.step(holder)
    assert len(holder.steps[-1].blocks_to_swap_in) == 10
    holder.planner.transfers.send(
        99, "executor 1", holder.planner.blocks.prefixes.exportable(names_of_prefix(holder))[1]
    )
    step = Step(1, 1, TableDelta(), blocks_to_swap_in=holder.steps[-1].blocks_to_swap_in)

    holder.planner.transfers.put_into(step, 10_000)

    assert not step.blocks_to_send
    assert holder.planner.transfers.has_news
    next_step = Step(1, 2, TableDelta())
    holder.planner.transfers.put_into(next_step, 10_000)
    assert len(next_step.blocks_to_send) == 1


@each_row(
    ("other bits", Numerics("numerics", "other"), {}),
    ("no digest", Numerics("numerics", ""), {}),
    ("other blocks", ALIKE, {"block_size": 8}),
    ("no transfers", ALIKE, {"max_transfers": 0}),
    ("other windows", ALIKE, {"sliding_window": 16}),
)
def test_executors_that_differ_exchange_nothing(what: str, numerics: Numerics, options: dict[str, Any]) -> None:
    limits = replace(small_limits(prefix_caching=True, blocks=40), max_transfers=4)
    bench = FleetBench(limits)
    other = bench.attach(replace(limits, **options), numerics)

    assert not exchange(bench.members[0].planner, other.planner), what


def test_an_answer_that_tells_of_a_strange_transfer_is_a_fault() -> None:
    bench = fleet_of()
    bench.add(group(1, 3, max_tokens(2)))
    bench.step(bench.members[0])
    member = next(member for member in bench.members if member.results)
    member.results[0].arrived_transfers = (99,)

    with pytest.raises(ExecutorFaultError, match="transfers that are not pending"):
        bench.process(member)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_transfers_with_faults_leave_no_block_behind() -> None:
    chance, num_transfers = random.Random(7), 0
    while num_transfers < 10_000:
        num_transfers += play_with_faults(chance)


def play_with_faults(chance: random.Random) -> int:
    """Play some hundred requests with few prefixes on a fleet; return the number of transfers.

    Members are drained and lost, clients leave, and a third of the transfers fails.
    """
    now_s = 0.0
    bench = fleet_of(3, lambda number: number % 3 == 0, host_blocks=24, host_prefixes=True)
    transfers = bench.fleet.dispatcher.transfers
    bench.checks_integrity = False
    prefixes = [[chance.randrange(1000) for _ in range(40)] for _ in range(6)]
    for arrival in range(1, 400):
        bench.add(group(arrival, [*chance.choice(prefixes), arrival], max_tokens(chance.randrange(1, 12))))
        now_s += chance.choice((0.05, 0.3))
        bench.turn(now_s)
        bench.fleet.dispatch(now_s)
        transfers._pauses.clear()
        if arrival % 11 == 0 and bench.is_live(bench.groups[arrival]):
            bench.abort(bench.groups[arrival])
        if arrival % 7 == 0:
            emptied = bench.members[arrival % 3].planner
            bench.fleet.set_draining(emptied, not emptied.is_draining)
            bench.fleet.set_takes_groups(emptied, not emptied.is_draining)
        if arrival % 50 == 0:
            limits = bench.members[0].planner.limits
            bench.lose(bench.members[0])
            bench.attach(limits, ALIKE)
    only(bench, 0, 1, 2)
    for member in bench.members:
        bench.fleet.set_draining(member.planner, False)
    now_s = turns(bench, lambda: not (len(bench.queue) or transfers), now_s)
    for _ in range(40):
        bench.turn(now_s := now_s + 0.05)
    for member in bench.members:
        check_integrity(member.planner)
    bench.check_all_is_free()
    return transfers.num_arrived + transfers.num_cancelled


def test_pairs_that_fail_for_ever_pause_five_minutes_and_are_forgotten_with_an_executor() -> None:
    bench = fleet_of(fails=lambda number: True)
    sender, receiver = (member.planner for member in bench.members)
    transfers, pair = bench.fleet.dispatcher.transfers, (sender.name, receiver.name)
    transfers._pauses[pair] = (2000, 0.0)
    only(bench, 1)
    bench.add(group(1, [*PREFIX, 7], max_tokens(2)))
    now_s = turns(bench, lambda: finished(bench, 1))
    assert transfers._pauses[pair][0] == 2001
    assert now_s + 299.0 < transfers._pauses[pair][1] <= now_s + 300.0
    transfers.follow([sender])
    assert not transfers._pauses
