"""The rows of one step: what the table makes of its delta, alike on both tiers. It does not travel.

Pure: NumPy only. `batch_table.py` makes it.
"""

from dataclasses import dataclass

import numpy as np

from octavo_shared.step_wire.step import NO_LOGPROBS, IndexArray, Int32Array


@dataclass(slots=True)
class StepLayout:
    """The rows of one step. Rows are sequences in the step: active slots ascending, then chunks.

    Sample rows are (logits row, slot) pairs: first the rows that reach the end of their sequence, in
    row order, then the forks. Nothing here may be written to, the arrays least of all: some share memory.

    With `allowances` a row of an active slot computes its last token and the drafts behind it, and is sampled once for
    each. On the scheduler its positions are then upper bounds, since earlier steps are not resolved.
    """

    slots: Int32Array  # [num_rows]
    generations: Int32Array  # [num_rows] generation of the slot
    starts: Int32Array  # [num_rows] position of the first token that the row computes
    lengths: Int32Array  # [num_rows] tokens that the row computes
    sample_rows: Int32Array  # [num_samples] row whose last token's logits are used
    sample_slots: Int32Array  # [num_samples] slot that gets the token
    sample_positions: Int32Array  # [num_samples] position of the token, or of the first one
    sample_generations: Int32Array  # [num_samples] generation of the slot
    sample_places: IndexArray  # [num_samples] where the token is in the table's `token_ids`, as if that were flat
    sample_index: IndexArray  # [num_samples] `sample_slots`, as NumPy takes an index fastest
    num_decodes: int  # the first rows, of active slots; the rest are prefill chunks
    num_candidates: Int32Array | None  # [num_samples] 0 except in beam rows; None: the step has no beam row
    num_alternatives: Int32Array | None = None  # [num_samples] asked for beside the token; None: by no row
    # [num_samples] most tokens that the row gets, 0 in beam rows; None: one, and the positions are exact
    allowances: Int32Array | None = None
    # [num_rows] prompt tokens whose log-probabilities the row answers, those behind `starts`; None: no row does.
    num_prompt_logprobs: Int32Array | None = None
    num_prompt_alternatives: Int32Array | None = None  # [num_rows] asked for beside each of them; None with the above

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        has_one_each = self.num_decodes == len(self.slots) and self.allowances is None
        return self.num_decodes if has_one_each else sum(self.lengths.tolist())

    @property
    def most_tokens(self) -> Int32Array:
        """How many tokens each sample row may get, [num_samples]; beam rows get none."""
        if self.allowances is not None:
            return self.allowances
        is_sampled = (
            np.ones(len(self.sample_slots), np.bool_) if self.num_candidates is None else self.num_candidates == 0
        )
        return is_sampled.astype(np.int32)

    @property
    def only_decodes(self) -> bool:
        """Whether all rows are those of active slots, each sampled once.

        Consecutive steps that decode the same sequences share `slots`, which then is `sample_slots` too.
        """
        return self.num_decodes == len(self.slots) == len(self.sample_rows) and self.allowances is None

    def ask_for_prompt_logprobs(self, asked: Int32Array, num_prompt_tokens: Int32Array) -> None:
        """Say which log-probabilities of prompts the rows answer: the token at p is predicted by the token at p - 1.

        Args:
            asked: How many alternatives each row wants beside them, [num_rows]; `NO_LOGPROBS`: it asks for none.
            num_prompt_tokens: Tokens of each row's prompt, [num_rows].
        """
        if np.count_nonzero(asked != NO_LOGPROBS):
            num_predicted = np.minimum(self.starts + self.lengths, num_prompt_tokens - 1) - self.starts
            self.num_prompt_logprobs = np.where(asked != NO_LOGPROBS, np.maximum(num_predicted, 0), 0).astype(np.int32)
            self.num_prompt_alternatives = np.maximum(asked, 0)
