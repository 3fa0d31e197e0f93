"""When a sequence ends by itself, by token ids and lengths: checked for all sample rows of a step at once."""

import numpy as np

from octavo_shared.step_wire.batch_table import IndexArray
from octavo_shared.step_wire.step import BoolArray, Int32Array
from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.request.parameters import StopConditions


class StopChecker:
    """One row of stop conditions for each slot of the batch table."""

    def __init__(self, max_num_seqs: int, max_model_len: int, eos_token_ids: tuple[int, ...]) -> None:
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._max_num_tokens: Int32Array = np.full(max_num_seqs, max_model_len, np.int32)
        self._ignores_eos: BoolArray = np.zeros(max_num_seqs, np.bool_)
        self._has_stop_token_ids: BoolArray = np.zeros(max_num_seqs, np.bool_)
        self._stop_token_ids: list[frozenset[int]] = [frozenset()] * max_num_seqs
        self._num_with_stop_token_ids = 0

    def set_slot(self, slot: int, num_prompt_tokens: int, conditions: StopConditions) -> None:
        """Set the conditions of a slot when a sequence is admitted to it."""
        self._max_num_tokens[slot] = conditions.length_limit(num_prompt_tokens, self._max_model_len)
        self._ignores_eos[slot] = conditions.ignore_eos
        self._stop_token_ids[slot] = conditions.stop_token_ids
        if conditions.stop_token_ids or self._num_with_stop_token_ids:
            self._num_with_stop_token_ids += bool(conditions.stop_token_ids) - int(self._has_stop_token_ids[slot])
            self._has_stop_token_ids[slot] = bool(conditions.stop_token_ids)

    def at_length_limit(self, num_tokens: Int32Array) -> BoolArray:
        """Return which slots, with `num_tokens` each, must not get another token; both [max_num_seqs]."""
        return num_tokens >= self._max_num_tokens

    def num_left(self, num_tokens: Int32Array) -> Int32Array:
        """Return how many more tokens slots with `num_tokens` may get; both [max_num_seqs]."""
        return self._max_num_tokens - num_tokens

    def finished(
        self, slots: Int32Array | IndexArray, positions: Int32Array, token_ids: Int32Array
    ) -> dict[int, FinishReason]:
        """Return why rows end at which `token_ids` arrived at `positions`: {row: reason}, few or none."""
        stopped = np.zeros(len(slots), np.bool_)
        for eos_token_id in self._eos_token_ids:
            stopped |= token_ids == eos_token_id
        if np.count_nonzero(stopped):
            stopped &= ~self._ignores_eos[slots]
        if self._num_with_stop_token_ids:
            for row in self._has_stop_token_ids[slots].nonzero()[0].tolist():
                stopped[row] |= int(token_ids[row]) in self._stop_token_ids[slots[row]]
        ended = stopped | (positions + 1 >= self._max_num_tokens[slots])
        return {row: FinishReason.STOP if stopped[row] else FinishReason.LENGTH for row in ended.nonzero()[0].tolist()}

    def finished_without_slot(
        self, token_ids: Int32Array, num_prompt_tokens: int, conditions: StopConditions
    ) -> FinishReason | None:
        """Return why a sequence that carries its tokens itself ends with its last token; None: it goes on."""
        return conditions.end_with(
            int(token_ids[-1]), len(token_ids), num_prompt_tokens, self._max_model_len, self._eos_token_ids
        )
