"""Several tokens of a sequence in one step: drafts are computed behind its last token, and kept where they are drawn.

Each row of a step draws as always: from its seed, its output and its position, with the penalties, rules and bits that
it has alone. So a draft that equals the draw before it is the token that would have come, and what is drawn behind it
is what would have been drawn. The others are thrown away: their keys and values are written over, and no state takes
them.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from executor_svc.drafts.mtp import Mtp, MtpRunner
from executor_svc.drafts.proposer import Grammars, Proposer
from executor_svc.parallel.group import TensorParallelGroup
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import IndexArray, Int32Array, Step, StepResult
from octavo_shared.step_wire.step_layout import StepLayout
from octavo_shared.step_wire.table_columns import NO_GRAMMAR

# What is counted of drafts at each step that has some, and at each step: older ones count less.
_KEPT_OF_DRAFTS = 0.8
_KEPT_OF_STEPS = 0.98
# Before any draft was proved: how often it is right, and how many drafts that stands for.
_PRIOR_RIGHT, _PRIOR_DRAFTS = 0.6, 2.0
# Before steps of several sizes were timed: what a row adds to a step without rows, as a share, and its weight.
_PRIOR_SHARE, _PRIOR_WEIGHT = 0.08, 2.0


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """A step with its drafts in the table."""

    layout: StepLayout  # sampled once behind each last token and each draft; rows with their drafts as `lengths`
    drafts: Int32Array  # [num_samples, most drafts]
    num_drafts: Int32Array  # [num_samples]
    num_looked_up: Int32Array  # [num_samples]: how many, the first ones, are not forced by a grammar

    def prove(self, answer: StepResult) -> None:
        """Keep, of the tokens of each row, those up to the first draft that was not drawn.

        A row with a flag behind a draft gets no token there; the next step finds it anew.

        Args:
            answer: To `layout`; becomes the answer to the step, with counts.
        """
        num_entries, candidates = self.num_drafts + 1, self.layout.num_candidates
        ends = num_entries.cumsum()
        places = ends - num_entries
        width = self.drafts.shape[1] + 1
        columns = np.minimum(places[:, None] + np.arange(width), ends[-1] - 1)
        drawn = answer.sampled_token_ids[columns[:, :-1]]
        is_right = (drawn == self.drafts) & (np.arange(width - 1) < self.num_drafts[:, None])
        counts = 1 + np.cumprod(is_right, axis=1).sum(axis=1)
        if answer.row_flags is not None:
            flagged = answer.row_flags[columns] != 0
            counts = np.minimum(counts, np.where(flagged.any(axis=1), flagged.argmax(axis=1), width))
            answer.row_flags = answer.row_flags[places]
        if candidates is not None:
            counts[candidates[places] > 0] = 0
        rows = np.arange(len(counts)).repeat(num_entries)
        kept = np.arange(len(rows)) - places[rows] < counts[rows]
        answer.token_counts = counts.astype(np.uint8)
        answer.draft_counts = self.num_drafts.astype(np.uint8)
        answer.sampled_token_ids = answer.sampled_token_ids[kept]
        if answer.logprobs is not None:
            answer.logprobs = answer.logprobs[kept]
        if answer.alternative_token_ids is not None:
            assert answer.alternative_logprobs is not None
            assert self.layout.num_alternatives is not None
            of_kept = kept.repeat(self.layout.num_alternatives)
            answer.alternative_token_ids = answer.alternative_token_ids[of_kept]
            answer.alternative_logprobs = answer.alternative_logprobs[of_kept]

    def num_accepted(self, answer: StepResult) -> Int32Array:
        """Return how many drafts of each row were right, [num_rows], by a proved answer."""
        assert answer.token_counts is not None
        num_accepted = np.zeros(len(self.layout.slots), np.int32)
        num_entries = self.num_drafts + 1
        rows = self.layout.sample_rows[num_entries.cumsum() - num_entries]
        np.maximum.at(num_accepted, rows, np.clip(answer.token_counts.astype(np.int32) - 1, 0, self.num_drafts))
        return num_accepted


class RowCost:
    """What a row adds to the time of a step that only decodes: a line through the steps so far."""

    def __init__(self) -> None:
        self._weight = self._rows = self._times = self._squares = self._products = 0.0

    def learn(self, num_rows: int, duration_us: float) -> None:
        """Learn from a step; earlier ones count a little less."""
        kept = _KEPT_OF_STEPS
        self._weight = self._weight * kept + 1.0
        self._rows = self._rows * kept + num_rows
        self._times = self._times * kept + duration_us
        self._squares = self._squares * kept + num_rows * num_rows
        self._products = self._products * kept + num_rows * duration_us

    def share(self, num_rows: int) -> float:
        """Return which share of the time of a step with so many rows it is to have them, 0 to 1."""
        if not self._weight:
            return num_rows * _PRIOR_SHARE / (1.0 + num_rows * _PRIOR_SHARE)
        rows, time = self._rows / self._weight, self._times / self._weight
        variance = max(0.0, self._squares - rows * self._rows)
        covariance = self._products - rows * self._times
        prior = _PRIOR_SHARE * time / (1.0 + _PRIOR_SHARE * rows)
        of_row = max(0.0, (covariance + _PRIOR_WEIGHT * prior) / (variance + _PRIOR_WEIGHT))
        of_rows = num_rows * of_row
        return min(1.0, of_rows / max(time + (num_rows - rows) * of_row, 1e-9))


class Drafting:
    """Decides how many drafts the rows of steps get, within their allowances.

    A draft is worth its row if it is right more often than its row costs: a step of n rows that takes a + b n is not
    slowed down, for each token, by a draft that is right with a probability above b n / (a + b n). Both sides are
    learned: what a row costs from all steps, how often drafts are right from those of the sequence.

    Args:
        proposer: Of the drafts; not asked if there is `mtp`.
        max_num_seqs: Slots of the batch table.
        most_drafts: Most drafts of a row.
        group: The ranks that share the model; rank 0 proposes.
        grammars: Of rank 0; None: rows that follow one have no drafts.
        mtp: Drafts with a head of the model; None: it has none, or it is not used.
    """

    def __init__(
        self,
        proposer: Proposer,
        max_num_seqs: int,
        most_drafts: int,
        group: TensorParallelGroup,
        grammars: Grammars | None = None,
        mtp: Mtp | None = None,
    ) -> None:
        self._proposer = proposer
        self._group = group
        self._grammars = grammars
        self.mtp = mtp
        self._most_drafts = most_drafts
        self._row_cost = RowCost()
        self._generations = np.full(max_num_seqs, -1, np.int64)
        self._num_tried = np.zeros(max_num_seqs)  # drafts up to the first wrong one, lately
        self._num_right = np.zeros(max_num_seqs)

    def draft(self, runner: MtpRunner, table: BatchTable, layout: StepLayout, step: Step) -> DraftedStep | None:
        """Write drafts behind the last tokens of rows with an allowance; None: there are none.

        Of rows that follow a grammar they are what it forces, or what it allows of the proposed ones.

        Args:
            runner: Of the model.
            table: With the step applied, and all steps before it resolved.
            layout: Of the step, with allowances.
            step: The step.
        """
        if step.draft_counts is not None and step.draft_token_ids is not None:
            counts = step.draft_counts.astype(np.int32)
            drafts = np.zeros((len(counts), int(counts.max(initial=0))), np.int32)
            drafts[np.arange(drafts.shape[1]) < counts[:, None]] = step.draft_token_ids
            return self._drafted(table, layout, drafts, counts, counts)
        allowances = layout.allowances
        assert allowances is not None
        slots = layout.sample_index
        most = np.maximum(allowances - 1, 0)
        most[layout.num_decodes :] = 0
        self._forget_others(slots, layout.sample_generations)
        drafts, counts, num_looked_up = self._proposed(runner, table, layout, most)
        return self._drafted(table, layout, drafts, counts, num_looked_up) if counts.any() else None

    def _drafted(
        self, table: BatchTable, layout: StepLayout, drafts: Int32Array, counts: Int32Array, num_looked_up: Int32Array
    ) -> DraftedStep:
        slots = layout.sample_index
        for place in range(drafts.shape[1]):
            with_draft = (counts > place).nonzero()[0]
            table.token_ids[slots[with_draft], layout.sample_positions[with_draft] + place] = drafts[with_draft, place]
        return DraftedStep(_with_drafts(layout, counts), drafts, counts, num_looked_up)

    def learn(self, layout: StepLayout, drafted: DraftedStep, answer: StepResult) -> None:
        """Learn from how many drafts of each row were right; forced ones say nothing of others."""
        assert answer.token_counts is not None
        rows = drafted.num_looked_up.nonzero()[0]
        slots, num_drafts = layout.sample_index[rows], drafted.num_looked_up[rows]
        num_right = np.clip(answer.token_counts[rows].astype(np.int32) - 1, 0, num_drafts)
        self._num_tried[slots] = self._num_tried[slots] * _KEPT_OF_DRAFTS + num_right + (num_right < num_drafts)
        self._num_right[slots] = self._num_right[slots] * _KEPT_OF_DRAFTS + num_right

    def learn_cost(self, layout: StepLayout, duration_us: int) -> None:
        """Learn from how long a step took, as it was computed."""
        if layout.num_decodes == len(layout.slots):
            self._row_cost.learn(layout.num_tokens, duration_us)

    def _worth(self, slots: IndexArray, num_rows: int) -> Int32Array:
        """Return how many drafts are worth their rows, [num_samples]."""
        for counted in (self._num_tried, self._num_right):
            counted[slots] *= _KEPT_OF_STEPS
        right = (self._num_right[slots] + _PRIOR_RIGHT * _PRIOR_DRAFTS) / (self._num_tried[slots] + _PRIOR_DRAFTS)
        share = max(self._row_cost.share(num_rows), 1e-3)
        # The last of d drafts is right with a probability of right ** d.
        worth = np.log(share) / np.log(np.minimum(right, 0.999))
        most: Int32Array = np.minimum(worth, self._most_drafts).astype(np.int32)
        return most

    def _forget_others(self, slots: IndexArray, generations: Int32Array) -> None:
        """Begin anew with slots that have another sequence than before."""
        new = slots[self._generations[slots] != generations]
        self._num_tried[new] = self._num_right[new] = 0.0
        self._generations[slots] = generations

    def _proposed(
        self, runner: MtpRunner, table: BatchTable, layout: StepLayout, most: Int32Array
    ) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Return what rank 0 proposes: drafts, [num_samples, any], how many each row has, how many are looked up."""
        drafts = np.zeros((len(most), self._most_drafts), np.int32)
        num_looked_up = worth = counts = np.zeros(len(most), np.int32)
        slots, num_tokens, found = layout.sample_slots, layout.sample_positions, drafts[:, :0]
        if self._group.rank == 0:
            worth = np.minimum(most, self._worth(layout.sample_index, layout.num_decodes))
        if self.mtp is not None:
            if self._group.size > 1:
                worth = self._group.broadcast(torch.from_numpy(worth.astype(np.int64))).numpy().astype(np.int32)
            found, counts = self.mtp.draft(runner, table, slots, num_tokens, worth), worth
        elif self._group.rank == 0:
            found, counts = self._proposer.propose(table.token_ids, slots, num_tokens, worth)
        drafts[:, : found.shape[1]] = found
        if self._group.rank == 0:
            num_looked_up = counts.copy()
            guided = ((table.grammar_slot[layout.sample_index] != NO_GRAMMAR) & (most > 0)).nonzero()[0]
            if len(guided):
                self._hold_to_grammars(table, layout, guided, most, drafts, counts, num_looked_up)
        if self._group.size > 1:
            told = self._group.broadcast(torch.from_numpy(np.column_stack((counts, drafts)).astype(np.int64))).numpy()
            counts, drafts = told[:, 0].astype(np.int32), told[:, 1:].astype(np.int32)
        return drafts[:, : int(counts.max(initial=0))], counts, num_looked_up

    def _hold_to_grammars(
        self,
        table: BatchTable,
        layout: StepLayout,
        guided: IndexArray,
        most: Int32Array,
        drafts: Int32Array,
        counts: Int32Array,
        num_looked_up: Int32Array,
    ) -> None:
        """Let rows that follow a grammar have the drafts that it allows and forces."""
        if self._grammars is None:
            counts[guided] = num_looked_up[guided] = 0
            return
        slots, ends = layout.sample_slots[guided].tolist(), layout.sample_positions[guided].tolist()
        begins = table.num_prompt_tokens[slots].tolist()
        likely = self._grammars.draft(
            slots,
            [table.token_ids[slot, begin:end] for slot, begin, end in zip(slots, begins, ends, strict=True)],
            [drafts[row, : counts[row]].tolist() for row in guided.tolist()],
            most[guided].tolist(),
        )
        for row, (token_ids, num_proposed) in zip(guided.tolist(), likely, strict=True):
            drafts[row, : len(token_ids)] = token_ids
            counts[row], num_looked_up[row] = len(token_ids), num_proposed


def without_drafts(layout: StepLayout) -> StepLayout:
    """Return the layout of a step whose rows get one token each, whatever their allowances."""
    lengths = layout.lengths.copy()
    lengths[: layout.num_decodes] = 1
    return replace(layout, lengths=lengths, allowances=None)


def _with_drafts(layout: StepLayout, counts: Int32Array) -> StepLayout:
    """Return a layout that computes and samples so many drafts of each sample row too."""
    lengths = layout.lengths.copy()
    lengths[: layout.num_decodes] = 1
    lengths[layout.sample_rows[: len(counts)]] += counts
    rows = np.arange(len(counts)).repeat(counts + 1)
    offsets = (np.arange(len(rows)) - (counts.cumsum() - counts + np.arange(len(counts)))[rows]).astype(np.int32)
    candidates, alternatives = layout.num_candidates, layout.num_alternatives
    return replace(
        layout,
        lengths=lengths,
        sample_rows=layout.sample_rows[rows],
        sample_slots=layout.sample_slots[rows],
        sample_positions=layout.sample_positions[rows] + offsets,
        sample_generations=layout.sample_generations[rows],
        sample_places=layout.sample_places[rows] + offsets,
        sample_index=layout.sample_index[rows],
        num_candidates=None if candidates is None else candidates[rows],
        num_alternatives=None if alternatives is None else alternatives[rows],
        allowances=None,
    )
