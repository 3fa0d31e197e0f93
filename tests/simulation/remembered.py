"""What the fake worker has answered to a row of a step, so that it is computed once: seeds ask for the same shapes.

An answer is a function of the row's key alone. It does not hang on what else a run has asked, and `alone.py` computes
its answers without this.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from executor_svc.fake.cache import Histories
from octavo_shared.step_wire.batch_table import BatchTable, StepLayout
from octavo_shared.step_wire.sampling_row import SAMPLING_ROW
from octavo_shared.step_wire.step import NO_LOGPROBS, UNKNOWN_TOKEN, Float32Array, Int32Array, Step, StepResult
from octavo_shared.step_wire.table_columns import NO_GRAMMAR

# The tokens, the hash of the history, how it is sampled, the length of its prompt, its rules, and the digest of its
# grammar.
RowKey = tuple[bytes, int, bytes, int, bytes | None, bytes | None]
TokensWithLogprobs = tuple[Int32Array, Float32Array]

# Of all rows that are remembered; about 1 KB each. A group of seeds asks for some 10,000.
MAX_ROWS = 40_000


class RowAnswer(NamedTuple):
    """What a sample row was answered with: a token, or the candidates of a beam."""

    token_id: int
    logprob: float | None = None
    alternatives: TokensWithLogprobs | None = None
    candidates: TokensWithLogprobs | None = None
    flag: int = 0


_answers: dict[RowKey, RowAnswer] = {}


def keys_of(table: BatchTable, layout: StepLayout, histories: Histories) -> list[RowKey]:
    """Return the key of each sample row."""
    slots, positions = layout.sample_slots, layout.sample_positions
    hashes = histories.by_position[slots, positions - 1].tolist()
    num_prompt_tokens = table.num_prompt_tokens[slots].tolist()
    sampling, size, token_ids = table.sampling[slots].tobytes(), SAMPLING_ROW.itemsize, table.token_ids
    rules = [None if rules is None else rules.content() for rules in table.token_rules[slots].tolist()]
    return [
        (
            token_ids[slot, :position].tobytes(),
            hashes[row],
            sampling[row * size : (row + 1) * size],
            num_prompt_tokens[row],
            rules[row],
            _grammar_of(table, slot),
        )
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True))
    ]


def _grammar_of(table: BatchTable, slot: int) -> bytes | None:
    grammar_slot = int(table.grammar_slot[slot])
    grammar = None if grammar_slot == NO_GRAMMAR else table.grammars[grammar_slot]
    return None if grammar is None else grammar.digest


def remembered(keys: Sequence[RowKey], step: Step) -> StepResult | None:
    """Return the answer to a step without log-probabilities of prompts; None: some row was not asked for before."""
    rows = []
    for key in keys:
        row = _answers.get(key)
        if row is None:
            return None
        rows.append(row)
    result = StepResult(step.epoch, step.step_id, np.array([row.token_id for row in rows], np.int32))
    logprobs = [row.logprob for row in rows]
    if logprobs.count(None) < len(rows):
        result.logprobs = np.array([np.nan if logprob is None else logprob for logprob in logprobs], np.float32)
        result.alternative_token_ids, result.alternative_logprobs = _joined([row.alternatives for row in rows])
    result.candidate_token_ids, result.candidate_logprobs = _joined([row.candidates for row in rows])
    if any(row.flag for row in rows):
        result.row_flags = np.array([row.flag for row in rows], np.uint8)
    return result


def remember(keys: Sequence[RowKey], sampling: npt.NDArray[np.void], result: StepResult) -> None:
    """Keep what was answered; `sampling` has how each of the rows is sampled."""
    if len(_answers) + len(keys) > MAX_ROWS:
        _answers.clear()
    num_candidates, num_logprobs = sampling["num_candidates"], sampling["num_logprobs"]
    are_asking = (num_logprobs != NO_LOGPROBS) & (num_candidates == 0)
    num_alternatives = np.where(are_asking, np.maximum(num_logprobs, 0), 0)
    alternatives = _split(result.alternative_token_ids, result.alternative_logprobs, num_alternatives)
    candidates = _split(result.candidate_token_ids, result.candidate_logprobs, num_candidates)
    for row, key in enumerate(keys):
        token_id, logprob = int(result.sampled_token_ids[row]), None
        if are_asking[row]:
            assert result.logprobs is not None
            logprob = float(result.logprobs[row])
        assert (token_id == UNKNOWN_TOKEN) == (candidates[row] is not None)
        flag = 0 if result.row_flags is None else int(result.row_flags[row])
        _answers[key] = RowAnswer(token_id, logprob, alternatives[row], candidates[row], flag)


def _joined(pieces: Sequence[TokensWithLogprobs | None]) -> TokensWithLogprobs | tuple[None, None]:
    some = [piece for piece in pieces if piece is not None]
    if not some:
        return None, None
    return np.concatenate([token_ids for token_ids, _ in some]), np.concatenate([logprobs for _, logprobs in some])


def _split(
    token_ids: Int32Array | None, logprobs: Float32Array | None, counts: npt.NDArray[np.integer]
) -> list[TokensWithLogprobs | None]:
    """Return the part of each row; None: it has none."""
    if token_ids is None or logprobs is None:
        return [None] * len(counts)
    ends = np.cumsum(counts).tolist()
    spans = [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]
    return [(token_ids[span].copy(), logprobs[span].copy()) if span.stop > span.start else None for span in spans]
