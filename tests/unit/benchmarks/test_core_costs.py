"""The scenarios of the planner and its fleet measure what they say, and what they show of prefixes holds."""

from dataclasses import replace

import pytest

from benchmarks.costs.core import (
    BLOCK_SIZE,
    FLEET_BATCHED_TOKENS,
    FLEET_PROMPT_TOKENS,
    LOOPS,
    OpenLoop,
    burst_turn,
    decode_turn,
    full_fleet,
    spread,
)


@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize("num_sequences", [1, 2 * BLOCK_SIZE + 5])
def test_decode_steps_are_measured_with_and_without_eviction(num_sequences: int, evicts: bool) -> None:
    figures = decode_turn(num_sequences, 20, evicts)
    assert 0 < figures["schedule, µs"] < figures["both, µs"] <= figures["both p99, µs"]


def test_a_burst_is_dispatched_as_far_as_the_planners_steps_can_admit_it() -> None:
    figures, budget = burst_turn(2, 100), FLEET_BATCHED_TOKENS // FLEET_PROMPT_TOKENS
    assert figures["dispatched"] == figures["admitted"] == 2 * budget
    assert 0 < figures["to dispatch one, µs"] < figures["to dispatch and admit one, µs"]


def test_a_full_fleet_has_no_slot_left_and_the_rest_waits() -> None:
    planners = full_fleet(2, 16, num_waiting=10, num_tenants=5, num_outputs=1)
    assert [planner.batch.num_free_slots for planner in planners.all] == [0, 0]
    assert len(planners.queue) == 10
    assert [int(planner.batch.is_decoding.sum()) for planner in planners.all] == [16, 16]


@pytest.mark.parametrize("loop", LOOPS[:2])
def test_requests_with_one_prefix_spread_over_the_executors(loop: OpenLoop) -> None:
    num_placed, largest_over_mean, num_computed = spread(loop)
    assert sum(num_placed) == loop.num_requests
    assert largest_over_mean <= 1.25
    assert num_computed <= loop.num_planners * (loop.prefix_tokens + 100) + 40 * loop.num_requests


def test_a_few_requests_stay_where_their_prefix_is() -> None:
    num_placed, _, _ = spread(replace(LOOPS[0], requests_per_s=1.0, num_requests=6, output_tokens=300))
    assert num_placed == [6, 0]
