"""Drafts: what prompt lookup proposes, what of it is kept, and when a draft is worth its row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.drafts.drafting import DraftedStep, Drafting, RowCost
from executor_svc.drafts.proposer import PromptLookup
from executor_svc.native.build import find_library
from executor_svc.parallel.group import SINGLE_RANK
from octavo_shared.step_wire.step import Int32Array, RowFlag, StepResult
from octavo_shared.step_wire.step_layout import StepLayout
from tests.support.each_row import each_row

WIDTH, MOST = 64, 5


@pytest.fixture(scope="module")
def lookup() -> PromptLookup:
    path = find_library()
    assert path is not None
    return PromptLookup(path)


def ints(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def looked_up(tokens: list[int], most: int) -> list[int]:
    """Return what follows the longest earlier match of the end, the latest of equal ones."""
    ends = [
        (length, end)
        for end in range(2, len(tokens))
        for length in range(2, min(end, 16) + 1)
        if tokens[end - length : end] == tokens[-length:]
    ]
    if not ends:
        return []
    end = max(ends)[1]
    grown = list(tokens)
    for place in range(end, end + most):
        grown.append(grown[place])
    return grown[len(tokens) :]


@given(texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=60), min_size=1, max_size=4), data=st.data())
def test_prompt_lookup_proposes_what_followed_the_longest_match(
    lookup: PromptLookup, texts: list[list[int]], data: st.DataObject
) -> None:
    token_ids = np.full((8, WIDTH), -1, np.int32)
    slots = ints(*data.draw(st.permutations(range(8)))[: len(texts)])
    most = ints(*data.draw(st.lists(st.integers(0, MOST), min_size=len(texts), max_size=len(texts))))
    for slot, text in zip(slots, texts, strict=True):
        token_ids[slot, : len(text)] = text

    drafts, counts = lookup.propose(token_ids, slots, ints(*map(len, texts)), most)

    found = [row[:count].tolist() for row, count in zip(drafts, counts, strict=True)]
    assert found == [looked_up(text, wanted) for text, wanted in zip(texts, most.tolist(), strict=True)]


def layout(num_drafts: Int32Array, num_candidates: Int32Array | None = None) -> StepLayout:
    rows = np.arange(len(num_drafts)).repeat(num_drafts + 1)
    zeros = np.zeros(len(rows), np.int32)
    return StepLayout(
        slots=zeros,
        generations=zeros,
        starts=zeros,
        lengths=zeros,
        sample_rows=zeros,
        sample_slots=zeros,
        sample_positions=zeros,
        sample_generations=zeros,
        sample_places=zeros.astype(np.intp),
        sample_index=zeros.astype(np.intp),
        num_decodes=len(num_drafts),
        num_candidates=None if num_candidates is None else num_candidates[rows],
        num_alternatives=rows.astype(np.int32),
    )


@each_row(
    # drafts of two rows; what they draw; flags; tokens of each
    (([5, 6], [7]), ([5, 6, 9], [7, 8]), (), ([5, 6, 9], [7, 8])),
    (([5, 6], [7]), ([4, 6, 9], [8, 1]), (), ([4], [8])),
    (([5, 6], []), ([5, 1, 6], [3]), (), ([5, 1], [3])),
    (([5, 6], [7]), ([5, 6, 9], [7, 8]), (1,), ([5], [7, 8])),  # the next step finds the flag anew
    (([5, 6], [7]), ([5, 6, 9], [7, 8]), (0, 3), ([], [])),
    (([5, 6], [7]), ([4, 6, 9], [7, 8]), (1,), ([4], [7, 8])),  # behind a wrong draft nothing counts
)
def test_tokens_are_kept_up_to_the_first_wrong_draft(
    drafts: tuple[list[int], ...],
    drawn: tuple[list[int], ...],
    flagged: tuple[int, ...],
    kept: tuple[list[int], ...],
) -> None:
    num_drafts = ints(*map(len, drafts))
    padded = np.array([[*row, 0, 0][:2] for row in drafts], np.int32)
    token_ids = ints(*[token for row in drawn for token in row])
    flags = np.isin(np.arange(len(token_ids)), flagged).astype(np.uint8) * RowFlag.NOT_FINITE
    # A row asks for as many alternatives as its number.
    rows = np.arange(len(drafts)).repeat(num_drafts + 1)
    answer = StepResult(
        1,
        1,
        token_ids,
        logprobs=token_ids.astype(np.float32),
        alternative_token_ids=token_ids.repeat(rows),
        alternative_logprobs=token_ids.repeat(rows).astype(np.float32),
        row_flags=flags.astype(np.uint8) if flagged else None,
    )

    DraftedStep(layout(num_drafts), padded, num_drafts, num_drafts).prove(answer)

    assert answer.token_counts is not None
    assert answer.token_counts.tolist() == [len(row) for row in kept]
    assert answer.sampled_token_ids.tolist() == [token for row in kept for token in row]
    assert answer.logprobs is not None
    assert answer.logprobs.tolist() == answer.sampled_token_ids.tolist()
    assert answer.alternative_token_ids is not None
    assert answer.alternative_token_ids.tolist() == kept[1]
    if answer.row_flags is not None:
        assert answer.row_flags.astype(bool).tolist() == [not row for row in kept]


def test_a_beam_row_gets_no_token() -> None:
    num_drafts = ints(1, 0)
    answer = StepResult(1, 1, ints(5, 6, -1))

    DraftedStep(layout(num_drafts, ints(0, 3)), np.array([[5], [0]], np.int32), num_drafts, num_drafts).prove(answer)

    assert answer.token_counts is not None
    assert answer.token_counts.tolist() == [2, 0]
    assert answer.sampled_token_ids.tolist() == [5, 6]


@each_row((1000, 10, 0.01), (100, 100, 0.5), (0, 50, 1.0))
def test_the_cost_of_a_row_is_learned_from_steps(fixed_us: int, of_row_us: int, share: float) -> None:
    cost = RowCost()
    assert cost.share(1) == pytest.approx(0.08 / 1.08)
    for num_rows in [1, 3, 8, 2, 5] * 40:
        cost.learn(num_rows, fixed_us + num_rows * of_row_us)

    assert cost.share(1) == pytest.approx(share, rel=0.15)


@each_row((10, 1.0, 7), (10, 0.0, 0), (1000, 1.0, 7), (100_000, 0.5, 0))
def test_drafts_stop_where_they_cost_more_than_they_bring(of_row_us: int, rate: float, most: int) -> None:
    class Nothing:
        def propose(self, _: object, slots: Int32Array, *__: Int32Array) -> tuple[Int32Array, Int32Array]:
            return np.zeros((len(slots), 0), np.int32), np.zeros(len(slots), np.int32)

    drafting = Drafting(Nothing(), 4, 7, SINGLE_RANK)
    for num_rows in [1, 3, 8] * 40:
        drafting._row_cost.learn(num_rows, 1000 + num_rows * of_row_us)
    drafting._num_tried[0], drafting._num_right[0] = 1000.0, rate * 1000

    assert drafting._worth(np.array([0]), 1).tolist() == [most]
