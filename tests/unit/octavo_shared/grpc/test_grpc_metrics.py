"""What is counted of calls is what their clients saw."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import pytest

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.generation.v1 import generation_service_pb2_grpc as pb_grpc
from octavo_shared.errors import QueueFullError
from octavo_shared.grpc.grpc_metrics import CallMetrics
from octavo_shared.grpc.grpc_server import GrpcServer
from octavo_shared.grpc.grpc_status import abort
from tests.support.each_row import each_row

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
GENERATE = ("server_stream", SERVICE, "Generate")
ABORT = ("unary", SERVICE, "Abort")


class Servicer(pb_grpc.GenerationServiceServicer):
    """Answers by the request's id."""

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: "grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]"
    ) -> AsyncIterator[pb.GenerateResponse]:
        for _ in range(3):
            yield pb.GenerateResponse()
        match request.request_id:
            case "full":
                raise QueueFullError(7, 1.0)
            case "bug":
                raise ZeroDivisionError
            case "aborts":
                await context.abort(grpc.StatusCode.DATA_LOSS, "gone")
            case "hangs":
                await asyncio.Event().wait()

    async def Abort(  # noqa: N802
        self, request: pb.AbortRequest, context: "grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse]"
    ) -> pb.AbortResponse:
        return pb.AbortResponse(was_live=True)

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, context: "grpc.aio.ServicerContext[pb.GetModelRequest, pb.GetModelResponse]"
    ) -> pb.GetModelResponse:
        return pb.GetModelResponse()

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: "grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse]"
    ) -> pb.TokenizeResponse:
        return pb.TokenizeResponse()

    async def StreamRequests(  # noqa: N802
        self,
        requests: AsyncIterator[pb.StreamRequestsRequest],
        context: "grpc.aio.ServicerContext[pb.StreamRequestsRequest, pb.StreamRequestsResponse]",
    ) -> AsyncIterator[pb.StreamRequestsResponse]:
        async for _ in requests:
            yield pb.StreamRequestsResponse()

    async def Detokenize(  # noqa: N802
        self,
        request: pb.DetokenizeRequest,
        context: "grpc.aio.ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse]",
    ) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse()

    async def Embed(  # noqa: N802
        self, request: pb.EmbedRequest, context: "grpc.aio.ServicerContext[pb.EmbedRequest, pb.EmbedResponse]"
    ) -> pb.EmbedResponse:
        return pb.EmbedResponse()

    async def Score(  # noqa: N802
        self, request: pb.ScoreRequest, context: "grpc.aio.ServicerContext[pb.ScoreRequest, pb.ScoreResponse]"
    ) -> pb.ScoreResponse:
        return pb.ScoreResponse()


class Refuses(grpc.aio.ServerInterceptor):
    """Stands where access control does."""

    async def intercept_service(self, continuation, handler_call_details):  # type: ignore[no-untyped-def]
        handler = await continuation(handler_call_details)
        if handler is None or handler.response_streaming:
            return handler

        async def refuse(request: object, context: "grpc.aio.ServicerContext[object, object]") -> object:
            await abort(context, QueueFullError(7, 1.0))

        return grpc.unary_unary_rpc_method_handler(refuse, handler.request_deserializer, handler.response_serializer)


@dataclass(slots=True)
class Bench:
    stub: "pb_grpc.GenerationServiceAsyncStub"
    channel: grpc.aio.Channel
    calls: CallMetrics

    def samples(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """The samples but the buckets, by name and labels' values."""
        return {
            (sample.name, tuple(sample.labels.values())): sample.value
            for family in self.calls.families()
            for sample in family.samples
            if "le" not in sample.labels
        }

    async def settled(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """The samples once every call that began has ended here too."""
        while True:
            found = self.samples()
            started = sum(value for (name, _), value in found.items() if name == "grpc_server_started_total")
            if started == sum(value for (name, _), value in found.items() if name == "grpc_server_handled_total"):
                return found
            await asyncio.sleep(0)


@asynccontextmanager
async def bench(*interceptors: grpc.aio.ServerInterceptor) -> AsyncIterator[Bench]:
    calls = CallMetrics()
    server = GrpcServer(
        listen="127.0.0.1:0",
        max_message_bytes=2**20,
        service_names=[SERVICE],
        call_metrics=calls,
        interceptors=interceptors,
    )
    pb_grpc.add_GenerationServiceServicer_to_server(Servicer(), server.server)
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        yield Bench(pb_grpc.GenerationServiceStub(channel), channel, calls)
    await server.stop(0)


async def code_of(bench: Bench, request_id: str, timeout_s: float | None = None) -> grpc.StatusCode:
    """Run a call; return the code that its client sees."""
    call = bench.stub.Generate(pb.GenerateRequest(request_id=request_id), timeout=timeout_s)
    with contextlib.suppress(grpc.aio.AioRpcError):
        [_ async for _ in call]
    return await call.code()


@each_row(("", "OK"), ("full", "RESOURCE_EXHAUSTED"), ("bug", "INTERNAL"), ("aborts", "DATA_LOSS"))
async def test_the_code_is_the_one_that_the_client_sees(request_id: str, code: str) -> None:
    async with bench() as running:
        assert (await code_of(running, request_id)).name == code
        samples = await running.settled()
    assert samples["grpc_server_handled_total", (*GENERATE, code)] == 1
    assert samples["grpc_server_started_total", GENERATE] == 1
    assert samples["grpc_server_msg_received_total", GENERATE] == 1
    assert samples["grpc_server_msg_sent_total", GENERATE] == 3
    assert samples["grpc_server_handling_seconds_count", GENERATE] == 1


async def test_a_call_past_its_deadline_is_counted_as_such() -> None:
    async with bench() as running:
        assert await code_of(running, "hangs", timeout_s=0.2) is grpc.StatusCode.DEADLINE_EXCEEDED
        samples = await running.settled()
    assert samples["grpc_server_handled_total", (*GENERATE, "DEADLINE_EXCEEDED")] == 1


async def test_a_client_that_leaves_is_counted_as_such() -> None:
    async with bench() as running:
        call = running.stub.Generate(pb.GenerateRequest(request_id="hangs"))
        await call.read()
        call.cancel()
        samples = await running.settled()
    assert samples["grpc_server_handled_total", (*GENERATE, "CANCELLED")] == 1


async def test_a_unary_call_has_one_message_each_way() -> None:
    async with bench() as running:
        await running.stub.Abort(pb.AbortRequest(request_id="a"))
        samples = await running.settled()
    assert samples["grpc_server_msg_received_total", ABORT] == 1
    assert samples["grpc_server_msg_sent_total", ABORT] == 1


async def test_what_an_interceptor_refuses_is_counted_with_its_status() -> None:
    async with bench(Refuses()) as running:
        with pytest.raises(grpc.aio.AioRpcError):
            await running.stub.Abort(pb.AbortRequest(request_id="a"))
        samples = await running.settled()
    assert samples["grpc_server_handled_total", (*ABORT, "RESOURCE_EXHAUSTED")] == 1
    assert samples["grpc_server_msg_sent_total", ABORT] == 0


async def test_methods_that_nobody_serves_make_no_labels() -> None:
    async with bench() as running:
        for path in (f"/{SERVICE}/Made", "/made.up.Service/Up"):
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = running.channel.unary_unary(path)
            with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
                await call(b"")
        assert running.samples() == {}


async def test_the_messages_of_a_streaming_client_are_counted() -> None:
    async with bench() as running:
        path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = running.channel.stream_stream(path)
        [_ async for _ in call(iter([b"\x3a\x00", b"\x3a\x00"]))]
        samples = await running.settled()
    labels = ("bidi_stream", "grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo")
    assert samples["grpc_server_msg_received_total", labels] == 2
    assert samples["grpc_server_msg_sent_total", labels] == 2


async def test_the_log_line_of_a_bug_names_the_request(caplog: pytest.LogCaptureFixture) -> None:
    async with bench() as running:
        await code_of(running, "bug")
    [message] = [record.getMessage() for record in caplog.records]
    assert message == f"event=rpc_failed method=/{SERVICE}/Generate request_id=bug"
