"""How the fake executor drafts: rows with an allowance get several tokens, the same as one by one.

How many of its drafts are right follows from a row's history. So tokens are the same whatever the counts, and a run can
be repeated.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from executor_svc.fake.cache import Histories
from octavo_shared.step_wire.step import Float32Array, IndexArray, Int32Array, StepResult
from octavo_shared.step_wire.step_layout import StepLayout

_HIGH_BITS = np.uint64(33)


def num_proved(layout: StepLayout, histories: Histories) -> Int32Array:
    """Return how many tokens each sample row gets, unless something ends it: 1 to its allowance, 0 for beams."""
    most, hashes = layout.most_tokens, histories.by_position[layout.sample_slots, layout.sample_positions - 1]
    counts = 1 + (hashes >> _HIGH_BITS).astype(np.int64) % np.maximum(most, 1)
    return np.where(most > 0, counts, 0).astype(np.int32)


class Spans:
    """The answer to a step while its rows get one token after the other.

    Args:
        layout: The step.
        first: What its rows get first; of beams and prompts that is all.
    """

    def __init__(self, layout: StepLayout, first: StepResult) -> None:
        self._layout = layout
        self._first = first
        num_rows = len(layout.sample_slots)
        self._token_ids: list[list[int]] = [[] for _ in range(num_rows)]
        self._logprobs: list[list[float]] = [[] for _ in range(num_rows)]
        self._alternatives: list[list[tuple[Int32Array, Float32Array]]] = [[] for _ in range(num_rows)]
        self.add(layout, np.arange(num_rows), first)

    def going_on(self, num_wanted: Int32Array, num_tokens: int) -> IndexArray:
        """Return the rows that have so many tokens and are to get more, ascending."""
        counts = np.array([len(token_ids) for token_ids in self._token_ids])
        rows: IndexArray = ((counts == num_tokens) & (num_wanted > num_tokens)).nonzero()[0]
        return rows

    def last_of(self, rows: IndexArray) -> Int32Array:
        """Return the newest token of each of some rows."""
        return np.array([self._token_ids[row][-1] for row in rows.tolist()], np.int32)

    def part(self, rows: IndexArray, num_tokens: int) -> StepLayout:
        """Return the layout of some rows that have so many tokens, for their next ones."""
        layout, widths = self._layout, self._layout.num_alternatives
        return replace(
            layout,
            sample_rows=layout.sample_rows[rows],
            sample_slots=layout.sample_slots[rows],
            sample_positions=layout.sample_positions[rows] + np.int32(num_tokens),
            sample_generations=layout.sample_generations[rows],
            sample_index=layout.sample_index[rows],
            sample_places=layout.sample_places[rows] + num_tokens,
            num_candidates=None,
            num_alternatives=None if widths is None else widths[rows],
            num_prompt_logprobs=None,
            num_prompt_alternatives=None,
            allowances=None,
        )

    def add(self, layout: StepLayout, rows: npt.NDArray[np.integer], result: StepResult) -> None:
        """Take the next token of each of some rows; a row with a flag gets none, but has it again as its first one."""
        has_token = layout.most_tokens > 0
        if result.row_flags is not None:
            has_token &= result.row_flags == 0
        widths = np.zeros(len(rows), np.int32) if layout.num_alternatives is None else layout.num_alternatives
        ends = widths.cumsum()
        for place in has_token.nonzero()[0].tolist():
            row, span = int(rows[place]), slice(int(ends[place] - widths[place]), int(ends[place]))
            self._token_ids[row].append(int(result.sampled_token_ids[place]))
            self._logprobs[row].append(np.nan if result.logprobs is None else float(result.logprobs[place]))
            if widths[place]:
                assert result.alternative_token_ids is not None
                assert result.alternative_logprobs is not None
                self._alternatives[row].append((result.alternative_token_ids[span], result.alternative_logprobs[span]))

    def result(self) -> StepResult:
        """Return the answer, with counts."""
        result = self._first
        result.token_counts = np.array([len(token_ids) for token_ids in self._token_ids], np.uint8)
        result.sampled_token_ids = np.array([one for row in self._token_ids for one in row], np.int32)
        if result.logprobs is not None:
            result.logprobs = np.array([one for row in self._logprobs for one in row], np.float32)
        pieces = [piece for row in self._alternatives for piece in row]
        if result.alternative_token_ids is not None:
            empty = np.empty(0, np.int32), np.empty(0, np.float32)
            result.alternative_token_ids = np.concatenate([empty[0], *(token_ids for token_ids, _ in pieces)])
            result.alternative_logprobs = np.concatenate([empty[1], *(logprobs for _, logprobs in pieces)])
            if not pieces:
                result.alternative_token_ids = result.alternative_logprobs = None
        return result
