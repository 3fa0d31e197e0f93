import pytest

from executor_svc.service.attachment import Attachment
from shared.errors import FencedError


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
    with pytest.raises(FencedError, match="epoch 1 is not the current one, 2"):
        attachment.renew(1, now=111.0)
    assert attachment.holder(now=120.0) == ""


def test_an_epoch_that_was_never_given_is_fenced() -> None:
    with pytest.raises(FencedError):
        attached().require(2)
