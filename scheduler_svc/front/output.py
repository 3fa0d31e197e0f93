"""One output of a request while it is made, and what of it is new to its client."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler_svc.front.text.output_text import OutputText, TextOptions
from scheduler_svc.request.output_end import OutputEnd
from scheduler_svc.request.outputs import Alternatives, FinishReason
from scheduler_svc.request.provenance import Made


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Which outputs of a group make up the answer, and what is told about them.

    Attributes:
        num_returned: Outputs in the answer (n).
        num_sampled: Outputs that the group samples (best_of); 0: a beam search finds them.
        returns_logprobs: Whether the client asked for log-probabilities.
        text: How tokens become text.
        returns_text: Whether the client gets text; without it, tokens become text only to look for stop strings.
        min_delta_interval_s: Least time between two deltas, in seconds.
        max_output_tokens: Most tokens of an output, as its request and the model's length have it.
        tells_provenance: Whether deltas say which kind of executor made their tokens.
        max_model_len: Longest sequence that the request is accepted for, prompt and output.
        waits_for_larger_executor: Whether it needs more than any executor here holds.
    """

    num_returned: int
    num_sampled: int
    returns_logprobs: bool
    text: TextOptions
    returns_text: bool = True
    min_delta_interval_s: float = 0.0
    max_output_tokens: int = 0
    tells_provenance: bool = False
    max_model_len: int = 0
    waits_for_larger_executor: bool = False

    @property
    def is_ranked(self) -> bool:
        """Whether only the end decides which outputs are returned, best first; none is streamed before."""
        return self.num_sampled != self.num_returned


@dataclass(frozen=True, slots=True)
class ContinuedText:
    """What a client has of one output of an interrupted answer.

    Attributes:
        token_ids: Its tokens.
        logprobs: Log-probability of each; empty unless asked for.
        alternatives: The likeliest tokens in the place of each.
        decoder: Makes the text of what follows.
        num_characters: How much of it the client has.
        finish_reason: Why it had ended; None: it goes on.
        stop_string: The stop string that ended it; None: none did.
    """

    token_ids: list[int]
    logprobs: list[float]
    alternatives: Alternatives
    decoder: OutputText
    text: str
    num_characters: int
    finish_reason: FinishReason | None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class ContinuedAnswer:
    """What a client has of an interrupted answer, as the front needs it to continue.

    Attributes:
        outputs: One for each output that is sampled; empty for a ranked answer, which begins anew.
        num_ranked: How many outputs of a ranked answer the client has, the best ones.
        prompt_logprobs: The prompt's log-probabilities that the client has.
        prompt_alternatives: The likeliest tokens in the place of each.
    """

    outputs: Sequence[ContinuedText]
    num_ranked: int
    prompt_logprobs: list[float]
    prompt_alternatives: Alternatives


_NO_LOGPROBS: list[float] = []
_NO_ALTERNATIVES = Alternatives([], [])


class Delta(NamedTuple):
    """New tokens and text of one output. `text` may lag behind `token_ids`.

    `provenance`: who made them, where that is new: the first token and the kind of executor of each span.
    """

    output_index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    alternatives: Alternatives = _NO_ALTERNATIVES
    provenance: Sequence[Made] = ()


@dataclass(frozen=True, slots=True)
class PromptDelta:
    """Log-probabilities of the next tokens of the prompt, and of the likeliest ones in their places."""

    logprobs: list[float]
    alternatives: Alternatives


class Output:
    """One output: its tokens, its text, how it ended, and how much of it was taken as deltas.

    Args:
        output_index: Its place in the answer; of ranked outputs, once that is known. Until then which sequence it is.
        returns_logprobs: Whether to keep the log-probability of each token.

    Attributes:
        end: How it ends.
        is_announced: Whether somebody was told that there is something to take.
        num_taken_tokens: How many were taken.
        num_spanned_tokens: It was told who made the first so many, and perhaps more.
    """

    __slots__ = (
        "_num_taken_alternatives",
        "_num_taken_pieces",
        "_num_tokens_at_piece",
        "_pieces",
        "_returns_logprobs",
        "alternatives",
        "beam_score",
        "cumulative_logprob",
        "end",
        "is_announced",
        "logprobs",
        "num_spanned_tokens",
        "num_taken_tokens",
        "output_index",
        "sequence_index",
        "stop_string",
        "token_ids",
    )

    def __init__(self, output_index: int, returns_logprobs: bool) -> None:
        self.output_index = self.sequence_index = output_index
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.alternatives = Alternatives([], [])
        self.cumulative_logprob: float | None = None
        self.beam_score: float | None = None
        self.end = OutputEnd()
        self.stop_string: str | None = None
        self.is_announced = False
        self._returns_logprobs = returns_logprobs
        self._pieces: list[str] = []  # what single tokens made
        self._num_tokens_at_piece: list[int] = []
        self.num_taken_tokens = 0
        self.num_spanned_tokens = 0
        self._num_taken_pieces = 0
        self._num_taken_alternatives = 0

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None: it has not."""
        return self.end.reason

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._pieces)

    @property
    def stop_token_id(self) -> int | None:
        """The token that ended it, if a token did."""
        ended_by_token = self.finish_reason is FinishReason.STOP and self.stop_string is None
        return self.token_ids[-1] if ended_by_token else None

    def restore(self, continued: ContinuedText) -> None:
        """Take what the client has of it from a call that was cut: it is there, and not new."""
        for place, token_id in enumerate(continued.token_ids):
            self.append_token(token_id, continued.logprobs[place] if continued.logprobs else None)
        self.alternatives.extend(continued.alternatives)
        self.append_text(continued.text[: continued.num_characters])
        self.num_taken_tokens = self.num_spanned_tokens = len(self.token_ids)
        self._num_taken_pieces = len(self._pieces)
        self.append_text(continued.text[continued.num_characters :])
        self._num_taken_alternatives = len(self.alternatives.token_ids)
        self.stop_string = continued.stop_string
        self.end.set_to(len(self.token_ids), continued.finish_reason)

    @property
    def has_news(self) -> bool:
        """Whether there is something to take."""
        return self.num_taken_tokens < len(self.token_ids) or self._num_taken_pieces < len(self._pieces)

    def append_token(self, token_id: int, logprob: float | None, alternatives: Alternatives | None = None) -> None:
        """Add a token; `logprob` None: it was not computed; `alternatives` None: they were not asked for."""
        self.token_ids.append(token_id)
        self.end.num_tokens += 1
        if logprob is not None:
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + logprob
            if self._returns_logprobs:
                self.logprobs.append(logprob)
        if alternatives is not None:
            self.alternatives.extend(alternatives)

    def append_text(self, text: str) -> None:
        """Add text; it may be empty."""
        if text:
            self._pieces.append(text)
            self._num_tokens_at_piece.append(len(self.token_ids))

    @property
    def has_only_token_ids(self) -> bool:
        """Whether there has been nothing but token ids, neither text nor log-probabilities."""
        return not (self._pieces or self.logprobs or self.alternatives.token_ids)

    def take_token_ids(self) -> list[int]:
        """Return the token ids that are new since the last time; as `take`, where there is nothing else."""
        self.is_announced = False
        begin, self.num_taken_tokens = self.num_taken_tokens, len(self.token_ids)
        return self.token_ids[begin:]

    def take(self) -> Delta:
        """Return what is new since the last time."""
        self.is_announced = False
        begin, self.num_taken_tokens = self.num_taken_tokens, len(self.token_ids)
        logprobs = self.logprobs[begin:] if self.logprobs else _NO_LOGPROBS
        text, alternatives = "", _NO_ALTERNATIVES
        if self._num_taken_pieces < len(self._pieces):
            text = "".join(self._pieces[self._num_taken_pieces :])
            self._num_taken_pieces = len(self._pieces)
        if self._num_taken_alternatives < len(self.alternatives.token_ids):
            alternatives = self.alternatives.since(self._num_taken_alternatives)
            self._num_taken_alternatives = len(self.alternatives.token_ids)
        return Delta(self.output_index, text, self.token_ids[begin:], logprobs, alternatives)

    def take_each(self) -> list[Delta]:
        """Return what is new since the last time, a delta for each token that made text: the same ones for any pace.

        Tokens without text are in the next delta; those behind the last text are in none.
        """
        self.is_announced = False
        deltas = []
        num_alternatives = len(self.alternatives.token_ids) // max(1, len(self.logprobs))
        for place in range(self._num_taken_pieces, len(self._pieces)):
            begin, end = self.num_taken_tokens, self._num_tokens_at_piece[place]
            self.num_taken_tokens = end
            alternatives = self.alternatives.since(begin * num_alternatives, end * num_alternatives)
            text, ids = self._pieces[place], self.token_ids[begin:end]
            deltas.append(Delta(self.output_index, text, ids, self.logprobs[begin:end], alternatives))
        self._num_taken_pieces = len(self._pieces)
        return deltas
