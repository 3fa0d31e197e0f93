from dataclasses import replace

import pytest

from tests.simulation.draw import draw_plan
from tests.simulation.plan import LIVENESS, MODES, SAFETY, Plan
from tests.simulation.plan_json import plan_from_json, plan_to_json
from tests.simulation.shrink import Shrinker, kind_of, smallest_parts

PLAN = draw_plan(0, SAFETY)


def _breaks(plan: Plan) -> str:
    """Break a promise where one fault meets one request, whatever else is there."""
    has_fault = any(fault.number == 5 and not fault.is_taken_away for fault in plan.faults)
    has_request = any(request.number == 7 for request in plan.requests)
    return f"at {1000 + len(plan.requests)}.5 s: r7 is in 2 places" if has_fault and has_request else ""


def test_a_plan_is_shrunk_to_the_fault_and_the_request_that_matter() -> None:
    shrinker = Shrinker(_breaks)

    plan = shrinker.shrink(PLAN)

    assert [fault.number for fault in plan.faults] == [5]
    assert [request.number for request in plan.requests] == [7]
    assert plan.is_fair
    assert len(plan.executors) == plan.num_schedulers == plan.num_clients == 1
    assert shrinker.num_runs < 150


def test_another_failure_is_not_taken_for_the_same() -> None:
    def breaks(plan: Plan) -> str:
        return "at 1 s: 3 used blocks are left" if len(plan.requests) > 9 else "at 1 s: 1 groups are left"

    assert len(Shrinker(breaks).shrink(PLAN).requests) == 10


@pytest.mark.parametrize(("max_runs", "max_s"), [(10, 1e9), (1000, 10.0)])
def test_shrinking_ends_after_so_many_runs_or_seconds(max_runs: int, max_s: float) -> None:
    seconds = iter(range(10_000))
    shrinker = Shrinker(_breaks, max_runs, max_s, clock=lambda: float(next(seconds)))

    plan = shrinker.shrink(PLAN)

    assert shrinker.num_runs <= 10
    assert _breaks(plan)


def test_a_plan_that_breaks_nothing_cannot_be_shrunk() -> None:
    with pytest.raises(ValueError, match="seed 0 in mode safety breaks no promise"):
        Shrinker(lambda plan: "").shrink(PLAN)


def test_the_smallest_parts_are_those_of_which_each_is_needed() -> None:
    needed = {3, 17, 18, 40}

    assert set(smallest_parts(range(50), lambda left: needed <= set(left))) == needed
    assert not smallest_parts(range(50), lambda left: True)


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        ("at 1003.25 s: r12 is in 2 places", "at 1.5 s: r7.3 is in 0 places", True),
        (
            "at 1 s: r1 (plain, shape 3) output 0 has text 'a', and alone 'b'",
            "at 2 s: r2 (beams, shape 9) output 1 has text 'x', and alone ''",
            True,
        ),
        (
            "at 1 s: no request ends for 240 s, and all is healed: r1, r2",
            "at 2 s: no request ends for 240 s, and all is healed: r5",
            True,
        ),
        ("at 1 s: r1 ended twice", "at 1 s: r1 is in 2 places", False),
        ("at 1 s: r1 ended twice", "", False),
    ],
)
def test_kinds_of_failures(one: str, other: str, are_equal: bool) -> None:
    assert (kind_of(one) == kind_of(other)) == are_equal


def test_a_plan_survives_json_exactly() -> None:
    for seed in range(10):
        for mode in MODES:
            plan = draw_plan(seed, mode)
            assert plan_from_json(plan_to_json(plan)) == plan


def test_a_placeholder_survives_json() -> None:
    plan = draw_plan(1, LIVENESS)
    plan = replace(plan, faults=tuple(replace(fault, is_taken_away=True) for fault in plan.faults))

    assert plan_from_json(plan_to_json(plan)) == plan
