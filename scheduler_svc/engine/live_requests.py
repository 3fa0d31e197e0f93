"""The live requests: from their arrival to their end, and the updates of steps for them.

The engine adds requests, and queues requests of lost executors again; the planners take them from the queue.
A request is forgotten when it has ended. Read next: `live_request.py`, `suspects.py`.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from octavo_shared.errors import (
    AdapterNotLoadedError,
    CacheTooSmallError,
    GrammarNotFollowedError,
    GrammarNotLoadedError,
    GrammarTooCostlyError,
    NotFiniteError,
    NothingAllowedError,
    OctavoServiceError,
    PooledNotFiniteError,
)
from octavo_shared.process.clock import monotonic_s
from octavo_shared.step_wire.step import RowFlag
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_plan import GroupEvent, GroupFailure
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.engine.held_requests import HeldRequests
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.suspects import Suspects, is_suspect
from scheduler_svc.engine.tenants import Tenants
from scheduler_svc.engine.token_quotas import TokenQuotas
from scheduler_svc.request.life import EndedRequest, EventKind, LifeEvent, RequestKey
from scheduler_svc.request.output_end import EndState, OutputEnd
from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.telemetry.meter import Meter

_NUM_LENGTHS = 128

# The error that a row with a flag ends its request with.
_ERRORS = {
    RowFlag.NO_TOKEN_ALLOWED: NothingAllowedError,
    RowFlag.GRAMMAR_LIMIT: GrammarTooCostlyError,
    RowFlag.GRAMMAR_FAILED: GrammarNotFollowedError,
    RowFlag.NOT_FINITE: NotFiniteError,
}

EndObserver: TypeAlias = Callable[[EndedRequest], None]


class LiveRequests(Mapping[RequestKey, LiveRequest]):
    """The live requests by tenant and id, in order of arrival.

    Args:
        fleet: Their groups wait in its queue.
        wake: Called when a group was queued.
        meter: Counts tokens and ends.
        observers: Each is called once for each request, right after it has ended.
        clock: Monotonic time in seconds.
        unix_s: Returns the seconds since 1970.
        on_room: Called when a request has made room in its planner.
        token_quotas: Charged for generated tokens.

    Attributes:
        latest_lengths: Mean tokens of an output of the last requests that finished.
        held: New requests that wait outside the queue.
    """

    def __init__(
        self,
        fleet: Fleet,
        wake: Callable[[], None],
        meter: Meter,
        observers: Sequence[EndObserver] = (),
        clock: Callable[[], float] = monotonic_s,
        unix_s: Callable[[], float] = time.time,
        on_room: Callable[[], None] = lambda: None,
        token_quotas: TokenQuotas | None = None,
    ) -> None:
        self.suspects = Suspects()
        self.latest_lengths: deque[int] = deque(maxlen=_NUM_LENGTHS)
        self._meter = meter
        self._observers = (meter.request_ended, *observers)
        self._clock = clock
        self._unix_s = unix_s
        self._fleet = fleet
        self._wake = wake
        self._on_room = on_room
        self._token_quotas = token_quotas or TokenQuotas(Tenants())
        self._requests: dict[RequestKey, LiveRequest] = {}
        self.held = HeldRequests()
        self._holds_new = False
        self._tenants_of: dict[str, dict[str, None]] = {}  # by id, in order of arrival
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    def __getitem__(self, key: RequestKey) -> LiveRequest:
        return self._requests[key]

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def of(self, group: SequenceGroup) -> LiveRequest:
        """Return the live request that a group belongs to."""
        return self._requests[group.tenant, group.request_id]

    def named(self, request_id: str, tenant: str | None) -> list[LiveRequest]:
        """Return the request to which a tenant gave an id; `tenant` None: the requests of all tenants."""
        tenants = self._tenants_of.get(request_id, {})
        return [self[one, request_id] for one in tenants if tenant in (None, one)]

    def _live(self, group: SequenceGroup) -> LiveRequest | None:
        """Return the request of a group; None: it has ended. Another request may have its id by now."""
        request = self._requests.get((group.tenant, group.request_id))
        return request if request is not None and request.group is group else None

    async def wait_until_all_ended(self) -> None:
        """Return once no request is live."""
        await self._all_ended.wait()

    # From arrival to end -------------------------------------------------------------------------

    def add(self, request: LiveRequest) -> None:
        """Take a new request, and queue it."""
        tenant, request_id = request.group.tenant, request.request_id
        self._requests[tenant, request_id] = request
        self._tenants_of.setdefault(request_id, {})[tenant] = None
        self._all_ended.clear()
        request.sink.begin(_Handle(self, request))
        request.tell_adapter()
        if request.has_ended:  # all its outputs had ended before its call was cut
            request.group.end()
            self._forget(request, self._clock())
        elif request.num_losses:
            self._fleet.add(request.group)  # first: a step log has calls that concern a group behind this one
            self._fleet.note_loss(request.group, request.told_losses.executor)
            self._set_runs_alone(request)
            self._park_suspect(request)
            self._wake()
        else:
            self.enqueue(request)

    def enqueue(self, request: LiveRequest) -> None:
        """Queue a live request, or park it if it is a suspect behind other suspects."""
        if self._holds_new and not request.group.has_run and request.group.continuation is None:
            self.held.add(request)
            return
        request.tell_losses()
        self._set_runs_alone(request)
        if self.suspects.may_run(request):
            self._fleet.add(request.group)
            self._wake()
        else:
            request.life.add(LifeEvent(EventKind.PARKED, self._clock()))

    def hold_new(self) -> None:
        """Let requests that come from now on wait outside the queue."""
        self._holds_new = True

    def release_held(self) -> None:
        """Queue the requests that wait outside the queue, and those that come from now on."""
        self._holds_new = False
        for request in self.held.take():
            self.enqueue(request)

    @property
    def num_unheld(self) -> int:
        """Live requests but those that wait outside the queue."""
        return len(self._requests) - len(self.held)

    def count_losses(self, executor: str) -> list[LiveRequest]:
        """Count unclear losses of an executor that works against the requests that suffered them; return these.

        All but one of the waiting requests that are suspects now are parked.
        """
        counted = [request for request in self.values() if request.count_loss(executor)]
        for request in counted:
            request.tell_losses()
            self._set_runs_alone(request)
            self._park_suspect(request)
        return counted

    def _park_suspect(self, request: LiveRequest) -> None:
        """Park a waiting request if it is a suspect now, behind other suspects."""
        if request.group in self._fleet.queue and not self.suspects.may_run(request):
            self._fleet.withdraw(request.group)
            request.life.add(LifeEvent(EventKind.PARKED, self._clock()))

    def forget_losses(self, executor: str) -> None:
        """Forget unclear losses of an executor that does not work by itself: no request is to blame."""
        for request in self.values():
            if request.unclear_losses.pop(executor, None) is not None:
                self._set_runs_alone(request)
        for request in self.suspects.absolve():
            self._fleet.add(request.group)
            self._wake()

    def _set_runs_alone(self, request: LiveRequest) -> None:
        """Let the fleet compute the request alone if it is a suspect, else with others."""
        if request.group.runs_alone != (runs_alone := is_suspect(request)):
            self._fleet.set_runs_alone(request.group, runs_alone)
            self._on_room()

    def fail(self, request: LiveRequest, error: OctavoServiceError) -> None:
        """End a request with an error; the caller ends its group."""
        request.error = error
        self._forget(request, self._clock())

    def abort(self, request: LiveRequest, error: OctavoServiceError) -> None:
        """End a request with an error, and its group; nothing happens if it has ended."""
        if self._live(request.group) is not None:
            is_held = request in self.held
            self.fail(request, error)
            if is_held:  # the fleet does not know it
                request.group.end()
                return
            self._fleet.abort(request.group)
            self._on_room()

    def finish_output(self, request: LiveRequest, output_index: int, num_tokens: int, reason: FinishReason) -> None:
        """The front of a request with stop strings says with how many tokens a sampled output ends, and why."""
        end = request.ends[output_index]
        if self._live(request.group) is None or not end.settle(num_tokens, reason):
            return
        if end.state is EndState.ENDED_BY_TEXT:
            self._finish_sequence(request.group, output_index, end)
        if request.has_ended:
            self._forget(request, self._clock())

    def _finish_sequence(self, group: SequenceGroup, output_index: int, end: OutputEnd) -> None:
        """End a sequence whose text holds a stop string, where it is; one that waits ends with its next token."""
        sequence = group.sequences[output_index]
        if (planner := self._fleet.planner_of(group)) is not None:
            self._fleet.finish(planner, sequence)
            self._on_room()
            end.confirm()
        elif group.is_last(sequence):
            self._fleet.abort(group)

    def _forgive_losses(self, request: LiveRequest) -> None:
        """Forget the losses of a request that got a token."""
        if request.group.lost_on:
            request.forgive_losses()
            if request.group.runs_alone:
                self._on_room()
            self._fleet.forgive_loss(request.group)
            request.tell_losses()

    def _clear_suspect(self, request: LiveRequest) -> None:
        """Let the next parked suspect run if a request that got a token, or ended, was the current one."""
        following = self.suspects.clear(request)
        if following is not None:
            self._fleet.add(following.group)
            self._wake()

    def _forget(self, request: LiveRequest, now_s: float) -> None:
        """Remove a request that has ended, and tell its sink and the observers."""
        tenant, request_id = request.group.tenant, request.request_id
        del self._requests[tenant, request_id]
        self.held.discard(request)
        tenants = self._tenants_of[request_id]
        del tenants[tenant]
        if not tenants:
            del self._tenants_of[request_id]
        self._clear_suspect(request)
        request.times.first_scheduled_at_s = request.group.first_scheduled_at_s
        request.times.ended_at_s = now_s
        if request.error is None and request.group.pooling is None:
            self.latest_lengths.append(request.mean_length)
        ended = request.summary(self._unix_s())
        request.sink.end(ended, request.error)
        for observe in self._observers:
            observe(ended)
        if not self._requests:
            self._all_ended.set()

    # Updates of steps ----------------------------------------------------------------------------

    def deliver(self, planner: ExecutorPlanner, updates: StepUpdates) -> None:
        """Give the updates of a planner's step to its requests; end requests that are complete.

        The next step may have been decided since: a request that failed or was aborted meanwhile gets nothing, and
        a request whose front finds a stop string may have surplus tokens in flight.
        """
        now_s = self._clock()
        last_tokens_at_s: list[float] = []
        logprobs: Sequence[float | None] = updates.logprobs or [None] * len(updates.token_ids)
        for prompt in updates.prompt_logprobs:
            if (request := self._live(prompt.group)) is not None:
                request.sink.push_prompt(prompt.logprobs, prompt.alternatives)
        num_tokens_of: Counter[tuple[str, str]] | None = None  # by tenant and adapter
        if self._token_quotas.are_there:
            num_tokens_of = Counter()
        requests, finished, alternatives_of = self._requests, updates.finished, updates.alternatives
        rows, last_places = updates.row_of_each_token(), updates.last_places()
        num_tokens = 0
        for place, (row, token_id, logprob) in enumerate(zip(rows, updates.token_ids, logprobs, strict=False)):
            sequence = updates.sequences[row]
            group = sequence.group
            request = requests.get((group.tenant, group.request_id))
            if request is None or request.group is not group:
                continue
            if group.lost_on:
                self._forgive_losses(request)
            index = sequence.index
            end = request.ends[index]
            if end.is_settled:
                if end.state is EndState.ENDED_BY_TEXT:  # the group waited for a planner until now
                    if row not in finished:
                        self._fleet.finish(planner, sequence)
                    end.confirm()
                continue
            self._note_progress(request, planner, now_s, last_tokens_at_s)
            end.num_tokens += 1
            num_tokens += 1
            if num_tokens_of is not None:
                num_tokens_of[group.tenant, request.lora_adapter] += 1
            if row in finished:
                end.end_by_tokens(finished[row])
            request.sink.push(index, token_id, logprob, alternatives_of.get(place))
            if place in last_places:
                self._end_output(request, index, end, now_s)
        for group in updates.advanced_searches:
            request = self._live(group)
            if request is None:
                continue
            self._forgive_losses(request)
            if num_tokens_of is not None:
                num_tokens_of[group.tenant, request.lora_adapter] += group.num_slots
            self._note_progress(request, planner, now_s, last_tokens_at_s)
        for group in updates.finished_searches:
            assert group.beams is not None
            request = self._live(group)
            if request is None:
                continue
            hypotheses = group.beams.finished_hypotheses()
            request.sink.finish_search(hypotheses)
            num_found = sum(len(hypothesis.token_ids) for hypothesis in hypotheses)
            request.ends[0].set_to(num_found, hypotheses[0].finish_reason)
            num_tokens += num_found
            if num_tokens_of is not None:
                num_tokens_of[group.tenant, request.lora_adapter] += group.num_slots
            self._note_progress(request, planner, now_s, last_tokens_at_s)
            self._forget(request, now_s)
        for (tenant, adapter), num_taken in (num_tokens_of or {}).items():
            self._token_quotas.take(tenant, num_taken, now_s, adapter=adapter)
        self._meter.tokens_delivered(num_tokens, last_tokens_at_s, now_s)
        for group, values in updates.pooled:
            if (request := self._live(group)) is not None:
                request.sink.pooled(values)
                request.ends[0].set_to(0, FinishReason.STOP)
                self._meter.text_pooled(group)
                self._forget(request, now_s)
        for failure in updates.failures:
            if (request := self._live(failure.group)) is not None:
                self._meter.num_flagged[failure.flag] += 1
                error = _ERRORS[failure.flag] if failure.group.pooling is None else PooledNotFiniteError
                self.abort(request, error(failure.message))

    def note_events(self, events: Sequence[GroupEvent], executor: str, step_id: int | None, now_s: float) -> None:
        """Add the events of a decision to their requests; `step_id` None: it led to no step of the executor."""
        for event in events:
            life_event = LifeEvent(
                event.kind, now_s, executor, step_id, event.num_tokens, event.num_computed_tokens, event.cause
            )
            request = self.of(event.group)
            request.life.add(life_event)
            if event.kind is EventKind.ADMITTED:
                request.tell_span()

    def end_failed(self, failures: Sequence[GroupFailure]) -> None:
        """End the requests of groups that can never go on."""
        for failure in failures:
            error: OctavoServiceError = CacheTooSmallError(failure.message)
            if failure.flag is not None:
                self._meter.num_flagged[failure.flag] += 1
                error = GrammarNotLoadedError(failure.message)
            elif failure.lacks_adapter:
                error = AdapterNotLoadedError(failure.message)
            self.fail(self.of(failure.group), error)

    def _note_progress(
        self, request: LiveRequest, planner: ExecutorPlanner, now_s: float, last_tokens_at_s: list[float]
    ) -> None:
        """Note that a request got a token; add the time of the one before to `last_tokens_at_s`."""
        times = request.times
        last_s, times.last_token_at_s = times.last_token_at_s, now_s
        if last_s is not None:
            last_tokens_at_s.append(last_s)
        else:
            times.first_scheduled_at_s, times.first_token_at_s = request.group.first_scheduled_at_s, now_s
            continuation = request.group.continuation
            if continuation is None or not continuation.num_tokens:  # else the call that was cut has counted it
                self._meter.first_token(request, planner)
        if self.suspects.current is not None:
            self._clear_suspect(request)

    def _end_output(self, request: LiveRequest, index: int, end: OutputEnd, now_s: float) -> None:
        """The sink has the last token of an output that the planner has ended."""
        if end.is_settled:  # by a stop string in the last token
            return
        assert end.reason is not None, "the planner has ended it"
        request.sink.finish_output(index, end.reason)
        if end.has_stop_strings:
            return
        end.confirm()
        if request.has_ended:
            self._forget(request, now_s)


class _Handle:
    def __init__(self, requests: LiveRequests, request: LiveRequest) -> None:
        self._requests = requests
        self._request = request

    def finish_output(self, output_index: int, num_tokens: int, reason: FinishReason) -> None:
        self._requests.finish_output(self._request, output_index, num_tokens, reason)

    def abort(self, error: OctavoServiceError) -> None:
        self._requests.abort(self._request, error)
