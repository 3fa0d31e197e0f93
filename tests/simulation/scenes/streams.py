"""Streams: messages in both directions, and how they end while both sides live."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from typing import Any

import grpc

from octavo_shared.errors import UnavailableError
from octavo_shared.grpc.grpc_status import StatusInterceptor
from tests.simulation.scenes.stage import LONG_ENOUGH_S, Scene, Stage, connected, end_of, method

down = grpc.unary_stream_rpc_method_handler
both = grpc.stream_stream_rpc_method_handler
Requests = AsyncIterator[bytes]

# More than any window holds: one message of it goes out, and the next one waits.
LARGE = bytes(2**20)
NUM_LARGE = 32

# Nothing has happened for so long: a writer that still waits is held up.
HELD_UP_S = 0.3


async def count(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
    """Yield as many messages as the request says."""
    for number in range(int(request)):
        yield b"%d" % number


async def echo(requests: Requests, context: Any) -> AsyncGenerator[bytes, None]:
    """Yield what comes."""
    async for request in requests:
        yield request


async def messages_in_order(stage: Stage) -> None:
    await stage.serve({"Count": down(count)})
    call = method(stage.channel(), "Count", "unary_stream")(b"50")
    stage.notes["client"] += [message async for message in call]
    stage.notes["client"] += [call.done(), call.cancel()]


async def read_after_the_end(stage: Stage) -> None:
    await stage.serve({"Count": down(count)})
    call = method(stage.channel(), "Count", "unary_stream")(b"2")
    stage.notes["client"] += [await end_of(call.read()) for _ in range(5)]


async def no_message(stage: Stage) -> None:
    await stage.serve({"Count": down(count)})
    call = method(stage.channel(), "Count", "unary_stream")(b"0")
    stage.notes["client"].append(await end_of(call.read()))
    call = method(stage.channel(), "Count", "unary_stream")(b"0")
    stage.notes["client"].append([message async for message in call])


async def there_and_back(stage: Stage) -> None:
    async def serve(requests: Requests, context: Any) -> AsyncGenerator[bytes, None]:
        async for request in requests:
            stage.notes["handler"].append(request)
            yield request
        stage.notes["handler"].append("end")
        yield b"last"

    await stage.serve({"Echo": both(serve)})
    call = method(stage.channel(), "Echo", "stream_stream")()
    for number in range(5):
        await call.write(b"%d" % number)
        stage.notes["client"].append(await end_of(call.read()))
    await call.done_writing()
    await call.done_writing()
    stage.notes["client"].append(await end_of(call.write(b"late")))
    stage.notes["client"] += [await end_of(call.read()) for _ in range(3)]
    stage.notes["client"].append(await end_of(call.write(b"later")))
    stage.notes["client"].append(await end_of(call.done_writing()))


async def headers_before_the_first_message(stage: Stage) -> None:
    async def serve(requests: Requests, context: Any) -> AsyncGenerator[bytes, None]:
        await context.send_initial_metadata(())
        async for request in requests:
            yield request

    await stage.serve({"Echo": both(serve)})
    call = method(stage.channel(), "Echo", "stream_stream")()
    stage.notes["client"].append(len(await call.initial_metadata()))
    await call.write(b"a")
    stage.notes["client"].append(await end_of(call.read()))
    await call.done_writing()
    stage.notes["client"].append(await end_of(call.read()))
    stage.notes["client"].append(len(await call.initial_metadata()))


async def all_written_before_the_first_read(stage: Stage) -> None:
    await stage.serve({"Echo": both(echo)})
    call = method(stage.channel(), "Echo", "stream_stream")()
    for number in range(20):
        await call.write(b"%d" % number)
    await call.done_writing()
    stage.notes["client"] += [message async for message in call]


async def two_streams_at_once(stage: Stage) -> None:
    await stage.serve({"Echo": both(echo), "Count": down(count)})
    channel = stage.channel()
    one, other = method(channel, "Echo", "stream_stream")(), method(channel, "Count", "unary_stream")(b"3")
    await one.write(b"a")
    stage.notes["client"] += [await end_of(other.read()), await end_of(one.read()), await end_of(other.read())]
    one.cancel()
    stage.notes["client"] += [await end_of(one.read()), await end_of(other.read()), await end_of(other.read())]


async def handler_writes_by_itself(stage: Stage) -> None:
    async def serve(request: bytes, context: Any) -> None:
        for number in range(3):
            await context.write(b"%d" % number)

    await stage.serve({"Count": down(serve)}, [StatusInterceptor()])
    call = method(stage.channel(), "Count", "unary_stream")(b"")
    stage.notes["client"] += [message async for message in call]


async def ends_with_an_error(stage: Stage, error: Exception | None, *, by_hand: bool) -> None:
    async def serve(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        yield b"a"
        yield b"b"
        if error is not None:
            raise error
        await context.abort(grpc.StatusCode.ABORTED, "enough", (("hint", "x"),))

    await stage.serve({"Serve": down(serve)}, [] if by_hand else [StatusInterceptor()])
    calling = method(stage.channel(), "Serve", "unary_stream")
    call = calling(b"")
    await asyncio.sleep(0.05)  # all has arrived, also the error
    stage.notes["client"] += [await end_of(call.read()) for _ in range(4)]
    call = calling(b"")
    for _ in range(3):
        stage.notes["client"].append(await end_of(anext(aiter(call))))


async def early_answer(stage: Stage) -> None:
    """The handler ends while the client would write."""

    async def serve(requests: Requests, context: Any) -> AsyncGenerator[bytes, None]:
        stage.notes["handler"].append(await anext(aiter(requests)))
        yield b"enough"

    await stage.serve({"Serve": both(serve)})
    call = method(stage.channel(), "Serve", "stream_stream")()
    await call.write(b"a")
    stage.notes["client"] += [await end_of(call.read()), await end_of(call.read())]
    stage.notes["client"] += [await end_of(call.write(b"b")), await end_of(call.read()), call.done()]


async def early_error(stage: Stage) -> None:
    """The handler fails without having read."""

    async def serve(requests: Requests, context: Any) -> AsyncGenerator[bytes, None]:
        if not context.done():
            raise UnavailableError("not now")
        yield b""

    await stage.serve({"Serve": both(serve)}, [StatusInterceptor()])
    call = method(stage.channel(), "Serve", "stream_stream")()
    stage.notes["client"] += [await end_of(call.read()), await end_of(call.write(b"b")), await end_of(call.read())]


def _waiting_handler(stage: Stage, has_begun: asyncio.Event, has_ended: asyncio.Event, messages: int = 0) -> Any:
    async def serve(requests: Requests, context: Any) -> AsyncGenerator[bytes, None]:
        try:
            for number in range(messages):
                yield b"%d" % number
            has_begun.set()
            async for request in requests:
                stage.notes["handler"].append(request)
            stage.notes["handler"].append("end of requests")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stage.notes["handler"].append("cancelled")
            raise
        finally:
            stage.notes["handler"].append("finally")
            has_ended.set()

    return both(serve)


async def cancelled_while_reading(stage: Stage) -> None:
    has_begun, has_ended = asyncio.Event(), asyncio.Event()
    await stage.serve({"Serve": _waiting_handler(stage, has_begun, has_ended)})
    call = method(stage.channel(), "Serve", "stream_stream")()
    reading = asyncio.create_task(end_of(call.read()))
    await has_begun.wait()
    stage.notes["client"] += [call.cancel(), await reading, await end_of(call.read()), call.done()]
    stage.notes["client"] += [await end_of(call.write(b"")), await end_of(call.done_writing()), call.cancel()]
    await has_ended.wait()


async def cancelled_after_half_close(stage: Stage) -> None:
    has_begun, has_ended = asyncio.Event(), asyncio.Event()
    await stage.serve({"Serve": _waiting_handler(stage, has_begun, has_ended, 1)})
    call = method(stage.channel(), "Serve", "stream_stream")()
    await call.write(b"a")
    await call.done_writing()
    stage.notes["client"].append(await end_of(call.read()))
    while "end of requests" not in stage.notes["handler"]:
        await asyncio.sleep(0.005)
    stage.notes["client"] += [call.cancel(), await end_of(call.read())]
    await has_ended.wait()


async def cancelled_with_messages_unread(stage: Stage) -> None:
    has_begun, has_ended = asyncio.Event(), asyncio.Event()
    await stage.serve({"Serve": _waiting_handler(stage, has_begun, has_ended, 3)})
    call = method(stage.channel(), "Serve", "stream_stream")()
    stage.notes["client"].append(await end_of(call.read()))
    await has_begun.wait()
    await asyncio.sleep(0.05)  # the others have arrived
    stage.notes["client"] += [call.cancel(), await end_of(call.read()), await end_of(call.read())]
    await has_ended.wait()


async def reading_task_cancelled(stage: Stage) -> None:
    has_begun, has_ended = asyncio.Event(), asyncio.Event()
    await stage.serve({"Serve": _waiting_handler(stage, has_begun, has_ended)})
    call = method(stage.channel(), "Serve", "stream_stream")()

    async def read() -> None:
        try:
            await call.read()
        except asyncio.CancelledError:
            stage.notes["client"].append("cancelled")
            raise

    reading = asyncio.create_task(read())
    await has_begun.wait()
    reading.cancel()
    await asyncio.wait([reading])
    stage.notes["client"] += [reading.cancelled(), call.done(), await end_of(call.read())]
    await has_ended.wait()


async def loop_left_early(stage: Stage) -> None:
    """Who leaves `async for` has not ended the call; `cancel` does."""
    has_begun, has_ended = asyncio.Event(), asyncio.Event()
    await stage.serve({"Serve": _waiting_handler(stage, has_begun, has_ended, 3)})
    call = method(stage.channel(), "Serve", "stream_stream")()
    async for message in call:
        stage.notes["client"].append(message)
        break
    async for message in call:
        stage.notes["client"].append(message)
        break
    await has_begun.wait()
    stage.notes["client"] += [call.done(), call.cancel()]
    await has_ended.wait()


async def deadline_of_a_stream(stage: Stage) -> None:
    has_begun, has_ended = asyncio.Event(), asyncio.Event()
    await stage.serve({"Serve": _waiting_handler(stage, has_begun, has_ended, 1)})
    calling = method(await connected(stage), "Serve", "stream_stream")
    call = calling(timeout=LONG_ENOUGH_S)
    stage.notes["client"] += [await end_of(call.read()) for _ in range(3)]
    stage.notes["client"].append(await end_of(call.write(b"")))
    await has_ended.wait()


async def slow_client(stage: Stage) -> None:
    """A handler writes more than there is room for, until the client reads."""
    written: list[int] = []

    async def serve(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        for number in range(NUM_LARGE):
            yield LARGE
            written.append(number)

    await stage.serve({"Serve": down(serve)})
    call = method(stage.channel(), "Serve", "unary_stream")(b"")
    stage.notes["client"].append(await call.read() == LARGE)
    await _until_nothing_happens(written)
    stage.notes["handler"].append(len(written) < NUM_LARGE)
    stage.notes["client"].append(len([message async for message in _rest(call)]))
    stage.notes["handler"].append(len(written))


async def slow_handler(stage: Stage) -> None:
    """A client writes more than there is room for, until the handler reads."""
    may_read, written = asyncio.Event(), []

    async def serve(requests: Requests, context: Any) -> AsyncGenerator[bytes, None]:
        await may_read.wait()
        stage.notes["handler"].append(len([request async for request in requests]))
        yield b"done"

    await stage.serve({"Serve": both(serve)})
    call = method(stage.channel(), "Serve", "stream_stream")()

    async def write() -> None:
        for number in range(NUM_LARGE):
            await call.write(LARGE)
            written.append(number)
        await call.done_writing()

    writing = asyncio.create_task(write())
    await _until_nothing_happens(written)
    stage.notes["client"].append(len(written) < NUM_LARGE)
    may_read.set()
    await writing
    stage.notes["client"] += [len(written), await end_of(call.read()), await end_of(call.read())]


async def writer_held_up_when_the_call_ends(stage: Stage) -> None:
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    async def serve(requests: Requests, context: Any) -> AsyncGenerator[bytes, None]:
        try:
            has_begun.set()
            await asyncio.Event().wait()
            yield b""
        finally:
            has_ended.set()

    await stage.serve({"Serve": both(serve)})
    call = method(stage.channel(), "Serve", "stream_stream")()
    written: list[str] = []

    async def write() -> None:
        while len(written) < NUM_LARGE and not call.done():
            written.append(await end_of(call.write(LARGE)))

    writing = asyncio.create_task(write())
    await has_begun.wait()
    await _until_nothing_happens(written)
    stage.notes["client"] += [len(written) < NUM_LARGE, call.cancel()]
    await writing
    stage.notes["client"] += [set(written[:-1]) <= {"None"}, written[-1], await end_of(call.read())]
    await has_ended.wait()


async def _until_nothing_happens(written: list[Any]) -> None:
    number = -1
    while number != len(written):
        number = len(written)
        await asyncio.sleep(HELD_UP_S)


async def _rest(call: Any) -> AsyncGenerator[bytes, None]:
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message


def _named(scene: Scene, name: str) -> Scene:
    scene.__name__ = name
    return scene


_unavailable = UnavailableError("no executor is attached")

SCENES: tuple[Scene, ...] = (
    messages_in_order,
    read_after_the_end,
    no_message,
    there_and_back,
    all_written_before_the_first_read,
    headers_before_the_first_message,
    two_streams_at_once,
    handler_writes_by_itself,
    _named(partial(ends_with_an_error, error=None, by_hand=True), "ends_with_an_abort"),
    _named(partial(ends_with_an_error, error=ValueError("it is wrong"), by_hand=True), "ends_with_a_bug"),
    _named(partial(ends_with_an_error, error=_unavailable, by_hand=False), "ends_with_an_error_of_ours"),
    early_answer,
    early_error,
    cancelled_while_reading,
    cancelled_after_half_close,
    cancelled_with_messages_unread,
    reading_task_cancelled,
    loop_left_early,
    deadline_of_a_stream,
    slow_client,
    slow_handler,
    writer_held_up_when_the_call_ends,
)
