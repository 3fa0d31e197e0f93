"""The masks of rows whose outputs follow a grammar: made on rank 0, beside the forward pass. NumPy only.

A slot's matcher is brought up to date with what the batch table has beyond it, before each of its masks, so admissions,
appended tokens, preemptions and continuations need nothing else. Read next: `octavo_shared/grammar/matcher.py`.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from executor_svc.sampler.sample_rows import GrammarMask, SampleRows
from octavo.values.rust_panic import is_panic
from octavo_shared.grammar.grammar import MAX_GRAMMAR_BYTES, Grammar
from octavo_shared.grammar.matcher import (
    GrammarError,
    GrammarLimitError,
    MatcherTokenizer,
    NoTokenAllowedError,
    OutputMatcher,
    UnsupportedTokenizerError,
    matcher_id_of,
    thread_of_large_stack,
)
from octavo_shared.process.events import Event
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.executor_info import TokenizerFile
from octavo_shared.step_wire.step import Fork, RowFlag, RowFlags, TableDelta
from octavo_shared.step_wire.token_rules import num_mask_bytes

_logger = logging.getLogger(__name__)

# Gives the rows of a step their masks; see `GrammarMasks.begin`.
FinishMasks = Callable[[], RowFlags | None]


@dataclass(frozen=True, slots=True)
class GrammarSupport:
    """What an executor says of grammars, and the tokenizer for them; without slots it has none.

    Attributes:
        num_slots, matcher_id, max_body_bytes: As in `ExecutorInfo`.
        load_tokenizer: Loads the tokenizer at the first call.
    """

    num_slots: int
    matcher_id: str
    max_body_bytes: int
    load_tokenizer: Callable[[], MatcherTokenizer]


def grammar_support(
    max_grammar_slots: int, tokenizer_files: Sequence[TokenizerFile], eos_token_ids: Sequence[int], vocab_size: int
) -> GrammarSupport:
    """Return what an executor can do with grammars: nothing without llguidance and a tokenizer that it can read.

    Args:
        max_grammar_slots: The setting; 0: grammars are not wanted.
        tokenizer_files: Of the model.
        eos_token_ids: Of the model.
        vocab_size: Width of the logits.
    """
    files, eos = tuple(tokenizer_files), tuple(eos_token_ids)

    @functools.cache
    def load() -> MatcherTokenizer:
        return MatcherTokenizer.load(files, eos, vocab_size)

    if max_grammar_slots:
        try:
            matcher_id = matcher_id_of(files, eos, vocab_size)
        except UnsupportedTokenizerError as error:
            _logger.info(Event("no_grammars", reason=str(error)))
        else:
            return GrammarSupport(max_grammar_slots, matcher_id, MAX_GRAMMAR_BYTES, load)
    return GrammarSupport(0, "", 0, load)


@dataclass(slots=True, eq=False)
class _Output:
    """The matcher of a slot, or why it has none."""

    matcher: OutputMatcher | None = None
    compiled: Callable[[], OutputMatcher] | None = None
    parent: "_Output | None" = None
    flag: RowFlag | None = None

    def resolve(self) -> OutputMatcher:
        """Return the matcher; that of a fork is a copy of its parent's. Raises GrammarError."""
        if self.matcher is None:
            if self.parent is not None:
                self.matcher, self.parent = self.parent.resolve().fork(), None
            else:
                assert self.compiled is not None
                self.matcher, self.compiled = self.compiled(), None
        return self.matcher


class GrammarMasks:
    """The matchers of the live slots. Called on one thread; works on threads of its own unless it is told not to.

    Args:
        load_tokenizer: See `GrammarSupport`.
        has_threads: Whether grammars are compiled and masks made beside what the caller does; else when they are
            needed, by the caller.
    """

    def __init__(self, load_tokenizer: Callable[[], MatcherTokenizer], *, has_threads: bool) -> None:
        self._load_tokenizer = load_tokenizer
        self._has_threads = has_threads
        self._compiling: ThreadPoolExecutor | None = None
        self._masking: ThreadPoolExecutor | None = None
        self._outputs: dict[int, _Output] = {}

    def reset(self) -> None:
        """Forget all slots: a scheduler has attached."""
        self._outputs.clear()

    def follow(self, table: BatchTable, delta: TableDelta) -> None:
        """Take note of the slots that a delta, just applied to the table, has changed."""
        if self._outputs and len(delta.released_slots):
            for slot in delta.released_slots.tolist():
                self._outputs.pop(slot, None)
        for admission in delta.admissions:
            if admission.grammar_slot is not None:
                self._outputs[admission.slot] = self._compile(table, admission.grammar_slot)
        if self._outputs:
            for fork in delta.beam_forks:
                self._fork_now(table, fork)
            for fork in delta.forks:
                if (parent := self._outputs.get(fork.parent_slot)) is not None:
                    self._outputs[fork.slot] = _Output(parent=parent)  # which has a row before it in this step

    def begin(self, rows: SampleRows) -> FinishMasks:
        """Begin to make the masks of a step, all of whose tokens so far are known.

        Returns: To be called before anything is sampled: gives `rows` their masks, and returns the flags of those that
            cannot go on, [num_rows]; None: there is no such row. The masks of these mean nothing.
        """
        assert rows.is_guided is not None, "else there is nothing to do"
        guided = rows.is_guided.nonzero()[0].tolist()
        if not self._has_threads:
            return lambda: self._fill(rows, guided)
        if self._masking is None:
            self._masking = thread_of_large_stack("grammar-masks")
        made = self._masking.submit(self._fill, rows, guided)
        return made.result

    def _compile(self, table: BatchTable, grammar_slot: int) -> _Output:
        """Begin to compile a matcher. Each output has its own: copies would share what a mask may compute."""
        grammar = table.grammars[grammar_slot]
        assert grammar is not None, "the table has checked it"
        if not self._has_threads:
            return _Output(compiled=functools.partial(self._compiled, grammar))
        if self._compiling is None:
            self._compiling = thread_of_large_stack("grammar-compiler")
        compiled: Future[OutputMatcher] = self._compiling.submit(self._compiled, grammar)
        return _Output(compiled=compiled.result)

    def _compiled(self, grammar: Grammar) -> OutputMatcher:
        return OutputMatcher(self._load_tokenizer(), grammar)

    def _fork_now(self, table: BatchTable, fork: Fork) -> None:
        """Copy a beam as it is now: it may go on before its copy has a mask."""
        parent = self._outputs.get(fork.parent_slot)
        if parent is None:
            return
        if parent.matcher is None:
            self._outputs[fork.slot] = self._compile(table, int(table.grammar_slot[fork.slot]))
        else:
            self._outputs[fork.slot] = _Output(matcher=parent.matcher.fork(), flag=parent.flag)

    def _fill(self, rows: SampleRows, guided: list[int]) -> RowFlags | None:
        masks: list[GrammarMask | None] = [None] * len(rows)
        flags = np.zeros(len(rows), np.uint8)
        for row in guided:
            slot, begin, end = int(rows.slots[row]), rows.num_prompt_tokens[row], rows.num_tokens[row]
            output = self._outputs[slot]
            if output.flag is None:
                try:
                    masks[row] = self._mask(output, rows, slot, int(begin), int(end))
                except BaseException as error:
                    output.flag = _flag_of(error)
            flags[row] = output.flag or 0
        rows.grammar_masks = masks
        return flags if flags.any() else None

    def _mask(self, output: _Output, rows: SampleRows, slot: int, begin: int, end: int) -> GrammarMask:
        matcher, tokenizer = output.resolve(), self._load_tokenizer()
        matcher.follow(rows.token_ids[slot, begin:end])
        words = np.empty(tokenizer.num_mask_words, np.uint32)
        matcher.fill_mask(words)
        return words.view(np.uint8)[: num_mask_bytes(tokenizer.vocab_size)]


def _flag_of(error: BaseException) -> RowFlag:
    """Return what the error of one output's matcher means for its row. Raises it if it is none of those."""
    if isinstance(error, NoTokenAllowedError):
        return RowFlag.NO_TOKEN_ALLOWED
    if isinstance(error, GrammarLimitError):
        return RowFlag.GRAMMAR_LIMIT
    if isinstance(error, GrammarError) or is_panic(error):
        return RowFlag.GRAMMAR_FAILED
    if isinstance(error, UnsupportedTokenizerError):
        _logger.error(Event("grammar_tokenizer_failed", reason=str(error)))
        return RowFlag.GRAMMAR_FAILED
    raise error
