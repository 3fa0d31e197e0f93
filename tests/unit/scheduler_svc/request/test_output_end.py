"""Which end of an output wins, as its engine sees it: the planner's or its front's."""

import pytest

from scheduler_svc.request.output_end import EndState, OutputEnd
from scheduler_svc.request.outputs import FinishReason

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("planner_says", "front_says", "state", "num_tokens", "reason"),
    [
        (LENGTH, (5, LENGTH), EndState.CONFIRMED, 5, LENGTH),
        (LENGTH, (5, STOP), EndState.CONFIRMED, 5, STOP),
        (STOP, (3, STOP), EndState.CONFIRMED, 3, STOP),
        (None, (3, STOP), EndState.ENDED_BY_TEXT, 3, STOP),
        (LENGTH, None, EndState.ENDED_BY_TOKENS, 5, LENGTH),
    ],
)
def test_the_front_has_the_last_word_and_the_first_one_of_it_counts(
    planner_says: FinishReason | None,
    front_says: tuple[int, FinishReason] | None,
    state: EndState,
    num_tokens: int,
    reason: FinishReason,
) -> None:
    end = OutputEnd(has_stop_strings=True)
    end.num_tokens = 5
    if planner_says is not None:
        end.end_by_tokens(planner_says)
    if front_says is not None:
        assert end.settle(*front_says)
        assert not end.settle(1, STOP)
        end.end_by_tokens(LENGTH)  # as a replayed step says it
    assert (end.state, end.num_tokens, end.reason) == (state, num_tokens, reason)
    assert end.is_settled == (front_says is not None)


@pytest.mark.parametrize(("has_stop_strings", "num_tokens"), [(True, 6), (False, 5)])
def test_a_front_decides_only_with_stop_strings_and_within_the_tokens_that_it_has(
    has_stop_strings: bool,
    num_tokens: int,
) -> None:
    end = OutputEnd(has_stop_strings=has_stop_strings)
    end.num_tokens = 5
    with pytest.raises(ValueError, match="cannot end with"):
        end.settle(num_tokens, STOP)
