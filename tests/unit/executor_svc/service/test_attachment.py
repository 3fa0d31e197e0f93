import pytest

from executor_svc.service.attachment import GRACE_S, MAX_SCHEDULERS, Attachment
from octavo_shared.errors import FencedError
from tests.support.each_row import each_row


def attached(lease_s: float = 10.0, now: float = 100.0) -> Attachment:
    attachment = Attachment()
    attachment.acquire("a", lease_s, now)
    return attachment


def test_nobody_holds_a_new_attachment() -> None:
    assert Attachment().holder(now=0.0) == ""
    with pytest.raises(FencedError, match="no scheduler has attached"):
        Attachment().require(0)


def test_epochs_rise_with_every_acquire() -> None:
    attachment = Attachment()
    assert [attachment.acquire("a", 10.0, now=1.0) for _ in range(3)] == [1, 2, 3]


def test_another_scheduler_is_refused_with_holder_and_time_left() -> None:
    attachment = attached(lease_s=10.0, now=100.0)
    with pytest.raises(FencedError, match=r"scheduler 'a' holds the lease for another 6\.0 s"):
        attachment.acquire("b", 10.0, now=104.0)
    assert (attachment.epoch, attachment.holder(now=104.0)) == (1, "a")


def test_the_same_scheduler_takes_over_at_once() -> None:
    attachment = attached(now=100.0)
    assert attachment.acquire("a", 10.0, now=100.0) == 2


def test_another_scheduler_takes_over_when_the_lease_has_run_out() -> None:
    attachment = attached(lease_s=10.0, now=100.0)
    assert attachment.holder(now=109.9) == "a"
    assert attachment.holder(now=110.0) == ""
    assert attachment.acquire("b", 10.0, now=110.0) == 2


def test_a_released_executor_is_anybodys_and_stays_so_when_a_late_step_renews() -> None:
    attachment = attached(lease_s=10.0, now=100.0)
    attachment.release(1)
    assert attachment.holder(now=100.0) == ""
    attachment.renew(1, now=101.0)
    assert attachment.holder(now=101.0) == ""
    assert attachment.acquire("b", 10.0, now=101.0) == 2
    assert attachment.holder(now=101.0) == "b"


def test_an_older_epoch_cannot_release() -> None:
    attachment = attached(now=100.0)
    attachment.acquire("a", 10.0, now=100.0)
    with pytest.raises(FencedError):
        attachment.release(1)
    assert attachment.holder(now=100.0) == "a"


def test_renewing_prolongs_the_lease_from_now() -> None:
    attachment = attached(lease_s=10.0, now=100.0)
    attachment.renew(1, now=108.0)
    assert attachment.holder(now=117.0) == "a"
    assert attachment.holder(now=118.0) == ""


def test_a_lease_that_ran_out_can_be_renewed_while_nobody_else_came() -> None:
    attachment = attached(lease_s=10.0, now=100.0)
    attachment.renew(1, now=500.0)
    assert attachment.holder(now=505.0) == "a"


def test_an_older_epoch_is_fenced_and_renews_nothing() -> None:
    attachment = attached(lease_s=10.0, now=100.0)
    attachment.acquire("b", 10.0, now=110.0)
    with pytest.raises(FencedError, match="epoch 1 is not the current epoch, 2"):
        attachment.renew(1, now=111.0)
    assert attachment.holder(now=120.0) == ""


def test_an_epoch_that_was_never_given_is_fenced() -> None:
    with pytest.raises(FencedError):
        attached().require(2)


def held_by(incarnation: int, *, has_stream: bool = True) -> Attachment:
    attachment = Attachment()
    attachment.acquire("a", 10.0, 100.0, incarnation)
    attachment.note_stream(is_open=has_stream, now=100.0)
    return attachment


@each_row(
    (7, 8, 101.0, False),  # the holder has its stream
    (7, 8, 110.0, True),  # and lost its lease
    (7, 7, 101.0, True),  # the holder itself, after a loss
    (0, 8, 101.0, True),  # the holder is of a release without numbers
    (7, 0, 101.0, True),  # the caller is
)
def test_a_later_incarnation_waits_while_the_holder_has_a_stream(
    holder: int, caller: int, now: float, is_granted: bool
) -> None:
    attachment = held_by(holder)
    if is_granted:
        assert attachment.acquire("a", 10.0, now, caller) == 2
    else:
        with pytest.raises(FencedError, match=r"another scheduler of the id 'a' holds the lease .* is its standby"):
            attachment.acquire("a", 10.0, now, caller)
        assert (attachment.epoch, attachment.incarnations) == (1, {"a": holder})


def test_a_later_incarnation_waits_for_a_holder_that_may_open_its_stream_again() -> None:
    attachment = held_by(7)
    attachment.note_stream(is_open=False, now=102.0)
    assert attachment.grace_s("a", 8, 102.25) == GRACE_S - 0.25
    with pytest.raises(FencedError, match="standby"):
        attachment.acquire("a", 10.0, 102.25, 8)
    attachment.renew(1, 102.5)  # a heartbeat: it is there
    assert attachment.grace_s("a", 8, 102.5) == GRACE_S <= 1.0
    assert attachment.acquire("a", 10.0, 102.5 + GRACE_S, 8) == 2


def test_a_later_incarnation_needs_not_wait_for_one_that_has_detached() -> None:
    attachment = held_by(7)
    attachment.release(1)
    assert attachment.grace_s("a", 8, 100.0) == 0.0
    assert attachment.acquire("a", 10.0, 100.0, 8) == 2


def test_an_older_incarnation_is_refused_with_the_larger_number_even_when_nobody_holds_the_lease() -> None:
    attachment = held_by(8)
    with pytest.raises(FencedError, match="already attached with incarnation 8; this one is older, 7"):
        attachment.acquire("a", 10.0, 500.0, 7)
    assert attachment.acquire("b", 10.0, 500.0, 7) == 2  # another scheduler has numbers of its own


def test_numbers_of_the_last_schedulers_are_kept() -> None:
    attachment = Attachment()
    for number in range(MAX_SCHEDULERS + 5):
        attachment.acquire(f"s{number}", 1.0, 10.0 * number, number + 1)
        attachment.acquire("a", 1.0, 10.0 * number + 5, 1)
    assert len(attachment.incarnations) == MAX_SCHEDULERS
    assert attachment.incarnations["a"] == 1
    assert "s0" not in attachment.incarnations
