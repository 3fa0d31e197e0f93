import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from octavo.values.status_details import DETAILS_KEY
from octavo_shared import errors
from octavo_shared.grpc.grpc_status import StatusInterceptor, failure_text, rpc_status, status_code
from tests.support.each_row import each_row

EXAMPLES: list[tuple[Exception, grpc.StatusCode]] = [
    (errors.InvalidFieldError("sampling_params.top_p", 2, "at most 1"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.MalformedMessageError(), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.RequestExistsError("r1"), grpc.StatusCode.ALREADY_EXISTS),
    (errors.UnknownNameError("slot 3 is not live"), grpc.StatusCode.NOT_FOUND),
    (errors.FencedError("stale"), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.UnauthenticatedError("no token"), grpc.StatusCode.UNAUTHENTICATED),
    (errors.PermissionDeniedError("another tenant"), grpc.StatusCode.PERMISSION_DENIED),
    (errors.QueueFullError(10, 1.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.TokenQuotaError("red", 9, 60, 3, 6.0), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.CacheTooSmallError("x"), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.DeadlineTooShortError("take", 20.0, 1.0), grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.AddressError("--listen", "a:1"), grpc.StatusCode.UNAVAILABLE),
    (errors.LostTooOftenError(4), grpc.StatusCode.UNAVAILABLE),
    (errors.DrainingError("it drains"), grpc.StatusCode.UNAVAILABLE),
    (errors.NoExecutorError("none", "it loads"), grpc.StatusCode.UNAVAILABLE),
    (errors.SlowCallerError(60), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.TooManyUntakenError(16_384), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.RequestAbortedError("aborted"), grpc.StatusCode.ABORTED),
    (errors.WeightsChangedError(), grpc.StatusCode.ABORTED),
    (errors.NotFiniteError("output 0 are not finite at token 17"), grpc.StatusCode.INTERNAL),
    (errors.PooledNotFiniteError("the vector of the text"), grpc.StatusCode.INTERNAL),
    (errors.NothingAllowedError("output 0 at token 17"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.GrammarTooCostlyError("output 0 at token 17"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.GrammarNotFollowedError("output 0 at token 17"), grpc.StatusCode.INTERNAL),
    (errors.GrammarNotLoadedError("it is not UTF-8"), grpc.StatusCode.INTERNAL),
    (errors.AdapterNotLoadedError("it is not there"), grpc.StatusCode.INTERNAL),
    (errors.InvalidStepError("slot 9"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.StepGapError("step 2 is missing"), grpc.StatusCode.OUT_OF_RANGE),
    (errors.StepFailedError("step 2 failed"), grpc.StatusCode.INTERNAL),
    (errors.ExecutorFaultError("nonsense"), grpc.StatusCode.UNAVAILABLE),
    (errors.DeviceLostError("device 0 is lost"), grpc.StatusCode.INTERNAL),
    (errors.TokenizerFailedError("it panicked"), grpc.StatusCode.INTERNAL),
    (errors.TokenizerFileError("tokenizer.json", "is missing"), grpc.StatusCode.INTERNAL),
    (errors.UnknownArchitectureError("no such model"), grpc.StatusCode.INTERNAL),
]


@each_row(*EXAMPLES)
def test_each_error_has_its_code_and_its_own_sentence(error: Exception, code: grpc.StatusCode) -> None:
    assert status_code(error) is code
    assert (rpc_status(error).code, rpc_status(error).message) == (code.value[0], str(error))


def test_no_leaf_of_the_tree_is_forgotten() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    leaves = {cls for cls in classes if not any(other is not cls and issubclass(other, cls) for other in classes)}
    assert leaves <= {type(error) for error, _ in EXAMPLES}


@each_row(AssertionError("state"), KeyError("x"), ZeroDivisionError())
def test_unexpected_errors_are_internal(error: Exception) -> None:
    assert status_code(error) is grpc.StatusCode.INTERNAL


def test_unexpected_errors_show_their_class_and_one_line() -> None:
    assert rpc_status(AssertionError("first\nsecond")).message == "internal error: AssertionError: first"


def test_unexpected_errors_are_cut_short() -> None:
    assert len(rpc_status(ValueError("x" * 10_000)).message) <= 300


def test_a_wrong_field_travels_as_bad_request() -> None:
    detail = error_details_pb2.BadRequest()
    assert rpc_status(errors.InvalidFieldError("prompt", "''", "not empty")).details[0].Unpack(detail)
    assert detail.field_violations[0].field == "prompt"


def test_a_full_queue_travels_with_retry_info() -> None:
    detail = error_details_pb2.RetryInfo()
    assert rpc_status(errors.QueueFullError(10, 1.5)).details[0].Unpack(detail)
    assert detail.retry_delay.ToMilliseconds() == 1500


class RaisingHandlers(grpc.GenericRpcHandler):
    """One method of each kind; every one raises `error`, the streaming ones after one message."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.num_closed = 0

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        kinds: dict[str, Callable[[], Any]] = {
            "/test/UnaryUnary": lambda: grpc.unary_unary_rpc_method_handler(self.answer),
            "/test/UnaryStream": lambda: grpc.unary_stream_rpc_method_handler(self.answer_many),
            "/test/StreamStream": lambda: grpc.stream_stream_rpc_method_handler(self.answer_stream),
            "/test/Aborting": lambda: grpc.unary_unary_rpc_method_handler(self.abort),
        }
        make = kinds.get(handler_call_details.method)
        return make() if make else None

    async def answer(self, request: bytes, context: Any) -> bytes:
        raise self.error

    async def answer_stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Take the request first: a client that still sends when the call ends sees INTERNAL."""
        async for request in requests:
            async for answer in self.answer_many(request, context):
                yield answer

    async def answer_many(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"one"
            raise self.error
        finally:
            self.num_closed += 1

    async def abort(self, request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.DATA_LOSS, "own words")
        return b""


@asynccontextmanager
async def serving(handlers: RaisingHandlers) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(handlers=[handlers], interceptors=[StatusInterceptor()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def failure_of(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def call(channel: grpc.aio.Channel, method: str) -> object:
    unary_unary: Any = channel.unary_unary(f"/test/{method}")
    return await unary_unary(b"")


async def test_unary_calls_end_with_status_and_details() -> None:
    async with serving(RaisingHandlers(errors.InvalidFieldError("n", 2, "1"))) as channel:
        error = await failure_of(call(channel, "UnaryUnary"))
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "n is 2; it must be 1")
    metadata: Any = error.trailing_metadata()
    status = status_pb2.Status.FromString(metadata[DETAILS_KEY])
    assert (status.code, len(status.details)) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], 2)


@each_row("UnaryStream", "StreamStream")
async def test_streams_deliver_first_and_end_with_the_status(method: str) -> None:
    handlers = RaisingHandlers(errors.RequestAbortedError("by an operator"))
    async with serving(handlers) as channel:
        kinds: Any = channel
        if method == "UnaryStream":
            stream = kinds.unary_stream(f"/test/{method}")(b"")
        else:
            stream = kinds.stream_stream(f"/test/{method}")(iter([b""]))
        assert await stream.read() == b"one"
        error = await failure_of(stream.read())
    assert error.code() is grpc.StatusCode.ABORTED
    assert handlers.num_closed == 1


async def test_a_status_that_the_handler_set_itself_is_kept() -> None:
    async with serving(RaisingHandlers(ValueError())) as channel:
        error = await failure_of(call(channel, "Aborting"))
    assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, "own words")


async def test_unknown_methods_are_unimplemented() -> None:
    async with serving(RaisingHandlers(ValueError())) as channel:
        error = await failure_of(call(channel, "Nothing"))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_only_unexpected_errors_are_logged_with_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        async with serving(RaisingHandlers(errors.UnavailableError("draining"))) as channel:
            await failure_of(call(channel, "UnaryUnary"))
        assert caplog.records == []
        async with serving(RaisingHandlers(AssertionError("free + used != total"))) as channel:
            await failure_of(call(channel, "UnaryUnary"))
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.getMessage() == "event=rpc_failed method=/test/UnaryUnary"


@each_row(
    (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "
        "Failed to connect to remote host: Connection refused",
        "UNAVAILABLE: connection refused",
    ),
    (
        "failed to connect to all addresses; last error: UNAVAILABLE: ipv6:[::1]:50061: "
        "Failed to connect to remote host: connect: No route to host (113)",
        "UNAVAILABLE: no route to host",
    ),
    ("failed to connect to all addresses; last error: FD Shutdown", "UNAVAILABLE: FD Shutdown"),
    ("the executor is loading", "UNAVAILABLE: the executor is loading"),
    ("", "UNAVAILABLE: no message was given"),
)
def test_a_failure_is_told_without_all_that_was_tried(details: str, text: str) -> None:
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
    assert failure_text(error) == text
