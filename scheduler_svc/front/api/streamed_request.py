"""One request of a stream of `StreamRequests`, from the message that submits it to its end."""

import asyncio
from collections.abc import Callable

from octavo.generation.v1 import generation_service_pb2 as pb
from scheduler_svc.front.api.generation import AcceptedRequest
from scheduler_svc.front.api.request_body import RequestBody
from scheduler_svc.front.api_meter import ApiRequest
from scheduler_svc.front.refusals import refusal_reason


class StreamedRequest:
    """One request of a stream.

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
