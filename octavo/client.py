"""The async client of a scheduler: typed events in, typed errors out.

Values are in octavo/values/outputs.py, errors in octavo/errors.py. An answer whose call is cut goes on in another call
(octavo/calls/resumption.py): callers get each token once, and notice a pause. A request that no scheduler has accepted
goes to each other address once, and again and again if a scheduler that had answered before goes away
(`GenerationCalls._pause_before`). Callers who want more catch `OverloadedError` and `UnavailableError` and decide.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
import grpc.aio

from octavo.answer_reading import reading_answers
from octavo.calls.generation_calls import grpc_timeout, nothing_to_check, now_s
from octavo.calls.pooling_calls import PoolingCalls
from octavo.calls.request_stream import RequestStream
from octavo.calls.resumption import DEFAULT_RESUME_TIMEOUT_S
from octavo.calls.rollouts import IsEnough, RolloutGroup, Rollouts
from octavo.calls.scheduler_channel import Endpoint
from octavo.calls.tls import TlsOptions
from octavo.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OctavoError,
    UnavailableError,
)
from octavo.generation.v1 import generation_service_pb2
from octavo.values.output_messages import model_from_proto
from octavo.values.outputs import (
    Accepted,
    Event,
    FailedRequest,
    Finished,
    ModelInfo,
    Prompt,
    RequestOutput,
    TokenizedPrompt,
)
from octavo.values.prompts import detokenize_request, generate_request, list_encoder_prompts, tokenize_request
from octavo.values.sampling_params import SamplingParams, list_params, one_for_each, with_keywords

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_ADMIN_ADDRESS = "127.0.0.1:50052"


class Client(PoolingCalls):
    """Talks to one scheduler; use it as `async with Client(address) as client`.

    It belongs to the event loop in which it is opened, and serves any number of requests at once.

    Args:
        address: HOST:PORT of the scheduler, or any gRPC target. Several, where several schedulers serve one model:
            calls go to one of them, and to the next when it cannot serve.
        tls: How to speak TLS; None: plaintext. The files are read when the client is opened.
        token: Identifies the caller to a scheduler with --tokens-file; over plaintext it goes to this machine only.
        resume_timeout_s: How long to try to go on with an answer whose call was cut, in seconds from the first loss
            since something new came, and to send a request again that a scheduler refused as it went away; 0: the error
            is raised at once.
        model: The name of the model that all calls are for; "": the only one at the address.

    Raises:
        ConnectionOptionsError: an address, the time or the model is none, or the token cannot be sent; when the client
            is opened, also: a file cannot be used.
    """

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        tls: TlsOptions | None = None,
        token: str | None = None,
        resume_timeout_s: float = DEFAULT_RESUME_TIMEOUT_S,
        model: str = "",
    ) -> None:
        super().__init__(address, tls=tls, token=token, resume_timeout_s=resume_timeout_s, model=model)

    def _to_octavo_error(self, error: grpc.aio.AioRpcError, endpoint: Endpoint) -> OctavoError:
        """Add which port was dialled: what answers there may be another one of Octavo's, or no gRPC server at all."""
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return InternalError(
                f"the server at {endpoint.address} does not implement this call; give a scheduler's --listen address, "
                f"by default {DEFAULT_ADDRESS}, or upgrade that scheduler"
            )
        return super()._to_octavo_error(error, endpoint)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        lora_adapter: str = "",
        speculate: bool = True,
        encoder_prompt: str | Sequence[int] | None = None,
        include_provenance: bool = False,
        require_same_numerics: bool = False,
        min_delta_interval_ms: int = 0,
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
            tenant: The tenant that the request runs for; tenants share the scheduler fairly.
            cache_salt: Prompts share cached blocks only with equal `tenant` and `cache_salt`.
            lora_adapter: Name of the adapter on top of the weights; `get_model` has the names. "": none.
            speculate: False: one token a step, also where the scheduler speculates; the tokens are the same.
            encoder_prompt: What the model's encoder reads, text or token ids; the prompt is the decoder's then. None:
                the encoder, if there is one, reads the prompt.
            include_provenance: Whether to say which numerics and weights made which tokens: `Output.provenance`.
            require_same_numerics: Whether executors of one numerics id have to make all of the answer; if none is left,
                it ends with UnavailableError. Otherwise it goes on, and `continued_on_other_numerics` tells.
            min_delta_interval_ms: Least time between two deltas, in milliseconds, up to 10,000: what is made meanwhile
                comes together. The first one and the end never wait. 0: they come as they are made.
            timeout_s: Time limit for the whole answer, in seconds; None: none.
            keywords: Fields of SamplingParams, such as `temperature=0`; they win over `sampling_params`.

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
            lora_adapter=lora_adapter,
            speculate=speculate,
            encoder_prompt=encoder_prompt,
            min_delta_interval_ms=min_delta_interval_ms,
            model=self.model,
        )
        request.include_provenance = include_provenance
        request.require_same_numerics = require_same_numerics
        deadline_s = None if timeout_s is None else now_s() + grpc_timeout(timeout_s)
        async with aclosing(self._run(request, deadline_s)) as events:
            async for event in events:
                yield event

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        lora_adapter: str = "",
        speculate: bool = True,
        encoder_prompt: str | Sequence[int] | None = None,
        include_provenance: bool = False,
        require_same_numerics: bool = False,
        timeout_s: float | None = None,
        **keywords: Any,
    ) -> RequestOutput:
        """Run one prompt and return all of it; arguments and errors as in `stream`, without the ones of deltas."""
        sampling_params = with_keywords(sampling_params, keywords, function="generate")
        accepted = Accepted(request_id or "", 0)
        finished: Finished | None = None
        async for event in self.stream(
            prompt,
            sampling_params,
            request_id=request_id,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            lora_adapter=lora_adapter,
            speculate=speculate,
            encoder_prompt=encoder_prompt,
            include_provenance=include_provenance,
            require_same_numerics=require_same_numerics,
            timeout_s=timeout_s,
        ):
            if isinstance(event, Accepted):
                accepted = event
            elif isinstance(event, Finished):
                finished = event
        assert finished is not None, "stream() ends with a Finished event or raises"
        return RequestOutput.of(prompt, accepted, finished)

    async def stream_many(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        lora_adapter: str = "",
        speculate: bool = True,
        encoder_prompts: Sequence[str | Sequence[int] | None] | None = None,
        min_delta_interval_ms: int = 0,
        include_text: bool = True,
        max_in_flight: int = 256,
        **keywords: Any,
    ) -> AsyncGenerator[tuple[int, Event | FailedRequest], None]:
        """Run many prompts on one stream and yield (index of the prompt, event) as they come.

        The events of a prompt are as in `stream`. A prompt that is refused or fails has a FailedRequest as its last
        event, and the rest goes on; what a full queue refuses is sent again later.

        Args:
            prompts: As for `stream`, each of them.
            sampling_params: For all prompts, or one for each; None: all defaults.
            priority: A lower number is served first.
            tenant: The tenant that the requests run for.
            cache_salt: Prompts share cached blocks only with equal `tenant` and `cache_salt`.
            lora_adapter: Name of the adapter of all of them; "": none.
            speculate: False: one token a step, also where the scheduler speculates; the tokens are the same.
            encoder_prompts: What the model's encoder reads beside each prompt, as `encoder_prompt` of `stream`; None,
                also for one of them: the encoder, if there is one, reads the prompt.
            min_delta_interval_ms: As for `stream`, of each prompt.
            include_text: Whether the events have text; without it they have token ids, which costs least.
            max_in_flight: How many requests the scheduler has at a time.
            keywords: Fields of SamplingParams; they win over `sampling_params`.

        Raises:
            InvalidRequestError: an argument is wrong; nothing was sent.
            OctavoError: the stream broke; prompts that had not ended have no last event.
        """
        if max_in_flight < 1:
            raise InvalidRequestError(f"max_in_flight is {max_in_flight}; it must be at least 1", field="max_in_flight")
        params_of_all = list_params(sampling_params, keywords, "stream_many")
        each = one_for_each(params_of_all, len(prompts), "prompts")
        make_request = partial(
            generate_request,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            lora_adapter=lora_adapter,
            speculate=speculate,
            min_delta_interval_ms=min_delta_interval_ms,
            model=self.model,
        )
        encoded = list_encoder_prompts(encoder_prompts, len(prompts), "prompts")
        requests = [
            (prompt, make_request(prompt, params, encoder_prompt=given, encoder_name=f"encoder_prompts[{index}]"))
            for index, (prompt, params, given) in enumerate(zip(prompts, each, encoded, strict=True))
        ]
        running = self.run_requests(requests, max_in_flight=max_in_flight, include_text=include_text)
        async with aclosing(running) as events:
            async for index, event in events:
                yield index, event

    async def rollouts(
        self,
        prompts: Iterable[Prompt],
        n: int,
        sampling_params: SamplingParams | None = None,
        *,
        max_groups: int = 32,
        is_enough: IsEnough | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        lora_adapter: str = "",
        include_text: bool = True,
        **keywords: Any,
    ) -> AsyncGenerator[RolloutGroup, None]:
        """Yield a group of n outputs for each prompt, for trainers; groups come in the order in which they end.

        Outputs go on while the loop's body runs, and over updates of the weights; an event loop that stands still for a
        minute loses its stream. Leaving the loop aborts what has not ended: use `contextlib.aclosing`.

        Args:
            prompts: As for `stream`; the next one is taken as soon as there is room for its group.
            n: Outputs of a group.
            sampling_params: Of all outputs. Their seeds are drawn from its seed, or by chance; log-probabilities come
                in any case.
            max_groups: Most groups that have begun, and were not yielded.
            is_enough: Called with a group whenever an output has ended; when it returns true, the rest is aborted.
            priority: A lower number is served first.
            tenant: The tenant that the requests run for.
            cache_salt: Prompts share cached blocks only with equal `tenant` and `cache_salt`.
            lora_adapter: Name of the adapter of all of them; "": none.
            include_text: Whether outputs have text; without it they have token ids, which costs least.
            keywords: Fields of SamplingParams; they win over `sampling_params`.

        Raises:
            InvalidRequestError: an argument is wrong.
            OctavoError: the stream broke. What fails for one output is in `RolloutGroup.errors`.
        """

        def make_request(prompt: Prompt, params: SamplingParams, name: str) -> generation_service_pb2.GenerateRequest:
            message = generate_request(
                prompt,
                params,
                priority=priority,
                tenant=tenant,
                cache_salt=cache_salt,
                lora_adapter=lora_adapter,
                model=self.model,
                name=name,
            )
            message.include_provenance = True
            self._ask_for_what_is_known(message)
            return message

        params = with_keywords(sampling_params, keywords, function="rollouts")
        many = self._many_requests(max_in_flight=max_groups * n, include_text=include_text, shows_provenance=True)
        runner = Rollouts(many, prompts, n, params, make_request, max_groups=max_groups, is_enough=is_enough)
        async with aclosing(runner.run(self._run_many(many))) as groups:
            async for group in groups:
                yield group

    async def run_requests(
        self,
        requests: Sequence[tuple[Prompt, generation_service_pb2.GenerateRequest]],
        *,
        max_in_flight: int,
        include_text: bool = True,
        on_loss: Callable[[], Awaitable[None]] = nothing_to_check,
    ) -> AsyncGenerator[tuple[int, Event | FailedRequest], None]:
        """As `stream_many`, for messages that were made; `on_loss` is called when the stream broke."""
        many = self._many_requests(max_in_flight=max_in_flight, include_text=include_text)
        for prompt, message in requests:
            self._ask_for_what_is_known(message)
            many.add(prompt, message)
        many.close()
        async with aclosing(self._run_many(many, on_loss)) as events:
            async for index, event in events:
                yield index, event

    def request_stream(self) -> RequestStream:
        """Return a stream for any number of requests, used as `async with`: for callers with many of them.

        A request on it costs no call, and one message brings what a step made of all of them. When it breaks,
        nothing on it is continued: `stream_many` does that.
        """
        return self._request_stream(self._endpoint())

    async def abort(self, request_id: str) -> bool:
        """End a request; with a token, one of its tenant. Returns whether it was live; unknown ids are fine.

        Of several addresses each is asked until one knows it.
        """
        request = generation_service_pb2.AbortRequest(request_id=request_id)
        num_answers, trouble = 0, UnavailableError("")
        for endpoint in self._all_endpoints():
            try:
                if (await self._answer_of(endpoint, lambda stub: stub.Abort, request)).was_live:
                    return True
                num_answers += 1
            except UnavailableError as error:
                trouble = error
        if not num_answers:
            raise trouble
        return False

    async def get_model(self) -> ModelInfo:
        """Describe the model that answers.

        Raises:
            UnavailableError: no executor is attached yet.
        """
        request = generation_service_pb2.GetModelRequest(model=self.model)
        answer = await self._answer(lambda stub: stub.GetModel, request)
        with reading_answers():
            return model_from_proto(answer)

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
        request = tokenize_request(prompt, add_special_tokens, self.model)
        response = await self._answer(lambda stub: stub.Tokenize, request)
        return TokenizedPrompt(tuple(response.token_ids), response.max_model_len)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None) -> str:
        """Return the text of token ids.

        Args:
            token_ids: The ids, also as an array of numpy or torch.
            skip_special_tokens: Whether special tokens stay out of the text; None: yes, as in `generate`.

        Raises:
            OctavoError: the model does not know a token, or has no tokenizer.
        """
        request = detokenize_request(token_ids, skip_special_tokens, self.model)
        return (await self._answer(lambda stub: stub.Detokenize, request)).text

    async def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Return as soon as the scheduler takes requests: it runs and an executor is attached.

        Raises:
            DeadlineError: it did not within `timeout_s` seconds.
        """
        troubles: dict[Endpoint, str] = {}
        watches = [asyncio.create_task(self._wait_at(each, troubles)) for each in self._all_endpoints()]
        try:
            done, _ = await asyncio.wait(watches, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if done:
                self._go_to(next(iter(done)).result())
                return
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
        addresses, trouble = " or ".join(self.addresses), "".join(f" ({each})" for each in troubles.values())
        raise DeadlineError(f"the scheduler at {addresses} was not ready within {timeout_s:g} s{trouble}")
