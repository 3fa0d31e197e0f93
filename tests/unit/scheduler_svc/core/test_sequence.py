"""Groups and their sequences."""

from itertools import product

import numpy as np
import pytest

from scheduler_svc.core.sequence import SequenceStatus
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions
from tests.support.driving import group
from tests.support.each_row import each_row


def test_a_new_group_waits_with_its_prompt_and_has_no_slot() -> None:
    created = group(3, 4)

    (sequence,) = created.sequences
    assert sequence.status is SequenceStatus.WAITING
    assert sequence.token_ids.tolist() == [400, 401, 402, 403]
    assert (sequence.slot, sequence.group.arrival, created.num_prompt_tokens) == (-1, 3, 4)
    assert not created.has_run


def test_the_outputs_of_a_group_differ_in_their_index_only() -> None:
    created = group(0, 4, num_sequences=3)

    rows = [created.sampling_of(sequence) for sequence in created.sequences]

    assert [row.output_index for row in rows] == [0, 1, 2]
    assert rows[0] is created.sampling


def test_a_inflight_token_is_appended_and_leaves_the_prompt_alone() -> None:
    created = group(0, 2)
    (sequence,) = created.sequences
    sequence.num_inflight_rows = 2

    sequence.append_inflight_tokens(np.array([9], np.int32))

    assert sequence.token_ids.tolist() == [100, 101, 9]
    assert sequence.token_ids.dtype == np.int32
    assert sequence.num_inflight_rows == 1
    assert created.num_prompt_tokens == 2
    assert created.has_inflight_rows


@each_row(*product(SequenceStatus, [-1, 0]))
def test_only_who_runs_has_a_slot_and_a_new_beam_has_none_yet(status: SequenceStatus, slot: int) -> None:
    (sequence,) = group(0, 2).sequences
    sequence.status, sequence.slot = status, slot

    assert sequence.has_slot is (status is SequenceStatus.RUNNING and slot == 0)


def test_equal_requests_are_still_two_sequences() -> None:
    assert group(0, 2).sequences[0] != group(0, 2).sequences[0]


def test_only_the_lead_of_a_group_is_computed_until_somebody_has_a_token() -> None:
    created = group(0, 2, num_sequences=3)
    before = created.sequences_to_compute

    for sequence in created.sequences:
        sequence.append_inflight_tokens(np.array([7], np.int32))

    assert before == created.sequences[:1]
    assert created.sequences_to_compute == created.sequences


def test_what_has_ended_needs_no_slot() -> None:
    created = group(0, 2, num_sequences=3)
    created.sequences[0].status = SequenceStatus.FINISHED

    assert created.live_sequences == created.sequences[1:]
    assert created.num_slots == 2


def test_a_search_needs_a_slot_for_each_beam() -> None:
    created = group(0, 2, beam_search=BeamSearchParams(beam_width=4))

    assert (len(created.sequences), created.num_slots) == (1, 4)


def test_a_search_chooses_its_own_sequences() -> None:
    with pytest.raises(AssertionError, match="chooses its own sequences"):
        group(0, 2, num_sequences=2, beam_search=BeamSearchParams(beam_width=4))


@each_row((None, 20), (5, 8), (17, 20), (100, 20))
def test_the_length_limit_is_the_lesser_of_the_request_s_and_the_model_s(max_tokens: int | None, expected: int) -> None:
    assert StopConditions(max_tokens).length_limit(num_prompt_tokens=3, max_model_len=20) == expected
