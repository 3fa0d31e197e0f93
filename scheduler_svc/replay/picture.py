"""The fleet at one step of a log, as AdminService would have shown it then."""

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.steplog.v1 import step_log_pb2
from octavo_shared.errors import OctavoServiceError
from scheduler_svc.admin.block_map import block_states, encoder_states
from scheduler_svc.admin.state import RequestLocation, locations_in, request_state, set_planner_state
from scheduler_svc.admin.steps import step_text
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.step_plan import GroupEvent
from scheduler_svc.replay.core_replay import StepName
from scheduler_svc.replay.requests import ReplayedRequests, with_requests
from scheduler_svc.replay.run import Moment, ReplayRun, read_logs
from scheduler_svc.telemetry.recent_steps import RecentStep


class UnknownStepError(OctavoServiceError):
    """No step of the log is meant, or several are."""


@dataclass(frozen=True, slots=True)
class StepChoice:
    """A step as a person names it: `57`, or `2:57` for the second attachment of the log."""

    step_id: int
    planner: int | None

    @classmethod
    def parse(cls, text: str) -> "StepChoice":
        """Return the step that a text names. Raises UnknownStepError: it names none."""
        planner, _, step_id = text.rpartition(":")
        if not (step_id.isdecimal() and (planner.isdecimal() or not planner)):
            raise UnknownStepError(
                f"--at {text!r}: give a step number, such as 57, or attachment and step, such as 2:57"
            )
        return cls(int(step_id), int(planner) if planner else None)

    def matches(self, call: step_log_pb2.StepDecided) -> bool:
        """Return whether a decision made this step."""
        return call.HasField("step") and call.step.step_id == self.step_id and self.planner in (None, call.core)


@dataclass(frozen=True, slots=True)
class StepPicture:
    """What there was right after a step was decided.

    Attributes:
        name: The step.
        since_begin_s: How long after the log's first file began.
        text: What the step does, in a sentence.
        events: What the decision did to requests, a line each.
        state, live, reasons: As AdminService answers.
        block_sizes: Tokens of a block, by executor.
        block_maps: The state of each block, by executor.
        encoder_maps: The same of the encoder's pool; empty: there is none.
    """

    name: StepName
    since_begin_s: float
    text: str
    events: list[str]
    state: pb.GetSchedulerStateResponse
    live: list[admin_pb2.RequestState]
    reasons: dict[str, str]
    block_sizes: dict[str, int]
    block_maps: dict[str, bytes]
    encoder_maps: dict[str, bytes]


def picture_at(run: ReplayRun, choice: StepChoice) -> StepPicture:
    """Replay up to a step and return what there was.

    Raises: UnknownStepError: there is none, or several are meant; or the replay does not get there.
    """
    _require_one(run, choice)
    for moment, requests, _ in with_requests(run):
        if moment.record.WhichOneof("call") == "step_decided" and choice.matches(moment.record.step_decided):
            return _picture(moment, requests)
    where = "" if run.difference is None else f": {run.difference}"
    raise UnknownStepError(f"the replay does not reach step {choice.step_id}{where}")


def _require_one(run: ReplayRun, choice: StepChoice) -> None:
    found: list[tuple[int, str]] = []
    names: dict[int, str] = {}
    last: dict[int, int] = {}
    logs = read_logs(run.directory)
    for log in logs:
        for file in log.files:
            names |= {planner.core: planner.name for planner in file.header.cores}
            for record in file.records():
                call = record.WhichOneof("call")
                if call == "core_joined":
                    names[record.core_joined.core] = record.core_joined.name
                elif call == "step_decided" and record.step_decided.HasField("step"):
                    planner, step_id = record.step_decided.core, record.step_decided.step.step_id
                    last[planner] = max(last.get(planner, 0), step_id)
                    if choice.matches(record.step_decided):
                        found.append((planner, names.get(planner, "")))
    is_of_several = len({planner for planner, _ in found}) < len(found)
    if is_of_several or (len(logs) > 1 and not found and choice.planner is not None):
        raise UnknownStepError("the directory has logs of several runs; copy the files of one run to another directory")
    if not found:
        raise UnknownStepError(_what_there_is(choice, sorted(names), last))
    if len(found) > 1:
        named = ", ".join(f"{planner}:{choice.step_id} ({name})" for planner, name in found)
        raise UnknownStepError(f"{len(found)} attachments have a step {choice.step_id}; choose one: {named}")


def _what_there_is(choice: StepChoice, planners: list[int], last: dict[int, int]) -> str:
    """Say what there is instead of a step that is not there."""
    if choice.planner is not None and choice.planner not in planners:
        numbers = f"{planners[0]} to {planners[-1]}" if len(planners) > 1 else "".join(map(str, planners)) or "none"
        return f"the log has no attachment {choice.planner}; it has {numbers}"
    where = "the log" if choice.planner is None else f"attachment {choice.planner}"
    steps = [last[planner] for planner in last if choice.planner in (None, planner)]
    has = f"its largest number is {max(steps)}" if steps else "it has no step at all"
    return f"{where} has no step {choice.step_id}; {has}"


def _picture(moment: Moment, requests: ReplayedRequests) -> StepPicture:
    replay, applied, header = moment.replay, moment.applied, moment.file.header
    assert applied.step is not None
    assert applied.decision is not None
    assert applied.decision.in_flight is not None
    fleet, now_s, sent = replay.fleet, replay.now_s, applied.decision.in_flight
    locations: dict[SequenceGroup, RequestLocation] = {}
    executors = []
    for planner in fleet.planners:
        state = admin_pb2.ExecutorState(address=planner.name, is_retired=not planner.takes_groups)
        set_planner_state(state, planner, now_s)
        if planner.info is not None:
            state.instance_id, state.model_id = planner.info.instance_id, planner.info.model_id
        executors.append(state)
        locations.update(locations_in(planner.name, planner))
    waiting = RequestLocation(admin_pb2.REQUEST_STATUS_WAITING)
    return StepPicture(
        name=applied.step,
        since_begin_s=now_s - header.started_at_s,
        text=step_text(RecentStep(sent.step, sent.layout)).removesuffix("; no result yet"),
        events=[_event_text(event) for event in applied.decision.events],
        state=pb.GetSchedulerStateResponse(
            version=header.release,
            num_waiting_requests=len(fleet.queue),
            num_running_requests=sum(executor.num_running_requests for executor in executors),
            num_swapped_requests=sum(executor.num_swapped_requests for executor in executors),
            num_preempted_requests=sum(executor.num_preempted_requests for executor in executors),
            num_preemptions=sum(fleet.num_preemptions.values()),
            uptime_ms=max(0, round(1000 * (now_s - header.started_at_s))),
            executors=executors,
            status_text="ready",
        ),
        live=[
            request_state(request, locations.get(request.group, waiting), now_s) for request in requests.live.values()
        ],
        reasons=dict(_reasons(fleet, now_s)),
        block_sizes={planner.name: planner.limits.block_size for planner in fleet.planners},
        block_maps={planner.name: block_states(planner.blocks.allocator).tobytes() for planner in fleet.planners},
        encoder_maps={planner.name: encoder_states(planner) for planner in fleet.planners},
    )


def _reasons(fleet: Fleet, now_s: float) -> Iterator[tuple[str, str]]:
    """Yield the waiting requests, in the order of admission, with what keeps the first one from each executor."""
    first: SequenceGroup | None = None
    for group in fleet.queue.in_order():
        if first is not None:
            yield group.request_id, f"queued behind {first.request_id!r}"
            continue
        first = group
        obstacles = [
            f"{planner.name}: {obstacle.reason}"
            for planner, obstacle in fleet.obstacles(group, now_s)
            if obstacle is not None
        ]
        yield group.request_id, "; ".join(obstacles) or "fits, and waits for token budget in a step"


def _event_text(event: GroupEvent) -> str:
    what = event.kind.value.replace("_", " ")
    ready = f", {event.num_computed_tokens} of them computed before" if event.num_computed_tokens else ""
    return f"{event.group.request_id} {what}, {event.num_tokens} tokens{ready}"
