"""A live request as the service sees it: tokens come in from the engine, deltas go out to its stream.

The engine pushes tokens as steps are processed and never waits for a client; what a slow client has
not taken yet piles up in one delta. Every request ends exactly once: by `push` (a stop string),
`finish` or `fail`; whichever comes first decides, later calls change nothing.
"""

import asyncio
from dataclasses import dataclass, field

from scheduler_svc.core.sequence import FinishReason, SequenceGroup
from scheduler_svc.output_text import OutputText
from shared.errors import OctavoServiceError
from shared.step import NO_LOGPROBS


@dataclass(slots=True)
class Delta:
    """New tokens and text of an output. `text` may lag behind `token_ids`."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.token_ids)


class Request:
    """One request from admission to its last event.

    Args:
        group: The request in the core's terms.
        output_text: Turns its tokens into text and finds its stop strings.
        arrived_at_s: Monotonic time of arrival, in seconds.
    """

    def __init__(self, group: SequenceGroup, output_text: OutputText, arrived_at_s: float) -> None:
        self.group = group
        self.arrived_at_s = arrived_at_s
        self.total = Delta()
        self.finish_reason: FinishReason | None = None
        self.stop_string: str | None = None
        self.error: OctavoServiceError | None = None
        self.num_losses = 0
        self._output_text = output_text
        self._wants_logprobs = group.sampling.num_logprobs != NO_LOGPROBS
        self._pending = Delta()
        self._changed = asyncio.Event()

    @property
    def request_id(self) -> str:
        """The id that the client knows."""
        return self.group.request_id

    @property
    def has_ended(self) -> bool:
        """Whether the request is finished or failed."""
        return self.finish_reason is not None or self.error is not None

    @property
    def stop_token_id(self) -> int | None:
        """The token that ended the output, if a token did."""
        ended_by_token = self.finish_reason is FinishReason.STOP and self.stop_string is None
        return self.total.token_ids[-1] if ended_by_token else None

    def push(self, token_id: int, logprob: float | None) -> None:
        """Take the next token; the request has ended afterwards if its text holds a stop string.

        `logprob` may be there because another request of the step asked for it.
        """
        if self.has_ended:
            return
        self.num_losses = 0
        for delta in (self.total, self._pending):
            delta.token_ids.append(token_id)
            if self._wants_logprobs and logprob is not None:
                delta.logprobs.append(logprob)
        text = self._output_text.push(token_id)
        self._add_text(text.text)
        if text.stop_string is not None:
            self.stop_string = text.stop_string
            self.finish_reason = FinishReason.STOP
        self._changed.set()

    def finish(self, reason: FinishReason) -> None:
        """End the request: its last token has been pushed."""
        if not self.has_ended:
            self._add_text(self._output_text.finish())
            self.finish_reason = reason
            self._changed.set()

    def fail(self, error: OctavoServiceError) -> None:
        """End the request with an error."""
        if not self.has_ended:
            self.error = error
            self._changed.set()

    async def next_delta(self) -> Delta | None:
        """Wait for something new; None once the request has ended and all of it was taken.

        Raises: OctavoServiceError: the request failed.
        """
        while True:
            if self._pending:
                delta, self._pending = self._pending, Delta()
                return delta
            if self.error is not None:
                raise self.error
            if self.finish_reason is not None:
                return None
            self._changed.clear()
            await self._changed.wait()

    def _add_text(self, text: str) -> None:
        self.total.text += text
        self._pending.text += text
