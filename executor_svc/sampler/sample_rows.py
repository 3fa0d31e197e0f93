"""What sampling needs to know of the sequences that get a token, and their draws: NumPy only, also for the fake.

A sample row is one (logits row, slot) pair of a step. Next: `sampler.py`, which makes tokens of logits and these rows.

A draw is one uniform number from a counter hash in place of a generator: preemption, migration to another executor and
the other rows of the batch cannot change what a sequence draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.values.sampling_params_table import NO_LOGPROBS, Stage, of_stage
from octavo_shared.step_wire.batch_table import BatchTable, StepLayout
from octavo_shared.step_wire.step import BoolArray, Int32Array
from octavo_shared.step_wire.table_columns import NO_GRAMMAR
from octavo_shared.step_wire.token_rules import NO_TOKEN, TokenRules

Int64Array = npt.NDArray[np.int64]
IndexArray = npt.NDArray[np.integer]
# In place of a token in front of a sequence: neither a token nor an unknown one.
BEFORE_BEGINNING = np.int32(-2)
# Which tokens a grammar allows, in the form of `TokenRules.allowed_mask`, [num_bytes].
GrammarMask = npt.NDArray[np.uint8]

# Of SplitMix64, see `uniforms`.
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)

_PROCESSORS = tuple((parameter.name, parameter.row_value) for parameter in of_stage(Stage.PROCESSOR))


@dataclass(slots=True)
class FlatTokens:
    """Tokens of several sample rows, joined: `rows` has the row of each of `token_ids`. Both [num_tokens] int64."""

    rows: Int64Array
    token_ids: Int64Array


@dataclass(slots=True)
class History(FlatTokens):
    """Tokens of sequences so far, and the position of each, [num_tokens] int64."""

    positions: Int64Array


@dataclass(slots=True)
class BannedWords:
    """The words of several sample rows that must not be completed."""

    rows: Int64Array  # the row of each, [num_words]
    words: Int32Array  # [num_words, longest], `NO_TOKEN` in front of shorter ones
    positions: Int64Array  # [num_words, longest - 1] of the row's tokens before the next one; below 0: there is none


@dataclass(slots=True)
class SampleRows:
    """How some rows are sampled, and what came before. All are [num_rows], but `token_ids`, which is the table's."""

    sampling: npt.NDArray[np.void]  # of SAMPLING_ROW
    rules: list[TokenRules | None]
    slots: Int32Array  # row of `token_ids`
    num_tokens: Int32Array  # prompt and output, before this step's token
    num_prompt_tokens: Int32Array
    token_ids: Int32Array  # [max_num_seqs, max_model_len]
    is_guided: BoolArray | None = None  # rows with a grammar; None: there is none
    grammar_masks: list[GrammarMask | None] | None = None  # of guided rows, once they are made

    @classmethod
    def of_step(cls, table: BatchTable, layout: StepLayout) -> SampleRows:
        """Return the sample rows of a step, in its order."""
        slots = layout.sample_slots
        is_guided = table.grammar_slot[slots] != NO_GRAMMAR
        return cls(
            sampling=table.sampling[slots],
            rules=table.token_rules[slots].tolist(),
            slots=slots,
            num_tokens=layout.sample_positions,
            num_prompt_tokens=table.num_prompt_tokens[slots],
            token_ids=table.token_ids,
            is_guided=is_guided if np.count_nonzero(is_guided) else None,
        )

    def __len__(self) -> int:
        return len(self.slots)

    def take_likeliest(self) -> bool:
        """Return whether every row takes the likeliest token of its logits as they are, and asks for nothing else."""
        if self.is_guided is not None:
            return False
        sampling = self.sampling
        asks = (
            (sampling["temperature"] > 0) | (sampling["num_logprobs"] != NO_LOGPROBS) | (sampling["num_candidates"] > 0)
        )
        return not (asks.any() or self.are_processed().any() or self.rules.count(None) < len(self.rules))

    def __getitem__(self, index: Int64Array | BoolArray | slice) -> SampleRows:
        """Return some of the rows."""
        if isinstance(index, slice):
            index = np.arange(len(self))[index]
        elif index.dtype == np.bool_:
            index = index.nonzero()[0]
        return SampleRows(
            sampling=self.sampling[index],
            rules=[self.rules[row] for row in index.tolist()],
            slots=self.slots[index],
            num_tokens=self.num_tokens[index],
            num_prompt_tokens=self.num_prompt_tokens[index],
            token_ids=self.token_ids,
            is_guided=None if self.is_guided is None else self.is_guided[index],
            grammar_masks=None if self.grammar_masks is None else [self.grammar_masks[row] for row in index.tolist()],
        )

    @property
    def num_output_tokens(self) -> Int32Array:
        """Output tokens before this step's, [num_rows]."""
        return self.num_tokens - self.num_prompt_tokens

    def are_processed(self) -> BoolArray:
        """Return which rows have their logits changed before anything is sampled, [num_rows]."""
        sampling = self.sampling
        processed: BoolArray = np.zeros(len(self), np.bool_) if self.is_guided is None else self.is_guided.copy()
        for name, neutral in _PROCESSORS:
            processed |= sampling[name] != neutral
        if self.rules.count(None) == len(self.rules):
            return processed
        for row, rules in enumerate(self.rules):
            if rules is not None and not processed[row]:
                processed[row] = rules.always_apply or sampling["min_tokens"][row] > self.num_output_tokens[row]
        return processed

    def history(self, rows: Int64Array, *, output_only: bool) -> History:
        """Return the tokens of some rows so far: prompt and output, or the output alone."""
        begins = self.num_prompt_tokens[rows] if output_only else np.zeros_like(rows)
        ends = self.num_tokens[rows]
        spans = zip(self.slots[rows].tolist(), begins.tolist(), ends.tolist(), strict=True)
        pieces = [self.token_ids[slot, begin:end] for slot, begin, end in spans]
        token_ids = np.concatenate(pieces).astype(np.int64) if pieces else np.empty(0, np.int64)
        lengths = ends - begins
        positions = np.arange(len(token_ids)) - (lengths.cumsum() - lengths - begins).repeat(lengths)
        return History(np.repeat(rows, lengths), token_ids, positions)

    def forbidden_tokens(self) -> FlatTokens:
        """Return the tokens that their rules keep from the rows now, but for banned words and allow-lists.

        These are banned tokens, and before `min_tokens` the tokens that would end the output.
        """
        banned = self._tokens_of_rules(lambda rules: rules.banned_token_ids)
        is_short = self.sampling["min_tokens"] > self.num_output_tokens
        stops = self._tokens_of_rules(lambda rules: rules.stop_token_ids, is_short)
        return FlatTokens(
            np.concatenate((banned.rows, stops.rows)), np.concatenate((banned.token_ids, stops.token_ids))
        )

    def banned_words(self) -> BannedWords | None:
        """Return the words of several tokens that the rows must not complete; None: there is none."""
        with_words = [
            (row, rules.banned_words) for row, rules in enumerate(self.rules) if rules and len(rules.banned_words)
        ]
        if not with_words:
            return None
        longest = max(words.shape[1] for _, words in with_words)
        words = np.concatenate([_widened(words, longest) for _, words in with_words])
        rows = np.repeat(np.array([row for row, _ in with_words], np.int64), [len(words) for _, words in with_words])
        ends = self.num_tokens[rows].astype(np.int64)
        return BannedWords(rows, words, ends[:, None] - np.arange(longest - 1, 0, -1))

    def tails_of(self, banned: BannedWords) -> Int32Array:
        """Return the tokens at the positions of banned words; before the beginning one that no word has."""
        tokens = self.token_ids[self.slots[banned.rows][:, None], np.maximum(banned.positions, 0)]
        return np.where(banned.positions >= 0, tokens, BEFORE_BEGINNING)

    def completed_tokens(self) -> FlatTokens:
        """Return the last token of each banned word that the next token would complete; all tokens are known."""
        banned = self.banned_words()
        if banned is None:
            return FlatTokens(np.empty(0, np.int64), np.empty(0, np.int64))
        prefixes = banned.words[:, :-1]
        completes = ((prefixes == NO_TOKEN) | (prefixes == self.tails_of(banned))).all(axis=1)
        return FlatTokens(banned.rows[completes], banned.words[completes, -1].astype(np.int64))

    def biased_tokens(self) -> tuple[FlatTokens, npt.NDArray[np.float32]]:
        """Return the tokens that have a bias, each once a row, and their biases, [num_tokens]."""
        biases = [rules.biases for rules in self.rules if rules is not None]
        tokens = self._tokens_of_rules(lambda rules: rules.biased_token_ids)
        return tokens, np.concatenate(biases) if biases else np.empty(0, np.float32)

    def allowed_masks(self) -> tuple[Int64Array, npt.NDArray[np.uint8]]:
        """Return the rows with an allow-list or a grammar, and their packed bits, [num_such_rows, num_bytes]."""
        masks = {
            row: np.frombuffer(rules.allowed_mask, np.uint8)
            for row, rules in enumerate(self.rules)
            if rules is not None and rules.allowed_mask is not None
        }
        for row, mask in enumerate(self.grammar_masks or ()):
            if mask is not None:
                masks[row] = masks[row] & mask if row in masks else mask
        rows = sorted(masks)
        return np.array(rows, np.int64), np.stack([masks[row] for row in rows]) if rows else np.empty((0, 0), np.uint8)

    def _tokens_of_rules(
        self, tokens_of: Callable[[TokenRules], Int32Array], applies: BoolArray | None = None
    ) -> FlatTokens:
        """Join what `tokens_of` gives for the rules of each row, or of the rows to which it applies."""
        rows, pieces = [], []
        for row, rules in enumerate(self.rules):
            if rules is not None and (applies is None or applies[row]) and len(token_ids := tokens_of(rules)):
                rows.append(row)
                pieces.append(token_ids)
        if not rows:
            return FlatTokens(np.empty(0, np.int64), np.empty(0, np.int64))
        lengths = [len(piece) for piece in pieces]
        return FlatTokens(np.repeat(np.array(rows, np.int64), lengths), np.concatenate(pieces).astype(np.int64))


class RowLookup:
    """Finds the sample rows of steps, and looks them up in the table once for decodes of the same sequences.

    Their layouts share an array of slots, which is made anew as soon as a slot begins or ends to decode; and no slot
    changes how it is sampled meanwhile.
    """

    def __init__(self) -> None:
        self.take_likeliest = False  # `SampleRows.take_likeliest` of the step
        self._rows: SampleRows | None = None

    def of_step(self, table: BatchTable, layout: StepLayout) -> SampleRows:
        """Return the sample rows of a step, in its order; valid until the next step."""
        rows = self._rows
        if rows is not None and rows.slots is layout.sample_slots:
            rows.num_tokens = layout.sample_positions
            return rows
        rows = self._rows = SampleRows.of_step(table, layout)
        self.take_likeliest = rows.take_likeliest()
        return rows


def _widened(words: Int32Array, width: int) -> Int32Array:
    """Return right-aligned words, [num_words, any], with `NO_TOKEN` in front up to a width."""
    padding = np.full((len(words), width - words.shape[1]), NO_TOKEN, np.int32)
    return np.concatenate((padding, words), axis=1)


def uniforms(
    seeds: npt.NDArray[np.uint64], output_indices: npt.NDArray[np.int32], num_output_tokens: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each row, [num_rows], with 53 random bits.

    Three rounds of the SplitMix64 step, one for each argument.
    Source: Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators", figure 17
    (the finalizer is Stafford's variant 13 of MurmurHash3's).
    """
    state = np.zeros_like(seeds)
    for values in (seeds, output_indices.astype(np.uint64), num_output_tokens.astype(np.uint64)):
        state = mix(state ^ values)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Advance by the golden gamma and finalize; arrays of uint64 wrap silently, as wanted."""
    state = state + GOLDEN_GAMMA
    state = (state ^ (state >> np.uint64(30))) * MIX_1
    state = (state ^ (state >> np.uint64(27))) * MIX_2
    return state ^ (state >> np.uint64(31))
