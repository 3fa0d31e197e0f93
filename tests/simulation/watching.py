"""Watchers are told of what happens in a run, and change nothing of it: the same seed has the same digest without them.

Read next: `sometimes.py`, `trace.py`.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo_shared.process.events import Event
from octavo_shared.step_wire.step import StepResult
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.sequence import Sequence as TokenSequence
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_plan import Decision
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.request.life import EndedRequest
from scheduler_svc.request.output_end import EndState
from tests.simulation.plan import FaultPlan

if TYPE_CHECKING:
    from tests.simulation.checks import RequestRecord
    from tests.simulation.world import World


class Watcher:
    """Does nothing with what it is told. `process`: the name of the one that it happened in."""

    def run_begins(self, clock: Callable[[], float]) -> None:
        """A run begins; `clock` has its time in seconds."""

    def fault_begins(self, world: "World", fault: FaultPlan) -> None:
        """A fault is about to strike."""

    def fault_ended(self, fault: FaultPlan) -> None:
        """A fault is over."""

    def logged(self, process: str, event: Event) -> None:
        """A line of the log."""

    def sent(self, record: "RequestRecord") -> None:
        """A client sends a request."""

    def answered(self, record: "RequestRecord") -> None:
        """The call of a request has ended, as its client sees it."""

    def ended(self, process: str, engine: Engine, ended: EndedRequest) -> None:
        """A request has ended in a scheduler."""

    def decided(self, process: str, planner: ExecutorPlanner, decision: Decision) -> None:
        """A core has decided; mostly that there is nothing to do."""

    def processed(self, process: str, planner: ExecutorPlanner, result: StepResult, updates: StepUpdates) -> None:
        """A core has taken a result."""

    def stopped(self, process: str, planner: ExecutorPlanner | None, sequence: TokenSequence) -> None:
        """A sequence is about to end because its text holds a stop string."""

    def probed(self, process: str, address: str, *, works: bool) -> None:
        """An executor that had failed was tried."""

    def asked_to_abort(self, process: str, request_id: str) -> None:
        """A scheduler was asked to abort a request by its id."""

    def linked(self, process: str, name: str) -> None:
        """Something rare was seen on the link between a core and a front (`link_watch.py`)."""

    def transferred(self, process: str, name: str) -> None:
        """Something rare was seen in a transfer of blocks (`transfer_watch.py`)."""

    def changed_weights(self, process: str, name: str) -> None:
        """Something rare was seen when an operator changed weights (`weights.py`)."""

    def broken(self, what: str) -> None:
        """The first promise is broken."""

    def run_ended(self) -> None:
        """The run is over: nothing of it may be held any more, or it is never let go."""


def watch(engine: Engine, process: str, watchers: Sequence[Watcher]) -> None:
    """Let watchers see what an engine does from now on."""
    fleet = engine.fleet
    for owner, name, told in (
        (fleet, "schedule", _tell_decision),
        (fleet, "process", _tell_result),
        (engine, "on_probed", _tell_probe),
    ):
        setattr(owner, name, partial(told, getattr(owner, name), process, watchers))
    engine.abort_request = partial(_tell_abort, engine.abort_request, process, watchers)  # type: ignore[method-assign]
    finish_output = partial(_tell_stop, engine.requests.finish_output, process, watchers, fleet)
    engine.requests.finish_output = finish_output  # type: ignore[method-assign]
    tell_end = partial(_tell_end, process, watchers, engine)
    engine.requests._observers = (*engine.requests._observers, tell_end)


def _tell_decision(
    schedule: Callable[..., tuple[Decision, set[ExecutorPlanner]]],
    process: str,
    watchers: Sequence[Watcher],
    planner: ExecutorPlanner,
    now_s: float,
) -> tuple[Decision, set[ExecutorPlanner]]:
    decided = schedule(planner, now_s)
    if decided[0].in_flight is not None or decided[0].events or decided[0].failures:
        for watcher in watchers:
            watcher.decided(process, planner, decided[0])
    return decided


def _tell_result(
    take: Callable[..., StepUpdates],
    process: str,
    watchers: Sequence[Watcher],
    planner: ExecutorPlanner,
    result: StepResult,
) -> StepUpdates:
    updates = take(planner, result)
    for watcher in watchers:
        watcher.processed(process, planner, result, updates)
    return updates


def _tell_stop(
    finish_output: Callable[..., None],
    process: str,
    watchers: Sequence[Watcher],
    fleet: Fleet,
    request: LiveRequest,
    output_index: int,
    *said: Any,
) -> None:
    if request.ends[output_index].state is EndState.RUNNING:  # its front has found a stop string
        for watcher in watchers:
            watcher.stopped(process, fleet.planner_of(request.group), request.group.sequences[output_index])
    finish_output(request, output_index, *said)


async def _tell_abort(
    abort_request: Callable[[str, str | None], Awaitable[bool]],
    process: str,
    watchers: Sequence[Watcher],
    request_id: str,
    tenant: str | None,
) -> bool:
    was_live = await abort_request(request_id, tenant)
    for watcher in watchers:
        watcher.asked_to_abort(process, request_id)
    return was_live


def _tell_probe(
    on_probed: Callable[..., None], process: str, watchers: Sequence[Watcher], address: str, *, works: bool
) -> None:
    for watcher in watchers:
        watcher.probed(process, address, works=works)
    on_probed(address, works=works)


def _tell_end(process: str, watchers: Sequence[Watcher], engine: Engine, ended: EndedRequest) -> None:
    for watcher in watchers:
        watcher.ended(process, engine, ended)
