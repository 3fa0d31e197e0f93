"""What the engine expects of its load; the doors are in tests/contract/test_deadlines.py."""

from dataclasses import replace

import numpy as np
import pytest

from octavo_shared.errors import DeadlineTooShortError
from octavo_shared.step_wire.step import SamplingRow
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.engine.live_request import group_of
from scheduler_svc.engine.load_estimate import forced_len
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.parameters import StopConditions
from tests.support.driving import group, names_of, small_limits
from tests.support.each_row import each_row
from tests.support.idle_engine import IdleEngine
from tests.unit.scheduler_svc.core.step.test_step_cost import step

STEP_S = 0.5
LARGE_STEP_S = 2.0
MAX_LEN = 1000


def limits(*, max_num_seqs: int = 2, prefix_caching: bool = False) -> CoreLimits:
    return small_limits(max_num_seqs=max_num_seqs, max_model_len=MAX_LEN, blocks=500, prefix_caching=prefix_caching)


def measured(*addresses: str, limits: CoreLimits) -> IdleEngine:
    """An engine whose executors take STEP_S for a step; they have 16 tokens in one, and those take LARGE_STEP_S."""
    idle = IdleEngine(addresses, limits)
    for planner in idle.planners:
        for _ in range(2):
            planner.pace.learn(step(1), STEP_S)
            planner.pace.learn(step(0, 16), LARGE_STEP_S)
    return idle


def asked(num_prompt_tokens: int = 4, first_id: int = 0, **fields: object) -> EngineRequest:
    prompt = np.arange(first_id, first_id + num_prompt_tokens, dtype=np.int32)
    plain = EngineRequest("new", prompt, SamplingRow(), StopConditions(max_tokens=100))
    return replace(plain, **fields)  # type: ignore[arg-type]


def grouped(request: EngineRequest) -> SequenceGroup:
    return group_of(request, 25, MAX_LEN)


def let_wait(idle: IdleEngine, num_groups: int, expected_len: int, **fields: object) -> None:
    for arrival in range(num_groups):
        waiting = group(arrival, 4, **fields)  # type: ignore[arg-type]
        waiting.expected_len = expected_len
        idle.add(waiting)


@pytest.mark.parametrize(
    ("conditions", "min_tokens", "has_stop_strings", "forced"),
    [
        (StopConditions(max_tokens=9), 0, False, 0),
        (StopConditions(max_tokens=9), 5, False, 5),
        (StopConditions(max_tokens=9, ignore_eos=True), 0, False, 9),
        (StopConditions(ignore_eos=True), 0, False, MAX_LEN - 4),
        (StopConditions(max_tokens=9, ignore_eos=True, stop_token_ids=frozenset({3})), 2, False, 2),
        (StopConditions(max_tokens=9, ignore_eos=True), 0, True, 0),
    ],
)
def test_what_has_to_come(conditions: StopConditions, min_tokens: int, *, has_stop_strings: bool, forced: int) -> None:
    request = asked(
        stop_conditions=conditions, sampling=SamplingRow(min_tokens=min_tokens), has_stop_strings=has_stop_strings
    )
    assert forced_len(request, grouped(request)) == forced


def test_the_queue_is_computed_in_all_places_of_all_executors() -> None:
    idle = measured("a", "b", limits=limits())
    let_wait(idle, 8, expected_len=100)
    assert idle.engine.estimate.begin_s(grouped(asked())) == 8 * 100 / 4 * STEP_S + STEP_S


def test_only_what_surely_comes_before_counts() -> None:
    idle = measured("a", limits=limits())
    let_wait(idle, 8, expected_len=100, tenant="heavy")
    assert idle.engine.estimate.begin_s(grouped(asked(tenant="light"))) == STEP_S
    heavy = idle.engine.estimate.begin_s(grouped(asked(tenant="heavy")))
    assert heavy == 8 * 100 / 2 * STEP_S + STEP_S


def test_a_request_is_refused_only_if_half_of_the_estimate_is_more_than_it_has() -> None:
    estimate = measured("a", limits=limits()).engine.estimate
    forced = asked(stop_conditions=StopConditions(max_tokens=100, ignore_eos=True))
    takes_s = 100 * STEP_S
    estimate.require_time(forced, grouped(forced), takes_s / 2 + 0.1)
    with pytest.raises(
        DeadlineTooShortError, match=(r"^the answer would take about 50 s; the call's deadline is in 25 s$")
    ):
        estimate.require_time(forced, grouped(forced), takes_s / 2)
    estimate.require_time(asked(), grouped(asked()), 0.3)
    with pytest.raises(
        DeadlineTooShortError, match=(r"^the answer would begin in about 0\.5 s; the call's deadline is in 0\.1 s$")
    ):
        estimate.require_time(asked(), grouped(asked()), 0.1)


def test_a_prompt_takes_as_many_steps_as_are_not_in_a_prefix_cache() -> None:
    idle = measured("a", limits=limits(prefix_caching=True))
    long = grouped(asked(160))
    assert idle.engine.estimate.begin_s(long) == 9 * LARGE_STEP_S
    planner = idle.planners[0]
    cached = names_of(planner.blocks, long.prompt_token_ids)[:32]
    planner.blocks.adopt(np.arange(32, dtype=np.int32), b"".join(cached))
    assert idle.engine.estimate.begin_s(grouped(asked(160))) == LARGE_STEP_S


def test_prompts_that_wait_count_as_far_as_prompts_are_computed() -> None:
    idle = measured("a", limits=limits())
    for arrival in range(4):
        idle.add(group(arrival, 160))
    idle.engine.meter.num_prompt_tokens, idle.engine.meter.num_hit_tokens = 100, 75
    assert idle.engine.estimate.begin_s(grouped(asked())) == 640 / 4 / 16 * LARGE_STEP_S + STEP_S


def test_answers_are_expected_to_be_as_long_as_the_latest_and_no_longer_than_they_may() -> None:
    idle = measured("a", limits=limits())
    estimate, lengths = idle.engine.estimate, idle.engine.requests.latest_lengths
    assert estimate.expected_len(asked(), grouped(asked())) == 0
    lengths.extend((40, 60))
    assert estimate.expected_len(asked(), grouped(asked())) == 50
    short = asked(stop_conditions=StopConditions(max_tokens=3))
    assert estimate.expected_len(short, grouped(short)) == 3
    forced = asked(sampling=SamplingRow(min_tokens=80))
    assert estimate.expected_len(forced, grouped(forced)) == 80


@each_row((0, 1.0), (1, 2.0), (20, 40.0), (100, 60.0))
def test_who_is_refused_comes_back_when_half_of_the_queue_is_through(expected_len: int, retry_after_s: float) -> None:
    idle = measured("a", limits=limits(max_num_seqs=1))
    let_wait(idle, 8, expected_len)
    assert idle.engine.estimate.retry_after_s() == retry_after_s


def test_nothing_is_estimated_before_anything_was_measured() -> None:
    idle = IdleEngine(["a"], limits())
    let_wait(idle, 8, expected_len=900)
    estimate = idle.engine.estimate
    estimate.require_time(asked(), grouped(asked()), 0.001)
    assert (estimate.begin_s(grouped(asked())), estimate.retry_after_s()) == (None, 1.0)
