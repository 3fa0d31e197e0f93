"""A live request as the engine sees it: tokens, times, losses; no text.

Its `TokenSink` (`request/engine_client.py`) makes what the client gets.
"""

from collections.abc import Callable
from dataclasses import replace

from octavo_shared.errors import OctavoServiceError
from octavo_shared.grpc.grpc_status import status_code
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.request.engine_client import TokenSink
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.life import EndedRequest, LifeEvent, RequestTimes
from scheduler_svc.request.losses import NO_LOSSES, Losses
from scheduler_svc.request.output_end import OutputEnd
from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.request.parameters import StopConditions
from scheduler_svc.request.provenance import UNKNOWN, Span

MAX_EVENTS = 96


class RequestLife:
    """The events of a request, for people, oldest first: the first and the last ones, at most MAX_EVENTS."""

    def __init__(self) -> None:
        self._events: list[LifeEvent] = []

    @property
    def events(self) -> tuple[LifeEvent, ...]:
        """The kept events."""
        return tuple(self._events)

    def add(self, event: LifeEvent) -> None:
        """Keep an event; when there are too many, drop one from the middle."""
        if len(self._events) == MAX_EVENTS:
            del self._events[MAX_EVENTS // 2]
        self._events.append(event)


class LiveRequest:
    """One request from its arrival to its end.

    Args:
        group: The request in the core's terms.
        sink: Takes its tokens.
        arrived_at_s: Monotonic time of arrival, in seconds.
        trace_id: The trace that its span belongs to; None: this process does not trace.
        has_stop_strings: Whether its front looks for stop strings.
        lora_adapter: The name of its adapter; "": it has none.
        losses: Losses that counted against it at earlier engines.
        on_losses: Called with the losses that count against it whenever they change.

    Attributes:
        times: Times of its arrival, tokens and end; kept by `LiveRequests`.
        life: Its other events.
        ends: How each output ends, by output index; a beam search and a text to be pooled have one.
        error: Why it failed; None: it has not.
        num_losses: How many losses of an executor in the middle of its steps count against it, since its last token.
        num_lone_losses: How many of these losses hit a step that computed nothing else.
        unclear_losses: Such losses, since its last token, of executors that still have to show whether they work
            without it: by the executor's address, whether the step computed nothing else.
        told_losses: The losses that `on_losses` was told last.
        num_lost_executors: How often an executor that ran it was lost, over its whole life.
    """

    def __init__(
        self,
        group: SequenceGroup,
        sink: TokenSink,
        arrived_at_s: float,
        trace_id: str | None = None,
        *,
        has_stop_strings: bool = False,
        lora_adapter: str = "",
        losses: Losses = NO_LOSSES,
        on_losses: Callable[[Losses], object] = lambda _: None,
    ) -> None:
        self.group = group
        self.sink = sink
        self.times = RequestTimes(arrived_at_s)
        self.life = RequestLife()
        self.trace_id = trace_id
        self.lora_adapter = lora_adapter
        self.ends = [OutputEnd(has_stop_strings=has_stop_strings) for _ in range(group.num_sequences)]
        self.error: OctavoServiceError | None = None
        self.num_losses, self.num_lone_losses = losses.num_losses, losses.num_lone_losses
        self.unclear_losses: dict[str, bool] = {}
        self.num_lost_executors = 0
        self.told_losses, self._on_losses = losses, on_losses
        self._told_span = group.provenance.spans[-1] if group.provenance.spans else None
        for end, output in zip(
            self.ends, () if group.continuation is None else group.continuation.outputs, strict=False
        ):
            end.set_to(len(output.token_ids), output.finish_reason)

    @property
    def request_id(self) -> str:
        """The id that the client knows."""
        return self.group.request_id

    @property
    def attempt(self) -> int:
        """How often its client has continued it; 0: it began here."""
        return 0 if self.group.continuation is None else self.group.continuation.attempt

    @property
    def num_output_tokens(self) -> int:
        """Tokens made so far, over all sampled outputs; of beams, those in the answer, at the end."""
        return sum(end.num_tokens for end in self.ends)

    @property
    def num_draft_tokens(self) -> int:
        """Output tokens that came as drafts; a stop string may have dropped some."""
        return min(self.group.num_draft_tokens, self.num_output_tokens)

    @property
    def mean_length(self) -> int:
        """Tokens of an output, on average."""
        search = self.group.beam_search
        return self.num_output_tokens // (self.group.num_sequences if search is None else search.num_outputs)

    @property
    def has_ended(self) -> bool:
        """Whether all outputs are finished, or the request failed."""
        return self.error is not None or all(end.is_settled for end in self.ends)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why its first output ended, or the best one of a beam search; None: it has not."""
        return self.ends[0].reason

    def tell_adapter(self) -> None:
        """Tell the sink the adapter that was found, before there is a span of it: it may be lost until then."""
        adapter, spans = self.group.adapter, self.group.provenance.spans
        if adapter is not None and (not spans or spans[-1].adapter != adapter):
            self.sink.begin_span(Span(spans[-1].numerics if spans else UNKNOWN, self.group.progress, adapter))

    def tell_span(self) -> None:
        """After an admission, tell the sink which numerics go on, if they are new."""
        provenance = self.group.provenance
        if provenance.spans[-1] is not self._told_span:
            self._told_span = provenance.spans[-1]
            assert provenance.latest is not None, "it was admitted"
            self.sink.begin_span(provenance.latest)

    def note_loss(self, executor: str, *, counts: bool, was_alone: bool = False) -> None:
        """Note that its executor was lost in the middle of its steps.

        Args:
            executor: The address.
            counts: Whether the loss counts against the request; False: this is not known yet.
            was_alone: Whether the step computed nothing else.
        """
        if counts:
            self.num_losses += 1
            self.num_lone_losses += was_alone
        else:
            self.unclear_losses[executor] = was_alone

    def count_loss(self, executor: str) -> bool:
        """Count an unclear loss against it, because the executor works without it; return whether there was one."""
        if executor not in self.unclear_losses:
            return False
        self.note_loss(executor, counts=True, was_alone=self.unclear_losses.pop(executor))
        return True

    def forgive_losses(self) -> None:
        """Forget its losses: it got a token."""
        self.num_losses = self.num_lone_losses = 0
        self.unclear_losses.clear()

    def tell_losses(self) -> None:
        """Tell the losses that count against it, if they are new: the next engine that goes on with it has to know."""
        losses = NO_LOSSES
        if self.num_losses:
            losses = Losses(self.num_losses, self.num_lone_losses, self.group.lost_on)
        if losses != self.told_losses:
            self.told_losses = losses
            self._on_losses(losses)

    def summary(self, ended_at_unix_s: float) -> EndedRequest:
        """Return what is kept of it after its end; `ended_at_unix_s` in seconds since 1970."""
        group = self.group
        return EndedRequest(
            request_id=group.request_id,
            tenant=group.tenant,
            priority=group.priority,
            num_prompt_tokens=group.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=group.num_cached_tokens,
            num_draft_tokens=self.num_draft_tokens,
            num_preemptions=group.num_preemptions,
            num_losses=self.num_lost_executors,
            times=self.times,
            events=self.life.events,
            ended_at_unix_s=ended_at_unix_s,
            finish_reason=None if self.error is not None else self.finish_reason,
            error_code=None if self.error is None else status_code(self.error).name,
            error_message="" if self.error is None else str(self.error),
            trace_id=self.trace_id,
            provenance=group.provenance,
            num_earlier_tokens=0 if group.continuation is None else group.continuation.num_tokens,
            lora_adapter=self.lora_adapter,
            num_encoder_tokens=group.num_input_tokens - group.num_prompt_tokens,
        )


def group_of(request: EngineRequest, arrival: int, max_model_len: int) -> SequenceGroup:
    """Return a request in the core's terms, where sequences of at most `max_model_len` tokens are served."""
    num_prompt_tokens, conditions = len(request.prompt_token_ids), request.stop_conditions
    if request.pooling is not None:
        conditions = StopConditions(max_tokens=0)
    if request.grammar is not None:  # the end-of-sequence token ends its text: no token may follow
        conditions = replace(conditions, ignore_eos=False)
    return SequenceGroup(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        stop_conditions=conditions.accept(num_prompt_tokens, request.longest_sequence(max_model_len)),
        arrival=arrival,
        num_sequences=request.num_sequences,
        beam_search=request.beam_search,
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        speculate=request.speculate,
        token_rules=request.token_rules,
        num_prompt_logprobs=request.num_prompt_logprobs,
        traceparent=request.traceparent,
        continuation=request.continuation,
        requires_same_numerics=request.requires_same_numerics,
        grammar=request.grammar,
        matcher_id=request.matcher_id,
        adapter=request.adapter,
        pooling=request.pooling,
        token_type_ids=request.token_type_ids,
        encoder_token_ids=request.encoder_token_ids,
    )
