"""A scheduler for the client's tests: a GenerationService whose answers are scripted by the prompt."""

import asyncio
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest_asyncio
from google.protobuf import duration_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from octavo.generation.v1 import generation_pb2, generation_service_pb2, generation_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

WORDS = ("The", " sky", " is", " blue")


@dataclass
class StandIn(generation_service_pb2_grpc.GenerationServiceServicer):
    """Answers every prompt with WORDS, token ids 0 to 3, n times; or as the prompt's text says.

    Further outputs have their number before each word. With best_of or beam_width they are ranked.
    "refuse", "exists", "full", "drain", "lost", "aborted", "cut", "bug" end in that error; "endless" never ends.
    "break" ends in an error after the first word. "silent" waits after it until `go_on` is set. "long" ends by length.
    A silent chat has no word until `go_on` is set.
    """

    has_chat_template: bool = False
    is_endless_chat: bool = False
    is_silent_chat: bool = False
    address: str = ""
    chat_wish: str = ""  # stands for the prompt's text in a chat
    server: grpc.aio.Server = field(default_factory=grpc.aio.server)
    requests: list[generation_service_pb2.GenerateRequest] = field(default_factory=list)
    tokenize_requests: list[generation_service_pb2.TokenizeRequest] = field(default_factory=list)
    detokenize_requests: list[generation_service_pb2.DetokenizeRequest] = field(default_factory=list)
    aborted_ids: list[str] = field(default_factory=list)
    num_whole_calls: int = 0  # that were not cancelled
    call_began: asyncio.Event = field(default_factory=asyncio.Event)
    call_ended: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    health: Any = field(default_factory=lambda: health.aio.HealthServicer())  # type: ignore[attr-defined]

    async def Generate(  # noqa: N802
        self, request: generation_service_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_service_pb2.GenerateResponse]:
        self.requests.append(request)
        self.call_began.set()
        wish = self.chat_wish if request.HasField("messages") else request.text
        await self._fail_if_asked(wish, context)
        try:
            yield generation_service_pb2.GenerateResponse(
                accepted=generation_service_pb2.Accepted(
                    request_id=request.request_id or "made-by-server", num_prompt_tokens=7
                )
            )
            if self.is_silent_chat and request.HasField("messages"):
                await self.go_on.wait()
            while request.text == "endless" or (self.is_endless_chat and request.HasField("messages")):
                yield _delta(0, 0, "again ")
                await asyncio.sleep(0.01)  # the pace of a slow model
            params = request.sampling_params
            for token_id in range(len(WORDS)):
                for output_index in range(params.n or 1):
                    yield _delta(output_index, token_id, _words(output_index)[token_id])
                if wish == "break":
                    await context.abort(grpc.StatusCode.INTERNAL, "a broken invariant")
                if request.text == "silent":
                    await self.go_on.wait()
            if request.text != "cut":
                yield _finished(params, is_cut=request.text == "long")
                has_waited = asyncio.Event()  # the status comes behind the last event
                asyncio.get_running_loop().call_later(0.02, has_waited.set)
                await has_waited.wait()
            self.num_whole_calls += 1
        finally:
            self.call_ended.set()

    async def StreamRequests(  # noqa: N802
        self, requests: AsyncIterator[generation_service_pb2.StreamRequestsRequest], context: Context
    ) -> AsyncIterator[generation_service_pb2.StreamRequestsResponse]:
        """Answer each request as Generate does, one after the other."""
        await context.send_initial_metadata(())
        async for asked in requests:
            if asked.HasField("submit"):
                async for response in self._numbered(asked, context):
                    yield response

    async def _numbered(
        self, asked: generation_service_pb2.StreamRequestsRequest, context: Context
    ) -> AsyncIterator[generation_service_pb2.StreamRequestsResponse]:
        number, inner = asked.number, _CallInStream()
        response = generation_service_pb2.StreamRequestsResponse
        try:
            async for event in self.Generate(asked.submit, inner):  # type: ignore[arg-type]
                match event.WhichOneof("event"):
                    case "accepted":
                        yield response(
                            accepted=[generation_service_pb2.RequestAccepted(number=number, accepted=event.accepted)]
                        )
                    case "delta":
                        deltas = generation_service_pb2.RequestDeltas(
                            numbers=[number],
                            output_indexes=[event.delta.output_index],
                            token_ids=event.delta.token_ids,
                            texts=[event.delta.text],
                        )
                        yield response(deltas=deltas)
                    case "finished":
                        yield response(
                            finished=[generation_service_pb2.RequestEnd(number=number, finished=event.finished)]
                        )
        except _EndedError:
            if inner.status.code == grpc.StatusCode.UNAVAILABLE.value[0]:
                await context.abort(grpc.StatusCode.UNAVAILABLE, inner.status.message)
            failed = generation_service_pb2.RequestFailed(
                number=number,
                code=inner.status.code,
                message=inner.status.message,
                details=inner.status.details,
            )
            yield response(failed=[failed])

    async def Abort(  # noqa: N802
        self, request: generation_service_pb2.AbortRequest, context: Context
    ) -> generation_service_pb2.AbortResponse:
        self.aborted_ids.append(request.request_id)
        return generation_service_pb2.AbortResponse(was_live=request.request_id == "live")

    async def GetModel(  # noqa: N802
        self, request: generation_service_pb2.GetModelRequest, context: Context
    ) -> generation_service_pb2.GetModelResponse:
        return generation_service_pb2.GetModelResponse(
            model_id="tiny",
            max_model_len=64,
            vocab_size=4,
            has_chat_template=self.has_chat_template,
            dtype="float32",
            adapters=["poet"],
        )

    async def Embed(  # noqa: N802
        self, request: generation_service_pb2.EmbedRequest, context: Context
    ) -> generation_service_pb2.EmbedResponse:
        """Return the length of each text as its vector."""
        await self._fail_if_asked(request.inputs[0].text, context)
        lengths = [float(len(each.text)) for each in request.inputs]
        values = struct.pack(f"<{len(lengths)}f", *lengths)
        return generation_service_pb2.EmbedResponse(values=values, num_dimensions=1, num_prompt_tokens=len(lengths))

    async def Score(  # noqa: N802
        self, request: generation_service_pb2.ScoreRequest, context: Context
    ) -> generation_service_pb2.ScoreResponse:
        """Return a score too few."""
        return generation_service_pb2.ScoreResponse(values=b"", num_scores=1)

    async def Tokenize(  # noqa: N802
        self, request: generation_service_pb2.TokenizeRequest, context: Context
    ) -> generation_service_pb2.TokenizeResponse:
        self.tokenize_requests.append(request)
        await self._fail_if_asked(request.text, context)
        text = request.text or "".join(turn.content for turn in request.messages.messages)
        return generation_service_pb2.TokenizeResponse(token_ids=text.encode(), max_model_len=64)

    async def Detokenize(  # noqa: N802
        self, request: generation_service_pb2.DetokenizeRequest, context: Context
    ) -> generation_service_pb2.DetokenizeResponse:
        self.detokenize_requests.append(request)
        return generation_service_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())

    async def stop(self) -> None:
        """End every call and listen no more."""
        await self.server.stop(0)

    async def set_ready(self, is_ready: bool) -> None:
        statuses = health_pb2.HealthCheckResponse
        await self.health.set("readiness", statuses.SERVING if is_ready else statuses.NOT_SERVING)

    async def _fail_if_asked(self, wish: str, context: Context) -> None:
        violation = error_details_pb2.BadRequest.FieldViolation(field="sampling_params.top_p")
        delay = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=2, nanos=500_000_000))
        failures: dict[str, tuple[grpc.StatusCode, str, message.Message | None]] = {
            "refuse": (
                grpc.StatusCode.INVALID_ARGUMENT,
                "sampling_params.top_p is 2; it must be at most 1",
                error_details_pb2.BadRequest(field_violations=[violation]),
            ),
            "exists": (grpc.StatusCode.ALREADY_EXISTS, "request_id 'a' is in use by a live request", None),
            "full": (grpc.StatusCode.RESOURCE_EXHAUSTED, "the waiting queue is full", delay),
            "unknown": (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", None),
            "drain": (
                grpc.StatusCode.UNAVAILABLE,
                "the scheduler is draining",
                error_details_pb2.ErrorInfo(reason="DRAINING", domain="octavo"),
            ),
            "lost": (grpc.StatusCode.UNAVAILABLE, "Stream removed (Socket closed)", None),
            "aborted": (grpc.StatusCode.ABORTED, "the request was aborted", None),
            "bug": (grpc.StatusCode.INTERNAL, "a broken invariant", None),
        }
        if wish in failures:
            code, text, detail = failures[wish]
            await context.abort(code, text, _details_metadata(code, text, detail))


class _EndedError(Exception):
    """A request of a stream was ended."""


class _CallInStream:
    """The context of one request of a stream: keeps the status that it ends with."""

    def __init__(self) -> None:
        self.status = status_pb2.Status()

    async def abort(self, code: grpc.StatusCode, text: str, metadata: tuple[tuple[str, bytes], ...] = ()) -> None:
        self.status = status_pb2.Status.FromString(metadata[0][1]) if metadata else status_pb2.Status()
        self.status.code, self.status.message = code.value[0], text
        raise _EndedError


@pytest_asyncio.fixture
async def stand_in() -> AsyncIterator[StandIn]:
    servicer = StandIn()
    server = servicer.server
    generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)  # type: ignore[no-untyped-call]
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer
    await server.stop(0)


def _details_metadata(
    code: grpc.StatusCode, text: str, detail: message.Message | None
) -> tuple[tuple[str, bytes], ...]:
    if detail is None:
        return ()
    status = status_pb2.Status(code=code.value[0], message=text)
    status.details.add().Pack(detail)
    return (("grpc-status-details-bin", status.SerializeToString()),)


def _words(output_index: int) -> list[str]:
    return [f"{output_index or ''}{word}" for word in WORDS]


def _delta(output_index: int, token_id: int, text: str) -> generation_service_pb2.GenerateResponse:
    delta = generation_service_pb2.OutputDelta(
        output_index=output_index, text=text, token_ids=[token_id], logprobs=[-0.5]
    )
    return generation_service_pb2.GenerateResponse(delta=delta)


def _finished(params: generation_pb2.SamplingParams, *, is_cut: bool) -> generation_service_pb2.GenerateResponse:
    outputs = [
        generation_pb2.Output(
            output_index=index,
            text="".join(_words(index)),
            token_ids=range(len(WORDS)),
            logprobs=[-0.5] * len(WORDS),
            finish_reason=generation_pb2.FINISH_REASON_STOP,
            stop_token_id=3,
            cumulative_logprob=-2.0 - index if params.best_of or params.beam_width else None,
            beam_score=-0.5 - index if params.beam_width else None,
        )
        for index in range(params.n or 1)
    ]
    if is_cut:
        for output in outputs:
            output.finish_reason = generation_pb2.FINISH_REASON_LENGTH
            output.ClearField("stop_token_id")
    usage = generation_pb2.Usage(
        num_prompt_tokens=7, num_output_tokens=len(WORDS) * len(outputs), num_cached_tokens=params.n
    )
    return generation_service_pb2.GenerateResponse(
        finished=generation_service_pb2.RequestFinished(outputs=outputs, usage=usage)
    )
