"""Groups and their sequences."""

import numpy as np

from scheduler_svc.core.sequence import SequenceStatus
from tests.support.driving import group


def test_a_new_group_waits_with_its_prompt_and_has_no_slot() -> None:
    created = group(3, 4)

    assert created.sequence.status is SequenceStatus.WAITING
    assert created.sequence.token_ids.tolist() == [400, 401, 402, 403]
    assert (created.sequence.slot, created.sequence.arrival, created.num_prompt_tokens) == (-1, 3, 4)


def test_a_late_token_is_appended_and_leaves_the_prompt_alone() -> None:
    created = group(0, 2)
    created.sequence.num_late_tokens = 2

    created.sequence.append_late_token(9)

    assert created.sequence.token_ids.tolist() == [100, 101, 9]
    assert created.sequence.token_ids.dtype == np.int32
    assert created.sequence.num_late_tokens == 1
    assert created.num_prompt_tokens == 2


def test_equal_requests_are_still_two_sequences() -> None:
    assert group(0, 2).sequence != group(0, 2).sequence
