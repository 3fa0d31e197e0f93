"""Which numerics made which tokens of a group.

A group goes on at another executor after a loss, a preemption or when its executor leaves. If the numerics of this
executor differ, a new span begins. Spans are noted at admissions only, so they cost a step nothing. Pure.
"""

from typing import NamedTuple

from octavo_shared.step_wire.step import Adapter


class Numerics(NamedTuple):
    """The numerics id and the weights of an executor: equal ones give equal outputs. Empty strings: it does not say.

    `keeps_cache`: what tokens see of those before them was computed by other weights, so that outputs equal no others.
    """

    numerics_id: str = ""
    weights_digest: str = ""
    keeps_cache: bool = False

    @property
    def described(self) -> str:
        """In words, for people."""
        weights = f"{self.weights_digest[:12]}…" if self.weights_digest else "unknown"
        return f"an executor of numerics {self.numerics_id or 'unknown'}, weights {weights}"


class Progress(NamedTuple):
    """How many tokens of a group are known.

    Attributes:
        num_tokens: Output tokens of each sequence, by its index; ENDED: it has ended. In a beam search, of each live
            beam; these are equally long.
        num_prompt_logprobs: Log-probabilities of the prompt.
    """

    num_tokens: tuple[int, ...]
    num_prompt_logprobs: int


class Span(NamedTuple):
    """The tokens of a group that executors with the same numerics make, from `begin` up to the next span.

    `adapter`: that of the group, which is the same in all its spans; None: it has none.
    """

    numerics: Numerics
    begin: Progress
    adapter: Adapter | None = None


class Made(NamedTuple):
    """Who makes the tokens of one output from `first_token` on."""

    first_token: int
    numerics: Numerics
    adapter: Adapter | None = None


UNKNOWN = Numerics()
ENDED = 2**31


class Provenance:
    """The spans of a group, oldest first.

    Attributes:
        spans: As above; the last one may be empty.
        latest: The numerics of the executor that admitted the group last, and the progress then; None: none has.
            Another `Provenance` that gets this whenever the last span is new has the same spans.
    """

    __slots__ = ("latest", "spans")

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.latest: Span | None = None

    def go_on(self, numerics: Numerics, progress: Progress, adapter: Adapter | None = None) -> None:
        """Note that an executor with these numerics admits the group, which has this adapter."""
        self.latest = Span(numerics, progress, adapter)
        self.spans = self._fruitful(progress)
        if not self.spans or self.spans[-1].numerics != numerics:
            self.spans.append(self.latest)

    def go_on_behind(self, numerics: Numerics, num_sequences: int, adapter: Adapter | None = None) -> None:
        """Note that these numerics made the last known tokens of a group that continues an answer."""
        if numerics != UNKNOWN:
            self.spans.append(Span(numerics, Progress((0,) * num_sequences, 0), adapter))

    def preferred(self, progress: Progress) -> Numerics | None:
        """Return the numerics that are to go on with the group, if there is a choice; None: any may."""
        spans = self._fruitful(progress)
        return spans[-1].numerics._replace(keeps_cache=False) if spans else None

    @property
    def adapter(self) -> Adapter | None:
        """That of the group, if there is a span; the latest one has what the engine found."""
        span = self.latest or (self.spans[-1] if self.spans else None)
        return None if span is None else span.adapter

    def of_output(self, index: int, num_tokens: int) -> list[tuple[int, Numerics]]:
        """Return the first token and the numerics of each span of a sequence, or with index 0 of a hypothesis."""
        found: list[tuple[int, Numerics]] = []
        begins = [span.begin.num_tokens[index] for span in self.spans]
        for span, begin, end in zip(self.spans, begins, [*begins[1:], num_tokens], strict=False):
            has_tokens = begin < min(end, num_tokens)
            if has_tokens and not (found and found[-1][1] == span.numerics):
                found.append((begin, span.numerics))
        return found

    def has_mixed_prompt_logprobs(self, num_prompt_logprobs: int) -> bool:
        """Return whether several numerics made the `num_prompt_logprobs` log-probabilities of the prompt."""
        return any(0 < span.begin.num_prompt_logprobs < num_prompt_logprobs for span in self.spans)

    def _fruitful(self, progress: Progress) -> list[Span]:
        """Return the spans without the last one if it is empty: its executor was lost before a result."""
        return [span for span in self.spans if span.begin != progress]
