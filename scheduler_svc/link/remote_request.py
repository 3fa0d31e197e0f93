"""A request as a front in a process of its own has it."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING

from octavo.core.v1 import core_service_pb2 as pb
from octavo_shared.errors import DrainingError, OctavoServiceError, UnavailableError
from octavo_shared.process.clock import monotonic_s
from scheduler_svc.link.messages import (
    decode_ended,
    decode_failure,
    decode_losses,
    decode_pooled,
    decode_reason,
    decode_search_end,
    decode_span,
    encode_submission,
)
from scheduler_svc.request.engine_client import AnswerSink
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.outputs import Alternatives, FinishReason, Float32Array
from scheduler_svc.request.served_model import ServedModel

if TYPE_CHECKING:
    from scheduler_svc.link.remote_engine import RemoteEngine


class TokenGapError(OctavoServiceError):
    """Tokens of an output are missing on the link: the session ends, and the request goes on behind what there is."""


class RemoteRequest:
    """A live request of a front; its own handle.

    Args:
        engine: The engine where it runs.
        number: Its number in the session.
        request: What was submitted.
        sink: Takes what comes.

    Attributes:
        queued: Done once the engine has queued it, or refused it.
        aborted_with: Why it was aborted; None: it was not.
        losses: What speaks against it, as its engine said last.
        is_put_back: Whether the engine that was to go on with it takes no requests any more; another engine may.
    """

    __slots__ = (
        "_checked_for",
        "_engine",
        "_num_tokens_of",
        "_number",
        "aborted_with",
        "is_put_back",
        "losses",
        "queued",
        "request",
        "sink",
    )

    def __init__(
        self, engine: "RemoteEngine", number: int, request: EngineRequest, sink: AnswerSink, checked_for: ServedModel
    ) -> None:
        self.request = request
        self.sink = sink
        self._checked_for = checked_for
        self.queued: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.aborted_with: OctavoServiceError | None = None
        self.is_put_back = False
        self.losses = request.losses
        self._engine = engine
        self._number = number
        self._num_tokens_of = request.num_known_tokens

    def submission(self, served: ServedModel | None) -> pb.Submission:
        """Return the message that submits it the first time to an engine that serves a model; None: it told none yet.

        Raises: UnavailableError: no executor of that engine has its sampling parameters.
        """
        model = self._checked_for
        self._require_sampler(served or model)
        return encode_submission(self._number, self.request, model.info.model_hash, model.max_model_len)

    def resubmission(self, served: ServedModel) -> pb.Submission:
        """Return the message that has the next engine go on with it.

        Raises: UnavailableError: that engine serves another model, or as `submission`.
        """
        model = self._checked_for
        self._require_sampler(served)
        if not served.goes_on_with(model.info.model_hash, model.reproducibility.weights_digest):
            raise UnavailableError("the scheduler came back with a different model; retry")
        request = replace(self.request, losses=self.losses)
        if request.pooling is None:  # else it begins anew
            self._end_by_tokens()
            request = replace(request, continuation=self.sink.so_far())
        self._num_tokens_of = request.num_known_tokens
        self.is_put_back = False
        was_queued = self.queued.done()
        return encode_submission(
            self._number, request, model.info.model_hash, model.max_model_len, was_queued=was_queued
        )

    def _require_sampler(self, served: ServedModel) -> None:
        """Raise UnavailableError if an engine, perhaps of an older release, would not see a sampling parameter."""
        if self.request.sampling.no_repeat_ngram_size and not served.info.bans_ngrams:
            raise UnavailableError(
                "the request has no_repeat_ngram_size, which the scheduler or its executors lack (the capability "
                "NO_REPEAT_NGRAM)"
            )

    def _end_by_tokens(self) -> None:
        """End the outputs whose last token ends them: the engine may have gone before it said so."""
        request, model = self.request, self._checked_for
        num_prompt_tokens, longest = len(request.prompt_token_ids), request.longest_sequence(model.max_model_len)
        for index, output in enumerate(self.sink.so_far().outputs):
            if output.finish_reason is None and len(output.token_ids):
                reason = request.stop_conditions.end_with(
                    int(output.token_ids[-1]),
                    num_prompt_tokens + len(output.token_ids),
                    num_prompt_tokens,
                    longest,
                    model.info.eos_token_ids,
                )
                if reason is not None:
                    self.sink.finish_output(index, reason)

    def move_to(self, engine: "RemoteEngine", number: int) -> None:
        """It goes on at another engine, which knows it by a number of its own."""
        self._engine, self._number = engine, number

    def begin(self) -> None:
        """An engine has queued it."""
        self.sink.begin(self)
        if not self.queued.done():
            self.queued.set_result(None)

    def push(
        self,
        output_index: int,
        position: int,
        token_id: int,
        logprob: float | None,
        alternatives: Alternatives | None,
    ) -> None:
        """The engine has sent a token of an output; a token that is there already is dropped.

        Raises: TokenGapError: earlier tokens are missing.
        """
        num_tokens = self._num_tokens_of[output_index]
        if position == num_tokens:
            self._num_tokens_of[output_index] = num_tokens + 1
            self.sink.push(output_index, token_id, logprob, alternatives)
        else:
            self._require_tokens(output_index, position)

    def end_output(self, output_index: int, num_tokens: int, reason: FinishReason) -> None:
        """The engine has ended an output with so many tokens. Raises TokenGapError: some of them are missing."""
        self._require_tokens(output_index, num_tokens)
        self.sink.finish_output(output_index, reason)

    def take_pooled(self, values: Float32Array) -> None:
        """The engine has answered a pooling request. Raises ValueError: it is none."""
        if self.request.pooling is None:
            raise ValueError(f"request {self.request.request_id!r} generates, and got {len(values)} values")
        self.sink.pooled(values)

    def _require_tokens(self, output_index: int, num_tokens: int) -> None:
        has = self._num_tokens_of[output_index]
        if num_tokens > has:
            raise TokenGapError(
                f"tokens {has} to {num_tokens - 1} of output {output_index} of request {self.request.request_id!r} "
                "are missing on the link"
            )

    def finish_output(self, output_index: int, num_tokens: int, reason: FinishReason) -> None:
        """See `RequestHandle`."""
        self._engine.finish_output(self._number, output_index, num_tokens, reason)

    def abort(self, error: OctavoServiceError) -> None:
        """See `RequestHandle`."""
        self.aborted_with = error
        self._engine.abort(self._number, error)

    def end(self, message: pb.RequestEnd) -> None:
        """The engine has ended it, or refused it; a queued one that another engine may take is put back."""
        error = decode_failure(message.failure) if message.HasField("failure") else None
        if not message.HasField("ended") and isinstance(error, DrainingError) and self.queued.done():
            self.is_put_back = self.aborted_with is None
        if self.is_put_back:
            return
        if message.HasField("ended"):
            self._end(message.ended, error)
        else:
            assert error is not None, "what was refused has a reason"
            self.fail(error)

    def fail(self, error: OctavoServiceError) -> None:
        """No engine has it, and none will."""
        if not self.queued.done():
            self.queued.set_exception(error)
        else:
            self._end(pb.EndedRequest(num_prompt_tokens=len(self.request.prompt_token_ids)), error)

    def _end(self, message: pb.EndedRequest, error: OctavoServiceError | None) -> None:
        request = self.request
        ended = decode_ended(
            message,
            monotonic_s(),
            error,
            request_id=request.request_id,
            tenant=request.tenant,
            priority=request.priority,
            trace_id=request.trace_id,
        )
        self.sink.end(ended, error)


def deliver(message: pb.JoinResponse, requests: Mapping[int, RemoteRequest]) -> None:
    """Tell requests what a message says of them, but not which have ended; requests that are gone hear nothing.

    Raises: TokenGapError: tokens are missing. ArithmeticError, LookupError, TypeError, ValueError: no engine sends it.
    """
    for number in message.accepted:
        if (request := requests.get(number)) is not None:
            request.begin()
    for prompt in message.prompt_logprobs:
        if (request := requests.get(prompt.number)) is not None:
            alternatives = Alternatives(list(prompt.alternative_token_ids), list(prompt.alternative_logprobs))
            request.sink.push_prompt(list(prompt.logprobs), alternatives)
    for begin in message.span_begins:
        if (request := requests.get(begin.number)) is not None:
            request.sink.begin_span(decode_span(begin.span))
    for told in message.losses:
        if (request := requests.get(told.number)) is not None:
            request.losses = decode_losses(told.losses)
    if message.HasField("tokens"):
        _deliver_tokens(message.tokens, requests)
    for end in message.output_ends:
        if (request := requests.get(end.number)) is not None:
            request.end_output(end.output_index, end.num_tokens, decode_reason(end.reason))
    for search in message.search_ends:
        if (request := requests.get(search.number)) is not None:
            request.sink.finish_search(decode_search_end(search))
    for pooled in message.pooled_answers:
        if (request := requests.get(pooled.number)) is not None:
            request.take_pooled(decode_pooled(pooled))


def _deliver_tokens(tokens: pb.Tokens, requests: Mapping[int, RemoteRequest]) -> None:
    """Give tokens to their requests, in the order in which they came.

    Raises: TokenGapError: some are missing. ValueError: columns do not fit each other.
    """
    num_tokens = len(tokens.numbers)
    num_alternatives = sum(tokens.alternative_counts)
    if {len(tokens.alternative_token_ids), len(tokens.alternative_logprobs)} != {num_alternatives}:
        raise ValueError(f"{num_alternatives} alternatives were counted")
    rows = zip(
        tokens.numbers,
        tokens.output_indexes or repeat(0, num_tokens),
        tokens.positions,
        tokens.token_ids,
        tokens.logprobs or repeat(None, num_tokens),
        tokens.alternative_counts or repeat(0, num_tokens),
        strict=True,
    )
    first = 0
    for number, output_index, position, token_id, logprob, num_alternatives in rows:
        alternatives = None
        if num_alternatives:
            ends = first + num_alternatives
            alternatives = Alternatives(
                list(tokens.alternative_token_ids[first:ends]), list(tokens.alternative_logprobs[first:ends])
            )
            first = ends
        request = requests.get(number)
        if request is not None:
            known = None if logprob is None or logprob != logprob else logprob  # NaN: not computed
            request.push(output_index, position, token_id, known, alternatives)
