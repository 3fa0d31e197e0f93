"""Many prompts at a time on the services of this machine: for `octavo.LLM`, which is in octavo/local/llm.py."""

import contextlib
from asyncio import timeout
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from octavo.client import Client
from octavo.errors import InvalidRequestError, OctavoError, UnavailableError
from octavo.generation.v1 import generation_service_pb2
from octavo.local.services import LocalServices
from octavo.values.outputs import Accepted, FailedRequest, Finished, Prompt, RequestOutput

_Result = TypeVar("_Result")

# Time within which the end of a process is seen here after its connections broke.
_END_IS_SEEN_S = 1.0

# How long answers wait for services that start again, which may load the model; giving a service up ends the wait.
_RESUME_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Account:
    """What all requests of one call have in common."""

    priority: int
    tenant: str
    cache_salt: str
    speculate: bool


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """A prompt, its message, and its name for sentences about it."""

    prompt: Prompt
    message: generation_service_pb2.GenerateRequest
    name: str


async def generate_all(
    services: LocalServices,
    requests: Sequence[LocalRequest],
    max_in_flight: int,
    on_output: Callable[[RequestOutput | FailedRequest], None],
) -> list[RequestOutput | FailedRequest]:
    """Run requests on one stream, so many at a time.

    Raises:
        LocalServiceError: a service stopped for good.
    """
    outputs: dict[int, RequestOutput | FailedRequest] = {}
    accepted: dict[int, Accepted] = {}

    def end(index: int, output: RequestOutput | FailedRequest) -> None:
        outputs[index] = output
        on_output(output)

    try:
        async with Client(services.address, resume_timeout_s=_RESUME_TIMEOUT_S) as client:
            messages = [(request.prompt, request.message) for request in requests]
            running = client.run_requests(
                messages, max_in_flight=max_in_flight, on_loss=lambda: _raise_if_stopped(services)
            )
            async with contextlib.aclosing(running) as events:
                async for index, event in events:
                    match event:
                        case Accepted():
                            accepted[index] = event
                        case Finished():
                            end(index, RequestOutput.of(requests[index].prompt, accepted[index], event))
                        case FailedRequest():
                            if isinstance(event.error, UnavailableError):
                                await _raise_if_stopped(services)
                            end(index, _named(event, requests[index], is_one=len(requests) == 1))
    except OctavoError as error:  # of the stream: all waiting requests get it
        if isinstance(error, UnavailableError):
            await _raise_if_stopped(services)
        for index in range(len(requests)):
            if index not in outputs:
                end(index, FailedRequest(requests[index].prompt, error))
    return [outputs[index] for index in range(len(requests))]


async def until_answered(services: LocalServices, ask: Callable[[], Awaitable[_Result]]) -> _Result:
    """Return an answer that can be asked for again if a service ends meanwhile and is started again.

    Raises:
        LocalServiceError: a service stopped for good.
    """
    deadline_s = monotonic() + _RESUME_TIMEOUT_S
    while True:
        try:
            return await ask()
        except UnavailableError:
            await _raise_if_stopped(services)  # a second in which it may come back
            if monotonic() >= deadline_s:
                raise


def _named(failed: FailedRequest, request: LocalRequest, *, is_one: bool) -> FailedRequest:
    """Return a failure whose sentence says which prompt it is about, if there are several."""
    error = failed.error
    if is_one or not isinstance(error, InvalidRequestError):
        return failed
    return FailedRequest(request.prompt, InvalidRequestError(f"{request.name}: {error}", field=error.field))


async def _raise_if_stopped(services: LocalServices) -> None:
    """Raise why a connection broke, if a service stopped for good: its end is seen a little later than its streams'."""
    with contextlib.suppress(TimeoutError):
        async with timeout(_END_IS_SEEN_S):
            raise await services.wait_for_failure()
