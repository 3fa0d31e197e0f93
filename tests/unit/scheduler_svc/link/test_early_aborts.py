"""Which requests an abort ends that came before them."""

import pytest

from scheduler_svc.link import early_aborts
from scheduler_svc.link.early_aborts import GRACE_S, EarlyAborts
from scheduler_svc.request.engine_request import MAX_REQUEST_ID_LENGTH


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def aborts(clock: Clock) -> EarlyAborts:
    return EarlyAborts(clock)


def test_a_request_that_was_received_before_its_abort_is_aborted_and_a_later_one_is_not(
    clock: Clock, aborts: EarlyAborts
) -> None:
    aborts.add("mine", "red")
    clock.now_s += 2.0
    assert aborts.has("mine", "red", received_before_s=2.5)
    assert not aborts.has("mine", "red", received_before_s=1.5)
    assert not aborts.has("mine", "red", received_before_s=2.0), "at the same moment: it may be the next one"


def test_the_last_abort_of_an_id_counts(clock: Clock, aborts: EarlyAborts) -> None:
    aborts.add("mine", "red")
    clock.now_s += 2.0
    aborts.add("mine", "red")
    clock.now_s += 1.0
    assert aborts.has("mine", "red", received_before_s=1.5)


def test_a_tenant_aborts_its_own_and_who_may_act_for_all_those_of_all(aborts: EarlyAborts) -> None:
    aborts.add("mine", "red")
    aborts.add("any", None)
    assert not aborts.has("mine", "blue", received_before_s=1.0)
    assert not aborts.has("mine", "", received_before_s=1.0)
    assert aborts.has("any", "red", received_before_s=1.0)
    assert aborts.has("any", "", received_before_s=1.0)


def test_what_is_old_is_forgotten(clock: Clock, aborts: EarlyAborts) -> None:
    aborts.add("old", "red")
    aborts.add("old", "blue")
    clock.now_s += GRACE_S
    aborts.add("new", "red")
    assert len(aborts) == 3
    clock.now_s += 0.1
    assert not aborts.has("other", "red", received_before_s=0.0)
    assert len(aborts) == 1


def test_a_tenant_that_aborts_much_crowds_out_its_own_only(
    aborts: EarlyAborts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_aborts, "MAX_OF_TENANT", 3)
    aborts.add("mine", "red")
    for number in range(10):
        aborts.add(f"r{number}", "blue")
    assert len(aborts) == 4
    assert aborts.has("mine", "red", received_before_s=1.0)
    assert [number for number in range(10) if aborts.has(f"r{number}", "blue", 1.0)] == [7, 8, 9]


def test_many_tenants_are_no_more_than_so_many(aborts: EarlyAborts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_aborts, "MAX_TENANTS", 2)
    for tenant in ("red", "blue", "red", "green"):
        aborts.add("mine", tenant)
    assert [tenant for tenant in ("red", "blue", "green") if aborts.has("mine", tenant, 1.0)] == ["red", "green"]


def test_an_id_that_no_request_may_have_is_not_kept(aborts: EarlyAborts) -> None:
    aborts.add("x" * (MAX_REQUEST_ID_LENGTH + 1), "red")
    assert len(aborts) == 0
