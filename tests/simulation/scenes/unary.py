"""Calls with one answer: what comes back, and how they end otherwise."""

import asyncio
from typing import Any, Never

import grpc
from google.protobuf.wrappers_pb2 import StringValue

from octavo_shared.errors import InvalidFieldError, QueueFullError
from octavo_shared.grpc.grpc_status import StatusInterceptor
from scheduler_svc.front.api.request_body import KeepBodies
from tests.simulation.scenes.stage import LONG_ENOUGH_S, SERVICE, Scene, Stage, connected, end_of, method

unary = grpc.unary_unary_rpc_method_handler


async def answers(stage: Stage) -> None:
    async def echo(request: bytes, context: Any) -> bytes:
        found = dict(context.invocation_metadata())
        stage.notes["handler"] += [request, found["tenant"], found["key-bin"], context.time_remaining()]
        stage.notes["handler"] += [context.cancelled(), context.done(), context.auth_context()]
        return b"<" + request + b">"

    await stage.serve({"Echo": unary(echo)})
    call = method(stage.channel(), "Echo")(b"a", metadata=(("tenant", "x"), ("key-bin", b"\x00\xff")))
    stage.notes["client"] += [await end_of(call), call.done(), call.cancel(), await end_of(call)]


async def two_calls_at_once(stage: Stage) -> None:
    both = asyncio.Barrier(2)

    async def echo(request: bytes, context: Any) -> bytes:
        await both.wait()
        return request

    await stage.serve({"Echo": unary(echo)})
    calling = method(stage.channel(), "Echo")
    stage.notes["client"] += await asyncio.gather(calling(b"a"), calling(b"b"))


async def aborted(stage: Stage) -> None:
    async def abort(request: bytes, context: Any) -> bytes:
        try:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing", (("hint-bin", b"\x01"),))
        except BaseException as error:
            stage.notes["handler"].append(type(error).__name__)
            raise
        return b"late"

    await stage.serve({"Abort": unary(abort)})
    stage.notes["client"].append(await end_of(method(stage.channel(), "Abort")(b"")))


async def aborted_before_its_handler_ends(stage: Stage) -> None:
    has_answer = asyncio.Event()

    async def abort(request: bytes, context: Any) -> bytes:
        try:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing")
        except grpc.aio.AbortError:
            stage.notes["handler"].append(await end_of(context.abort(grpc.StatusCode.OK, "not that")))
        await has_answer.wait()
        return b"late"

    await stage.serve({"Abort": unary(abort)})
    stage.notes["client"].append(await end_of(method(stage.channel(), "Abort")(b"")))
    has_answer.set()


async def raised(stage: Stage) -> None:
    async def fail(request: bytes, context: Any) -> Never:
        raise ValueError("it is wrong")

    await stage.serve({"Fail": unary(fail)})
    stage.notes["client"].append(await end_of(method(stage.channel(), "Fail")(b"")))


async def raised_within_interceptors(stage: Stage) -> None:
    errors = {
        "Field": InvalidFieldError("sampling_params.n", "must be at least 1", "1"),
        "Full": QueueFullError(3, 2.5),
        "Bug": ValueError("it is wrong"),
    }

    async def fail(request: Any, context: Any) -> Never:
        stage.notes["handler"].append(type(request).__name__)
        raise errors[request.decode({}).value]

    methods = {f"/{SERVICE}/Fail": StringValue}
    await stage.serve({"Fail": unary(fail)}, [StatusInterceptor(), KeepBodies(methods)])
    calling = method(stage.channel(), "Fail")
    for name in errors:
        stage.notes["client"].append(await end_of(calling(StringValue(value=name).SerializeToString())))
    stage.notes["client"].append(await end_of(calling(b"\xff")))


async def unknown_method(stage: Stage) -> None:
    await stage.serve({}, [StatusInterceptor()])
    channel = stage.channel()
    stage.notes["client"].append(await end_of(method(channel, "None")(b"")))
    stream = method(channel, "None", "stream_stream")()
    stage.notes["client"].append(await end_of(stream.read()))


async def deadline(stage: Stage) -> None:
    has_ended = asyncio.Event()

    async def wait(request: bytes, context: Any) -> None:
        remaining_s = context.time_remaining()
        stage.notes["handler"].append(0.0 < remaining_s <= LONG_ENOUGH_S + 0.01)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stage.notes["handler"] += ["cancelled", context.time_remaining()]
            raise
        finally:
            has_ended.set()

    await stage.serve({"Wait": unary(wait)})
    call = method(await connected(stage), "Wait")(b"", timeout=LONG_ENOUGH_S)
    stage.notes["client"] += [await end_of(call), call.done(), call.cancel()]
    await has_ended.wait()


class _NoteCalls(grpc.aio.ServerInterceptor):
    """Sets an event when a call has come; its request may not have."""

    def __init__(self) -> None:
        self.has_come = asyncio.Event()

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        self.has_come.set()
        return await continuation(details)


async def deadline_while_the_client_stands_still(stage: Stage) -> None:
    """The server ends the call, and its word may be there before the client looks at the clock."""
    calls = _NoteCalls()

    async def wait(request: bytes, context: Any) -> None:
        await asyncio.Event().wait()

    await stage.serve({"Wait": unary(wait)}, [calls])
    channel = await connected(stage)
    for request in (b"", None):  # who calls it as a stream may send no request
        calls.has_come.clear()
        call = method(channel, "Wait", "stream_stream")(timeout=LONG_ENOUGH_S)
        if request is not None:
            await call.write(request)
        await calls.has_come.wait()
        await stage.stand_still(2 * LONG_ENOUGH_S)
        stage.notes["client"].append(await end_of(call.read()))


async def ended_before_its_request_came(stage: Stage) -> None:
    calls = _NoteCalls()

    async def answer(request: bytes, context: Any) -> bytes:
        stage.notes["handler"].append(request)
        return request

    await stage.serve({"Answer": unary(answer)}, [calls])
    channel = await connected(stage)
    for end in (lambda call: call.cancel(), lambda _: stage.reset()):
        calls.has_come.clear()
        call = method(channel, "Answer", "stream_stream")()
        reading = asyncio.create_task(end_of(call.read()))
        await calls.has_come.wait()
        stage.notes["client"] += [end(call), await reading]


async def deadline_of_zero(stage: Stage) -> None:
    async def answer(request: bytes, context: Any) -> bytes:
        return b""

    await stage.serve({"Answer": unary(answer)})
    stage.notes["client"].append(await end_of(method(stage.channel(), "Answer")(b"", timeout=0.0)))


async def cancelled_by_client(stage: Stage) -> None:
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    async def wait(request: bytes, context: Any) -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stage.notes["handler"] += ["cancelled"]
            raise
        finally:
            has_ended.set()

    await stage.serve({"Wait": unary(wait)})
    call = method(stage.channel(), "Wait")(b"")
    waiting = asyncio.create_task(end_of(call))
    await has_begun.wait()
    stage.notes["client"] += [call.cancel(), await waiting, call.cancel(), await end_of(call)]
    await has_ended.wait()


async def cancelled_before_it_begins(stage: Stage) -> None:
    await stage.serve({})
    call = method(stage.channel(), "Wait")(b"")
    stage.notes["client"] += [call.cancel(), await end_of(call), call.done()]


async def waiting_task_cancelled(stage: Stage) -> None:
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    async def wait(request: bytes, context: Any) -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stage.notes["handler"].append("finally")
            has_ended.set()

    await stage.serve({"Wait": unary(wait)})
    call = method(stage.channel(), "Wait")(b"")

    async def ask() -> None:
        try:
            await call
        except asyncio.CancelledError:
            stage.notes["client"].append("cancelled")
            raise

    asking = asyncio.create_task(ask())
    await has_begun.wait()
    asking.cancel()
    await asyncio.wait([asking])
    stage.notes["client"] += [asking.cancelled(), await end_of(call)]
    await has_ended.wait()


async def handler_that_ignores_its_cancellation(stage: Stage) -> None:
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    async def wait(request: bytes, context: Any) -> bytes:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stage.notes["handler"].append("cancelled")
        await asyncio.sleep(0.01)
        stage.notes["handler"].append("goes on")
        has_ended.set()
        return b"late"

    await stage.serve({"Wait": unary(wait)})
    call = method(stage.channel(), "Wait")(b"")
    waiting = asyncio.create_task(end_of(call))
    await has_begun.wait()
    call.cancel()
    stage.notes["client"].append(await waiting)
    await has_ended.wait()


SCENES: tuple[Scene, ...] = (
    answers,
    two_calls_at_once,
    aborted,
    aborted_before_its_handler_ends,
    raised,
    raised_within_interceptors,
    unknown_method,
    deadline,
    deadline_while_the_client_stands_still,
    ended_before_its_request_came,
    deadline_of_zero,
    cancelled_by_client,
    cancelled_before_it_begins,
    waiting_task_cancelled,
    handler_that_ignores_its_cancellation,
)
