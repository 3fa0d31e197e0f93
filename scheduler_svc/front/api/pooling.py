"""Embeddings and scores: each input of a call is one request of the engine, and the call ends as a whole."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from octavo_shared.errors import OctavoServiceError, QueueFullError, RequestAbortedError
from octavo_shared.process.clock import monotonic_s
from scheduler_svc.front.access.identity import current_identity, private_deployment
from scheduler_svc.front.api.generation import CLIENT_LEFT, Generation, Metadata
from scheduler_svc.front.api.pooling_validation import (
    InputNames,
    PoolingRequest,
    ValidPooling,
    check_pooling,
    has_text,
    own_names,
)
from scheduler_svc.front.text.text_model import check_model
from scheduler_svc.request.continuation import Continuation
from scheduler_svc.request.engine_client import RequestHandle
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.life import EndedRequest
from scheduler_svc.request.outputs import Float32Array
from scheduler_svc.request.provenance import Span
from scheduler_svc.request.served_model import ServedModel

# Inputs of one call that the engine has at once: more than a step computes, so that no step runs short.
MAX_IN_ENGINE = 256

# How far the length of a normalized vector may be from 1.
_UNIT_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Pooled:
    """The answer to a call: `values` are its vectors or scores, float32 [num_inputs, width]."""

    request_id: str
    values: Float32Array
    num_prompt_tokens: int

    @property
    def content(self) -> bytes:
        """The values as they travel."""
        return self.values.astype("<f4", copy=False).tobytes()


async def pool(
    generation: Generation,
    request: PoolingRequest,
    metadata: Metadata,
    *,
    names: InputNames | None = None,
    time_left_s: float | None = None,
    why_left: Callable[[], str] = lambda: CLIENT_LEFT,
    on_queued: Callable[[], None] = lambda: None,
) -> Pooled:
    """Compute the vectors or the scores of all inputs; abort all of them if the caller leaves.

    Args:
        generation: Runs requests for the model.
        request: The request; its tenant is filled in.
        metadata: The call's.
        names: The caller's names of the inputs; None: those of the native API.
        time_left_s: How long the caller still waits; None: without limit.
        why_left: Returns why the caller left; called if it did.
        on_queued: Called when the engine has an input: from then on the call is not refused.

    Raises: OctavoServiceError: the call is refused, or an input failed.
    """
    received_at_s = monotonic_s()
    request.tenant = current_identity().tenant_for(request.tenant)
    await generation.engine.wait_until_reachable()
    with private_deployment(), generation.traced(request, metadata) as trace:
        with generation.engine.checking(request.request_id, request.tenant) as served:
            model = generation.text_model(served)
            if request.model:
                check_model(request.model, model, takes_adapters=False)
            run = generation.text_threads.run if has_text(request) else asyncio.to_thread
            valid: ValidPooling = await run(
                check_pooling, request, model, generation.settings, names or own_names(request)
            )
        deadline_s = None if time_left_s is None else received_at_s + time_left_s
        requests = [replace(each, received_at_s=received_at_s, deadline_s=deadline_s) for each in valid.requests]
        if trace is not None:
            requests = trace.follow_inputs(requests, valid.request_id, model.name)
        call = _Call(generation, served, on_queued, why_left)
        rows = await call.run(requests)
        if trace is not None:
            trace.end_inputs()
    values = np.stack(rows)
    if valid.num_dimensions:
        values = cut(values, valid.num_dimensions)
    return Pooled(valid.request_id, values, sum(len(each.prompt_token_ids) for each in requests))


def cut(vectors: Float32Array, num_dimensions: int) -> Float32Array:
    """Return the first numbers of vectors, [num_vectors, num_dimensions]; vectors of length 1 are normalized again."""
    short = vectors[:, :num_dimensions]
    is_unit = np.abs(np.linalg.norm(vectors, axis=1, keepdims=True) - 1) < _UNIT_TOLERANCE
    lengths = np.linalg.norm(short, axis=1, keepdims=True)
    return np.where(is_unit & (lengths > 0), short / np.where(lengths > 0, lengths, 1), short).astype(np.float32)


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

    def push(self, *_: Any, **__: Any) -> NoReturn:
        """Never called, like the three that follow: nothing is generated."""
        raise AssertionError("a request for values has no tokens, no log-probabilities and no outputs")

    push_prompt = finish_output = finish_search = push


@dataclass(slots=True)
class _Call:
    """The inputs of one call that run."""

    generation: Generation
    served: ServedModel
    on_queued: Callable[[], None]
    why_left: Callable[[], str]
    num_in_engine: int = 0
    has_failed: bool = False
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_IN_ENGINE))
    input_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, requests: list[EngineRequest]) -> list[Float32Array]:
        """Return the values of each. Raises OctavoServiceError: the first input that failed; the others are aborted."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._compute(request)) for request in requests]
        except* OctavoServiceError as failed:
            raise _first_of(failed) from None
        return [task.result() for task in tasks]

    async def _compute(self, request: EngineRequest) -> Float32Array:
        async with self.places:
            answer = PooledAnswer(self._note_end)
            try:
                await self._submit(request, answer)
                self.on_queued()
                return await answer.values()
            except OctavoServiceError:
                self.has_failed = True
                raise
            finally:
                why = "another input of the call failed" if self.has_failed else self.why_left()
                answer.abort(RequestAbortedError(why))

    async def _submit(self, request: EngineRequest, answer: PooledAnswer) -> None:
        """Queue an input; if other inputs of the call fill the queue, wait until one of them ends."""
        while True:
            self.input_ended.clear()
            self.num_in_engine += 1
            try:
                await self.generation.engine.submit(request, answer, checked_for=self.served)
            except OctavoServiceError as error:
                self.num_in_engine -= 1
                if not (isinstance(error, QueueFullError) and self.num_in_engine):
                    raise
                await self.input_ended.wait()
            else:
                return

    def _note_end(self) -> None:
        self.num_in_engine -= 1
        self.input_ended.set()


def _first_of(failed: ExceptionGroup[OctavoServiceError]) -> OctavoServiceError:
    error = failed.exceptions[0]
    return _first_of(error) if isinstance(error, ExceptionGroup) else error
