"""The requests of a stream of `StreamRequests`, and the news of many of them as one message."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.grpc.grpc_status import rpc_status
from scheduler_svc.front.api.generation import AcceptedRequest
from scheduler_svc.front.api.generation_messages import (
    accepted_message,
    finished_message,
    prompt_message,
    provenance_message,
)
from scheduler_svc.front.api.request_body import RequestBody
from scheduler_svc.front.api_meter import ApiRequest, refusal_reason
from scheduler_svc.front.output import Delta
from scheduler_svc.request.provenance import Made


class StreamedRequest:
    """One request of a stream, from the message that submits it to its end.

    Args:
        number: The caller's number for it.
        tell: Called with the request when it has news.
        counted: Reports it to the metrics.

    Attributes:
        accepted: The request, once it is queued.
        asked: The request as the caller sent it, once it is decoded.
        was_told: Whether the caller has read that it is queued.
        is_aborted: Whether the caller has aborted it.
        is_announced: Whether it is listed as having news.
    """

    __slots__ = (
        "_rest",
        "_tell",
        "accepted",
        "asked",
        "body",
        "counted",
        "error",
        "includes_text",
        "is_aborted",
        "is_announced",
        "number",
        "was_told",
    )

    def __init__(
        self,
        number: int,
        body: RequestBody[pb.GenerateRequest],
        *,
        includes_text: bool,
        tell: "Callable[[StreamedRequest], None]",
        counted: ApiRequest,
    ) -> None:
        self.number = number
        self.body: RequestBody[pb.GenerateRequest] | None = body
        self.includes_text = includes_text
        self.counted = counted
        self.accepted: AcceptedRequest | None = None
        self.asked: pb.GenerateRequest | None = None
        self.error: Exception | None = None
        self.was_told = self.is_aborted = self.is_announced = False
        self._tell = tell
        self._rest: asyncio.TimerHandle | None = None

    @property
    def has_ended(self) -> bool:
        """Whether there will be no more news."""
        return self.error is not None or (self.accepted is not None and self.accepted.response.ended is not None)

    def announce(self) -> None:
        """Announce news, or news that comes soon; the caller reads it once the request is accepted or refused.

        While the request rests, only its end is announced.
        """
        if self.is_announced or (self._rest is not None and not self.has_ended):
            return
        if self.accepted is not None or self.error is not None:
            self.is_announced = True
            self._tell(self)

    def rest(self) -> None:
        """The caller has read all news: collect further news for a while, if the request asked for that."""
        if self.asked is not None and self.asked.min_delta_interval_ms and not self.has_ended:
            self.stop_resting()
            self._rest = asyncio.get_running_loop().call_later(self.asked.min_delta_interval_ms / 1000, self._wake)

    def stop_resting(self) -> None:
        """Stop resting: the request has ended, or its caller has left."""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def _wake(self) -> None:
        self._rest = None
        if self.accepted is not None and self.accepted.response.has_news:
            self.announce()

    def fail(self, error: Exception) -> None:
        """End the request as refused."""
        self.error, self.body = error, None
        self.counted.refuse(refusal_reason(error))
        self.announce()


V = TypeVar("V")


class StreamBatch:
    """Collects news, request by request; a protobuf message takes whole lists faster than single numbers.

    A list that is empty in most messages is filled up once it has its first value.

    Attributes:
        num_values: The size so far, in numbers and events.
    """

    def __init__(self) -> None:
        self.num_values = 0
        self._response = pb.StreamRequestsResponse()
        self._numbers: list[int] = []
        self._output_indexes: list[int] = []
        self._token_counts: list[int] = []
        self._token_ids: list[int] = []
        self._logprob_counts: list[int] = []
        self._logprobs: list[float] = []
        self._alternative_counts: list[int] = []
        self._alternative_token_ids: list[int] = []
        self._alternative_logprobs: list[float] = []
        self._texts: list[str] = []

    def add(self, request: StreamedRequest) -> bool:
        """Add the news of a request; return whether its end is among them."""
        if request.accepted is None:
            assert request.error is not None, "a request has news once it is accepted or refused"
            self._add_failure(request.number, request.error)
            return True
        response, number = request.accepted.response, request.number
        if not request.was_told:
            request.was_told = True
            self.num_values += 1
            assert request.asked is not None, "an accepted request was decoded"
            accepted = accepted_message(request.asked, response)
            self.num_values += len(accepted.prompt_token_ids)
            self._response.accepted.add(number=number, accepted=accepted)
        if response.prompt_logprobs and (prompt := response.take_prompt()) is not None:
            self.num_values += len(prompt.logprobs) + 2 * len(prompt.alternatives.token_ids)
            logprobs = prompt_message(prompt.logprobs, prompt.alternatives)
            self._response.prompt_logprobs.add(number=number, prompt_logprobs=logprobs)
        tells_provenance = request.asked is not None and request.asked.include_provenance
        if changed := response.take_changed():
            request.rest()
        for output in changed:
            if output.has_only_token_ids:  # as in most cases, at half the cost
                self._add_token_ids(number, output.output_index, output.take_token_ids())
            else:
                self._add_delta(number, output.take())
            if tells_provenance:
                self._add_provenance(number, output.output_index, response.take_provenance(output))
        if response.ended is None:
            return False
        if response.error is not None:
            self._add_failure(number, response.error)
        else:
            assert request.asked is not None, "an accepted request was decoded"
            finished = finished_message(response, is_lean=True, shows_provenance=request.asked.include_provenance)
            self.num_values += len(finished.outputs)
            self._response.finished.add(number=number, finished=finished)
        return True

    def message(self) -> pb.StreamRequestsResponse:
        """Return the message."""
        num_places, deltas, counts = len(self._numbers), self._response.deltas, self._token_counts
        if not num_places:
            return self._response
        deltas.numbers.extend(self._numbers)
        if counts.count(1) != num_places:
            deltas.token_counts.extend(counts)
        deltas.token_ids.extend(self._token_ids)
        if self._output_indexes:
            deltas.output_indexes.extend(_filled(self._output_indexes, num_places, 0))
        if self._logprob_counts:
            deltas.logprob_counts.extend(_filled(self._logprob_counts, num_places, 0))
            deltas.logprobs.extend(self._logprobs)
        if self._alternative_counts:
            deltas.alternative_counts.extend(_filled(self._alternative_counts, num_places, 0))
            deltas.alternative_token_ids.extend(self._alternative_token_ids)
            deltas.alternative_logprobs.extend(self._alternative_logprobs)
        if self._texts:
            deltas.texts.extend(_filled(self._texts, num_places, ""))
        return self._response

    def _add_token_ids(self, number: int, output_index: int, token_ids: list[int]) -> None:
        if output_index:
            _filled(self._output_indexes, len(self._numbers), 0).append(output_index)
        self._numbers.append(number)
        self._token_counts.append(len(token_ids))
        self._token_ids += token_ids
        self.num_values += 1 + len(token_ids)

    def _add_delta(self, number: int, delta: Delta) -> None:
        output_index, text, token_ids, logprobs, alternatives, _ = delta
        place = len(self._numbers)
        self._add_token_ids(number, output_index, token_ids)
        if text:
            _filled(self._texts, place, "").append(text)
        if logprobs:
            _filled(self._logprob_counts, place, 0).append(len(logprobs))
            self._logprobs += logprobs
            self.num_values += len(logprobs)
        if alternatives.token_ids:
            _filled(self._alternative_counts, place, 0).append(len(alternatives.token_ids))
            self._alternative_token_ids += alternatives.token_ids
            self._alternative_logprobs += alternatives.logprobs
            self.num_values += 2 * len(alternatives.token_ids)

    def _add_provenance(self, number: int, output_index: int, begun: Sequence[Made]) -> None:
        self.num_values += len(begun)
        for span in begun:
            self._response.provenance.add(number=number, output_index=output_index, provenance=provenance_message(span))

    def _add_failure(self, number: int, error: Exception) -> None:
        self.num_values += 1
        status = rpc_status(error)
        self._response.failed.add(number=number, code=status.code, message=status.message, details=status.details)


def _filled(values: list[V], length: int, nothing: V) -> list[V]:
    """Pad a list to a length in place, and return it."""
    values += [nothing] * (length - len(values))
    return values
