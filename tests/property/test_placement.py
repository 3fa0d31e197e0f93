"""Of the executors that have room a group goes to one of the cheapest, whatever runs and is cached where."""

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.fleet.capacity import Capacity, Footprint, num_expected_tokens
from scheduler_svc.core.fleet.placement import Offer, Placement
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting.waiting_queue import Turn
from tests.support.driving import group, max_tokens, small_limits
from tests.support.fleet_driving import FleetBench

LIMITS = small_limits(max_num_seqs=8, budget=64, max_model_len=64, blocks=128, prefix_caching=True)
PREFIX = list(range(1000, 1024))


@dataclass(frozen=True)
class State:
    """What is at an executor: tokens of the prefix that are cached, sequences that decode, what a row costs."""

    num_cached: int
    num_rows: int
    row_tokens: float


STATES = st.builds(State, st.integers(0, len(PREFIX)), st.integers(0, 6), st.sampled_from([0.25, 0.5, 1.0, 1.7]))
PROMPTS = st.builds(lambda depth, end: [*PREFIX[:depth], *[7] * end], st.integers(0, len(PREFIX)), st.integers(1, 9))
NEWCOMERS = st.lists(st.tuples(PROMPTS, st.sampled_from([1, 2, 5, 40])), min_size=1, max_size=8)


def fleet_of(states: list[State]) -> FleetBench:
    bench = FleetBench()
    for state in states:
        for member in bench.members:
            member.planner.takes_groups = False
        member = bench.attach(LIMITS)
        bench.add(group(len(bench.groups), [*PREFIX[: state.num_cached], 1], max_tokens(1)))
        bench.step(member)
        bench.process(member)
        for row in range(state.num_rows):
            bench.add(group(len(bench.groups), [50 + row] * 3, max_tokens(30)))
        bench.step(member)
        while member.results:
            bench.process(member)
        member.planner.step_cost.row_tokens = state.row_tokens
    for member in bench.members:
        member.planner.takes_groups = True
    return bench


def cost_by_definition(bench: FleetBench, capacity: Capacity, newcomer: SequenceGroup) -> int:
    """Return the cost of a place, from nothing but the definition in `placement.py`."""
    planner = capacity.planner
    lead = newcomer.sequences[0]
    num_cached = planner.blocks.plan_admission(newcomer).sequences[0].num_cached * planner.blocks.block_size
    row_tokens = sorted(member.planner.step_cost.row_tokens for member in bench.members)[(len(bench.members) - 1) // 2]
    rows = int(np.count_nonzero(planner.batch.is_decoding)) + capacity.inbox.num_slots
    before = planner.load + capacity.inbox.num_tokens + capacity.inbox.num_slots
    row_cost = max(1, round(row_tokens * num_expected_tokens(newcomer)))
    return before + len(lead.token_ids) - num_cached + rows * row_cost


@given(st.lists(STATES, min_size=1, max_size=5), NEWCOMERS)
def test_a_group_is_offered_to_the_cheapest_executor_that_has_room(
    states: list[State], newcomers: list[tuple[list[int], int]]
) -> None:
    bench = fleet_of(states)
    dispatcher = bench.fleet.dispatcher
    placement = Placement(dispatcher.takers(), dispatcher.holders, None, -math.inf)
    for arrival, (prompt, num_tokens) in enumerate(newcomers, len(bench.groups)):
        newcomer = group(arrival, prompt, max_tokens(num_tokens))
        turn = Turn(0, 0.0, not newcomer.has_run, newcomer.arrival, newcomer)
        costs = {}
        for number, inbox in enumerate(dispatcher.inboxes):
            capacity = Capacity.of(inbox, is_serving=False, number=number)
            footprint = Footprint.of(newcomer, inbox.planner)
            found = inbox.planner.blocks.plan_admission(newcomer).sequences[0].num_cached
            if capacity.obstacle(turn, footprint, found) is None:
                costs[inbox.planner] = cost_by_definition(bench, capacity, newcomer)
        offer = placement.choose(turn)
        assert isinstance(offer, Offer) == bool(costs)
        if isinstance(offer, Offer):
            assert offer.placed.cost == costs[offer.capacity.planner] == min(costs.values())
            placement.give(offer)
