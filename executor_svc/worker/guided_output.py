"""What follows one output that follows a grammar, and the slot of its grammar. NumPy only.

`grammar_masks.py` has one for each live slot. Read next: `kept_masks.py`, then `octavo_shared/grammar/matcher.py`.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from executor_svc.worker.kept_masks import KeptMasks, KeptPosition
from octavo.values.wording import shown
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.grammar.matcher import (
    GrammarError,
    GrammarLimitError,
    MaskRow,
    NoTokenAllowedError,
    OutputMatcher,
    UnsupportedTokenizerError,
)
from octavo_shared.process.clock import monotonic_s
from octavo_shared.process.events import Event
from octavo_shared.rust_panic import is_panic
from octavo_shared.step_wire.step import MAX_ERROR_CHARS, Int32Array, RowFlag

_logger = logging.getLogger(__name__)

# Work for one output in one step that takes longer is logged with its grammar, in seconds.
SLOW_S = 0.5


class GrammarSlot:
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
        flag_of(error)
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
class GuidedOutput:
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

    slot: GrammarSlot
    position: KeptPosition | None
    num_kept: int = 0
    matcher: OutputMatcher | None = None
    parent: "GuidedOutput | None" = None
    flag: RowFlag | None = None
    has_drafts: bool = True

    def fork(self) -> "GuidedOutput":
        """Return a copy for an output with the same tokens so far."""
        self.resolve()
        if self.matcher is None:
            return GuidedOutput(self.slot, self.position, self.num_kept, flag=self.flag)
        self.position = None  # what it may compute from now on depends on its copy
        return GuidedOutput(self.slot, None, matcher=self.matcher.fork(), flag=self.flag)

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
        """Return drafts behind its tokens, and how many are proposed ones; see `OutputMatcher.likely`.

        Raises: GrammarError: as `follow`.
        """
        if self.parent is not None or self.flag is not None or not self.has_drafts:
            return [], 0
        if (kept := self.take_kept(token_ids)) is None:
            return self.follow(token_ids, words).likely(proposed, most)
        return self.slot.kept.forced(kept, most), 0

    @contextmanager
    def trying(self, num_tokens: int) -> Iterator[None]:
        """Go back to so many tokens in the end: those behind them are drafts."""
        position, num_kept = self.position, self.num_kept
        yield
        self.position, self.num_kept = position, num_kept
        if self.flag is not None or (self.matcher is not None and not self.matcher.retract(num_tokens)):
            self.matcher, self.flag, self.has_drafts = None, None, False  # a matcher is made anew


def flag_of(error: BaseException) -> RowFlag:
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
