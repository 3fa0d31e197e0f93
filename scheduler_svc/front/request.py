"""A live request as the service sees it: tokens come in from the engine, deltas go out to its stream.

The engine pushes tokens as steps are processed and never waits for a client; what a slow client has
not taken yet piles up in one delta an output. The outputs end one by one, each by `push` (a stop
string) or `finish_output`; those of a beam search together, by `finish_search`. Every request ends
exactly once: with its last output, or by `fail`; whichever comes first decides, later calls change
nothing.

Ranked outputs (best_of above n, beams) are not streamed. At the end they are put in order, the best
ones become the answer, and only then are their tokens and text handed out. Next: output.py.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from scheduler_svc.core.beam_search import Hypothesis
from scheduler_svc.core.results import Alternatives
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.stop_conditions import FinishReason
from scheduler_svc.engine.request_life import RequestLife
from scheduler_svc.engine.request_times import RequestTimes
from scheduler_svc.front.output import AnswerOptions, Delta, Output, PromptDelta
from scheduler_svc.front.text.output_text import OutputText
from scheduler_svc.front.text.tokenizer import Tokenizer
from shared.errors import OctavoServiceError
from shared.step import NO_LOGPROBS


class Request:
    """One request from admission to its last event.

    Args:
        group: The request in the core's terms.
        options: What its answer consists of.
        tokenizer: Turns its tokens into text.
        arrived_at_s: Monotonic time of arrival, in seconds.

    Attributes:
        times: When what happened to it; kept by `LiveRequests`.
        life: What else happened to it.
        num_losses: How many losses of an executor that ran it were counted against it, since its last token.
        unclear_losses: Addresses of lost executors that ran it, since its last token, and that still have to show
            whether they work without it.
        num_lost_executors: How often one was lost that ran it, over its whole life.
        trace_id: The trace that its span belongs to; None: this process does not trace.
    """

    def __init__(self, group: SequenceGroup, options: AnswerOptions, tokenizer: Tokenizer, arrived_at_s: float) -> None:
        self.group = group
        self.times = RequestTimes(arrived_at_s)
        self.life = RequestLife()
        self.error: OctavoServiceError | None = None
        self.num_losses = 0
        self.unclear_losses: set[str] = set()
        self.num_lost_executors = 0
        self.trace_id: str | None = None
        self.prompt_logprobs: list[float] = []
        self.prompt_alternatives = Alternatives([], [])
        self._num_taken_prompt_logprobs = 0
        self._options = options
        self._tokenizer = tokenizer
        self._made = [Output(index, options.returns_logprobs) for index in range(options.num_sampled)]
        self._texts = [OutputText(tokenizer, options.text) for _ in self._made]
        self._num_unfinished = len(self._made)
        self._returned = [] if options.is_ranked else self._made
        self._is_finished = False
        self._has_logprobs = group.sampling.num_logprobs != NO_LOGPROBS
        self._news: deque[Output] = deque()
        self._changed = asyncio.Event()

    @property
    def request_id(self) -> str:
        """The id that the client knows."""
        return self.group.request_id

    @property
    def has_ended(self) -> bool:
        """Whether all outputs are finished, or the request failed."""
        return self._is_finished or self.error is not None

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first output of the answer ended; only once the request has finished."""
        reason = self.outputs[0].finish_reason
        assert reason is not None, "the request has finished"
        return reason

    @property
    def outputs(self) -> Sequence[Output]:
        """The outputs in the answer, by output index; ranked ones are there once the request has ended."""
        return self._returned

    @property
    def num_output_tokens(self) -> int:
        """Tokens made so far, over all sampled outputs; of beams, those in the answer, at the end."""
        return sum(len(output.token_ids) for output in self._made)

    def push(
        self, output_index: int, token_id: int, logprob: float | None, alternatives: Alternatives | None = None
    ) -> bool:
        """Take the next token of a sampled output.

        `logprob` may be there because another request of the step asked for it.

        Returns:
            Whether the output has ended with it, because its text holds a stop string now.
        """
        output = self._made[output_index]
        if self.has_ended or output.finish_reason is not None:
            return False
        if self.group.lost_on:
            self.forgive_losses()
        text = self._texts[output_index].push(token_id)
        self._announce(output)
        output.append_token(token_id, logprob if self._has_logprobs else None, alternatives)
        output.append_text(text.text)
        if text.stop_string is None:
            return False
        output.stop_string = text.stop_string
        self._end_output(output, FinishReason.STOP)
        return True

    def finish_output(self, output_index: int, reason: FinishReason) -> None:
        """End a sampled output: its last token has been pushed."""
        output = self._made[output_index]
        if self.has_ended or output.finish_reason is not None:
            return
        rest = self._texts[output_index].finish()
        if rest:
            self._announce(output)
            output.append_text(rest)
        self._end_output(output, reason)

    def finish_search(self, hypotheses: Sequence[Hypothesis]) -> None:
        """End the request with what its beam search found, best first."""
        if self.has_ended:
            return
        self._made = [self._output_of(hypothesis) for hypothesis in hypotheses]
        self._return_ranked(self._made)
        self._finish()

    def note_loss(self, executor: str, *, counts: bool) -> None:
        """The executor at an address was lost, which ran it; `counts`: against the request, as far as is known now."""
        self.num_lost_executors += 1
        self.group.lost_on = executor
        if counts:
            self.num_losses += 1
        else:
            self.unclear_losses.add(executor)

    def count_loss(self, executor: str) -> bool:
        """Count a loss against it that was unclear: the executor works without it. Return whether there was one."""
        if executor not in self.unclear_losses:
            return False
        self.unclear_losses.remove(executor)
        self.num_losses += 1
        return True

    def forgive_losses(self) -> None:
        """It got a token."""
        self.num_losses = 0
        self.unclear_losses.clear()
        self.group.lost_on = ""

    def fail(self, error: OctavoServiceError) -> None:
        """End the request with an error."""
        if not self.has_ended:
            self.error = error
            self._changed.set()

    def push_prompt(self, logprobs: Sequence[float], alternatives: Alternatives) -> None:
        """Take the log-probabilities of the next tokens of the prompt."""
        if not self.has_ended:
            self.prompt_logprobs.extend(logprobs)
            self.prompt_alternatives.extend(alternatives)
            self._changed.set()

    async def next_delta(self) -> Delta | PromptDelta | None:
        """Wait for something new; None once the request has ended and all of it was taken.

        Raises: OctavoServiceError: the request failed.
        """
        while True:
            if self._num_taken_prompt_logprobs < len(self.prompt_logprobs):
                return self._take_prompt()
            if self._news:
                return self._news.popleft().take()
            if self.error is not None:
                raise self.error
            if self._is_finished:
                return None
            self._changed.clear()
            await self._changed.wait()

    def _take_prompt(self) -> PromptDelta:
        first, self._num_taken_prompt_logprobs = self._num_taken_prompt_logprobs, len(self.prompt_logprobs)
        begin = first * max(0, self.group.num_prompt_logprobs)
        return PromptDelta(self.prompt_logprobs[first:], self.prompt_alternatives.since(begin))

    def _announce(self, output: Output) -> None:
        """Put an output that is about to change in line for `next_delta`; those in front changed earlier."""
        if not (self._options.is_ranked or output.has_news):
            self._news.append(output)
            self._changed.set()

    def _end_output(self, output: Output, reason: FinishReason) -> None:
        output.finish_reason = reason
        self._num_unfinished -= 1
        if self._num_unfinished:
            return
        if self._options.is_ranked:
            best_first = sorted(self._made, key=_cumulative_logprob, reverse=True)  # stable: ties keep their order
            self._return_ranked(best_first[: self._options.num_returned])
        self._finish()

    def _output_of(self, hypothesis: Hypothesis) -> Output:
        """Return a hypothesis as a finished output."""
        output = Output(0, self._options.returns_logprobs)
        for token_id, logprob in zip(hypothesis.token_ids.tolist(), hypothesis.logprobs.tolist(), strict=True):
            output.append_token(token_id, logprob)
        output.append_text(self._tokenizer.decode(output.token_ids, self._options.text.skip_special_tokens))
        output.beam_score = hypothesis.score
        output.finish_reason = hypothesis.finish_reason
        return output

    def _return_ranked(self, outputs: Sequence[Output]) -> None:
        for rank, output in enumerate(outputs):
            output.output_index = rank
        self._returned = list(outputs)
        self._news.extend(outputs)

    def _finish(self) -> None:
        self._is_finished = True
        self._changed.set()


def _cumulative_logprob(output: Output) -> float:
    assert output.cumulative_logprob is not None, "ranked outputs are sampled with log-probabilities"
    return output.cumulative_logprob
