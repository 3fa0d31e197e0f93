"""The masks of rows with a grammar: made on rank 0, beside the forward pass. NumPy only.

Before each of an output's masks, its matcher is brought up to date with the tokens in the batch table, so admissions,
appended tokens, preemptions and continuations need nothing else. Behind drafts it goes back. An output has no matcher
of its own while others with its grammar began alike.

Read next: `kept_masks.py`, then `octavo_shared/grammar/matcher.py`.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeVar

import numpy as np

from executor_svc.sampler.sample_rows import GrammarMask, SampleRows
from executor_svc.worker.kept_masks import KeptMasks, KeptPosition
from octavo.values.wording import shown
from octavo_shared.grammar.grammar import MAX_GRAMMAR_BYTES, Grammar
from octavo_shared.grammar.matcher import (
    GrammarError,
    GrammarLimitError,
    MaskRow,
    MatcherTokenizer,
    NoTokenAllowedError,
    OutputMatcher,
    UnsupportedTokenizerError,
    matcher_id_of,
    thread_of_large_stack,
)
from octavo_shared.process.clock import monotonic_s
from octavo_shared.process.events import Event
from octavo_shared.rust_panic import is_panic
from octavo_shared.step_wire.executor_info import TokenizerFile
from octavo_shared.step_wire.step import (
    MAX_ERROR_CHARS,
    GrammarLoad,
    GrammarLoaded,
    Int32Array,
    RowFlag,
    RowFlags,
    TableDelta,
)
from octavo_shared.step_wire.token_rules import num_mask_bytes

_logger = logging.getLogger(__name__)

# Work for one output in one step that takes longer is logged with its grammar, in seconds.
SLOW_S = 0.5

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


class _Slot:
    """A grammar slot: the matcher that its load compiles, and what its outputs were allowed.

    Args:
        grammar_slot: Its number, for people.
        grammar: What it holds.
        compile_matcher: Compiles a matcher that nothing else has, on the calling thread.
        num_steps_left: Without threads: steps that the load takes, beside its own.
    """

    def __init__(
        self, grammar_slot: int, grammar: Grammar, compile_matcher: Callable[[], OutputMatcher], num_steps_left: int
    ) -> None:
        self.grammar_slot = grammar_slot
        self.grammar = grammar
        self.kept = KeptMasks()
        self.num_steps_left = num_steps_left
        self._compile = compile_matcher
        self._load: Future[OutputMatcher] = Future()
        self._is_load_taken = False
        self._is_slow = False

    @property
    def is_loaded(self) -> bool:
        """Whether the load has ended, or was given up since a step needed a matcher before it began."""
        return self._load.done()

    def load(self) -> None:
        """Compile the first matcher; any thread may do it."""
        if self._load.set_running_or_notify_cancel():
            try:
                self._load.set_result(self._compile())
            except BaseException as error:  # a value for the caller of `matcher`
                self._load.set_exception(error)

    def drop(self) -> None:
        """Give the load up if it has not begun."""
        self._load.cancel()

    def load_error(self) -> str:
        """Return why the grammar of a load that has ended cannot be followed; empty: it can."""
        error = None if self._load.cancelled() else self._load.exception()
        if error is None:
            return ""
        _flag_of(error)
        return shown(str(error), MAX_ERROR_CHARS)

    def take_matcher(self) -> OutputMatcher:
        """Return a matcher at the beginning that shares nothing with others. Raises GrammarError."""
        if self._is_load_taken or self._load.cancel():
            return self._compile()
        self._is_load_taken = True
        return self._load.result()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Log the grammar, once, if what is done for it keeps a step waiting."""
        began_s = monotonic_s()
        try:
            yield
        finally:
            took_s = monotonic_s() - began_s
            if took_s > SLOW_S and not self._is_slow:
                self._is_slow = True
                event = Event(
                    "slow_grammar",
                    grammar_slot=self.grammar_slot,
                    bytes=len(self.grammar.body),
                    sha256=self.grammar.digest.hex()[:16],
                    seconds=round(took_s, 2),
                )
                _logger.warning(event)


@dataclass(slots=True, eq=False)
class _Output:
    """What follows an output: the positions that were kept, then a matcher; or why none can.

    Attributes:
        slot: Of its grammar.
        position: Its position among the kept ones; None: it has left them.
        num_kept: Tokens up to there.
        matcher: Its own; None: it needed none so far.
        parent: The output that it is a copy of, if the copy has not been made yet.
        flag: Why it cannot go on.
        has_drafts: Whether it may have some: none of them has met a limit.
    """

    slot: _Slot
    position: KeptPosition | None
    num_kept: int = 0
    matcher: OutputMatcher | None = None
    parent: "_Output | None" = None
    flag: RowFlag | None = None
    has_drafts: bool = True

    def fork(self) -> "_Output":
        self.resolve()
        if self.matcher is None:
            return _Output(self.slot, self.position, self.num_kept, flag=self.flag)
        self.position = None  # what it may compute from now on depends on its copy
        return _Output(self.slot, None, matcher=self.matcher.fork(), flag=self.flag)

    def resolve(self) -> None:
        """Become what its parent is, before the parent gets another token."""
        if self.parent is not None:
            copy, self.parent = self.parent.fork(), None
            self.position, self.num_kept, self.matcher, self.flag = (
                copy.position,
                copy.num_kept,
                copy.matcher,
                copy.flag,
            )

    def take_kept(self, token_ids: Int32Array) -> KeptPosition | None:
        """Return what may follow all of its tokens, if another output has been there; None: it needs a matcher."""
        if self.matcher is not None or self.position is None:
            return None
        found = self.slot.kept.find(self.position, token_ids[self.num_kept :].tolist())
        if found is not None:
            self.position, self.num_kept = found, len(token_ids)
        return found

    def follow(self, token_ids: Int32Array, words: MaskRow) -> OutputMatcher:
        """Return its matcher, behind all of its tokens. Raises GrammarError.

        An output that needed no matcher before computes the kept masks as well, as if it had had one all the time.
        """
        if self.matcher is None:
            self.matcher = self.slot.take_matcher()
            for num_tokens in range(self.num_kept):
                self.matcher.fill_mask(words)
                self.matcher.follow(token_ids[: num_tokens + 1])
            if self.position is not None and self.position.mask is not None and len(token_ids) == self.num_kept + 1:
                self.matcher.fill_mask(words)
        if self.position is not None:
            self._keep_position(token_ids)
        self.matcher.follow(token_ids)
        return self.matcher

    def _keep_position(self, token_ids: Int32Array) -> None:
        """Go on to the position behind its tokens, if there was a mask at every one."""
        for token_id in token_ids[self.num_kept :].tolist():
            if self.position is None or self.position.mask is None:
                self.position = None
                break
            self.position = self.slot.kept.behind(self.position, token_id)
        self.num_kept = len(token_ids)

    def likely(self, token_ids: Int32Array, proposed: list[int], most: int, words: MaskRow) -> tuple[list[int], int]:
        """Return drafts behind its tokens, and whether they are forced; see `OutputMatcher.likely`.

        Raises: GrammarError: as `follow`.
        """
        if self.parent is not None or self.flag is not None or not self.has_drafts:
            return [], False
        if (kept := self.take_kept(token_ids)) is None:
            return self.follow(token_ids, words).likely(proposed, most)
        forced = self.slot.kept.forced(kept, most)
        return forced, bool(forced)

    @contextmanager
    def trying(self, num_tokens: int) -> Iterator[None]:
        """Go back to so many tokens in the end: those behind them are drafts."""
        position, num_kept = self.position, self.num_kept
        yield
        self.position, self.num_kept = position, num_kept
        if self.flag is not None or (self.matcher is not None and not self.matcher.retract(num_tokens)):
            self.matcher, self.flag, self.has_drafts = None, None, False  # a matcher is made anew


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
        self._slots: dict[int, _Slot] = {}
        self._loading: list[_Slot] = []  # their ends were not told yet
        self._outputs: dict[int, _Output] = {}

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
                self._outputs[admission.slot] = _Output(grammar, grammar.kept.beginning)
        if self._outputs:
            for fork in delta.beam_forks:  # now: the beam may go on before its copy has a mask
                if (parent := self._outputs.get(fork.parent_slot)) is not None:
                    self._outputs[fork.slot] = parent.fork()
            for fork in delta.forks:
                if (parent := self._outputs.get(fork.parent_slot)) is not None:
                    # It has a row before this one in this step.
                    self._outputs[fork.slot] = _Output(parent.slot, None, parent=parent)

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
        slot = self._slots[load.slot] = _Slot(load.slot, load.grammar, compile_matcher, self._num_load_steps)
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
                _flag_of(error)  # its mask finds the same
                likely.append(([], False))
        return likely

    def _mask(self, output: _Output, token_ids: Int32Array) -> GrammarMask | None:
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
            output.flag = _flag_of(error)
            mask = None
        else:
            mask = words.view(np.uint8)[: num_mask_bytes(tokenizer.vocab_size)]
        if output.position is not None and output.position.mask is None and output.position.flag is None:
            output.position.mask, output.position.flag = mask, output.flag
        return mask


def _flag_of(error: BaseException) -> RowFlag:
    """Return what the error of one output's matcher means for its row. Raises any other error."""
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
