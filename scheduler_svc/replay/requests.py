"""The requests of a replayed fleet, with what happened to them: what the engine keeps of live ones."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import repeat
from typing import Any

from octavo.admin.v1 import admin_pb2
from octavo.steplog.v1 import step_log_pb2 as pb
from octavo.values.wording import counted
from scheduler_svc.admin.life import event_states
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.replay.core_replay import CoreReplay
from scheduler_svc.replay.run import LogFile, Moment, ReplayRun
from scheduler_svc.request.life import EventKind, LifeEvent
from scheduler_svc.request.outputs import FinishReason

# Only these end groups.
_ENDING_CALLS = ("group_aborted", "result_taken", "sequence_finished", "step_decided")
# A replay has no clients, so nothing calls it.
_NO_SINK: Any = None


@dataclass(frozen=True, slots=True)
class Life:
    """What happened to one request.

    Attributes:
        arrived: When it arrived, or the log begins, in words; and which start of the scheduler it was.
        events: Oldest first.
    """

    arrived: str
    events: list[admin_pb2.RequestEvent]


def follow(run: ReplayRun, request_id: str) -> Iterator[Life]:
    """Replay, and yield the life of each request with this id: an id may be used again after its request ended."""

    def lives(of: Iterable[LiveRequest], requests: ReplayedRequests, file: LogFile) -> Iterator[Life]:
        return (_life(request, file, requests) for request in of if request.request_id == request_id)

    last: tuple[ReplayedRequests, LogFile] | None = None
    for moment, requests, ended in with_requests(run):
        if last is not None and last[0] is not requests:
            yield from lives(last[0].live.values(), *last)
        last = requests, moment.file
        yield from lives(ended, *last)
    if last is not None:
        yield from lives(last[0].live.values(), *last)


def _life(request: LiveRequest, file: LogFile, requests: "ReplayedRequests") -> Life:
    header = file.header
    arrived_at_unix_s = header.started_at_unix_us / 1e6 + request.times.arrived_at_s - header.started_at_s
    arrived = datetime.fromtimestamp(arrived_at_unix_s, UTC)
    has_arrival = request.group.arrival in requests.has_arrival
    words = f"{'arrived' if has_arrival else 'seen first'} {arrived:%Y-%m-%d %H:%M:%S} UTC, log {header.log_id[:8]}"
    return Life(words, _events_of(request, has_arrival=has_arrival))


def _events_of(request: LiveRequest, *, has_arrival: bool) -> list[admin_pb2.RequestEvent]:
    """Return what happened to a request, oldest first, with its end if it has ended."""
    group, times = request.group, request.times
    times = replace(times, first_scheduled_at_s=group.first_scheduled_at_s)
    events = event_states(times, group.num_prompt_tokens, request.life.events)
    if not has_arrival:
        events[0].text = "existed before the log begins"
    made = counted(request.num_output_tokens, "output token")
    if times.ended_at_s is None:
        return events
    since_us = max(0, round((times.ended_at_s - times.arrived_at_s) * 1e6))
    if request.finish_reason is not None:
        kind, text = admin_pb2.REQUEST_EVENT_KIND_FINISHED, f"finished with {made}: {request.finish_reason.value}"
    else:
        kind = admin_pb2.REQUEST_EVENT_KIND_FAILED
        text = f"ended after {made}: by a stop string, by its client, or by an error"
    return [*events, admin_pb2.RequestEvent(kind=kind, since_arrival_us=since_us, text=text)]


def with_requests(run: ReplayRun) -> Iterator[tuple[Moment, "ReplayedRequests", list[LiveRequest]]]:
    """Replay, and yield each call with the requests of its fleet, and those of them that ended with it."""
    requests: ReplayedRequests | None = None
    for moment in run.play():
        if moment.is_first or requests is None:
            requests = ReplayedRequests(moment.replay)
        yield moment, requests, requests.take(moment)


class ReplayedRequests:
    """The live requests of a replayed fleet, by arrival.

    Attributes:
        live: Those that have not ended.
        has_arrival: Arrivals of those that came while the log was written.
    """

    def __init__(self, replay: CoreReplay) -> None:
        self.live: dict[int, LiveRequest] = {}
        self.has_arrival: set[int] = set()
        for group in sorted(replay.groups.values(), key=lambda group: group.arrival):
            if group.live_sequences:
                self._add(group, replay.now_s)

    def _add(self, group: SequenceGroup, now_s: float) -> None:
        self.live[group.arrival] = LiveRequest(group, _NO_SINK, now_s)

    def take(self, moment: Moment) -> list[LiveRequest]:
        """Note what a call did; return the requests that ended with it."""
        record, replay, now_s = moment.record, moment.replay, moment.record.at_s
        match record.WhichOneof("call"):
            case "group_added":
                arrival = record.group_added.arrival
                self._add(replay.groups[arrival], now_s)
                self.has_arrival.add(arrival)
            case "group_withdrawn":
                self._note(record.group_withdrawn.arrival, LifeEvent(EventKind.PARKED, now_s))
            case "loss_noted":
                self.live[record.loss_noted.arrival].note_loss(record.loss_noted.executor, counts=True)
            case "core_left":
                executor, cause = replay.joined[record.core_left.core].name, "the step log does not record why"
                for group in moment.applied.evacuated:
                    self._note(group.arrival, LifeEvent(EventKind.EXECUTOR_LOST, now_s, executor, cause=cause))
            case "step_decided":
                self._note_decision(moment, record.step_decided)
            case "result_taken" if moment.applied.updates is not None:
                self._note_updates(moment.applied.updates, now_s)
        return self._take_ended(now_s) if record.WhichOneof("call") in _ENDING_CALLS else []

    def _note(self, arrival: int, event: LifeEvent) -> None:
        if arrival in self.live:
            self.live[arrival].life.add(event)

    def _note_decision(self, moment: Moment, call: pb.StepDecided) -> None:
        decision, step = moment.applied.decision, moment.applied.step
        executor = moment.replay.joined[call.core].name
        for event in () if decision is None else decision.events:
            step_id = None if step is None else step.step_id
            life = LifeEvent(event.kind, call.now_s, executor, step_id, event.num_tokens, event.num_computed_tokens)
            self._note(event.group.arrival, life)

    def _note_updates(self, updates: StepUpdates, now_s: float) -> None:
        groups = [sequence.group for sequence in updates.sequences]
        for sequence, num_tokens in zip(updates.sequences, updates.counts or repeat(1), strict=False):
            if (request := self.live.get(sequence.group.arrival)) is not None:
                request.ends[sequence.index].num_tokens += num_tokens
        for row, reason in updates.finished.items():
            if (request := self.live.get(groups[row].arrival)) is not None:
                request.ends[updates.sequences[row].index].end_by_tokens(reason)
        for group, _ in updates.pooled:
            if (request := self.live.get(group.arrival)) is not None:
                request.ends[0].set_to(0, FinishReason.STOP)
        for group in updates.finished_searches:
            assert group.beams is not None
            hypotheses = group.beams.finished_hypotheses()
            if (request := self.live.get(group.arrival)) is not None and hypotheses:
                num_found = sum(len(hypothesis.token_ids) for hypothesis in hypotheses)
                request.ends[0].set_to(num_found, hypotheses[0].finish_reason)
        for group in (*groups, *updates.advanced_searches, *updates.finished_searches):
            if (request := self.live.get(group.arrival)) is not None:
                request.times.last_token_at_s = now_s
                if request.times.first_token_at_s is None:
                    request.times.first_token_at_s = now_s

    def _take_ended(self, now_s: float) -> list[LiveRequest]:
        ended = [request for request in self.live.values() if _has_ended(request.group)]
        for request in ended:
            del self.live[request.group.arrival]
            request.times.ended_at_s = now_s
        return ended


def _has_ended(group: SequenceGroup) -> bool:
    return all(sequence.status is SequenceStatus.FINISHED for sequence in group.sequences)
