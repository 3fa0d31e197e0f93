"""The answer to one input that is embedded or scored."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NoReturn

from octavo_shared.errors import OctavoServiceError
from scheduler_svc.request.continuation import Continuation
from scheduler_svc.request.engine_client import RequestHandle
from scheduler_svc.request.life import EndedRequest
from scheduler_svc.request.outputs import Alternatives, FinishReason, Float32Array, Hypothesis
from scheduler_svc.request.provenance import Span


class PooledAnswer:
    """The `AnswerSink` of one input.

    Args:
        on_end: Called when its request has ended, if it was queued.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._handle: RequestHandle | None = None
        self._values: Float32Array | None = None
        self._end: asyncio.Future[OctavoServiceError | None] = asyncio.get_running_loop().create_future()

    def begin(self, handle: RequestHandle) -> None:
        """Note that the request is queued."""
        self._handle = handle

    def pooled(self, values: Float32Array) -> None:
        """Take the vector, or the scores."""
        self._values = values

    def end(self, ended: EndedRequest, error: OctavoServiceError | None) -> None:
        """Note that the request has ended, with its values or with an error."""
        if not self._end.done():
            self._end.set_result(error)
            self._on_end()

    async def values(self) -> Float32Array:
        """Return the vector, or the scores, once they are there. Raises OctavoServiceError: the request failed."""
        if (error := await asyncio.shield(self._end)) is not None:
            raise error
        assert self._values is not None, "it ended without an error"
        return self._values

    def abort(self, error: OctavoServiceError) -> None:
        """End the request with an error, unless it has ended."""
        if self._handle is not None and not self._end.done():
            self._handle.abort(error)

    def so_far(self) -> Continuation:
        """Return nothing: a text is computed whole, or again."""
        return Continuation(attempt=0)

    def begin_span(self, span: Span) -> None:
        """Ignore which executor computes it."""

    def push(
        self, output_index: int, token_id: int, logprob: float | None, alternatives: Alternatives | None = None
    ) -> NoReturn:
        """Never called: nothing is generated."""
        raise AssertionError("a request for values has no tokens")

    def push_prompt(self, logprobs: Sequence[float], alternatives: Alternatives) -> NoReturn:
        """Never called."""
        raise AssertionError("a request for values has no log-probabilities")

    def finish_output(self, output_index: int, reason: FinishReason) -> NoReturn:
        """Never called."""
        raise AssertionError("a request for values has no outputs")

    def finish_search(self, hypotheses: Sequence[Hypothesis]) -> NoReturn:
        """Never called."""
        raise AssertionError("a request for values has no beams")
