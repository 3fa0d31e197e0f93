"""What a processed step brought, for the engine: tokens, ends, answers and failures, as values.

Pure. `results.py` makes them.
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from octavo_shared.step_wire.step import RowFlag
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.request.outputs import Alternatives, FinishReason, Float32Array


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log-probabilities of the next tokens of a group's prompt, and their alternatives, if any."""

    group: SequenceGroup
    logprobs: list[float]
    alternatives: Alternatives


@dataclass(frozen=True, slots=True)
class FlaggedGroup:
    """A group that ends because one of its rows has a flag; `message` says where: "output 0 at token 17"."""

    group: SequenceGroup
    flag: RowFlag
    message: str


@dataclass(slots=True)
class StepUpdates:
    """The updates of one processed step, as parallel lists.

    `counts`: how many tokens each of `sequences` got, one sequence after the other; None: one each. Tokens behind
    the end of a sequence are cut off.
    `finished` maps an index of `sequences` to the reason why that sequence ended with its last token.
    `advanced_searches` are groups whose beams got their next tokens, `finished_searches` groups whose
    search is over; `SequenceGroup.beams` has the hypotheses. `alternatives` maps an index of `token_ids` to
    the likeliest tokens in that place, where they were requested. `prompt_logprobs` come before all tokens.
    `failures`: groups that have a row with a flag, and where. They have ended, or are in a queue for the caller to end.
    `pooled`: groups that have ended with an answer, and their vectors or scores.
    `num_void_rows`: rows of sequences or beams that had ended when the result came.
    """

    sequences: list[Sequence]
    token_ids: list[int]
    logprobs: list[float] | None
    finished: dict[int, FinishReason]
    counts: list[int] | None = None
    advanced_searches: list[SequenceGroup] = field(default_factory=list)
    finished_searches: list[SequenceGroup] = field(default_factory=list)
    alternatives: dict[int, Alternatives] = field(default_factory=dict)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    failures: list[FlaggedGroup] = field(default_factory=list)
    pooled: Seq[tuple[SequenceGroup, Float32Array]] = ()
    num_void_rows: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the step; for a search that goes on, one for each beam."""
        return len(self.token_ids) + sum(group.num_slots for group in self.advanced_searches)

    @property
    def num_drafted(self) -> int:
        """Tokens behind the first one of their sequence: they came as drafts."""
        return 0 if self.counts is None else len(self.token_ids) - len(self.counts)

    def row_of_each_token(self) -> Iterable[int]:
        """Return the index of the sequence of each of `token_ids`."""
        return count() if self.counts is None else np.arange(len(self.counts)).repeat(self.counts).tolist()

    def last_places(self) -> Collection[int]:
        """Return the indexes of `token_ids` with which sequences end."""
        if self.counts is None or not self.finished:
            return self.finished
        ends = np.cumsum(self.counts)
        return {int(ends[row]) - 1 for row in self.finished}
