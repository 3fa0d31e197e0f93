"""A step while it is decided."""

import numpy as np

from scheduler_svc.core.step_plan import StepPlan
from tests.support.tables import admission


def test_a_chunk_is_cut_to_what_is_left_of_the_budget() -> None:
    plan = StepPlan(token_budget=5)

    assert [plan.take_chunk(0, 3), plan.take_chunk(1, 3), plan.take_chunk(2, 3)] == [3, 2, 0]
    assert plan.prefill_chunks == [(0, 3), (1, 2)]
    assert plan.token_budget == 0


def test_a_plan_is_empty_until_it_computes_or_releases() -> None:
    assert StepPlan(1).is_empty
    assert not StepPlan(1, num_decodes=1).is_empty
    assert not StepPlan(1, released_slots=[0]).is_empty
    assert not StepPlan(1, prefill_chunks=[(0, 1)]).is_empty


def test_holding_a_slot_back_is_no_reason_for_a_step() -> None:
    assert StepPlan(1, deactivated_slots=np.array([0], np.int32)).is_empty


def test_to_step_carries_every_decision() -> None:
    plan = StepPlan(
        token_budget=9,
        released_slots=[2],
        admissions=[admission()],
        prefill_chunks=[(0, 3)],
        appended_blocks=np.array([[1, 7]], np.int32),
        deactivated_slots=np.array([3], np.int32),
    )

    step = plan.to_step(epoch=4, step_id=5)

    assert (step.epoch, step.step_id, step.table_digest) == (4, 5, None)
    assert step.delta.released_slots.tolist() == [2]
    assert [entry.slot for entry in step.delta.admissions] == [0]
    assert step.delta.prefill_chunks.tolist() == [[0, 3]]
    assert step.delta.appended_blocks.tolist() == [[1, 7]]
    assert step.delta.deactivated_slots.tolist() == [3]
