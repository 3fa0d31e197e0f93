"""What a client gets for its request: tokens come in from the engine, deltas go out to its stream.

The engine pushes tokens as steps are processed and never waits for a client; what a slow client has
not taken yet piles up in one delta an output. The outputs end one by one, each by `push` (a stop
string) or `finish_output`; those of a beam search together, by `finish_search`. Every response ends
exactly once, by `end`; later calls change nothing. Of each output of a request with stop strings the engine is told
with how many tokens it ends.

Ranked outputs (best_of above n, beams) are not streamed. At the end they are put in order, the best
ones become the answer, and only then are their tokens and text handed out. Where no stop string is looked for, they
have no text before, and the others never get one. Next: output.py.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from octavo_shared.errors import OctavoServiceError, TokenizerFailedError
from octavo_shared.step_wire.step import NO_LOGPROBS
from scheduler_svc.front.delta_pace import DeltaPace
from scheduler_svc.front.output import AnswerOptions, ContinuedAnswer, Delta, Output, PromptDelta
from scheduler_svc.front.text.output_text import OutputText
from scheduler_svc.front.text.tokenizer import Tokenizer
from scheduler_svc.request.continuation import Continuation, ContinuedOutput
from scheduler_svc.request.engine_client import RequestHandle
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.life import EndedRequest
from scheduler_svc.request.outputs import Alternatives, FinishReason, Float32Array, Hypothesis
from scheduler_svc.request.provenance import UNKNOWN, Made, Provenance, Span

_News = TypeVar("_News")


class Response:
    """The answer to one request, while it is made; it is the `TokenSink` of the request.

    Args:
        request: What the engine was asked for.
        options: What the answer consists of.
        tokenizer: Turns tokens into text.
        listener: Called when something is about to be new, for who takes it by `take_prompt` and `take`; None: it is
            waited for by `next_delta`.
        pace: How long `next_delta` rests after a delta, at least; None: as long as `options` says.

    Attributes:
        request: As above.
        ended: What is known of the request since its end; None: it has not ended.
        error: Why it failed; None: it has not.
    """

    def __init__(
        self,
        request: EngineRequest,
        options: AnswerOptions,
        tokenizer: Tokenizer,
        listener: Callable[[], None] | None = None,
        pace: DeltaPace | None = None,
    ) -> None:
        self.request = request
        self.ended: EndedRequest | None = None
        self.error: OctavoServiceError | None = None
        self.prompt_logprobs: list[float] = []
        self.prompt_alternatives = Alternatives([], [])
        self._num_taken_prompt_logprobs = 0
        self._options = options
        self._tokenizer = tokenizer
        self._made = [Output(index, options.returns_logprobs) for index in range(options.num_sampled)]
        has_stop_strings = bool(options.text.stop_strings)
        self._decodes_at_end = options.returns_text and options.is_ranked and not has_stop_strings
        decodes = has_stop_strings or (options.returns_text and not self._decodes_at_end)
        self._texts = [OutputText(tokenizer, options.text) for _ in self._made] if decodes else None
        self._num_unfinished = len(self._made)
        self._returned = [] if options.is_ranked else self._made
        self._num_delivered_ranks = 0  # before the call was cut
        self._is_streamed = not options.is_ranked
        self._has_logprobs = request.sampling.num_logprobs != NO_LOGPROBS
        self._handle: RequestHandle | None = None
        self._news: deque[Output] = deque()
        self._changed = asyncio.Event()
        self._tell = listener or self._changed.set
        self._pace = pace
        self._has_given = False
        self._is_over = asyncio.Event()
        self._text_error: TokenizerFailedError | None = None
        self._provenance = Provenance()

    @property
    def request_id(self) -> str:
        """The id that the client knows."""
        return self.request.request_id

    @property
    def options(self) -> AnswerOptions:
        """What the answer consists of."""
        return self._options

    @property
    def outputs(self) -> Sequence[Output]:
        """The outputs in the answer, by output index; ranked ones are there once the last one has finished."""
        return self._returned

    @property
    def num_encoder_tokens(self) -> int:
        """How many tokens the model's encoder reads; 0: it has none."""
        encoded = self.request.encoder_token_ids
        return 0 if encoded is None else len(encoded)

    @property
    def num_input_tokens(self) -> int:
        """How many tokens the prompt has, and the encoder's input: what other APIs count as one."""
        return self.request.num_input_tokens

    def provenance_of(self, output: Output) -> list[Made]:
        """Return who made the tokens of an output."""
        return self._made_by(output, len(output.token_ids))

    def _made_by(self, output: Output, num_tokens: int) -> list[Made]:
        adapter = self._provenance.adapter
        return [Made(*span, adapter) for span in self._provenance.of_output(output.sequence_index, num_tokens)]

    @property
    def was_continued_on_other_numerics(self) -> bool:
        """Whether executors of several kinds made the answer."""
        if self._provenance.has_mixed_prompt_logprobs(len(self.prompt_logprobs)):
            return True
        return any(len(self.provenance_of(output)) > 1 for output in self.outputs)

    def take_provenance(self, output: Output) -> list[Made]:
        """Return as `provenance_of` the spans that begin with a token that was taken, and that are new."""
        spans, index = self._provenance.spans, output.sequence_index
        if not spans or spans[-1].begin.num_tokens[index] < output.num_spanned_tokens:
            return []
        told, output.num_spanned_tokens = output.num_spanned_tokens, output.num_taken_tokens
        return [span for span in self._made_by(output, output.num_taken_tokens) if span.first_token >= told]

    def go_on_behind(self, answer: ContinuedAnswer) -> None:
        """Take what the client has of the answer, from a call that was cut; before the request is submitted."""
        self.prompt_logprobs.extend(answer.prompt_logprobs)
        self.prompt_alternatives.extend(answer.prompt_alternatives)
        self._num_taken_prompt_logprobs = len(self.prompt_logprobs)
        self._num_delivered_ranks = answer.num_ranked
        if (continuation := self.request.continuation) is not None:
            self._provenance.go_on_behind(continuation.numerics, len(self._made) or 1, continuation.adapter)
        for index, continued in enumerate(answer.outputs):
            output = self._made[index]
            output.restore(continued if self._options.returns_text else replace(continued, text="", num_characters=0))
            if self._texts is not None:
                self._texts[index] = continued.decoder
            if output.finish_reason is not None:
                self._num_unfinished -= 1
            if output.has_news:  # the call was cut before the text was delivered that its tokens had made
                self._announce(output)

    def begin(self, handle: RequestHandle) -> None:
        """The request is queued."""
        self._handle = handle

    def begin_span(self, span: Span) -> None:
        """See `TokenSink`."""
        self._provenance.go_on(*span)

    def abort(self, error: OctavoServiceError) -> None:
        """End the request with an error, unless it has ended."""
        if self.ended is None and self._handle is not None:
            self._handle.abort(error)

    def push(
        self, output_index: int, token_id: int, logprob: float | None, alternatives: Alternatives | None = None
    ) -> None:
        """Take the next token of a sampled output.

        `logprob` may be there because another request of the step asked for it.
        """
        output = self._made[output_index]
        if self.ended is not None or output.end.is_settled or self._text_error is not None:
            return
        text, stop_string = "", None
        if self._texts is not None:
            try:
                text, stop_string = self._texts[output_index].push(token_id)
            except TokenizerFailedError as error:
                self._lose_text(error)
                return
        if self._is_streamed and not output.is_announced:
            output.is_announced = True
            self._news.append(output)
            self._tell()
        output.append_token(token_id, logprob if self._has_logprobs else None, alternatives)
        if text:
            self._append_text(output, text)
        if stop_string is not None:
            output.stop_string = stop_string
            output.end.end_by_text()
            self._end_output(output)

    def finish_output(self, output_index: int, reason: FinishReason) -> None:
        """End a sampled output: its last token has been pushed."""
        output = self._made[output_index]
        if self.ended is not None or output.end.is_settled or self._text_error is not None:
            return
        try:
            rest = "" if self._texts is None else self._texts[output_index].finish()
            if rest:
                self._announce(output)
                self._append_text(output, rest)
            output.end.end_by_tokens(reason)
            self._end_output(output)
        except TokenizerFailedError as error:
            self._lose_text(error)

    def finish_search(self, hypotheses: Sequence[Hypothesis]) -> None:
        """Take what the beam search found, best first."""
        if self.ended is None:
            try:
                self._return_ranked([self._output_of(hypothesis) for hypothesis in hypotheses])
            except TokenizerFailedError as error:
                self._lose_text(error)

    def pooled(self, values: Float32Array) -> None:
        """Never called: these requests generate."""
        raise AssertionError("a request that generates has no vector")

    def _lose_text(self, error: TokenizerFailedError) -> None:
        """The tokenizer fails at the tokens of the answer: the request ends, once the engine has done with the step."""
        if self._text_error is None:
            self._text_error = error
            asyncio.get_running_loop().call_soon(self.abort, error)

    def push_prompt(self, logprobs: Sequence[float], alternatives: Alternatives) -> None:
        """Take the log-probabilities of the next tokens of the prompt."""
        if self.ended is None:
            self.prompt_logprobs.extend(logprobs)
            self.prompt_alternatives.extend(alternatives)
            self._tell()

    def so_far(self) -> Continuation:
        """See `AnswerSink`."""
        earlier, spans = self.request.continuation, self._provenance.spans
        return Continuation(
            outputs=tuple(
                ContinuedOutput(np.array(output.token_ids, np.int32), output.finish_reason) for output in self._made
            ),
            num_prompt_logprobs=len(self.prompt_logprobs),
            numerics=spans[-1].numerics if spans else UNKNOWN,
            attempt=0 if earlier is None else earlier.attempt,
            max_model_len=None if earlier is None else earlier.max_model_len,
            adapter=self._provenance.adapter or (None if earlier is None else earlier.adapter),
        )

    def end(self, ended: EndedRequest, error: OctavoServiceError | None) -> None:
        """The request has ended, with its last output or with an error."""
        if self.ended is None:
            self.ended, self.error = ended, self._text_error or error
            self._is_over.set()
            self._tell()

    async def next_delta(self) -> Delta | PromptDelta | None:
        """Wait for something new, and for the pace of the stream; None once the request has ended and all was taken.

        Raises: OctavoServiceError: the request failed.
        """
        return await self._next(lambda: self.take_prompt() or self.take())

    async def next_token_deltas(self) -> list[Delta] | None:
        """Wait as `next_delta`, for new text of any output: a delta for each token that made some.

        Their sequence follows from the tokens alone; how many come at once does not.
        """
        return await self._next(lambda: self._news.popleft().take_each() if self._news else None)

    async def _next(self, take: Callable[[], _News | None]) -> _News | None:
        """Return what `take` finds that is new, once there is something."""
        if self._has_given:
            await self._rest()
        while True:
            if news := take():
                self._has_given |= not isinstance(news, PromptDelta)
                return news
            if self._news:
                continue
            if self.error is not None:
                raise self.error
            if self.ended is not None:
                return None
            self._changed.clear()
            await self._changed.wait()

    async def _rest(self) -> None:
        """Let what comes next grow together for a while; the end comes at once."""
        rest_s = self._options.min_delta_interval_s
        if self._pace is not None:
            rest_s = max(rest_s, self._pace.rest_s)
        if rest_s and not self._is_over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._is_over.wait()

    async def wait_until_ended(self) -> None:
        """Return once the request has ended, for who takes no deltas.

        Raises: OctavoServiceError: the request failed.
        """
        while self.ended is None:
            self._changed.clear()
            await self._changed.wait()
        if self.error is not None:
            raise self.error

    def take(self) -> Delta | None:
        """Return what is new in the output that changed first; None: nothing is new in any."""
        if not self._news:
            return None
        output = self._news.popleft()
        delta = output.take()
        if self._options.tells_provenance and (begun := self.take_provenance(output)):
            return delta._replace(provenance=begun)
        return delta

    @property
    def has_news(self) -> bool:
        """Whether something is there to be taken: of an output, or of the prompt."""
        return bool(self._news) or self._num_taken_prompt_logprobs < len(self.prompt_logprobs)

    def take_changed(self) -> list[Output]:
        """Return the outputs in which something is new, which the caller takes from them."""
        changed = list(self._news)
        self._news.clear()
        return changed

    def take_prompt(self) -> PromptDelta | None:
        """Return the log-probabilities of the prompt that are new; None: there are none."""
        if self._num_taken_prompt_logprobs == len(self.prompt_logprobs):
            return None
        first, self._num_taken_prompt_logprobs = self._num_taken_prompt_logprobs, len(self.prompt_logprobs)
        begin = first * max(0, self.request.num_prompt_logprobs)
        return PromptDelta(self.prompt_logprobs[first:], self.prompt_alternatives.since(begin))

    def _announce(self, output: Output) -> None:
        """Put an output that is about to change in line to be taken; those in front changed earlier."""
        if self._is_streamed and not output.is_announced:
            output.is_announced = True
            self._news.append(output)
            self._tell()

    def _append_text(self, output: Output, text: str) -> None:
        if self._options.returns_text:
            output.append_text(text)

    def _end_output(self, output: Output) -> None:
        output.end.confirm()
        self._num_unfinished -= 1
        if self._num_unfinished == 0 and self._options.is_ranked:
            best_first = sorted(self._made, key=_cumulative_logprob, reverse=True)  # stable: ties keep their order
            best = best_first[: self._options.num_returned]
            if self._decodes_at_end:
                for returned in best:
                    returned.append_text(self._decode(returned))
            self._return_ranked(best)
        if self._options.text.stop_strings and self._handle is not None and output.end.reason is not None:
            self._handle.finish_output(output.sequence_index, output.end.num_tokens, output.end.reason)

    def _output_of(self, hypothesis: Hypothesis) -> Output:
        """Return a hypothesis as a finished output."""
        output = Output(0, self._options.returns_logprobs)
        for token_id, logprob in zip(hypothesis.token_ids.tolist(), hypothesis.logprobs.tolist(), strict=True):
            output.append_token(token_id, logprob)
        if self._options.returns_text:
            output.append_text(self._decode(output))
        output.beam_score = hypothesis.score
        output.end.set_to(len(output.token_ids), hypothesis.finish_reason)
        return output

    def _decode(self, output: Output) -> str:
        """Return the text of a finished output from all its tokens."""
        return self._tokenizer.decode(output.token_ids, self._options.text.skip_special_tokens)

    def _return_ranked(self, outputs: Sequence[Output]) -> None:
        for rank, output in enumerate(outputs):
            output.output_index, output.is_announced = rank, True
        self._returned = list(outputs)
        for delivered in outputs[: self._num_delivered_ranks]:
            delivered.take()
        self._news.extend(outputs[self._num_delivered_ranks :])
        self._tell()


def _cumulative_logprob(output: Output) -> float:
    assert output.cumulative_logprob is not None, "ranked outputs are sampled with log-probabilities"
    return output.cumulative_logprob
