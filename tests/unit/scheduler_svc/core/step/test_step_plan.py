"""A step while it is decided."""

import numpy as np

from octavo_shared.step_wire.step import Fork, SamplingRow
from scheduler_svc.core.step.step_plan import StepPlan
from tests.support.each_row import each_row
from tests.support.tables import admission


def new_plan() -> StepPlan:
    return StepPlan(token_budget=9, now_s=0.0, num_admissible_bytes=99, has_steps_in_flight=False)


def test_a_new_plan_is_empty() -> None:
    assert new_plan().is_empty


@each_row(
    ("num_decodes", 1),
    ("released_slots", np.array([0], np.int32)),
    ("prefill_chunks", [(0, 1)]),
    ("blocks_to_swap_out", [(0, 1)]),
    ("blocks_to_swap_in", [(0, 1)]),
)
def test_a_plan_that_computes_moves_or_releases_is_a_step(name: str, value: object) -> None:
    plan = new_plan()
    setattr(plan, name, value)

    assert not plan.is_empty


def test_holding_a_slot_back_is_no_reason_for_a_step() -> None:
    plan = new_plan()
    plan.deactivated_slots = np.array([0], np.int32)

    assert plan.is_empty


def test_an_empty_plan_makes_a_step_of_empty_lists() -> None:
    step = new_plan().to_step(epoch=1, step_id=1)

    assert step.blocks_to_copy.shape == (0, 2)
    assert step.delta.replaced_blocks.shape == (0, 3)
    assert step.delta.appended_tokens.shape == (0, 2)


def test_to_step_carries_every_decision() -> None:
    fork, beam_fork = Fork(0, 1, 1, SamplingRow()), Fork(2, 3, 1, SamplingRow())
    plan = new_plan()
    plan.released_slots = np.array([2], np.int32)
    plan.admissions.append(admission())
    plan.forks.append(fork)
    plan.beam_forks.append(beam_fork)
    plan.appended_tokens.append((3, 42))
    plan.replaced_blocks.append((3, 0, 5))
    plan.appended_blocks = np.array([[1, 7]], np.int32)
    plan.appended_blocks_of_chunks.append((0, 8))
    plan.prefill_chunks.append((0, 3))
    plan.activated_slots = np.array([1], np.int32)
    plan.deactivated_slots = np.array([3], np.int32)
    plan.blocks_to_swap_out.append((1, 2))
    plan.blocks_to_copy.append((3, 4))

    step = plan.to_step(epoch=4, step_id=5)

    assert (step.epoch, step.step_id, step.table_digest) == (4, 5, None)
    delta = step.delta
    assert (delta.released_slots.tolist(), [entry.slot for entry in delta.admissions]) == ([2], [0])
    assert (delta.forks, delta.beam_forks) == ((fork,), (beam_fork,))
    assert (delta.appended_tokens.tolist(), delta.replaced_blocks.tolist()) == ([[3, 42]], [[3, 0, 5]])
    assert delta.appended_blocks.tolist() == [[1, 7], [0, 8]]
    assert delta.prefill_chunks.tolist() == [[0, 3]]
    assert (delta.activated_slots.tolist(), delta.deactivated_slots.tolist()) == ([1], [3])
    assert (step.blocks_to_swap_out.tolist(), step.blocks_to_copy.tolist()) == ([[1, 2]], [[3, 4]])
