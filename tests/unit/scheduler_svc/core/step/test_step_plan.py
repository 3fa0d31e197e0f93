"""A step while it is decided."""

import numpy as np

from scheduler_svc.core.step.step_plan import StepPlan
from tests.support.each_row import each_row


def new_plan() -> StepPlan:
    return StepPlan(token_budget=9, now_s=0.0, num_admissible_bytes=99, has_steps_in_flight=False)


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
