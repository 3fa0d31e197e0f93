"""A request's life as `AdminService` shows it: what happened to it, one event after another, and how it ended."""

from collections.abc import Iterable, Mapping

from octavo.admin.v1 import admin_pb2
from octavo.values.wording import counted
from scheduler_svc.request.life import EndedRequest, EventKind, LifeEvent, RequestTimes

EVENT_KIND: Mapping[EventKind, "admin_pb2.RequestEventKind.ValueType"] = {
    EventKind.ADMITTED: admin_pb2.REQUEST_EVENT_KIND_ADMITTED,
    EventKind.PREEMPTED: admin_pb2.REQUEST_EVENT_KIND_PREEMPTED,
    EventKind.DROPPED: admin_pb2.REQUEST_EVENT_KIND_DROPPED,
    EventKind.SWAPPED_OUT: admin_pb2.REQUEST_EVENT_KIND_SWAPPED_OUT,
    EventKind.SWAPPED_IN: admin_pb2.REQUEST_EVENT_KIND_SWAPPED_IN,
    EventKind.EXECUTOR_LOST: admin_pb2.REQUEST_EVENT_KIND_EXECUTOR_LOST,
    EventKind.WEIGHTS_CHANGED: admin_pb2.REQUEST_EVENT_KIND_WEIGHTS_CHANGED,
    EventKind.PARKED: admin_pb2.REQUEST_EVENT_KIND_PARKED,
}


def ended_state(ended: EndedRequest, now_s: float, *, shows_events: bool = True) -> admin_pb2.RequestState:
    """Return a request that has ended; `now_s` is the monotonic time."""
    times = ended.times
    assert times.ended_at_s is not None
    state = admin_pb2.RequestState(
        request_id=ended.request_id,
        status=admin_pb2.REQUEST_STATUS_ENDED,
        status_text="aborted" if ended.error_code == "ABORTED" else "failed" if ended.has_failed else "finished",
        tenant=ended.tenant,
        priority=ended.priority,
        num_prompt_tokens=ended.num_prompt_tokens,
        num_output_tokens=ended.num_output_tokens,
        num_cached_tokens=ended.num_cached_tokens,
        num_draft_tokens=ended.num_draft_tokens,
        num_preemptions=ended.num_preemptions,
        num_losses=ended.num_losses,
        age_ms=milliseconds(times.ended_at_s - times.arrived_at_s),
        outcome=ended.outcome,
        ended_ago_ms=milliseconds(now_s - times.ended_at_s),
    )
    state.ended_at.FromMilliseconds(round(ended.ended_at_unix_s * 1000))
    set_times(state, times)
    if shows_events:
        state.events.extend(event_states(times, ended.num_prompt_tokens, ended.events))
        state.events.append(_end_state(ended))
    return state


def set_times(state: admin_pb2.RequestState, times: RequestTimes) -> None:
    """Fill in how long a request waited for its first step and its first token, if it has had them."""
    if times.queue_s is not None:
        state.queue_ms = milliseconds(times.queue_s)
    if times.time_to_first_token_s is not None:
        state.time_to_first_token_ms = milliseconds(times.time_to_first_token_s)


def event_states(
    times: RequestTimes, num_prompt_tokens: int, events: Iterable[LifeEvent]
) -> list[admin_pb2.RequestEvent]:
    """Return the events of a request up to now, except its end, in the order of time."""
    arrival_s = times.arrived_at_s
    arrived = _event(
        admin_pb2.REQUEST_EVENT_KIND_ARRIVED, 0.0, f"arrived with {counted(num_prompt_tokens, 'prompt token')}"
    )
    states = [arrived, *(_life_event_state(event, arrival_s) for event in events)]
    if times.first_token_at_s is not None:
        states.append(
            _event(admin_pb2.REQUEST_EVENT_KIND_FIRST_TOKEN, times.first_token_at_s - arrival_s, "first token")
        )
    return sorted(states, key=lambda state: state.since_arrival_us)  # stable: those of a step keep their order


def milliseconds(seconds: float) -> int:
    """Return a duration in whole milliseconds; 0 if rounding made it negative."""
    return max(0, round(seconds * 1000))


def _life_event_state(event: LifeEvent, arrival_s: float) -> admin_pb2.RequestEvent:
    state = _event(EVENT_KIND[event.kind], event.at_s - arrival_s, _life_event_text(event))
    state.executor = event.executor
    if event.step_id is not None:
        state.step_id = event.step_id
    return state


def _life_event_text(event: LifeEvent) -> str:
    num_tokens, num_computed = counted(event.num_tokens, "token"), event.num_computed_tokens
    since = f", because {event.cause}" if event.cause else ""
    places = f", {event.cause}" if event.cause else ""
    texts = {
        EventKind.ADMITTED: f"admitted; of {num_tokens}, {num_computed} came from the prefix cache{places}",
        EventKind.PREEMPTED: f"preempted{since}; {num_tokens} will be recomputed",
        EventKind.DROPPED: f"dropped from the host cache{since}; {num_tokens} will be recomputed",
        EventKind.SWAPPED_OUT: f"preempted; the blocks of {num_tokens} move to the host cache",
        EventKind.SWAPPED_IN: f"swapped in from the host cache; {num_computed} of {num_tokens} were there",
        EventKind.EXECUTOR_LOST: f"the executor was lost: {event.cause}",
        EventKind.WEIGHTS_CHANGED: f"the weights have changed; it goes on with the keys and values of {num_tokens}",
        EventKind.PARKED: "quarantined: it may have crashed an executor",
    }
    return texts[event.kind]


def _end_state(ended: EndedRequest) -> admin_pb2.RequestEvent:
    duration_s = ended.times.duration_s
    assert duration_s is not None
    made = counted(ended.num_output_tokens, "output token")
    if ended.has_failed:
        text = f"failed after {made}: {ended.outcome}"
        return _event(admin_pb2.REQUEST_EVENT_KIND_FAILED, duration_s, text)
    return _event(admin_pb2.REQUEST_EVENT_KIND_FINISHED, duration_s, f"finished with {made}: {ended.outcome}")


def _event(kind: "admin_pb2.RequestEventKind.ValueType", since_arrival_s: float, text: str) -> admin_pb2.RequestEvent:
    since_arrival_us = max(0, round(since_arrival_s * 1e6))
    return admin_pb2.RequestEvent(kind=kind, since_arrival_us=since_arrival_us, text=text)
