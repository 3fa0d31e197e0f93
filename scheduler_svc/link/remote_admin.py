"""Calls of AdminService over the link: errors that stay what they are, and one call to several engines.

The engine's end is `FailuresInStatus`; the front's end is `call_remote`, and `call_all` for all engines of a cell.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc.aio
from google.protobuf.message import DecodeError, Message

from octavo.admin.v1 import admin_service_pb2
from octavo.core.v1 import core_service_pb2 as pb
from octavo.values.status_details import DETAILS_KEY
from octavo_shared.errors import FencedError, MalformedMessageError, OctavoServiceError, UnavailableError
from octavo_shared.grpc.grpc_status import failure_text, rpc_status, status_code
from octavo_shared.grpc.interceptor import Context, Handler, HandlerInterceptor, handler_parts, run_handler
from scheduler_svc.link.messages import decode_failure, encode_failure

# The trailing metadata of a call that failed with an error of ours: `pb.Failure`, whose message is the status' own.
FAILURE_KEY = "octavo-failure-bin"

_SERVICE = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

# Longest text in the attributes of an error: statuses travel as headers, which gRPC limits to 8 KiB.
_MAX_ATTRIBUTE_CHARS = 200

# What a method gets: its message, or those of its stream.
Asked: TypeAlias = Message | AsyncIterator[Message]
Call: TypeAlias = Callable[[Asked], Awaitable[Message]]


class FailuresInStatus(HandlerInterceptor):
    """Adds to the status of a call of AdminService that failed what its front needs to raise the same error."""

    def wrap(self, method: str, handler: Handler) -> Handler:
        """Return the handler with its errors turned into such statuses."""
        if method.rpartition("/")[0].lstrip("/") != _SERVICE:
            return handler
        behavior, rebuild = handler_parts(handler)

        async def guarded(request: Any, context: Context) -> Any:
            try:
                return await run_handler(behavior, request, context)
            except MalformedMessageError:
                raise  # of a peer that is no front
            except OctavoServiceError as error:
                status, failure = rpc_status(error), encode_failure(error)
                failure.message = ""
                attributes: dict[str, object] = json.loads(failure.attributes_json)
                failure.attributes_json = json.dumps({name: _short(value) for name, value in attributes.items()})
                metadata = ((DETAILS_KEY, status.SerializeToString()), (FAILURE_KEY, failure.SerializeToString()))
                await context.abort(status_code(error), status.message, metadata)

        return rebuild(guarded, handler.request_deserializer, handler.response_serializer)


def _short(value: object) -> object:
    return value[:_MAX_ATTRIBUTE_CHARS] if isinstance(value, str) else value


async def call_remote(call: Call, request: Asked) -> Message:
    """Call a method of an engine.

    Raises: OctavoServiceError: what it raised there; or the connection broke. What the stream of messages raises.
    """
    troubles: list[Exception] = []  # of the stream; gRPC only cancels the call

    async def watched(messages: AsyncIterator[Message]) -> AsyncIterator[Message]:
        try:
            async for message in messages:
                yield message
        except Exception as error:
            troubles.append(error)
            raise

    try:
        return await call(request if isinstance(request, Message) else watched(request))
    except grpc.aio.AioRpcError as error:
        raise _failure_of(error) from error
    except asyncio.CancelledError:
        if troubles:
            raise troubles[0] from None
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise UnavailableError("the connection to the scheduler's engine broke during the call; retry") from None


def _failure_of(error: grpc.aio.AioRpcError) -> OctavoServiceError:
    for key, value in error.trailing_metadata() or ():
        if key == FAILURE_KEY and isinstance(value, bytes):
            try:
                failure = pb.Failure.FromString(value)
                failure.message = error.details() or ""
                return decode_failure(failure)
            except (DecodeError, TypeError, ValueError):
                break
    kind = UnavailableError if error.code() is grpc.StatusCode.UNAVAILABLE else OctavoServiceError
    return kind(f"the scheduler's engine did not answer: {failure_text(error)}")


async def call_all(calls: Sequence[Call], request: Asked) -> Message:
    """Call a method of several engines at once; return the first one's answer when all have ended.

    Messages of a stream go to all engines, each once all have room for it. Raises what the first one that failed
    raised, with how many have not failed, or the stream; FencedError: they serve different weights.
    """
    if len(calls) == 1:
        return await calls[0](request)
    if isinstance(request, Message):
        return _one_of(await asyncio.gather(*(call(request) for call in calls), return_exceptions=True))
    queues: list[asyncio.Queue[Message | None]] = [asyncio.Queue(1) for _ in calls]
    tasks = [asyncio.ensure_future(call(_messages(queue))) for call, queue in zip(calls, queues, strict=True)]
    try:
        await _feed(request, queues, tasks)
        return _one_of(await asyncio.gather(*tasks, return_exceptions=True))
    finally:
        for task in tasks:
            task.cancel()


def _one_of(answers: Sequence[Message | BaseException]) -> Message:
    """Return the answer of several engines. Raises as `call_all`."""
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    given = [answer for answer in answers if isinstance(answer, Message)]
    for error in errors:
        if given and isinstance(error, OctavoServiceError):
            counts = f"{len(given)} of {len(answers)} engines did what was asked, and {len(errors)} did not"
            error.args = (f"{error} ({counts}; call again)",)
        raise error
    versions = [answer for answer in given if isinstance(answer, admin_service_pb2.GetWeightVersionResponse)]
    if len(digests := sorted({version.weights_digest for version in versions})) > 1:
        if all(version.has_open_update for version in versions):  # it makes them equal
            versions[0].weights_digest = ""
        else:
            raise FencedError(
                f"the engines serve different weights, {' and '.join(digests)}; update them all, from a folder or from "
                "/start_weight_update on"
            )
    return given[0]


async def _messages(queue: "asyncio.Queue[Message | None]") -> AsyncIterator[Message]:
    while (message := await queue.get()) is not None:
        yield message


async def _feed(
    request: AsyncIterator[Message],
    queues: Sequence["asyncio.Queue[Message | None]"],
    tasks: Sequence["asyncio.Future[Message]"],
) -> None:
    """Put the messages of a stream into queues; calls that have ended take no more."""

    async def put(message: Message | None) -> None:
        for queue, task in zip(queues, tasks, strict=True):
            putting = asyncio.create_task(queue.put(message))
            either: set[asyncio.Future[Any]] = {putting, task}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            putting.cancel()

    async for message in request:
        await put(message)
        if all(task.done() for task in tasks):
            return
    await put(None)
