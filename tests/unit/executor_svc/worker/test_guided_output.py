"""What follows an output goes back behind drafts, and knows what is forced without a matcher."""

import numpy as np
import pytest

from executor_svc.worker.guided_output import GrammarSlot, GuidedOutput
from executor_svc.worker.kept_masks import KeptMasks, KeptPosition
from octavo_shared.grammar.matcher import OutputMatcher
from octavo_shared.step_wire.step import Int32Array, RowFlag
from octavo_shared.step_wire.token_rules import pack_mask
from tests.support.grammars import byte_matcher
from tests.unit.octavo_shared.grammar.test_matcher import regex

VOCAB_SIZE = 64


def ints(*values: int) -> Int32Array:
    return np.array(values, np.int32)


@pytest.fixture
def output() -> GuidedOutput:
    grammar = regex("abcdef|[x-z]+")
    slot = GrammarSlot(0, grammar, lambda: OutputMatcher(byte_matcher(), grammar), 0)
    return GuidedOutput(slot, slot.kept.beginning)


def test_what_a_draft_meets_is_not_the_end_of_the_output(output: GuidedOutput) -> None:
    words = np.empty(byte_matcher().num_mask_words, np.uint32)
    output.follow(ints(97), words)
    with output.trying(1):
        output.follow(ints(97, 98), words)
        output.flag = RowFlag.GRAMMAR_LIMIT
    assert [output.flag, output.matcher].count(None) == 2
    assert output.likely(ints(97), [], 9, words) == ([], 0), "it would meet it again in each step"


def test_drafts_leave_no_trace(output: GuidedOutput) -> None:
    words = np.empty(byte_matcher().num_mask_words, np.uint32)
    matcher = output.follow(ints(), words)
    matcher.fill_mask(words)
    assert output.position is not None
    output.position.mask = words.view(np.uint8).copy()
    before = output.position, output.num_kept
    with output.trying(0):
        output.follow(ints(120), words)
    assert (output.position, output.num_kept) == before
    assert output.likely(ints(97), [], 9, words) == ([*b"bcdef"], 0)


def position(*token_ids: int) -> KeptPosition:
    mask = pack_mask(ints(*token_ids), VOCAB_SIZE)
    return KeptPosition(np.frombuffer(mask, np.uint8))


def test_forced_without_a_matcher_is_the_only_token_as_far_as_masks_are_kept() -> None:
    first, second, third = position(5), position(40), position(1, 2)
    first.followers, second.followers = {5: second}, {40: third}
    third.followers = {1: position(7), 2: position(7)}
    kept = KeptMasks()
    assert kept.forced(first, 9) == [5, 40]
    assert kept.forced(first, 1) == [5]
    assert kept.forced(third, 9) == []
    third.mask = None
    assert kept.forced(first, 9) == [5], "what may follow on the last one is not known"
