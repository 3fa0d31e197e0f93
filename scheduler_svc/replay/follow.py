"""One request's life, as a step log has it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from octavo.admin.v1 import admin_pb2
from octavo.values.wording import counted
from scheduler_svc.admin.life import event_states
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.replay.log_reader import LogFile
from scheduler_svc.replay.requests import ReplayedRequests
from scheduler_svc.replay.run import ReplayRun


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
    requests: ReplayedRequests | None = None
    file: LogFile | None = None
    for moment in run.play():
        if moment.is_first or requests is None:
            if requests is not None and file is not None:
                yield from _unended(requests, file, request_id)
            requests = ReplayedRequests(moment.replay)
        file = moment.file
        for request in requests.take(moment):
            if request.request_id == request_id:
                yield _life(request, file, requests)
    if requests is not None and file is not None:
        yield from _unended(requests, file, request_id)


def _unended(requests: ReplayedRequests, file: LogFile, request_id: str) -> Iterator[Life]:
    for request in requests.live.values():
        if request.request_id == request_id:
            yield _life(request, file, requests)


def _life(request: LiveRequest, file: LogFile, requests: ReplayedRequests) -> Life:
    header = file.header
    arrived_at_unix_s = header.started_at_unix_us / 1e6 + request.times.arrived_at_s - header.started_at_s
    arrived = datetime.fromtimestamp(arrived_at_unix_s, UTC)
    has_arrival = request.group.arrival in requests.has_arrival
    words = f"{'arrived' if has_arrival else 'seen first'} {arrived:%Y-%m-%d %H:%M:%S} UTC, log {header.log_id[:8]}"
    return Life(words, life_of(request, has_arrival=has_arrival))


def life_of(request: LiveRequest, *, has_arrival: bool) -> list[admin_pb2.RequestEvent]:
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
