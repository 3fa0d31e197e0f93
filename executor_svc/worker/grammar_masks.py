"""The masks of rows with a grammar: made on rank 0, beside the forward pass. NumPy only.

Before each of an output's masks, its matcher is brought up to date with the tokens in the batch table, so admissions,
appended tokens, preemptions and continuations need nothing else. Behind drafts it goes back. An output has no matcher
of its own while others with its grammar began alike.

Read next: `guided_output.py`.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeVar

import numpy as np

from executor_svc.sampler.sample_rows import GrammarMask, SampleRows
from executor_svc.worker.guided_output import GrammarSlot, GuidedOutput, flag_of
from octavo_shared.grammar.grammar import MAX_GRAMMAR_BYTES, Grammar
from octavo_shared.grammar.matcher import (
    MatcherTokenizer,
    OutputMatcher,
    UnsupportedTokenizerError,
    matcher_id_of,
    thread_of_large_stack,
)
from octavo_shared.process.events import Event
from octavo_shared.step_wire.executor_info import TokenizerFile
from octavo_shared.step_wire.step import (
    GrammarLoad,
    GrammarLoaded,
    Int32Array,
    RowFlags,
    TableDelta,
)
from octavo_shared.step_wire.token_rules import num_mask_bytes

_logger = logging.getLogger(__name__)

Made = TypeVar("Made")
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


class GrammarMasks:
    """What follows the outputs of the live slots. Called on one thread; works on its own threads unless told not to.

    Args:
        load_tokenizer: See `GrammarSupport`.
        has_threads: Whether grammars are compiled and masks made beside what the caller does; else by the caller.
        num_load_steps: Without threads: how many steps after its own a load ends.
    """

    def __init__(
        self, load_tokenizer: Callable[[], MatcherTokenizer], *, has_threads: bool, num_load_steps: int = 0
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self._has_threads = has_threads
        self._num_load_steps = num_load_steps
        self._compiling: ThreadPoolExecutor | None = None
        self._masking: ThreadPoolExecutor | None = None
        self._cpu_clocks: tuple[int, ...] = ()
        self._slots: dict[int, GrammarSlot] = {}
        self._loading: list[GrammarSlot] = []  # their ends were not told yet
        self._outputs: dict[int, GuidedOutput] = {}

    @property
    def cpu_time_us(self) -> int:
        """Processor time that its threads have used, in microseconds; for any thread."""
        return sum(map(time.clock_gettime_ns, self._cpu_clocks)) // 1000

    def reset(self) -> None:
        """Forget all slots: a scheduler has attached."""
        self._outputs.clear()
        for grammar_slot in list(self._slots):
            self._drop(grammar_slot)

    def follow(self, delta: TableDelta) -> None:
        """Take note of the slots that a delta has changed, which the table has taken."""
        if self._outputs and len(delta.released_slots):
            for slot in delta.released_slots.tolist():
                self._outputs.pop(slot, None)
        for grammar_slot in delta.grammar_drops:
            self._drop(grammar_slot)
        for load in delta.grammar_loads:
            self._begin_load(load)
        for admission in delta.admissions:
            if (named := admission.resources.grammar_slot) is not None:
                grammar = self._slots[named]
                self._outputs[admission.slot] = GuidedOutput(grammar, grammar.kept.beginning)
        if self._outputs:
            for fork in delta.beam_forks:  # now: the beam may go on before its copy has a mask
                if (parent := self._outputs.get(fork.parent_slot)) is not None:
                    self._outputs[fork.slot] = parent.fork()
            for fork in delta.forks:
                if (parent := self._outputs.get(fork.parent_slot)) is not None:
                    # It has a row before this one in this step.
                    self._outputs[fork.slot] = GuidedOutput(parent.slot, None, parent=parent)

    def begin(self, rows: SampleRows) -> FinishMasks:
        """Begin to make the masks of a step; all its tokens so far are known.

        Returns: To be called before anything is sampled: gives `rows` their masks, and returns the flags of rows that
            cannot go on, [num_rows], where masks mean nothing; None: there is no such row.
        """
        assert rows.is_guided is not None, "else there is nothing to do"
        guided = rows.is_guided.nonzero()[0].tolist()
        return self._on_masking_thread(partial(self._fill, rows, guided))

    def draft(
        self, slots: list[int], outputs: Sequence[Int32Array], proposed: Sequence[list[int]], most: list[int]
    ) -> list[tuple[list[int], int]]:
        """Return drafts that grammars allow; the caller waits. See `executor_svc.drafts.proposer.Grammars`."""
        return self._on_masking_thread(partial(self._draft, slots, outputs, proposed, most))()

    def take_loaded(self) -> tuple[GrammarLoaded, ...]:
        """Return the loads that have ended since the last call; called once in each step, behind `follow`."""
        if not self._loading:
            return ()
        if not self._has_threads:
            for slot in self._loading:
                if not slot.num_steps_left:
                    slot.load()
                slot.num_steps_left -= 1
        ended = [slot for slot in self._loading if slot.is_loaded]
        self._loading = [slot for slot in self._loading if slot not in ended]
        return tuple(GrammarLoaded(slot.grammar_slot, slot.load_error()) for slot in ended)

    def _begin_load(self, load: GrammarLoad) -> None:
        compile_matcher = partial(self._compile, load.grammar)
        slot = self._slots[load.slot] = GrammarSlot(load.slot, load.grammar, compile_matcher, self._num_load_steps)
        self._loading.append(slot)
        if self._has_threads:
            if self._compiling is None:
                self._compiling = self._start_thread("grammar-compiler")
            self._compiling.submit(slot.load)

    def _drop(self, grammar_slot: int) -> None:
        slot = self._slots.pop(grammar_slot)
        slot.drop()
        if slot in self._loading:
            self._loading.remove(slot)

    def _compile(self, grammar: Grammar) -> OutputMatcher:
        return OutputMatcher(self._load_tokenizer(), grammar)

    def _on_masking_thread(self, make: Callable[[], Made]) -> Callable[[], Made]:
        """Begin to make something; return what waits for it."""
        if not self._has_threads:
            return make
        if self._masking is None:
            self._masking = self._start_thread("grammar-masks")
        return self._masking.submit(make).result

    def _start_thread(self, name: str) -> ThreadPoolExecutor:
        pool = thread_of_large_stack(name)
        clock = pool.submit(lambda: time.pthread_getcpuclockid(threading.get_ident())).result()
        self._cpu_clocks = (*self._cpu_clocks, clock)
        return pool

    def _fill(self, rows: SampleRows, guided: list[int]) -> RowFlags | None:
        masks: list[GrammarMask | None] = [None] * len(rows)
        flags = np.zeros(len(rows), np.uint8)

        def fill(row: int) -> None:
            begin, end = int(rows.num_prompt_tokens[row]), int(rows.num_tokens[row])
            if output.flag is None:
                masks[row] = self._mask(output, rows.token_ids[slot, begin:end])
            flags[row] = output.flag or 0

        for slot, group in groupby(guided, lambda row: int(rows.slots[row])):
            output, (first, *behind) = self._outputs[slot], group
            with output.slot.watching():
                fill(first)
                if behind and output.flag is None:
                    with output.trying(int(rows.num_output_tokens[first])):
                        for row in behind:
                            fill(row)
        rows.grammar_masks = masks
        return flags if flags.any() else None

    def _draft(
        self, slots: list[int], outputs: Sequence[Int32Array], proposed: Sequence[list[int]], most: list[int]
    ) -> list[tuple[list[int], int]]:
        likely: list[tuple[list[int], int]] = []
        for slot, token_ids, its, its_most in zip(slots, outputs, proposed, most, strict=True):
            output = self._outputs[slot]
            try:
                words = np.empty(self._load_tokenizer().num_mask_words, np.uint32)
                with output.slot.watching():
                    likely.append(output.likely(token_ids, its, its_most, words))
            except BaseException as error:
                flag_of(error)  # its mask finds the same
                likely.append(([], 0))
        return likely

    def _mask(self, output: GuidedOutput, token_ids: Int32Array) -> GrammarMask | None:
        """Return which tokens may follow an output; None: it cannot go on, and has the flag that says why."""
        try:
            output.resolve()
            if output.flag is not None:
                return None
            if (kept := output.take_kept(token_ids)) is not None:
                output.flag = kept.flag
                return kept.mask
            tokenizer = self._load_tokenizer()
            words = np.empty(tokenizer.num_mask_words, np.uint32)
            output.follow(token_ids, words).fill_mask(words)
        except BaseException as error:
            output.flag = flag_of(error)
            mask = None
        else:
            mask = words.view(np.uint8)[: num_mask_bytes(tokenizer.vocab_size)]
        if output.position is not None and output.position.mask is None and output.position.flag is None:
            output.position.mask, output.position.flag = mask, output.flag
        return mask
