"""Levels, and the virtual token counters."""

import math

import pytest

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.core.waiting.policy import MAX_IDLE_COUNTERS, FairShare
from tests.support.waiting import shares_of


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_weight_that_is_no_share_is_refused_by_name(weight: float) -> None:
    with pytest.raises(InvalidFieldError, match=r"^weight is .*; it must be a finite number above 0$"):
        FairShare(shares_of({"a": 1.0, "b": weight}))


def test_when_nobody_waits_a_newcomer_is_lifted_to_the_counter_of_the_last_one_to_leave() -> None:
    share = FairShare()
    for tenant in ("a", "b"):
        share.enter(0, tenant)
        share.leave(0, tenant)
    share.charge("a", 1000)
    share.charge("b", 30)  # while it ran, after it had left

    assert share.enter(0, "c").value == 30.0


def test_who_starves_on_a_low_level_lends_its_counter_to_nobody_above() -> None:
    share = FairShare()
    share.enter(5, "batch")
    share.enter(0, "busy")
    share.charge("busy", 900)

    assert share.enter(0, "newcomer").value == 900.0


def test_lifting_on_one_level_leaves_the_counter_on_another_alone() -> None:
    share = FairShare()
    low = share.enter(5, "both")
    share.enter(0, "busy")
    share.charge("busy", 900)

    high = share.enter(0, "both")

    assert (high.value, low.value) == (900.0, 0.0)


def test_a_lifted_counter_is_equal_to_the_last_bit() -> None:
    share = FairShare(shares_of({"a": 3.0, "b": 7.0}))
    share.enter(0, "b")
    share.charge("b", 1)
    share.leave(0, "b")
    floor = share.enter(0, "a")
    share.charge("a", 10**9 + 1)

    assert share.enter(0, "b").value == floor.value


def test_the_tenant_that_left_longest_ago_is_forgotten_first() -> None:
    share = FairShare()
    for tenant in ("oldest", "old", *(f"{number}" for number in range(MAX_IDLE_COUNTERS - 1))):
        share.enter(0, tenant)
        share.leave(0, tenant)
    share.charge("oldest", 10**6)
    share.charge("old", 10**6)

    assert share.enter(0, "oldest").value == 0.0
    assert share.enter(0, "old").value == 10**6


def test_who_waits_is_not_forgotten() -> None:
    share = FairShare()
    share.enter(0, "patient")
    share.leave(0, "patient")
    patient = share.enter(0, "patient")
    for number in range(2 * MAX_IDLE_COUNTERS):
        share.enter(0, f"{number}")
        share.leave(0, f"{number}")

    share.charge("patient", 10)

    assert patient.value == 10.0


def test_a_tenant_is_known_as_long_as_one_of_its_counters() -> None:
    share = FairShare()
    share.enter(1, "a")
    share.leave(1, "a")
    counter = share.enter(0, "a")
    for number in range(MAX_IDLE_COUNTERS):
        share.enter(0, f"{number}")
        share.leave(0, f"{number}")

    share.charge("a", 10)

    assert counter.value == 10.0


def test_what_is_kept_of_tenants_that_are_gone_is_bounded() -> None:
    share = FairShare()
    for number in range(3 * MAX_IDLE_COUNTERS):
        share.enter(number // 2, f"{number}")
        share.leave(number // 2, f"{number}")
        share.charge(f"{number}", 1)

    assert len(share._idle) == len(share._tenants) == MAX_IDLE_COUNTERS
    assert len(share._levels) == MAX_IDLE_COUNTERS // 2
