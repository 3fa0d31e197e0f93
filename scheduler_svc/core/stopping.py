"""Stop conditions on token ids and lengths, checked for all sample rows of a step at once."""

import numpy as np

from scheduler_svc.core.sequence import FinishReason, Sequence, StopConditions
from shared.step import BoolArray, Int32Array


class StopChecker:
    """One row of stop conditions for each slot of the batch table.

    Args:
        max_num_seqs: Number of slots.
        max_model_len: Most tokens of a sequence, prompt and output.
        eos_token_ids: The model's end-of-sequence tokens.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, eos_token_ids: tuple[int, ...]) -> None:
        self._max_model_len = max_model_len
        self._eos_token_ids: Int32Array = np.array(eos_token_ids, np.int32)
        self._max_num_tokens: Int32Array = np.full(max_num_seqs, max_model_len, np.int32)
        self._ignores_eos: BoolArray = np.zeros(max_num_seqs, np.bool_)
        self._has_stop_token_ids: BoolArray = np.zeros(max_num_seqs, np.bool_)
        self._stop_token_ids: list[frozenset[int]] = [frozenset()] * max_num_seqs

    def set_slot(self, slot: int, num_prompt_tokens: int, conditions: StopConditions) -> None:
        """Set the conditions of a slot when a sequence is admitted to it."""
        self._max_num_tokens[slot] = self._length_limit(num_prompt_tokens, conditions)
        self._ignores_eos[slot] = conditions.ignore_eos
        self._stop_token_ids[slot] = conditions.stop_token_ids
        self._has_stop_token_ids[slot] = bool(conditions.stop_token_ids)

    def at_length_limit(self, slots: Int32Array, num_tokens: Int32Array) -> BoolArray:
        """Return which of `slots`, with so many tokens each, must not get another one; [num_slots]."""
        return num_tokens >= self._max_num_tokens[slots]

    def finished(self, slots: Int32Array, positions: Int32Array, token_ids: Int32Array) -> dict[int, FinishReason]:
        """Return why rows end that got `token_ids` at `positions`: {row: reason}, few or none."""
        stopped = (token_ids[:, None] == self._eos_token_ids).any(axis=1) & ~self._ignores_eos[slots]
        for row in np.flatnonzero(self._has_stop_token_ids[slots]).tolist():
            stopped[row] |= int(token_ids[row]) in self._stop_token_ids[slots[row]]
        ended = stopped | self.at_length_limit(slots, positions + 1)
        return {
            row: FinishReason.STOP if stopped[row] else FinishReason.LENGTH for row in np.flatnonzero(ended).tolist()
        }

    def finished_late(self, sequence: Sequence) -> FinishReason | None:
        """Return why a waiting sequence ends with its last token, None if it goes on."""
        group, token_id = sequence.group, int(sequence.token_ids[-1])
        conditions = group.stop_conditions
        is_eos = token_id in self._eos_token_ids and not conditions.ignore_eos
        if is_eos or token_id in conditions.stop_token_ids:
            return FinishReason.STOP
        at_limit = len(sequence.token_ids) >= self._length_limit(group.num_prompt_tokens, conditions)
        return FinishReason.LENGTH if at_limit else None

    def _length_limit(self, num_prompt_tokens: int, conditions: StopConditions) -> int:
        """Return the most tokens of a sequence, prompt and output."""
        if conditions.max_tokens is None:
            return self._max_model_len
        return min(num_prompt_tokens + conditions.max_tokens, self._max_model_len)
