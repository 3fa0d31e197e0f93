"""The number of a core: it rises until an executor has granted it, and nothing absurd is believed."""

from itertools import product

import pytest

from octavo_shared.errors import FencedError, InvalidFieldError
from scheduler_svc.processes import incarnation as processes_incarnation
from scheduler_svc.processes.incarnation import ASK_INTERVAL_S, RAISE_INTERVAL_S, Incarnation, SupersededError
from tests.support.each_row import each_row

NOW_MS = 1_800_000_000_000
HOUR_MS = 3_600_000
YEAR_MS = 365 * 86_400_000


def incarnation(clock_ms: int = NOW_MS) -> Incarnation:
    return Incarnation("one", lambda: clock_ms / 1000)


async def nobody_answers() -> bool:
    return False


@each_row(
    (0, NOW_MS),  # nobody knows another core
    (NOW_MS - 1, NOW_MS),
    (NOW_MS, NOW_MS + 1),
    (NOW_MS + HOUR_MS, NOW_MS + HOUR_MS + 1),  # our clock is slow
)
def test_a_core_that_was_granted_nothing_is_later_than_every_core_that_it_is_told_of(told: int, number: int) -> None:
    own = incarnation()
    own.follow(told, "executor a:1")
    assert (own.number, own.granted) == (number, 0)


def test_a_core_that_was_granted_its_number_ends_when_it_is_told_of_a_larger_one() -> None:
    own = incarnation()
    own.grant()
    own.follow(NOW_MS, "executor a:1")  # its own
    own.require_current()
    with pytest.raises(SupersededError, match="executor a:1 knows an engine of scheduler 'one' with the incarnation"):
        own.follow(NOW_MS + 1, "executor a:1")
    assert (own.number, own.largest_told) == (NOW_MS, NOW_MS + 1)
    with pytest.raises(SupersededError):
        own.require_current()


async def test_fronts_raise_what_fronts_see_once_a_minute_and_the_executors_are_asked_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, num_asked, does_answer, own = 100.0, 0, False, incarnation()
    monkeypatch.setattr(processes_incarnation, "monotonic_s", lambda: now_s)

    async def ask() -> bool:
        nonlocal num_asked
        num_asked += 1
        return does_answer

    async def is_followed(told: int) -> bool:
        try:
            await own.follow_front(told, "front '0'", ask)
        except FencedError:
            return False
        return True

    assert await is_followed(NOW_MS + 5)
    assert (own.number, num_asked) == (NOW_MS + 6, 0)  # nothing was granted yet: it rises, for executors too
    own.grant()
    assert await is_followed(NOW_MS + 6)  # its own
    assert not await is_followed(NOW_MS + 7)  # nobody answers
    assert not await is_followed(NOW_MS + 7)  # nor is anybody asked anew
    assert num_asked == 1
    now_s, does_answer = now_s + ASK_INTERVAL_S, True
    assert await is_followed(NOW_MS + 7)
    assert (own.number, own.granted, own.largest_told, num_asked) == (NOW_MS + 6, NOW_MS + 8, NOW_MS + 5, 2)
    now_s += RAISE_INTERVAL_S - 1
    assert await is_followed(NOW_MS + 8)  # no larger one
    assert not await is_followed(NOW_MS + 9)
    now_s += 1
    assert await is_followed(NOW_MS + 9)
    assert (own.granted, num_asked) == (NOW_MS + 10, 3)
    own.require_current()


@each_row(*product([2**64 - 1, NOW_MS + 11 * YEAR_MS], [False, True]))
async def test_an_absurd_number_is_refused_and_changes_nothing(told: int, is_granted: bool) -> None:
    own = incarnation()
    if is_granted:
        own.grant()
    with pytest.raises(InvalidFieldError, match=f"incarnation is {told}; it must be at most .* ten years ahead"):
        own.follow(told, "executor a:1")
    for of_front in (told, NOW_MS + 25 * HOUR_MS):
        with pytest.raises(InvalidFieldError, match=f"incarnation is {of_front}; it must be at most .* 1 day ahead"):
            await own.follow_front(of_front, "front '0'", nobody_answers)
    assert (own.number, own.largest_told) == (NOW_MS, 0)
    own.require_current()


def test_a_clock_that_was_never_set_believes_the_numbers_of_others() -> None:
    own = incarnation(clock_ms=0)
    own.follow(NOW_MS, "executor a:1")
    assert own.number == NOW_MS + 1


def test_a_standby_leaves_alone_what_the_holder_has_lost_while_that_has_most_executors() -> None:
    own = incarnation()
    own.note_holder("a:1", is_other=True)
    own.note_holder("b:1", is_other=True)
    with pytest.raises(FencedError, match="holds 2 of 3 executors; this one is its standby"):
        own.note_holder("c:1", is_other=False)
    own.note_holder("b:1", is_other=False)
    own.note_holder("c:1", is_other=False)
    own.note_holder("a:1", is_other=True)  # whether that one is gone, the executor says
