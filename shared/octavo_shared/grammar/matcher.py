"""Which tokens a grammar allows behind an output. Only this and `matcher_tokenizer.py` know llguidance.

The state of a matcher is a function of the output's tokens alone, so an executor can build it anew at any time. Two
properties of the library would break that, and are dealt with here:

- A matcher in error allows exactly the end of the sequence, which would look like a finished output. So its error is
  checked after every call, and a matcher in error gives no mask.
- How much it may compute at a time depends on what it has computed before, also for drafts that were wrong, and copies
  share that. So a matcher begins with an eighth of the limits: what stays within them is far from them in any order.
  After an error it is built anew with all of them, sharing nothing, with a mask at every position, as if the output had
  been sampled with it; only an error that occurs then too counts, and drafts are over.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from octavo_shared.errors import OctavoServiceError
from octavo_shared.grammar.grammar import MAX_GRAMMAR_BYTES, Grammar
from octavo_shared.grammar.matcher_tokenizer import MatcherTokenizer as MatcherTokenizer
from octavo_shared.grammar.matcher_tokenizer import UnsupportedTokenizerError as UnsupportedTokenizerError
from octavo_shared.grammar.matcher_tokenizer import matcher_id_of as matcher_id_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

MaskRow = npt.NDArray[np.uint32]

# The most that a mask may compute: some 4 ms of the lexer and 1 ms of the parser, while other rows of the step wait. A
# change of these numbers requires a higher _RULES_VERSION.
_STEP_LEXER_FUEL = 50_000
_STEP_MAX_ITEMS = 25_000
_TIGHTER = 8  # see above

# A chain of 20,000 rules took less than 64 MiB. This is address space: unused memory is not allocated.
_STACK_BYTES = 256 * 2**20
_changing_stack_size = threading.Lock()

# The library's errors for a token that does not follow the grammar; its other errors are about limits.
_MISMATCHES = ("doesn't satisfy the grammar", "out of range", "parser stopped")


class GrammarError(OctavoServiceError):
    """An output cannot continue by its grammar; the message is the library's, in one line."""


class GrammarFailedError(GrammarError):
    """The grammar cannot be compiled, or the output does not follow it."""


class GrammarLimitError(GrammarError):
    """The matcher would have to compute more than it may."""


class NoTokenAllowedError(GrammarError):
    """The grammar allows no token, and the output may not end here."""


def check_grammar(tokenizer: MatcherTokenizer, grammar: Grammar) -> str:
    """Return why outputs cannot follow a grammar, in its parser's words and with the place; empty: they can.

    Takes up to some 0.3 s, mostly far less, and cannot be stopped: call it in a thread. It works in one of its own.
    """
    if len(grammar.body) > MAX_GRAMMAR_BYTES:
        return f"it has {len(grammar.body)} bytes; the limit is {MAX_GRAMMAR_BYTES}"
    with thread_of_large_stack("grammar-check") as thread:
        return thread.submit(reason_against, tokenizer, grammar).result()


def thread_of_large_stack(name: str) -> ThreadPoolExecutor:
    """Return a pool of one thread, whose stack no grammar of `MAX_GRAMMAR_BYTES` overflows.

    The library recurses for rules that name each other, and an overflow ends the process.
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
    with _changing_stack_size:
        former = threading.stack_size(_STACK_BYTES)
        try:
            pool.submit(int).result()  # a pool starts its thread with the first task
        finally:
            threading.stack_size(former)
    return pool


def reason_against(tokenizer: MatcherTokenizer, grammar: Grammar) -> str:
    """See `check_grammar`; runs on this thread, whose stack a hostile grammar may overflow."""
    try:
        OutputMatcher(tokenizer, grammar).fill_mask(np.zeros(tokenizer.num_mask_words, np.uint32))
    except NoTokenAllowedError:
        return "no text satisfies it"
    except GrammarError as error:
        return str(error)
    return ""


class OutputMatcher:
    """Follows one output by a grammar. Not thread-safe. Raises GrammarFailedError: the grammar cannot be compiled."""

    def __init__(self, tokenizer: MatcherTokenizer, grammar: Grammar) -> None:
        self._tokenizer = tokenizer
        self._grammar = grammar
        self._matcher = _compile(tokenizer, grammar, _TIGHTER)
        self._is_tight = True  # it has not met the tighter limits
        self._token_ids: list[int] = []  # followed so far, without what ends an output
        self._has_ended = False
        self._has_mask = False  # of this position
        self._is_on_its_own = True  # shares nothing with a copy, and had a mask at every position

    def follow(self, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Consume the new tokens of an output; tokens behind its end are ignored.

        Args:
            token_ids: The whole output, which begins with the tokens consumed before.

        Raises: GrammarError: as `fill_mask`.
        """
        new = [int(token_id) for token_id in token_ids[len(self._token_ids) :]]
        if not new or self._has_ended:
            return
        end = next((index for index, token_id in enumerate(new) if token_id in self._tokenizer.eos_token_ids), None)
        if new := new[:end]:
            self._is_on_its_own &= self._has_mask and len(new) == 1
            self._has_mask = False
            self._token_ids += new
            self._matcher.consume_tokens(new)
            if self._matcher.is_error():
                self._build_anew()
        if end is not None:
            if not self._matcher.is_accepting():
                raise GrammarFailedError("the output ends where its grammar does not")
            self._has_ended = True

    def fill_mask(self, row: MaskRow) -> None:
        """Write the mask of the tokens that may come next: bit i % 32 of word i // 32 stands for token i.

        Behind the end of an output, and where only its end can follow, these are the tokens that end it.

        Args:
            row: [num_mask_words], contiguous.

        Raises:
            NoTokenAllowedError: no token may come.
            GrammarLimitError: see `GrammarLimitError`.
            GrammarFailedError: the output does not follow the grammar.
        """
        if self._has_ended:
            row[:] = 0
            for token_id in self._tokenizer.eos_token_ids:
                row[token_id // 32] |= np.uint32(1 << token_id % 32)
            return
        _compute_mask(self._matcher, row)
        if self._matcher.is_error():
            self._build_anew()
            _compute_mask(self._matcher, row)
            _require_sound(self._matcher)
        self._has_mask = True
        if not row.any():
            raise NoTokenAllowedError("the grammar allows no token")

    def likely(self, proposed: Sequence[int], most: int) -> tuple[list[int], int]:
        """Return tokens that may come next, at most `most`, and how many of them are the first ones of `proposed`.

        These end before the first that the grammar forbids or that ends the output. Behind them are those that it
        forces: of the text that has to follow there, split as its tokenizer splits it. Where it forces more than is
        proposed, all are forced. A grammar that takes much computing has none.

        Raises: GrammarError: as `fill_mask`.
        """
        if self._has_ended or not self._is_tight:
            return [], 0
        self._is_on_its_own = False
        likely = self._matcher.compute_ff_tokens()[:most]
        end = next((at for at, token_id in enumerate(proposed) if token_id in self._tokenizer.eos_token_ids), most)
        tried = [*proposed[: min(end, most)]]
        num_allowed = self._matcher.validate_tokens(tried) if len(tried) > len(likely) else 0
        if num_allowed > len(likely):
            likely = tried[:num_allowed]
            self._matcher.consume_tokens(likely)
            likely += self._matcher.compute_ff_tokens()[: most - num_allowed]
            self._matcher.rollback(num_allowed)
        else:
            num_allowed = 0
        if self._matcher.is_error():
            self._build_anew()
            return [], 0
        return likely, num_allowed

    def retract(self, num_tokens: int) -> bool:
        """Go back to the first so many tokens; return False if that failed: then it is of no use any more.

        Nor is it if the others brought it to its limits: with all of them it may compute only what the output needs.
        """
        if self._has_ended or not self._is_tight:
            return False
        if (excess := len(self._token_ids) - num_tokens) > 0:
            self._is_on_its_own = self._has_mask = False
            self._matcher.rollback(excess)
            del self._token_ids[num_tokens:]
        return not self._matcher.is_error()

    def fork(self) -> "OutputMatcher":
        """Return a copy that follows an output with the same tokens so far."""
        copy = object.__new__(OutputMatcher)
        copy._tokenizer, copy._grammar = self._tokenizer, self._grammar
        copy._matcher = self._matcher.deep_copy()
        copy._token_ids, copy._has_ended, copy._has_mask = [*self._token_ids], self._has_ended, self._has_mask
        copy._is_on_its_own = self._is_on_its_own = False
        copy._is_tight = self._is_tight
        return copy

    def _build_anew(self) -> None:
        """Follow the output from its beginning, with a mask at every position. Raises GrammarError: that fails too."""
        if self._is_on_its_own and not self._is_tight:
            _require_sound(self._matcher)
        self._matcher, self._is_tight, self._is_on_its_own = _compile(self._tokenizer, self._grammar), False, True
        row = np.zeros(self._tokenizer.num_mask_words, np.uint32)
        for token_id in self._token_ids:
            _compute_mask(self._matcher, row)
            _require_sound(self._matcher)
            self._matcher.consume_token(token_id)
            _require_sound(self._matcher)


def _compile(tokenizer: MatcherTokenizer, grammar: Grammar, tighter: int = 1) -> "LLMatcher":
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        step_lexer_fuel=_STEP_LEXER_FUEL // tighter, step_max_items=_STEP_MAX_ITEMS // tighter, verbose_errors=False
    )
    try:
        body = grammar.body.decode()
    except UnicodeDecodeError as error:
        raise GrammarFailedError(f"it is not UTF-8: {error}") from error
    matcher = LLMatcher(tokenizer.loaded, body, log_level=0, limits=limits)
    if matcher.is_error():
        raise GrammarFailedError(_words(matcher))
    return matcher


def _compute_mask(matcher: "LLMatcher", row: MaskRow) -> None:
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)


def _require_sound(matcher: "LLMatcher") -> None:
    """Raise the GrammarError of a matcher in error."""
    if not matcher.is_error():
        return
    words = _words(matcher)
    if words.startswith("NoExtension"):
        raise NoTokenAllowedError("the grammar allows no token")
    if any(mismatch in words for mismatch in _MISMATCHES):
        raise GrammarFailedError(words)
    raise GrammarLimitError(words)


def _words(matcher: "LLMatcher") -> str:
    """Return the error of a matcher in one line."""
    return " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
