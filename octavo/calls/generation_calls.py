"""The calls of `octavo.Client`: to several addresses, and as many as one answer takes.

Next: octavo/calls/resumption.py, which says when and how an answer goes on, and octavo/calls/scheduler_channel.py.
"""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.answer_reading import message_of, reading_answers
from octavo.calls.many_requests import ManyRequests
from octavo.calls.request_stream import RequestStream
from octavo.calls.resumption import ResumableRequest, ResumeWindow
from octavo.calls.scheduler_channel import Endpoint, SchedulerChannel, is_elsewhere_better
from octavo.calls.tls import TlsOptions
from octavo.errors import (
    TIME_LIMIT_PASSED,
    ConnectionOptionsError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OctavoError,
    TlsHandshakeError,
    UnavailableError,
)
from octavo.generation.v1 import generation_service_pb2, generation_service_pb2_grpc
from octavo.values.output_messages import event_from_proto
from octavo.values.outputs import Accepted, Event, FailedRequest, Finished

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response")

if TYPE_CHECKING:  # only the type stub of the generated module has it
    _Stub: TypeAlias = generation_service_pb2_grpc.GenerationServiceAsyncStub
    # A method of the stub.
    _Method: TypeAlias = Callable[[_Stub], Callable[..., grpc.aio.UnaryUnaryCall[_Request, _Response]]]

# Under this name the scheduler's grpc.health.v1 service says whether it can take requests.
_READINESS_SERVICE = "readiness"

# gRPC counts nanoseconds in 64 bits: a limit of more than 292 years would be over at once.
_LONGEST_TIMEOUT_S = 1e9

# What a scheduler of an earlier release calls a field that it does not know. It refuses the request; without the field
# it answers as it always did.
_UNKNOWN_FIELDS = {
    "field 10 of GenerateRequest": "lean_finished",
    "field 11 of GenerateRequest": "include_provenance",
    "field 15 of GenerateRequest": "include_prompt_token_ids",
}

# How long the end of a call may take after the last event.
_END_WITHIN_S = 1.0

# Pause before a watch of the readiness that ended is opened again.
_WATCH_AGAIN_S = 0.2


async def nothing_to_check() -> None:
    """Do nothing."""


@dataclass(slots=True)
class Attempts:
    """Where a request was sent that no scheduler has accepted.

    Attributes:
        window: How long it is sent again.
        refusals: What came of it since the last pause, by address.
    """

    window: ResumeWindow
    refusals: dict[Endpoint, OctavoError] = field(default_factory=dict)


class GenerationCalls(SchedulerChannel):
    """Makes the calls. `Client` describes the arguments, and has the methods for callers."""

    channel_options = (
        # Find a scheduler that vanished without a word. It allows pings this often (octavo_shared/grpc/grpc_server.py),
        # also while a request waits in the queue and nothing else is sent.
        ("grpc.keepalive_time_ms", 6_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
    )

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        tls: TlsOptions | None,
        token: str | None,
        resume_timeout_s: float,
        model: str,
    ) -> None:
        super().__init__(address, tls=tls, token=token)
        if not isinstance(resume_timeout_s, int | float) or not resume_timeout_s >= 0:
            sentence = f"resume_timeout_s is {resume_timeout_s!r}; it must be a number of seconds, 0 or more"
            raise ConnectionOptionsError(sentence)
        if not isinstance(model, str):
            raise ConnectionOptionsError(f"model is {model!r}; it must be the name of a model")
        self.model = model
        self._resume_timeout_s = resume_timeout_s
        self._random = random.random
        self._unknown_fields: set[str] = set()  # to the scheduler

    async def _run(
        self, message: generation_service_pb2.GenerateRequest, deadline_s: float | None
    ) -> AsyncGenerator[Event, None]:
        """Run a request in as many calls as it takes."""
        shows_provenance = message.include_provenance
        self._ask_for_what_is_known(message)
        request = ResumableRequest(message, self._resume_window(), shows_provenance=shows_provenance)
        endpoint, attempts = self._endpoint(), Attempts(self._resume_window("accepted"))
        while True:
            try:
                async with aclosing(self._call(request, endpoint, deadline_s)) as events:
                    async for event in events:
                        yield event
                return
            except OctavoError as error:
                if request.is_accepted:
                    pause_s = request.pause_s(error, now_s())
                elif self._forget_unknown_field(message, error):
                    continue
                else:
                    pause_s = self._pause_before(attempts, endpoint, error)
            if pause_s:
                await _pause(pause_s, deadline_s, request)
            endpoint = self._untried(attempts.refusals) or self._endpoint()

    def _pause_before(self, attempts: "Attempts", endpoint: Endpoint, error: OctavoError) -> float:
        """Return how long to wait until a request that no scheduler has accepted is sent again.

        It goes to all other addresses at once. If none takes it, and a scheduler that has answered before goes away, it
        goes to all of them again and again, after pauses.

        Raises: OctavoError: it is not sent again; `error`, or why that scheduler went.
        """
        if not is_elsewhere_better(error):
            raise error
        attempts.refusals[endpoint] = error
        if self._untried(attempts.refusals) is not None:
            return 0.0
        leaving = [each for each in attempts.refusals.values() if isinstance(each, UnavailableError) and each.goes_away]
        if not leaving and attempts.window.first_loss is None:
            raise error
        attempts.refusals.clear()
        try:
            return attempts.window.pause_s(leaving[0] if leaving else error, now_s())
        except UnavailableError:
            self._answering.clear()  # they are gone: the next request does not wait for them
            raise

    async def _call(
        self, request: ResumableRequest, endpoint: Endpoint, deadline_s: float | None
    ) -> AsyncGenerator[Event, None]:
        """Make one call for a request, and yield the events that its caller has not had."""
        # The addresses share the time that a continuation may wait for its first event: one that waits for a larger
        # executor waits until there is one, and another address may have it.
        patience_s = request.left_s(now_s()) / len(self.addresses) if request.is_accepted else None
        message, answer = request.message(), request.answer
        timeout_s = None if deadline_s is None else deadline_s - now_s()
        call = self._stub(endpoint).Generate(message, timeout=timeout_s, metadata=self._metadata)
        event: Event | None = None
        try:
            responses = aiter(call)
            while (response := await _next_within(patience_s, responses)) is not None:
                if event is None:
                    self._answering.add(endpoint)
                with reading_answers():
                    event = event_from_proto(response)
                    waits = response.accepted.waits_for_larger_executor and len(self.addresses) > 1
                    if not waits:
                        patience_s = None
                    if isinstance(event, Accepted):
                        event = answer.accept(response.accepted)
                    else:
                        event = answer.take(event, is_lean=message.lean_finished)
                    new = None if isinstance(event, Finished) else request.told(event)
                if isinstance(event, Finished):
                    break
                if new is not None:
                    yield new
            if isinstance(event, Finished):
                # Let the call end by itself: a cancelled call counts as failed there.
                await _next_within(_END_WITHIN_S, responses)
        except TimeoutError as error:
            if not isinstance(event, Finished):
                self._move_on(endpoint)
                needs = f"has no executor for its {request.num_tokens_needed:,} tokens"
                what = "does not answer" if event is None else needs
                raise UnavailableError(f"the scheduler at {endpoint.address} {what}") from error
        except grpc.aio.AioRpcError as error:
            if not isinstance(event, Finished):  # else the answer is whole, and only the end of the call was lost
                raise self._failed(error, endpoint) from error
        finally:
            call.cancel()  # does nothing to a call that has ended
        if not isinstance(event, Finished):
            raise InternalError("the scheduler closed the stream without a final event")
        with reading_answers():
            last = request.told(event)
        if last is not None:
            yield last

    def _resume_window(self, wanted: str = "resumed") -> ResumeWindow:
        return ResumeWindow(self._resume_timeout_s, self._random, wanted)

    def _ask_for_what_is_known(self, message: generation_service_pb2.GenerateRequest) -> None:
        """Set the fields that a continuation needs, as far as the scheduler knows them."""
        message.lean_finished = "lean_finished" not in self._unknown_fields
        has_prompt = message.WhichOneof("prompt") == "token_ids"
        message.include_prompt_token_ids = not has_prompt and "include_prompt_token_ids" not in self._unknown_fields
        if self._resume_timeout_s > 0 and "include_provenance" not in self._unknown_fields:
            message.include_provenance = True

    def _forget_unknown_field(self, message: generation_service_pb2.GenerateRequest, error: OctavoError) -> bool:
        """Leave out a field that a scheduler of an earlier release does not know; False: it refused something else."""
        name = _UNKNOWN_FIELDS.get(error.field or "") if isinstance(error, InvalidRequestError) else None
        if name is None or not getattr(message, name):
            return False
        self._unknown_fields.add(name)
        setattr(message, name, False)
        return True

    def _request_stream(self, endpoint: Endpoint) -> RequestStream:
        return RequestStream(
            lambda: self._stub(endpoint).StreamRequests(metadata=self._metadata),
            lambda error: self._failed(error, endpoint),
            self.model,
        )

    def _many_requests(self, *, max_in_flight: int, include_text: bool, shows_provenance: bool = False) -> ManyRequests:
        return ManyRequests(
            self._resume_window,
            max_in_flight=max_in_flight,
            include_text=include_text,
            has_other_addresses=len(self.addresses) > 1,
            shows_provenance=shows_provenance,
        )

    async def _run_many(
        self, many: ManyRequests, on_loss: Callable[[], Awaitable[None]] = nothing_to_check
    ) -> AsyncGenerator[tuple[int, Event | FailedRequest], None]:
        """Run requests on as many streams as it takes; `on_loss` is called when one broke."""
        while True:
            endpoint = self._endpoint()
            try:
                async with self._request_stream(endpoint) as stream, aclosing(many.run(stream)) as events:
                    async for index, event in events:
                        yield index, event
                return
            except UnavailableError as error:
                if not is_elsewhere_better(error):
                    raise
                await on_loss()
                pause_s = many.window.pause_s(error, now_s())
                self._move_on(endpoint)
            await asyncio.sleep(pause_s)

    async def _wait_at(self, endpoint: Endpoint, troubles: dict[Endpoint, str]) -> Endpoint:
        """Return an endpoint once the scheduler there is ready; `troubles` is told what may be wrong with TLS."""
        while True:
            try:
                await self._watch_readiness(endpoint)
                return endpoint
            except UnavailableError as error:  # it is not there yet, or it went away while we watched
                troubles.pop(endpoint, None)
                if isinstance(error, TlsHandshakeError):
                    troubles[endpoint] = str(error)
            await asyncio.sleep(_WATCH_AGAIN_S)

    async def _watch_readiness(self, endpoint: Endpoint) -> None:
        """Return once the scheduler is ready. Raises UnavailableError: it ended the watch, or does not answer."""
        request = health_pb2.HealthCheckRequest(service=_READINESS_SERVICE)
        stub = health_pb2_grpc.HealthStub(endpoint.channel)  # type: ignore[no-untyped-call]
        watch = stub.Watch(request)
        try:
            async for response in watch:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.aio.AioRpcError as error:
            raise self._to_octavo_error(error, endpoint) from error
        finally:
            watch.cancel()
        raise UnavailableError(f"the scheduler at {endpoint.address} closed the watch stream")

    async def _answer(
        self, method: "_Method[_Request, _Response]", request: _Request, *, timeout_s: float | None = None
    ) -> _Response:
        """Return the answer to a call that has one, of the first address that can give it, within a time limit."""
        deadline_s = None if timeout_s is None else now_s() + timeout_s
        endpoint, attempts = self._endpoint(), Attempts(self._resume_window("accepted"))
        while True:
            left_s = None if deadline_s is None else deadline_s - now_s()
            try:
                return await self._answer_of(endpoint, method, request, left_s)
            except UnavailableError as error:
                pause_s = self._pause_before(attempts, endpoint, error)
            if pause_s:
                await _pause(pause_s, deadline_s)
            endpoint = self._untried(attempts.refusals) or self._endpoint()

    async def _answer_of(
        self,
        endpoint: Endpoint,
        method: "_Method[_Request, _Response]",
        request: _Request,
        timeout_s: float | None = None,
    ) -> _Response:
        try:
            answer = await method(self._stub(endpoint))(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._failed(error, endpoint) from error
        self._answering.add(endpoint)
        return message_of(answer)

    @staticmethod
    def _stub(endpoint: Endpoint) -> "_Stub":
        return generation_service_pb2_grpc.GenerationServiceStub(endpoint.channel)


async def _next_within(patience_s: float | None, responses: AsyncIterator[_Response]) -> _Response | None:
    """Return the next response; None: there is none. Raises TimeoutError: it takes too long."""
    if patience_s is None:
        return await anext(responses, None)
    async with asyncio.timeout(patience_s):
        return await anext(responses, None)


async def _pause(pause_s: float, deadline_s: float | None, request: ResumableRequest | None = None) -> None:
    """Wait. Raises DeadlineError: the deadline comes first; it has what came of the request's answer."""
    if deadline_s is not None and (left_s := deadline_s - now_s()) <= pause_s:
        await asyncio.sleep(left_s)
        error = DeadlineError(TIME_LIMIT_PASSED)
        if request is not None:
            error.keep(request.answer.unfinished_outputs())
        raise error
    await asyncio.sleep(pause_s)


def now_s() -> float:
    """Return the time of the event loop."""
    return asyncio.get_running_loop().time()


def grpc_timeout(timeout_s: object) -> float:
    """Return a time limit that gRPC can count; one in the past stays in the past."""
    if not isinstance(timeout_s, int | float) or math.isnan(timeout_s):
        raise InvalidRequestError(f"timeout_s is {timeout_s!r}; it must be a number of seconds", field="timeout_s")
    return min(timeout_s, _LONGEST_TIMEOUT_S)
