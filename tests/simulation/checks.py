"""The promises that a run is checked against, all the time, and what was seen while it kept them."""

import asyncio
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from octavo.calls.resumption import DEFAULT_RESUME_TIMEOUT_S
from octavo.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OctavoError,
    OverloadedError,
    RequestAbortedError,
    RequestExistsError,
    ResourceExhaustedError,
    UnavailableError,
)
from octavo.values.outputs import Accepted, Delta, Event, Finished, Output
from octavo_shared.process import events
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.engine.engine import Engine
from scheduler_svc.link.absence import LIMIT_S
from scheduler_svc.link.engine_servicer import EngineServicer
from tests.simulation.adapters import Adapters, digests_of
from tests.simulation.alone import answer_alone
from tests.simulation.engine_checks import COUNTED_OUT, EngineChecks
from tests.simulation.link_checks import LinkChecks
from tests.simulation.loop import SimulationLoop
from tests.simulation.plan import WEIGHT_FAULTS, Plan, RequestPlan
from tests.simulation.processes import PROCESS, SimulatedProcess
from tests.simulation.shapes import MAX_MODEL_LEN, POISON, Shape, shape
from tests.simulation.watching import Watcher

# Between two looks at all that is inside a scheduler, in its callbacks: some 20 steps. Faults are looked at besides.
CALLBACKS_BETWEEN_LOOKS = 200

# What our own services log as an error only if they have a bug.
_BUGS = frozenset(("engine_failed", "rpc_failed", "step_thread_failed", "delivery_failed"))

# Why an executor was lost that no fault brings about: one of our own sessions did not keep to the order of steps.
_MISTAKES = re.compile(
    r"came instead of|is missing$|was not executed in this epoch|is no longer kept|no step is in flight"
    r"|has no expected_weights_version|expects version|was computed with version"
)

# What a request is told that an operator ends to pause the fleet.
_PAUSED = "an operator has paused the fleet"

# Why a client ends at once what it could have gone on with: the scheduler refuses the continuation for good.
_CANNOT_GO_ON = re.compile(r"cannot be resumed: ")


class PromiseBrokenError(Exception):
    """Something happened that must never happen."""


# What a queued request is told that makes room for one of a tenant which has less than its share. Else what was queued
# once stays so, at whichever core.
GAVE_WAY = "was displaced by another tenant's"


@dataclass(slots=True)
class RequestRecord:
    """What the client of one request saw.

    Attributes:
        goes_on: Whether the client goes on with its answer, should the call be cut.
        left: Whether the client went away by itself.
        was_aborted: Whether another call asked to abort it.
        max_model_len: The longest sequence that it was first accepted for.
        accepted_at_s, last_event_s: When the first event came, and the last one.
        token_ids, texts: What the deltas have brought, by output index.
        sent_at_s: When its client sent it.
        lora_adapter: The name of its adapter; empty: it has none.
        adapter_digests: Of the adapters that the deltas say.
    """

    plan: RequestPlan
    shape: Shape
    request_id: str
    goes_on: bool
    events: int = 0
    finished: Finished | None = None
    error: OctavoError | None = None
    left: bool = False
    was_aborted: bool = False
    has_ended: bool = False
    max_model_len: int = 0
    accepted_at_s: float = 0.0
    last_event_s: float = 0.0
    token_ids: defaultdict[int, tuple[int, ...]] = field(default_factory=lambda: defaultdict(tuple))
    texts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    sent_at_s: float = 0.0
    lora_adapter: str = ""
    adapter_digests: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Checks:
    """Watches one run.

    Attributes:
        seen: How often things happened, by name: ends of requests, log events, faults.
        records: Of all requests that were sent.
        watchers: Told of what happens.
        is_quiet: Whether all is well again, but for requests that break executors.
        is_poisoned: Whether such a request was sent since then.
        faults_at_s: When faults began, by number.
        adapters: Those of the run.
    """

    plan: Plan
    loop: SimulationLoop
    seen: Counter[str] = field(default_factory=Counter)
    records: list[RequestRecord] = field(default_factory=list)
    watchers: tuple[Watcher, ...] = ()
    broken: str = ""
    is_quiet: bool = False
    is_poisoned: bool = False
    faults_at_s: dict[int, float] = field(default_factory=dict)
    adapters: Adapters = field(init=False)
    _engines: dict[Engine, EngineChecks] = field(default_factory=dict)
    _links: dict[Engine, LinkChecks] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.adapters = Adapters(self.plan, self.loop.time)

    def break_promise(self, what: str) -> None:
        """A promise is broken: only the first one counts."""
        if not self.broken:
            self.broken = f"at {self.loop.time():.6f} s: {what}"
            for watcher in self.watchers:
                watcher.broken(self.broken)
            self.loop.end(PromiseBrokenError(self.broken))

    # Requests ----------------------------------------------------------------------------------------

    def begin(self, plan: RequestPlan, request_id: str) -> RequestRecord:
        """A request is sent."""
        asked = shape(plan.shape).with_encoder() if self.plan.has_encoder else shape(plan.shape)
        # Who goes on with one that breaks executors has them broken for as long as it tries.
        goes_on = plan.client < self.plan.num_resuming and not plan.is_streamed and asked.kind != POISON
        record = RequestRecord(plan, asked, request_id, goes_on, sent_at_s=self.loop.time())
        if asked.kind != POISON:
            record.lora_adapter = self.adapters.name_of(plan)
        self.records.append(record)
        for watcher in self.watchers:
            watcher.sent(record)
        return record

    def note_event(self, record: RequestRecord, event: Event) -> None:
        """Its client got an event."""
        record.events += 1
        record.last_event_s = self.loop.time()
        if record.finished is not None:
            self.break_promise(f"{record.request_id} got {type(event).__name__} after its end")
        if isinstance(event, Accepted) != (record.events == 1):
            self.break_promise(f"event {record.events} of {record.request_id} is {type(event).__name__}")
        if isinstance(event, Accepted):
            record.max_model_len, record.accepted_at_s = event.max_model_len, record.last_event_s
            record.shape = record.shape.with_seed(event.seed)
        if isinstance(event, Delta):
            record.token_ids[event.output_index] += event.token_ids
            record.texts[event.output_index] += event.text
            record.adapter_digests |= digests_of(event)
        if isinstance(event, Finished):
            record.finished = event

    def end(self, record: RequestRecord) -> None:
        """Its call has ended: with its answer, with an error, or because the client left."""
        if record.has_ended:
            self.break_promise(f"{record.request_id} ended twice")
        record.has_ended = True
        for watcher in self.watchers:
            watcher.answered(record)
        if record.error is not None:
            self.seen[f"ended: {type(record.error).__name__}"] += 1
            self._check_error(record, record.error)
        elif record.finished is not None:
            self.seen["ended: finished"] += 1
            self.seen[f"finished: {record.shape.kind}"] += 1
            self.seen["finished: with an adapter"] += bool(record.lora_adapter)
            self._check_answer(record, record.finished)
        elif record.left:
            self.seen["ended: client left"] += 1
        else:
            self.break_promise(f"the call of {record.request_id} ended without a word")

    def _check_answer(self, record: RequestRecord, finished: Finished) -> None:
        """It must be what it is alone, to the bit."""
        if record.shape.refused_as is not None:
            self.break_promise(f"{record.request_id} should have been refused: {record.shape.options}")
            return
        for output in finished.outputs:  # what the last event says, the deltas have brought, over all calls
            index = output.output_index
            if (record.token_ids[index], record.texts[index]) != (output.token_ids, output.text):
                self.break_promise(f"{record.request_id} got {record.token_ids[index]}, and the end says {output}")
        content = self.adapters.content_of(finished) if record.lora_adapter else None
        if record.lora_adapter and (content is None or len(record.adapter_digests) > 1):
            self.break_promise(f"{record.request_id} with {record.lora_adapter} says that {finished.outputs} made it")
            return
        expected = self._answer_alone(record, content)
        for ours, theirs in zip(finished.outputs, expected.outputs, strict=True):
            if difference := _difference(ours, theirs):
                self.break_promise(
                    f"{record.request_id} ({record.shape.kind}, shape {record.shape.number}) {difference}"
                )
                return
        if finished.prompt_logprobs != expected.prompt_logprobs:
            self.break_promise(f"{record.request_id} has other log-probabilities of its prompt than alone")
        usage, alone = finished.usage, expected.usage
        if (usage.num_prompt_tokens, usage.num_output_tokens) != (alone.num_prompt_tokens, alone.num_output_tokens):
            self.break_promise(f"{record.request_id} has the usage {usage}, and alone {alone}")

    def _answer_alone(self, record: RequestRecord, content: bytes | None) -> Finished:
        """Return what it is answered alone, up to the length that it was first accepted for, with this adapter."""
        shape, most = record.shape, record.shape.num_prompt_tokens + record.shape.options["max_tokens"]
        is_bound = record.max_model_len < min(most, MAX_MODEL_LEN)
        if is_bound:
            self.seen["finished: accepted for less than it may use"] += 1
        length = record.max_model_len if is_bound else MAX_MODEL_LEN
        return answer_alone(shape, self.plan.sliding_window_tokens, length, content)

    def _check_error(self, record: RequestRecord, error: OctavoError) -> None:
        """It must be one that the plan explains."""
        plan, kinds = record.plan, {fault.kind for fault in self.plan.faults}
        # One that goes on takes the id from one that came meanwhile.
        has_namesakes = sum(other.request_id == record.request_id for other in self.records) > 1
        lacked_its_adapter = self.adapters.explain(str(error), record.lora_adapter, is_quiet=self.is_quiet)
        allowed: dict[type[OctavoError], bool] = {
            InvalidRequestError: record.shape.refused_as is InvalidRequestError
            or "shrink_executor" in kinds
            or lacked_its_adapter,
            InternalError: (record.shape.refused_as is InternalError and "are not finite at token" in str(error))
            or lacked_its_adapter,
            DeadlineError: plan.timeout_s is not None,
            RequestAbortedError: record.was_aborted
            or has_namesakes
            or (_PAUSED in str(error) and not kinds.isdisjoint(WEIGHT_FAULTS)),
            RequestExistsError: has_namesakes,
            OverloadedError: (record.events == 0 or (GAVE_WAY in str(error) and not any(record.token_ids.values())))
            and (not self.is_quiet or self.is_poisoned)
            and self.plan.settings["max_waiting_requests"] < len(self.records),
            ResourceExhaustedError: "shrink_executor" in kinds or len(answer_outputs(record.shape)) > 1,
            # Beside one request that breaks executors others may find none; but nobody else is taken for the cause.
            UnavailableError: record.shape.kind == POISON
            or (
                COUNTED_OUT not in str(error)
                and (
                    self.is_poisoned
                    or self._lacked_an_engine(error)
                    or not (self.is_quiet or self._goes_on(record) or self._gave_up_early(record, error))
                )
            ),
        }
        why = self.adapters.why_wrong(str(error), record.lora_adapter, plan.scheduler, record.sent_at_s)
        if why or not any(isinstance(error, kind) and is_allowed for kind, is_allowed in allowed.items()):
            self.break_promise(f"{record.request_id} ended with {type(error).__name__}: {error}{why}")

    def _goes_on(self, record: RequestRecord) -> bool:
        """Return whether its front must have gone on with it, whatever became of the core."""
        return self.plan.is_seamless and record.events > 0 and not self._has_poison

    def _lacked_an_engine(self, error: OctavoError) -> bool:
        """Return whether cores ended again and again: none may have stayed until its front had found it."""
        since_s = self.loop.time() - LIMIT_S
        kinds = {fault.number: fault.kind for fault in self.plan.faults}
        times_s = [at_s for number, at_s in self.faults_at_s.items() if kinds[number] == "kill_engine"]
        return "no new one has started for" in str(error) and sum(at_s >= since_s for at_s in times_s) > 1

    def _gave_up_early(self, record: RequestRecord, error: OctavoError) -> bool:
        """Return whether its client goes on with what was cut, and did not for as long as it said."""
        if not (record.goes_on and record.events):
            return False
        if self.loop.time() >= record.last_event_s + DEFAULT_RESUME_TIMEOUT_S:
            return False
        return not _CANNOT_GO_ON.search(str(error))

    @property
    def _has_poison(self) -> bool:
        return any(shape(request.shape).kind == POISON for request in self.plan.requests)

    # Inside ------------------------------------------------------------------------------------------

    def watch(self, engine: Engine) -> Callable[[], None]:
        """Look at an engine that begins, now and then; return what is to be called after each of its callbacks."""
        inside = self._engines[engine] = EngineChecks(engine, self.loop, self.break_promise)

        def callback_ran() -> None:
            inside.note_callback()
            if inside.num_callbacks % CALLBACKS_BETWEEN_LOOKS == 0:
                self.look_now(engine)

        return callback_ran

    def num_requests(self) -> dict[Engine, int]:
        """Return how many requests each engine was given so far."""
        return {engine: inside.num_requests for engine, inside in self._engines.items()}

    def watch_link(self, link: EngineServicer, engine: Engine) -> None:
        """Look at the link between an engine and its fronts, now and then."""
        self._links[engine] = LinkChecks(link, engine, self.break_promise)

    def expect_no_end(self, task: asyncio.Task[None], process: SimulatedProcess) -> None:
        """A process runs until it is ended: when its task ends, that was a bug."""

        def ended(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            self.break_promise(f"{process.name} ended by itself: {type(error).__name__}: {error}")

        task.add_done_callback(ended)

    def look_now(self, engine: Engine) -> None:
        """Look at all that is inside an engine, which has just run."""
        self.look_at_cores(engine)
        self._engines[engine].look()
        if engine in self._links:
            self._links[engine].look()

    def look_at_cores(self, engine: Engine) -> None:
        """Assert the invariants of all cores, and that each live request is in exactly one place."""
        try:
            for planner in engine.fleet.planners:
                check_integrity(planner)
        except AssertionError as error:
            self.break_promise(f"an invariant: {error}")
        queued, parked = set(engine.queue), {request.group for request in engine.requests.suspects.parked}
        for request in engine.requests.values():
            num_places = sum(request.group in planner.groups for planner in engine.fleet.planners)
            num_places += (request.group in queued) + (request.group in parked) + (request in engine.requests.held)
            # What has ended is in the last step's results, and about to be delivered.
            if num_places != bool(request.group.live_sequences):
                self.break_promise(f"{request.request_id} is in {num_places} places")

    def check_empty(self, engine: Engine) -> None:
        """Nothing is left of requests that have ended."""
        left = {
            "requests": len(engine.requests),
            "groups in the queue": len(engine.queue),
            "parked requests": len(engine.requests.suspects.parked),
            "groups": sum(len(planner.groups) for planner in engine.fleet.planners),
            "live slots": sum(int(planner.table.live.sum()) for planner in engine.fleet.planners),
            "used blocks": sum(
                group.allocator.num_used_blocks for planner in engine.fleet.planners for group in planner.blocks.groups
            ),
            "used host blocks": sum(planner.swapped.host.num_used_blocks for planner in engine.fleet.planners),
            "requests that count as waiting": engine.waiting.num_waiting,
        }
        for what, number in left.items():
            if number:
                self.break_promise(f"all requests have ended, and {number} {what} are left")
        for driver in engine.drivers.values():
            if driver.planner is not None and not driver.planner.takes_groups:
                self.break_promise(f"{driver.address} is there, and gets no requests")
        self.look_now(engine)

    @contextmanager
    def reading_the_log(self) -> Iterator[None]:
        """Count what the services log; an error of our own making breaks a promise."""
        root, handler = logging.getLogger(), _LogReader(self)
        handlers, level = root.handlers[:], root.level
        root.handlers[:], root.level = [handler], logging.INFO
        logging.getLogger().setLevel(logging.INFO)
        try:
            yield
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)


class _LogReader(logging.Handler):
    def __init__(self, checks: Checks) -> None:
        super().__init__()
        self._checks = checks

    def handle(self, record: logging.LogRecord) -> bool:
        event = record.msg
        name = event.name if isinstance(event, events.Event) else str(event)
        self._checks.seen[f"log: {name}"] += 1
        if isinstance(event, events.Event):
            process = PROCESS.get().name
            for watcher in self._checks.watchers:
                watcher.logged(process, event)
            if name == "no_executor" and _MISTAKES.search(str(event.fields["cause"])):
                self._checks.break_promise(f"the log says {event}")
        if name in _BUGS or record.levelno >= logging.CRITICAL or record.name.startswith("asyncio"):
            error = record.exc_info[1] if record.exc_info else None
            self._checks.break_promise(f"the log says {event}: {type(error).__name__}: {error}")
        return True


def answer_outputs(shape: Shape) -> range:
    """Return the sequences that a shape has at once."""
    options = shape.options
    return range(max(options.get(name, 1) for name in ("n", "best_of", "beam_width")))


def _difference(ours: Output, theirs: Output) -> str:
    """Return where two outputs differ, in words; empty: they do not. Which executor made it does not count."""
    for name in ("output_index", "token_ids", "text", "logprobs", "alternatives", "finish_reason", "stopped_by"):
        found, expected = getattr(ours, name), getattr(theirs, name)
        if found != expected:
            return f"output {ours.output_index} has {name} {found}, and alone {expected}"
    if (ours.beam_score, ours.cumulative_logprob) != (theirs.beam_score, theirs.cumulative_logprob):
        return f"output {ours.output_index} has another score than alone"
    return ""
