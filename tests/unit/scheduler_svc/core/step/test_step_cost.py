"""How long a step may take: no false alarm, and a hang is found soon."""

import random

import numpy as np
import pytest

from octavo_shared.step_wire.batch_table import StepLayout
from octavo_shared.step_wire.step import Int32Array
from scheduler_svc.core.step.step_cost import COLD_START_S, LEAST_SLACK, StepCost, StepPace
from tests.support.each_row import each_row


def ints(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def step(num_decodes: int, chunk: int = 0, context: int = 0) -> StepLayout:
    """Return the rows of so many decodes and a prefill chunk, all at a context of so many tokens."""
    num_rows = num_decodes + bool(chunk)
    lengths = ints(*[1] * num_decodes, *[chunk] * bool(chunk))
    rows = np.arange(num_rows, dtype=np.int32)
    starts = np.full(num_rows, context, np.int32)
    index = rows.astype(np.intp)
    return StepLayout(rows, rows, starts, lengths, rows, rows, rows, rows, index, index, num_decodes, None)


def warm() -> StepCost:
    """Return what is known of an executor that has run a step of each kind, in next to no time."""
    cost = StepCost()
    for layout in (step(1), step(0, 4), step(1, 4)):
        cost.learn(layout, 0.0001)
    return cost


def test_nothing_is_known_before_the_first_result() -> None:
    assert StepCost().longest_s(step(1)) is None


def test_a_step_like_those_before_may_take_little_longer() -> None:
    cost = StepCost()
    for duration_s in (0.02, 0.03, 0.02):
        cost.learn(step(8), duration_s)
    longest_s = cost.longest_s(step(8))
    assert longest_s is not None
    assert 0.028 < longest_s / LEAST_SLACK <= 0.03


def test_the_first_step_of_a_kind_may_compile() -> None:
    cost = StepCost()
    cost.learn(step(0, 2048), 1.0)
    allowances_s = [cost.allowance_s(step(1))]
    cost.learn(step(1), 5.0)
    allowances_s.append(cost.allowance_s(step(1)))
    assert allowances_s == [COLD_START_S, 0.0]
    assert cost.longest_s(step(1)) == 1.0 * LEAST_SLACK, "no step took longer than one with more work"


@each_row((0.0, 1e-3, 0.0), (0.02, 1e-5, 1e-9), (1e-4, 1e-6, 0.0), (0.05, 2e-3, 4e-7), (0.3, 0.0, 0.0))
def test_no_step_of_an_executor_that_works_is_overdue(fixed_s: float, token_s: float, attended_s: float) -> None:
    """Short and long steps come in any order; times vary by a fifth."""
    chance = random.Random(7)
    cost = StepCost()
    for _ in range(400):
        num_decodes = chance.choice((0, 1, 3, 16, 200))
        chunk = chance.choice((0, 1, 30, 500, 2048)) if num_decodes else chance.choice((1, 2048))
        context = chance.choice((0, 100, 4000, 30_000))
        layout = step(num_decodes, chunk, context)
        num_attended = float(np.dot(layout.lengths.astype(float), layout.starts + layout.lengths))
        exact_s = fixed_s + token_s * layout.num_tokens + attended_s * num_attended
        duration_s = exact_s * chance.uniform(1.0, 1.2)
        longest_s = cost.longest_s(layout)
        assert longest_s is None or duration_s < longest_s + cost.allowance_s(layout) + 1.0
        cost.learn(layout, duration_s)


def test_a_long_prefill_after_short_steps_has_the_time_of_its_tokens() -> None:
    longest_s = warm().longest_s(step(0, 2048))
    assert longest_s is not None
    assert longest_s > 0.02


def test_a_slow_step_is_forgotten_in_time() -> None:
    cost = StepCost()
    cost.learn(step(1), 30.0)
    for _ in range(300):
        cost.learn(step(1), 0.01)
    assert (cost.longest_s(step(1)) or 0.0) < 0.02


@each_row((0.5e-4, 0.5), (1e-4, 1.0), (2e-4, 2.0), (1e-6, 0.25), (1.0, 4.0))
def test_what_a_row_costs_beside_a_token_of_a_prompt_is_learned(row_s: float, row_tokens: float) -> None:
    """A token takes 0.1 ms; all times vary by a tenth."""
    chance = random.Random(3)
    cost = StepCost()
    assert cost.row_tokens == 1.0, "as far as is known"
    for _ in range(400):
        num_decodes, chunk = chance.randrange(1, 65), chance.choice([0, 0, 0, 300, 1500])
        cost.learn(step(num_decodes, chunk), (5e-3 + row_s * num_decodes + 1e-4 * chunk) * chance.uniform(1.0, 1.1))
    assert cost.row_tokens == pytest.approx(row_tokens, rel=0.3)


def test_a_lone_conversation_teaches_nothing_of_rows() -> None:
    cost = StepCost()
    for number in range(200):
        cost.learn(step(0 if number % 50 == 0 else 1, 300 if number % 50 == 0 else 0), 0.01 + 0.005 * (number % 3))
    assert 0.8 < cost.row_tokens < 1.25


def test_each_verdict_gives_the_next_step_twice_the_time_until_results_come() -> None:
    cost = StepCost()
    cost.learn(step(4), 1.0)
    once = cost.longest_s(step(4))
    cost.note_hang()
    cost.note_hang()
    assert once is not None
    assert cost.longest_s(step(4)) == 4 * once
    for _ in range(60):
        cost.learn(step(4), 1.0)
    assert cost.slack == LEAST_SLACK


# Pace ------------------------------------------------------------------------------------------------


def test_the_first_step_of_a_kind_says_nothing_of_the_pace() -> None:
    pace = StepPace(16)
    pace.learn(step(1), 10.0)
    pace.learn(step(0, 4), 10.0)
    pace.learn(step(0, 16), 10.0)
    assert (pace.step_s, pace.large_step_s) == (None, None)


def test_the_shortest_of_the_recent_steps_counts() -> None:
    pace = StepPace(16)
    for duration_s in (9.0, 0.01, 0.03):
        pace.learn(step(1), duration_s)
    assert (pace.step_s, pace.large_step_s) == (0.01, 0.01)
    for duration_s in (9.0, 0.5, 0.4):
        pace.learn(step(2, 8), duration_s)
    assert (pace.step_s, pace.large_step_s) == (0.01, 0.4)
    for _ in range(16):
        pace.learn(step(4), 0.02)
    assert pace.step_s == 0.02


def test_moves_are_priced_by_what_they_add_to_a_step() -> None:
    cost = StepCost()
    for chunk in (0, 0, 99, 99, 0, 99):
        cost.learn(step(1, chunk), 0.01 + 0.001 * chunk)
    for chunk in (0, 99, 0):
        cost.learn(step(1, chunk), 0.06 + 0.001 * chunk, 1000)

    assert cost.byte_s == pytest.approx(5e-5, rel=0.1)
    assert cost.pays(1000, 100)
    assert not cost.pays(1000, 10)
    assert cost.copied_bytes(100) == pytest.approx(0.05 * 0.11 / 5e-5, rel=0.2)


def test_a_move_before_the_cost_of_tokens_is_known_teaches_nothing() -> None:
    cost = StepCost()

    cost.learn(step(1), 5.0, 1000)

    assert (cost.byte_s, cost.copied_bytes(1), cost.pays(10**9, 1)) == (0.0, None, True)


def test_what_the_executor_measures_of_a_move_counts_and_a_noisy_step_does_not() -> None:
    cost = warm()

    for _ in range(4):
        cost.learn(step(1), 5.0, 1000, 0.05)

    assert cost.byte_s == pytest.approx(5e-5)
