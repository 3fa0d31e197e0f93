"""The promises on cells: a front has each of its requests at one engine, and at one that takes requests.

- A request of an engine that is away goes on at once, if one with equal weights and numerics takes requests.
- An engine that is away gets no new request while another one takes some.
- A front leaves no engine that has requests of its.
- No request is computed by two schedulers for longer than the link to one of them may seem to live.
- When all is quiet, each scheduler gets some of the new requests.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_plan import Decision
from scheduler_svc.engine.engine import Engine
from scheduler_svc.link.remote_engine import RemoteEngine
from tests.simulation.network.link import SERVER_KEEPALIVE_S
from tests.simulation.plan import RequestPlan
from tests.simulation.watching import Watcher

if TYPE_CHECKING:
    from tests.simulation.checks import RequestRecord
    from tests.simulation.machines import FrontMachine
    from tests.simulation.world import World

# How long a request may wait for an engine that is away while another one could go on with it, and how often we look.
LONGEST_WAIT_S = 3.0
_LOOK_INTERVAL_S = 0.5

# How long two schedulers may compute one request, and how soon after a step one has stopped, in seconds.
_BOTH_S = SERVER_KEEPALIVE_S + 5.0
_STOPPED_AFTER_S = 1.0

# So many different prompts for each scheduler find all of them: by chance one is left out once in a million runs.
_PROMPTS_PER_SCHEDULER = 12


async def watch_fronts(world: "World") -> None:
    """Look at what the fronts of a cell have where, until cancelled."""
    waits_since_s: dict[RemoteEngine, float] = {}
    while True:
        former, waits_since_s = waits_since_s, {}
        for machine in world.fronts:
            if machine.process is None or not machine.process.is_running or machine.cell is None:
                continue
            engines = machine.cell.engines
            for engine in machine.engines:
                if engine.num_requests and engine not in engines:
                    world.checks.break_promise(f"{machine.name} has left an engine with {engine.num_requests} requests")
            for lost in engines:
                if lost.waiting_requests and any(_goes_on_with(other, lost, engines) for other in engines):
                    since_s = waits_since_s[lost] = former.get(lost, world.loop.time())
                    if world.loop.time() - since_s > LONGEST_WAIT_S:
                        ids = ", ".join(request.request_id for _, request in lost.waiting_requests)
                        world.checks.break_promise(f"{ids} wait for {lost.scheduler_id}, and another could go on")
        await asyncio.sleep(_LOOK_INTERVAL_S)


def _takes_requests(engine: RemoteEngine) -> bool:
    return engine.is_reachable and not engine.is_away and not engine.why_not_ready and engine.model is not None


def _goes_on_with(other: RemoteEngine, lost: RemoteEngine, engines: Sequence[RemoteEngine]) -> bool:
    """Return whether an engine could go on with requests of one that is away."""
    if not _takes_requests(other) or other.model is None or lost.model is None:
        return False
    if any(one.scheduler_id == other.scheduler_id and one.incarnation > other.incarnation for one in engines):
        return False  # another one is in its place
    own, its = other.model.reproducibility, lost.model.reproducibility
    return bool(own.numerics_ids) and (own.weights_digest, own.numerics_ids) == (its.weights_digest, its.numerics_ids)


def watch_submissions(engine: RemoteEngine, front: "FrontMachine", accuse: Callable[[str], None]) -> None:
    """Look at each request that a front gives an engine from now on."""
    submit = engine.submit

    async def looked_at(*arguments: Any) -> None:
        others = [] if front.cell is None else front.cell.engines
        if engine.is_away and any(map(_takes_requests, others)):
            accuse(f"{front.name} gives a request to an engine that is away, and others take some")
        await submit(*arguments)

    engine.submit = looked_at  # type: ignore[method-assign, assignment]


@dataclass(slots=True)
class CellChecks(Watcher):
    """Watches all schedulers of a cell."""

    world: "World"
    _sent: set[str] = field(default_factory=set)
    _namesakes: set[str] = field(default_factory=set)
    # By request id and process: since when it computes, and when it did last.
    _runs: defaultdict[str, dict[str, tuple[float, float]]] = field(default_factory=lambda: defaultdict(dict))

    def sent(self, record: "RequestRecord") -> None:
        """See `Watcher`."""
        (self._namesakes if record.request_id in self._sent else self._sent).add(record.request_id)

    def decided(self, process: str, planner: ExecutorPlanner, decision: Decision) -> None:
        """See `Watcher`."""
        now_s = self.world.loop.time()
        for group in planner.batch.running if self.world.plan.cell and decision.step is not None else ():
            if group.request_id in self._namesakes:
                continue
            runs = self._runs[group.request_id]
            since_s, last_s = runs.get(process, (now_s, now_s))
            since_s = since_s if now_s - last_s <= _STOPPED_AFTER_S else now_s
            runs[process] = since_s, now_s
            for other, (others_since_s, others_last_s) in runs.items():
                both_s = now_s - max(since_s, others_since_s)
                if other != process and now_s - others_last_s <= _STOPPED_AFTER_S and both_s > _BOTH_S:
                    self.world.checks.break_promise(
                        f"{process} and {other} compute {group.request_id} for {both_s:.1f} s"
                    )


def has_used_all(world: "World", num_requests: Mapping[Engine, int], sent: Sequence[RequestPlan]) -> bool:
    """Return whether each scheduler of a cell got one of these, since it had so many requests, or it needs no more.

    A promise is broken if they are enough to tell that one is left out.
    """
    if not world.plan.cell:
        return True
    engines = {machine.name: machine.scheduler.engine for machine in world.schedulers if machine.scheduler is not None}
    counts = world.checks.num_requests()
    unused = [name for name, engine in engines.items() if counts[engine] == num_requests.get(engine, 0)]
    has_enough = len({request.shape for request in sent}) >= _PROMPTS_PER_SCHEDULER * len(engines)
    if unused and has_enough:
        world.checks.break_promise(f"{', '.join(unused)} got none of {len(sent)} requests, and all is healed")
    return not unused or has_enough
