"""The path of a request through the front, whatever its protocol: it is checked, submitted, answered by a `Response`.

`servicer.py` wraps this in gRPC, `scheduler_svc/front/openai/` in HTTP; both give it a `GenerateRequest` of
`octavo.generation.v1`, so there is one set of checks.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import (
    InvalidFieldError,
    NoExecutorError,
    RequestAbortedError,
    RequestExistsError,
    UnavailableError,
)
from octavo_shared.process.clock import monotonic_s
from octavo_shared.step_wire.step import Int32Array
from scheduler_svc.front.access.identity import current_identity, private_deployment
from scheduler_svc.front.api.continuation_validation import accepted_limits
from scheduler_svc.front.api.encoder_prompts import tokenize_prompts
from scheduler_svc.front.api.model_tasks import check_generates
from scheduler_svc.front.api.params_validation import tokenize_words
from scheduler_svc.front.api.request_limits import FrontSettings, RequestLimits
from scheduler_svc.front.api.request_validation import (
    ValidRequest,
    check_request_fields,
    validate_request,
)
from scheduler_svc.front.api.tokenization import Tokenization, refuse_text
from scheduler_svc.front.delta_pace import DeltaPace
from scheduler_svc.front.grammars.grammar_checks import GrammarChecks
from scheduler_svc.front.grammars.parts import AskedGrammar, message_part, whole
from scheduler_svc.front.response import Response
from scheduler_svc.front.text.text_model import ModelTokenizer, TextModel, check_model
from scheduler_svc.front.text.text_threads import TextThreads
from scheduler_svc.request.engine_client import EngineClient
from scheduler_svc.request.served_model import ServedModel

if TYPE_CHECKING:  # imports opentelemetry
    from scheduler_svc.telemetry.request_tracing import RequestTrace, RequestTracer


TracedRequest: TypeAlias = pb.GenerateRequest | pb.EmbedRequest | pb.ScoreRequest

# Returns the trace headers of a call: lower-case keys, and values. Called only if requests are traced.
Metadata: TypeAlias = Callable[[], Iterable[tuple[str, str | bytes]] | None]

# Returns the grammar of a request's outputs, given its prompt; for APIs whose grammar fields are not the native ones.
GrammarMaker: TypeAlias = Callable[[Sequence[int] | Int32Array], AskedGrammar]

# Why a request was aborted, for operators: its client is gone.
CLIENT_LEFT = "the client cancelled the call or disconnected"


class Generation:
    """Runs the requests for one model.

    Args:
        tracer: Makes the spans of requests; None: requests are not traced.
        grammars: Checks grammars; None: with a compiler process of its own.
        pace: The pace of the streams, shared by all models of the front; None: one of its own.

    Attributes:
        pace: The pace of the streams; its `watch` must be run.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: ModelTokenizer,
        settings: FrontSettings,
        tracer: "RequestTracer | None" = None,
        grammars: GrammarChecks | None = None,
        pace: DeltaPace | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.text_threads = TextThreads()
        self.grammars = grammars or GrammarChecks()
        self.tokenization = Tokenization(self.served, self.text_threads)
        self._tokenizer = tokenizer
        self._tracer = tracer
        self._checks = _RunningChecks()
        self.pace = pace or DeltaPace()

    @property
    def model(self) -> TextModel | None:
        """The model that is served, or was last; None: no executor has been attached yet."""
        served = self.engine.model
        return None if served is None else self.text_model(served)

    def text_model(self, served: ServedModel) -> TextModel:
        """Return a served model with its tokenizer."""
        return self._tokenizer.model(served)

    def served(self) -> tuple[TextModel, RequestLimits]:
        """Return the model and the limits of its requests. Raises NoExecutorError: there is none yet."""
        model = self.model
        if model is None:
            with private_deployment():
                raise NoExecutorError("no executor has been attached yet", self.engine.last_trouble or "none answers")
        return model, RequestLimits.of(model, self.settings)

    @contextmanager
    def reading(self) -> Iterator[RequestLimits]:
        """Count a call as waiting while its request is read; yields the limits of the request.

        Raises: UnavailableError, NoExecutorError, QueueFullError: the request would not be queued.
        """
        with private_deployment(), self.engine.checking("", current_identity().tenant_for("")) as served:
            yield RequestLimits.of(self.text_model(served), self.settings)

    @asynccontextmanager
    async def running(
        self,
        request: pb.GenerateRequest,
        metadata: Metadata,
        why_left: Callable[[], str] = lambda: CLIENT_LEFT,
        *,
        time_left_s: float | None = None,
        make_grammar: GrammarMaker | None = None,
    ) -> AsyncIterator[Response]:
        """Check and submit a request, and yield its response; abort the request if the caller leaves before its end.

        Args:
            request: The request; its tenant is filled in.
            metadata: The call's.
            why_left: Returns why the caller left; called if it did.
            time_left_s: See `accept`.
            make_grammar: See `accept`.

        Raises: OctavoServiceError: the request is refused.
        """
        accepted = await self.accept(request, metadata, time_left_s=time_left_s, make_grammar=make_grammar)
        try:
            yield accepted.response
        finally:
            accepted.close(why_left)

    async def accept(
        self,
        request: pb.GenerateRequest,
        metadata: Metadata,
        *,
        returns_text: bool = True,
        listener: Callable[[], None] | None = None,
        time_left_s: float | None = None,
        make_grammar: GrammarMaker | None = None,
    ) -> "AcceptedRequest":
        """Check and submit a request; the caller closes it.

        Args:
            request: The request; its tenant is filled in.
            metadata: The call's.
            returns_text: Whether the answer has text.
            listener: See `Response`.
            time_left_s: How long the caller still waits for the answer; None: without limit.
            make_grammar: Makes the grammar of the outputs; None: the request's own, if any.

        Raises: OctavoServiceError: the request is refused.
        """
        received_at_s = monotonic_s()
        request.tenant = current_identity().tenant_for(request.tenant)
        await self.engine.wait_until_reachable()
        with private_deployment(), self.traced(request, metadata) as trace:
            # A continuation replaces a call that still has the request.
            new_id = "" if request.HasField("continuation") else request.request_id
            with self.engine.checking(new_id, request.tenant) as served, self._checks.running(request):
                model = self.text_model(served)
                if request.model:
                    if not request.continuation.adapter_digest:  # else its adapter may have no name any more
                        check_model(request.model, model)
                    name_adapter(request, model)
                check_generates(model)
                run = self.text_threads.run if has_text(request) else asyncio.to_thread
                valid = await run(check_request, request, model, self.settings, make_grammar)
                check_weights(request.continuation, served)
                if valid.grammar is not None:
                    grammar = await self.grammars.check(valid.grammar, model, request.tenant)
                    guided = replace(valid.engine, grammar=grammar, matcher_id=model.info.matcher_id)
                    valid = replace(valid, engine=guided)
            deadline_s = None if time_left_s is None else received_at_s + time_left_s
            asked = replace(valid.engine, received_at_s=received_at_s, deadline_s=deadline_s)
            if trace is not None:
                asked = trace.follow(asked, model.name)
            options = valid.answer_options if returns_text else replace(valid.answer_options, returns_text=False)
            response = Response(asked, options, model.tokenizer, listener, self.pace)
            if valid.continued is not None:
                response.go_on_behind(valid.continued)
            await self.engine.submit(asked, response, checked_for=served)
        return AcceptedRequest(response, trace)

    def traced(self, request: TracedRequest, metadata: Metadata) -> "RequestTrace | AbstractContextManager[None]":
        """Return a context that records a refusal in the request's trace."""
        return nullcontext() if self._tracer is None else self._tracer.receive(request, metadata() or ())

    async def abort(self, request_id: str) -> bool:
        """End a live request; False: the caller may abort no request with this id."""
        if self._checks.abort(request_id):
            return True
        return await self.engine.abort_request(request_id, current_identity().tenant)


class _RunningChecks:
    """Requests that are being checked: the engine does not have them yet, but `Abort` finds them."""

    def __init__(self) -> None:
        self._is_aborted: dict[tuple[str, str], bool] = {}  # by id and tenant

    @contextmanager
    def running(self, request: pb.GenerateRequest) -> Iterator[None]:
        """Register a request while it is checked; a request without an id cannot be aborted.

        Raises:
            RequestExistsError: a request of the tenant with the same id is being checked.
            RequestAbortedError: it was aborted meanwhile.
        """
        key = request.request_id, request.tenant
        if not request.request_id:
            yield
            return
        if key in self._is_aborted:
            raise RequestExistsError(request.request_id)
        self._is_aborted[key] = False
        try:
            yield
        finally:
            is_aborted = self._is_aborted.pop(key)
        if is_aborted:
            raise RequestAbortedError(f"request {request.request_id!r} was aborted")

    def abort(self, request_id: str) -> bool:
        """Abort requests once their check is over; False: no request of the caller with this id is being checked."""
        identity = current_identity()
        found = [key for key in self._is_aborted if key[0] == request_id and identity.may_act_for(key[1])]
        self._is_aborted.update(dict.fromkeys(found, True))
        return bool(found)


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """A request that was submitted."""

    response: Response
    _trace: "RequestTrace | None"

    def abort(self, why: str) -> None:
        """End it with an error, unless it has ended."""
        self.response.abort(RequestAbortedError(why))

    def close(self, why_left: Callable[[], str] = lambda: CLIENT_LEFT) -> None:
        """Abort the request if it has not ended: its caller no longer waits, and `why_left` says why."""
        if self.response.ended is None:
            self.abort(why_left())
        if self._trace is not None:
            self._trace.end(self.response)


def has_text(request: pb.GenerateRequest) -> bool:
    """Return whether a request has text to tokenize."""
    of_encoder = request.encoder_prompt.WhichOneof("prompt") == "text"
    is_text = request.WhichOneof("prompt") in ("text", "messages")
    return is_text or of_encoder or bool(request.sampling_params.banned_words)


def name_adapter(request: pb.GenerateRequest, model: TextModel) -> None:
    """Let a request that names an adapter as its model have that adapter. Raises InvalidFieldError: it has another."""
    if request.model == model.name:
        return
    if request.lora_adapter not in ("", request.model):
        rule = f"unset, or {request.model}, which is the name of an adapter too, given as model"
        raise InvalidFieldError("lora_adapter", request.lora_adapter, rule)
    request.lora_adapter = request.model


def check_request(
    request: pb.GenerateRequest,
    model: TextModel,
    settings: FrontSettings,
    make_grammar: GrammarMaker | None = None,
) -> ValidRequest:
    """Return the request in the service's own values; for a thread, as it may take long.

    Raises: InvalidFieldError: the first wrong field.
    """
    check_request_fields(request)
    is_guided = make_grammar is not None or request.sampling_params.HasField("grammar")
    if is_guided:  # a grammar ends with the end of the sequence, and only there
        request.sampling_params.ignore_eos = False
    served = RequestLimits.of(model, settings)
    limits = accepted_limits(request, served)
    prompt_token_ids, encoder_token_ids, banned_words = tokenize(request, model, limits)
    valid = validate_request(
        request, prompt_token_ids, limits, model.tokenizer, banned_words, encoder_token_ids=encoder_token_ids
    )
    if is_guided:
        asked = (make_grammar or partial(own_grammar, request))(prompt_token_ids)
        valid = replace(valid, grammar=asked)
        if valid.engine.beam_search is not None:
            raise InvalidFieldError(asked.field, "set", "unset with beam_width: beams follow no grammar")
    num_tokens = len(prompt_token_ids) + valid.answer_options.max_output_tokens
    if num_tokens <= served.max_len:
        return valid
    return replace(valid, answer_options=replace(valid.answer_options, waits_for_larger_executor=True))


def own_grammar(request: pb.GenerateRequest, prompt_token_ids: Sequence[int] | Int32Array) -> AskedGrammar:
    """Return the grammar in a request. Raises InvalidFieldError: there is none, or it is too large."""
    del prompt_token_ids  # the grammar is the same for all prompts
    return whole(message_part(request.sampling_params.grammar, "sampling_params.grammar"))


def check_weights(continuation: pb.Continuation, served: ServedModel) -> None:
    """Refuse to continue an answer that other weights began, as far as the weights are known.

    Raises: UnavailableError: another scheduler may serve those weights.
    """
    begun_with, weights = continuation.weights_digest, served.reproducibility.weights_digest
    if not served.goes_on_with("", begun_with):
        raise UnavailableError(
            f"the answer was started with different weights ({begun_with[:12]}…) from those served here "
            f"({weights[:12]}…)"
        )


def tokenize(
    request: pb.GenerateRequest, model: TextModel, limits: RequestLimits
) -> tuple[Sequence[int] | Int32Array, Int32Array | None, list[list[int]]]:
    """Return the token ids of the prompt, of the encoder's input, and of the banned words; may take long.

    Raises: InvalidFieldError: see `tokenize_prompts`, `tokenize_words` and `refuse_text`.
    """
    if model.tokenizer.is_absent:
        refuse_text(request)
    return *tokenize_prompts(request, model, limits), tokenize_words(request.sampling_params, model.tokenizer)
