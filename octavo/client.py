"""The async client of a scheduler: one channel, typed events in, typed errors out.

Values are in octavo/outputs.py, errors in octavo/errors.py. When a call breaks, the client goes on with its answer in
another one (octavo/resumption.py): callers get each token once, and notice a pause. What no scheduler has accepted is
sent again to another address only: who wants more catches `OverloadedError` and `UnavailableError` and decides.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
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
from octavo.many_requests import ManyRequests
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
from octavo.resumption import NEVER, ResumableRequest, ResumePolicy
from octavo.sampling_params import SamplingParams, list_params, one_for_each, with_keywords
from octavo.scheduler_channel import SchedulerChannel
from octavo.tls import TlsOptions

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response")

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_ADMIN_ADDRESS = "127.0.0.1:50052"

DEFAULT_RESUME_TIMEOUT_S = 30.0

# Under this name the scheduler's grpc.health.v1 service says whether it can take requests.
_READINESS_SERVICE = "readiness"

# gRPC counts nanoseconds in 64 bits: a limit of more than 292 years would be over at once.
_LONGEST_TIMEOUT_S = 1e9

# What a scheduler of 0.1.0 calls the fields that it does not know: lean_finished and include_prompt_token_ids.
_UNKNOWN_FIELDS = ("field 10 of GenerateRequest", "field 15 of GenerateRequest")

# Pause before a watch of the readiness that ended is opened again.
_WATCH_AGAIN_S = 0.2


async def nothing_to_check() -> None:
    """Do nothing."""


class Client(SchedulerChannel):
    """Talks to one scheduler; use it as `async with Client(address) as client`.

    It belongs to the event loop in which it is opened, and serves any number of requests at once.

    Args:
        address: HOST:PORT of the scheduler, or any gRPC target; or several, of which one is used until it fails.
        tls: How to speak TLS; None: plaintext. The files are read when the client is opened.
        token: Who we are, for a scheduler with --tokens-file; over plaintext it goes to this machine only.
        resume_timeout_s: How long to try to go on with an answer whose call broke, in seconds since the loss; 0: the
            error is raised at once.

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
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        tls: TlsOptions | None = None,
        token: str | None = None,
        resume_timeout_s: float = DEFAULT_RESUME_TIMEOUT_S,
    ) -> None:
        super().__init__(address, tls=tls, token=token)
        self._resume = ResumePolicy(resume_timeout_s)
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
            if not request.lean_finished or error.field not in _UNKNOWN_FIELDS:
                raise
        # A scheduler of 0.1.0: it has refused the request, and repeats everything anyway.
        request.lean_finished = request.include_prompt_token_ids = self._takes_lean_finished = False
        async with aclosing(self._events(request, timeout_s)) as events:
            async for event in events:
                yield event

    async def _events(
        self, request: generation_service_pb2.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[Event, None]:
        """Send a request and yield its events; go on with it in another call if one breaks."""
        loop = asyncio.get_running_loop()
        deadline_s = None if timeout_s is None else loop.time() + timeout_s
        running = ResumableRequest(request, self._resume if request.lean_finished else NEVER)
        num_untried = len(self.addresses) - 1
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - loop.time())
            address = self.address
            try:
                async with aclosing(self._call(running, left_s)) as events:
                    async for event in events:
                        yield event
                return
            except UnavailableError as error:
                if running.can_go_on:
                    pause_s = running.losses.pause_s(error)
                elif running.has_begun or not num_untried:
                    raise
                else:
                    num_untried, pause_s = num_untried - 1, 0.0
                self._move_on(address)
            except OctavoError as error:
                raise running.refused(error) from error
            await asyncio.sleep(pause_s if left_s is None else min(pause_s, left_s))

    async def _call(self, running: ResumableRequest, timeout_s: float | None) -> AsyncGenerator[Event, None]:
        """Make one call for a request and yield the events that its caller has not had."""
        is_first = not running.has_begun
        message, answer = running.message(), running.answer
        call = self._stub().Generate(message, timeout=timeout_s, metadata=self._metadata)
        is_finished = False
        try:
            async for response in call:
                event = event_from_proto(response)
                if isinstance(event, Accepted):
                    answer.accepted = answer.accepted or response.accepted
                    if is_first:
                        yield event
                    continue
                is_finished = isinstance(event, Finished)
                running.losses.forget()
                yield running.completed(event) if message.lean_finished else event
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
                    event.num_resumptions,
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
        running = self.run_requests(requests, max_in_flight=max_in_flight, include_text=include_text)
        async with aclosing(running) as events:
            async for index, event in events:
                yield index, event

    async def run_requests(
        self,
        requests: Sequence[tuple[Prompt, generation_service_pb2.GenerateRequest]],
        *,
        max_in_flight: int,
        include_text: bool = True,
        on_loss: Callable[[], Awaitable[None]] = nothing_to_check,
    ) -> AsyncGenerator[tuple[int, Event | FailedRequest], None]:
        """As `stream_many`, for messages that were made; `on_loss` is called when the stream broke."""
        many = ManyRequests(requests, max_in_flight=max_in_flight, include_text=include_text, policy=self._resume)
        while True:
            address = self.address
            try:
                async with self.request_stream() as stream, aclosing(many.run(stream)) as events:
                    async for index, event in events:
                        yield index, event
                return
            except UnavailableError as error:
                await on_loss()
                pause_s = many.losses.pause_s(error)
                self._move_on(address)
            await asyncio.sleep(pause_s)

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
