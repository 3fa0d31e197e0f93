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
        number: As its caller calls it.
        body: The request.
        includes_text: Whether the caller wants text.
        tell: Called with it when something of it is new.
        counted: What the metrics learn of it.

    Attributes:
        accepted: The request, once it is queued.
        asked: As its caller asked for it; once it is decoded.
        error: Why it was refused.
        was_told: Whether the caller knows that it is queued.
        is_aborted: Whether the caller has ended it.
        is_announced: Whether it is among those that have news.
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
        """Whether nothing more will come of it."""
        return self.error is not None or (self.accepted is not None and self.accepted.response.ended is not None)

    def announce(self) -> None:
        """Something of it is new, or about to be; its caller hears of it once it is accepted or refused.

        While it rests only its end is told.
        """
        if self.is_announced or (self._rest is not None and not self.has_ended):
            return
        if self.accepted is not None or self.error is not None:
            self.is_announced = True
            self._tell(self)

    def rest(self) -> None:
        """Its caller was told what is new: let what comes next grow together, if it asked for that."""
        if self.asked is not None and self.asked.min_delta_interval_ms and not self.has_ended:
            self.stop_resting()
            self._rest = asyncio.get_running_loop().call_later(self.asked.min_delta_interval_ms / 1000, self._wake)

    def stop_resting(self) -> None:
        """It has ended, or nobody waits for it any more."""
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def _wake(self) -> None:
        self._rest = None
        if self.accepted is not None and self.accepted.response.has_news:
            self.announce()

    def fail(self, error: Exception) -> None:
        """It was refused."""
        self.error, self.body = error, None
        self.counted.refuse(refusal_reason(error))
        self.announce()
