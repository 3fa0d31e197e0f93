"""The async client of a scheduler: one channel, typed events in, typed errors out.

Values are in octavo/outputs.py, errors in octavo/errors.py. A client never sends a request twice that a scheduler may
have begun: its prompt could be answered twice. Who wants retries catches `OverloadedError` and `UnavailableError` and
decides.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OctavoError,
    TlsHandshakeError,
    UnavailableError,
)
from octavo.generation.v1 import generation_service_pb2, generation_service_pb2_grpc
from octavo.many_requests import run_many
from octavo.outputs import (
    Accepted,
    Event,
    FailedRequest,
    Finished,
    ModelInfo,
    Prompt,
    RequestOutput,
    TokenizedPrompt,
    event_from_proto,
    model_from_proto,
)
from octavo.prompts import detokenize_request, generate_request, tokenize_request
from octavo.request_stream import RequestStream
from octavo.sampling_params import SamplingParams, list_params, one_for_each, with_keywords
from octavo.scheduler_channel import SchedulerChannel
from octavo.streamed_answer import StreamedAnswer
from octavo.tls import TlsOptions

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response")

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_ADMIN_ADDRESS = "127.0.0.1:50052"

# Under this name the scheduler's grpc.health.v1 service says whether it can take requests.
_READINESS_SERVICE = "readiness"

# gRPC counts nanoseconds in 64 bits: a limit of more than 292 years would be over at once.
_LONGEST_TIMEOUT_S = 1e9

# What a scheduler calls the field lean_finished that does not know it.
_LEAN_FINISHED_UNKNOWN = "field 10 of GenerateRequest"

# Pause before a watch of the readiness that ended is opened again.
_WATCH_AGAIN_S = 0.2


class Client(SchedulerChannel):
    """Talks to one scheduler; use it as `async with Client(address) as client`.

    It belongs to the event loop in which it is opened, and serves any number of requests at once.

    Args:
        address: HOST:PORT of the scheduler, or any gRPC target.
        tls: How to speak TLS; None: plaintext. The files are read when the client is opened.
        token: Who we are, for a scheduler with --tokens-file; over plaintext it goes to this machine only.

    Raises:
        ConnectionOptionsError: the address is none, or the token cannot be sent; when the client is opened, also: a
            file cannot be used.
    """

    channel_options = (
        # Find a scheduler that vanished without a word. It allows pings this often (shared/grpc_server.py),
        # also while a request waits in the queue and nothing else is sent.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
    )

    def __init__(
        self, address: str = DEFAULT_ADDRESS, *, tls: TlsOptions | None = None, token: str | None = None
    ) -> None:
        super().__init__(address, tls=tls, token=token)
        self._takes_lean_finished = True  # the scheduler

    def _to_octavo_error(self, error: grpc.aio.AioRpcError) -> OctavoError:
        """Add which port was dialled: what answers there may be another one of Octavo's, or no gRPC server at all."""
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return InternalError(
                f"the server at {self.address} does not know this call; give a scheduler's --listen, by default "
                f"{DEFAULT_ADDRESS}, or update that scheduler"
            )
        return super()._to_octavo_error(error)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        include_provenance: bool = False,
        timeout_s: float | None = None,
        **keywords: Any,
    ) -> AsyncGenerator[Event, None]:
        """Run one prompt and yield its events: one Accepted, any number of Delta, one Finished.

        With `prompt_logprobs`, PromptLogprobs come before the first Delta.

        Leaving the loop early cancels the call, and the scheduler aborts the request. Where that has to
        happen at once, wrap the iterator in `contextlib.aclosing`.

        Args:
            prompt: Text, token ids (also as an array of numpy or torch), or a conversation.
            sampling_params: How to choose tokens; None: all defaults.
            request_id: Unique among the live requests; None: the scheduler makes one.
            priority: A lower number is served first.
            tenant: On whose account the request runs; tenants share the scheduler fairly.
            cache_salt: Prompts share cached blocks only with equal `tenant` and `cache_salt`.
            include_provenance: Whether to say which kind of executor made which tokens: `Output.provenance`.
            timeout_s: Time limit for the whole answer, in seconds; None: none.
            keywords: Fields of SamplingParams, such as `temperature=0`; they win over those of `sampling_params`.

        Raises:
            OctavoError: one of the tree in octavo/errors.py, also after some events.
        """
        request = generate_request(
            prompt,
            with_keywords(sampling_params, keywords, function="stream"),
            request_id=request_id or "",
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
        )
        if timeout_s is not None:
            timeout_s = _grpc_timeout(timeout_s)
        request.include_provenance = include_provenance
        request.lean_finished = self._takes_lean_finished
        try:
            async with aclosing(self._events(request, timeout_s)) as events:
                async for event in events:
                    yield event
            return
        except InvalidRequestError as error:
            if not request.lean_finished or error.field != _LEAN_FINISHED_UNKNOWN:
                raise
        # A scheduler of 0.1.0: it has refused the request, and repeats everything anyway.
        request.lean_finished = self._takes_lean_finished = False
        async with aclosing(self._events(request, timeout_s)) as events:
            async for event in events:
                yield event

    async def _events(
        self, request: generation_service_pb2.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[Event, None]:
        """Send a request and yield its events."""
        call = self._stub().Generate(request, timeout=timeout_s, metadata=self._metadata)
        answer = StreamedAnswer() if request.lean_finished else None
        is_finished = False
        try:
            async for response in call:
                event = event_from_proto(response)
                is_finished = isinstance(event, Finished)
                yield event if answer is None else answer.take(event)
        except grpc.aio.AioRpcError as error:
            raise self._to_octavo_error(error) from error
        finally:
            call.cancel()  # does nothing to a call that has ended
        if not is_finished:
            raise InternalError("the scheduler ended the stream without a last event")

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        include_provenance: bool = False,
        timeout_s: float | None = None,
        **keywords: Any,
    ) -> RequestOutput:
        """Run one prompt and return all of it; arguments and errors are those of `stream`."""
        sampling_params = with_keywords(sampling_params, keywords, function="generate")
        accepted_id = request_id or ""
        async for event in self.stream(
            prompt,
            sampling_params,
            request_id=request_id,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            include_provenance=include_provenance,
            timeout_s=timeout_s,
        ):
            if isinstance(event, Accepted):
                accepted_id = event.request_id
            elif isinstance(event, Finished):
                return RequestOutput(
                    accepted_id,
                    prompt,
                    event.outputs,
                    event.usage,
                    event.prompt_logprobs,
                    event.continued_on_other_numerics,
                )
        raise AssertionError("stream() ends with a Finished event or raises")

    async def stream_many(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        include_text: bool = True,
        max_in_flight: int = 256,
        **keywords: Any,
    ) -> AsyncGenerator[tuple[int, Event | FailedRequest], None]:
        """Run many prompts on one stream and yield (index of the prompt, event) as they come.

        The events of a prompt are those of `stream`. One that is refused or fails has a FailedRequest as its last
        event, and the others go on; what a full queue refuses is sent again later.

        Args:
            prompts: As for `stream`, each of them.
            sampling_params: For all prompts, or one for each; None: all defaults.
            priority: A lower number is served first.
            tenant: On whose account the requests run.
            cache_salt: Prompts share cached blocks only with equal `tenant` and `cache_salt`.
            include_text: Whether the events have text; without it they have token ids, which costs least.
            max_in_flight: How many requests the scheduler has at a time.
            keywords: Fields of SamplingParams; they win over those of `sampling_params`.

        Raises:
            InvalidRequestError: an argument is wrong; nothing was sent.
            OctavoError: the stream broke; prompts that had not ended have no last event.
        """
        if max_in_flight < 1:
            raise InvalidRequestError(f"max_in_flight is {max_in_flight}; it must be at least 1", field="max_in_flight")
        params_of_all = list_params(sampling_params, keywords, "stream_many")
        each = one_for_each(params_of_all, len(prompts), "prompts")
        requests = [
            (prompt, generate_request(prompt, params, priority=priority, tenant=tenant, cache_salt=cache_salt))
            for prompt, params in zip(prompts, each, strict=True)
        ]
        async with self.request_stream() as stream:
            running = run_many(stream, requests, max_in_flight=max_in_flight, include_text=include_text)
            async with aclosing(running) as events:
                async for index, event in events:
                    yield index, event

    def request_stream(self) -> RequestStream:
        """Return a stream for any number of requests, used as `async with`: for callers with many of them.

        A request on it costs no call, and one message brings what a step made of all of them.
        """
        return RequestStream(lambda: self._stub().StreamRequests(metadata=self._metadata), self._to_octavo_error)

    async def abort(self, request_id: str) -> bool:
        """End a request; with a token, one of its tenant. Returns whether it was live; unknown ids are fine."""
        request = generation_service_pb2.AbortRequest(request_id=request_id)
        return (await self._answer(self._stub().Abort, request)).was_live

    async def get_model(self) -> ModelInfo:
        """Describe the model that answers.

        Raises:
            UnavailableError: no executor is attached yet.
        """
        return model_from_proto(await self._answer(self._stub().GetModel, generation_service_pb2.GetModelRequest()))

    async def tokenize(
        self, prompt: str | Sequence[Mapping[str, object]], *, add_special_tokens: bool | None = None
    ) -> TokenizedPrompt:
        """Return the token ids that `generate` would make of a prompt.

        Args:
            prompt: Text, or a conversation for the model's chat template.
            add_special_tokens: Whether a text gets the special tokens that the tokenizer adds; None: yes, as in
                `generate`. In a conversation the template writes them.

        Raises:
            OctavoError: `generate` would refuse the prompt, too; or the model has no tokenizer.
        """
        request = tokenize_request(prompt, add_special_tokens)
        response = await self._answer(self._stub().Tokenize, request)
        return TokenizedPrompt(tuple(response.token_ids), response.max_model_len)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None) -> str:
        """Return the text of token ids.

        Args:
            token_ids: The ids, also as an array of numpy or torch.
            skip_special_tokens: Whether special tokens stay out of the text; None: yes, as in `generate`.

        Raises:
            OctavoError: the model does not know a token, or has no tokenizer.
        """
        request = detokenize_request(token_ids, skip_special_tokens)
        return (await self._answer(self._stub().Detokenize, request)).text

    async def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Return as soon as the scheduler takes requests: it runs and an executor is attached.

        Raises:
            DeadlineError: it did not within `timeout_s` seconds.
        """
        trouble = ""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await self._watch_readiness()
                        return
                    except UnavailableError as error:  # it is not there yet, or it went away while we watched
                        trouble = f" ({error})" if isinstance(error, TlsHandshakeError) else ""
                    await asyncio.sleep(_WATCH_AGAIN_S)
        except TimeoutError:
            text = f"the scheduler at {self.address} was not ready within {timeout_s:g} s{trouble}"
            raise DeadlineError(text) from None

    async def _watch_readiness(self) -> None:
        """Return once the scheduler is ready. Raises UnavailableError: it ended the watch, or does not answer."""
        request = health_pb2.HealthCheckRequest(service=_READINESS_SERVICE)
        stub = health_pb2_grpc.HealthStub(self._open_channel())  # type: ignore[no-untyped-call]
        watch = stub.Watch(request)
        try:
            async for response in watch:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.aio.AioRpcError as error:
            raise self._to_octavo_error(error) from error
        finally:
            watch.cancel()
        raise UnavailableError(f"the scheduler at {self.address} ended the watch")

    async def _answer(
        self, method: Callable[..., grpc.aio.UnaryUnaryCall[_Request, _Response]], request: _Request
    ) -> _Response:
        """Return the answer to a call that has one."""
        try:
            return await method(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._to_octavo_error(error) from error

    def _stub(self) -> "generation_service_pb2_grpc.GenerationServiceAsyncStub":  # quoted: only the type stub has it
        return generation_service_pb2_grpc.GenerationServiceStub(self._open_channel())


def _grpc_timeout(timeout_s: object) -> float:
    """Return a time limit as gRPC can count it; one that has passed already is one too."""
    if not isinstance(timeout_s, int | float) or math.isnan(timeout_s):
        raise InvalidRequestError(f"timeout_s is {timeout_s!r}; it must be a number of seconds", field="timeout_s")
    return min(timeout_s, _LONGEST_TIMEOUT_S)
