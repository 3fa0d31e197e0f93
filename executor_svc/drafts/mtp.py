"""Drafts by a head of the model's own: multi-token prediction (MTP), one layer that is run once for each draft.

For a token the head takes its embedding and the hidden state that the model had before it, and so proposes the token
behind. It has a layer of the KV cache, where the pair of hidden state i and token i + 1 lies at position i + 1: a block
depends on nothing behind it, and is shared, swapped and kept as those of other layers. It takes the tokens of each step
when the model has computed them; what it wrote for drafts is written over then. The hidden state of a sequence's last
token lies at its slot, among the states.

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report"; Qwen Team 2025, "Qwen3-Next", whose head takes normed states.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from executor_svc.parallel.group import TensorParallelGroup
from executor_svc.states.live_states import state_rows
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import IndexArray, Int32Array
from octavo_shared.step_wire.step_layout import StepLayout


@dataclass(frozen=True, slots=True)
class MtpRows:
    """The rows that a head computes, as in `StepLayout`."""

    slots: Int32Array  # [num_rows]
    starts: Int32Array  # [num_rows] position of the first token of a row
    lengths: Int32Array  # [num_rows] tokens, 1 or more
    previous: torch.Tensor  # [num_tokens, hidden_size] float32: the normed hidden state before each token
    has_drafts: bool  # whether the token behind each row, of one token, is wanted


@dataclass(frozen=True, slots=True)
class MtpResult:
    """What a head says of rows with drafts; valid until its next run."""

    normed: torch.Tensor  # [num_rows, hidden_size]: the next draft goes on from it
    token_ids: Int32Array | None  # [num_rows]; negative: it is not a number. None: another rank has them.


class MtpRunner(Protocol):
    """Runs the head of a model on its cache."""

    def run_mtp(self, table: BatchTable, rows: MtpRows) -> MtpResult | None:
        """Let keys and values of rows enter the head's cache, and with drafts return what comes next; else None."""


class Mtp:
    """Follows the steps of a model, and drafts.

    Args:
        last_hidden: The normed hidden state of each sequence's last computed token, [max_num_seqs, hidden_size].
        group: The ranks that share the model; all of them run the head together.
    """

    def __init__(self, last_hidden: torch.Tensor, group: TensorParallelGroup) -> None:
        self._last_hidden = last_hidden
        self._group = group
        # Of the last step: its slots, the last certain token of each row, and the hidden states of all its tokens.
        self._slots: IndexArray = np.empty(0, np.intp)
        self._ends: IndexArray = np.empty(0, np.intp)
        self._normed = torch.empty(0)

    def follow(self, runner: MtpRunner, table: BatchTable, layout: StepLayout, normed: torch.Tensor) -> None:
        """Take the tokens of a step.

        Args:
            runner: That has computed it.
            table: With the step applied.
            layout: Of the step, as it was computed.
            normed: The normed hidden states of all its tokens, [num_tokens, hidden_size].
        """
        rows = state_rows(layout)
        slots, begins = rows.slots.astype(np.intp), (rows.lengths.cumsum() - rows.lengths).astype(np.intp)
        previous = torch.empty_like(normed)
        previous[1:] = normed[:-1]
        previous[begins] = self._last_hidden[slots].where(torch.from_numpy(rows.starts > 0)[:, None], 0.0)
        runner.run_mtp(table, MtpRows(rows.slots, rows.starts, rows.lengths, previous, has_drafts=False))
        ends = begins + (rows.lengths if rows.commits is None else rows.commits) - 1
        self._last_hidden[slots] = normed[ends]
        self._slots, self._ends, self._normed = slots, ends, normed

    def accept(self, num_accepted: Int32Array) -> None:
        """Go on behind the first drafts of each row of the last step, [num_rows]."""
        self._last_hidden[self._slots] = self._normed[self._ends + num_accepted]

    def draft(
        self, runner: MtpRunner, table: BatchTable, slots: Int32Array, num_tokens: Int32Array, most: Int32Array
    ) -> Int32Array:
        """Return drafts, [num_rows, most.max()], and write them behind the tokens of the table; all ranks call this.

        Args:
            runner: Of the model.
            table: With all tokens of the sequences.
            slots: Of the rows, [num_rows].
            num_tokens: How many tokens the sequence of each row has, [num_rows].
            most: How many drafts each row gets, [num_rows].
        """
        drafts = np.zeros((len(slots), int(most.max(initial=0))), np.int32)
        rows = most.nonzero()[0]
        previous = self._last_hidden[slots[rows].astype(np.intp)]
        for place in range(drafts.shape[1]):
            starts, ones = num_tokens[rows] - 1 + place, np.ones(len(rows), np.int32)
            result = runner.run_mtp(table, MtpRows(slots[rows], starts.astype(np.int32), ones, previous, True))
            assert result is not None, "it was asked for drafts"
            drafts[rows, place] = self._told(result.token_ids, len(rows))
            table.token_ids[slots[rows], num_tokens[rows] + place] = drafts[rows, place]
            goes_on = most[rows] > place + 1
            rows, previous = rows[goes_on], result.normed[torch.from_numpy(goes_on)]
        return drafts

    def _told(self, token_ids: Int32Array | None, num_rows: int) -> Int32Array:
        """Return the drafts of rank 0, on all ranks."""
        if token_ids is None:
            token_ids = np.zeros(num_rows, np.int32)
        if self._group.size > 1:
            token_ids = self._group.broadcast(torch.from_numpy(token_ids.astype(np.int64))).numpy().astype(np.int32)
        return np.maximum(token_ids, 0)
