"""A failing plan is made smaller while it fails in the same way: fewer faults, fewer requests, simpler settings.

Faults and requests are taken away by delta debugging (Zeller and Hildebrandt 2002, "Simplifying and isolating
failure-inducing input"). A fault first stays
in the plan and does nothing: all that comes before it then stays what it was.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from tests.simulation.loop import START_S
from tests.simulation.network.link import Weather
from tests.simulation.plan import NO_CELL, FaultPlan, Plan, RequestPlan

T = TypeVar("T")

# Returns which promise a plan breaks; empty: none.
Fails = Callable[[Plan], str]

_NOISE = (
    (re.compile(r"^at [\d.]+ s: "), ""),
    (re.compile(r"'[^']*'|\"[^\"]*\""), "'…'"),
    (re.compile(r"\[[^\]]*\]|\([^)]*\)|\{[^}]*\}"), "(…)"),
    (re.compile(r"\b(?:r|last)\d+(?:\.\d+)?\b(?:, )?"), "…"),
    (re.compile(r"(?:executor|scheduler)\d+:\d+(?:#\d+)?"), "…"),
    (re.compile(r"-?\d+(?:[.,]\d+)*"), "N"),
    (re.compile(r"(?:…)+"), "…"),
)

# The simplest value of each setting.
_SIMPLE_SETTINGS: dict[str, Any] = {
    "steps_in_flight": "1",
    "prefix_caching": False,
    "policy": "fcfs",
    "preemption_mode": "recompute",
    "prefill_mode": "chunked",
    "tenant_weights": {},
    "long_prefill_threshold": 0,
    "watermark": 0.0,
    "max_waiting_requests": 1000,
    "max_executors": None,
    "host_prefixes": False,
    "block_transfers": False,
}

_SIMPLE_REQUEST: dict[str, Any] = {
    "priority": 0,
    "leaves_after": 0,
    "aborts_after": 0,
    "timeout_s": None,
    "reads_every_s": 0.0,
    "is_duplicate": False,
    "max_retries": 0,
}


def kind_of(broken: str) -> str:
    """Return a broken promise without what differs from run to run: times, numbers, names, tokens."""
    kind = broken.splitlines()[0] if broken else ""
    for pattern, replacement in _NOISE:
        kind = pattern.sub(replacement, kind)
    return kind.strip()


@dataclass(slots=True)
class Shrinker:
    """Makes a plan smaller.

    Attributes:
        fails: Runs a plan.
        max_runs: So many runs at most.
        max_s: So many seconds at most.
        clock: Monotonic time in seconds.
        plan: The smallest plan so far that breaks the same promise.
        broken: What it breaks.
        num_runs: So far.
        tell: Told of each smaller plan.
    """

    fails: Fails
    max_runs: int = 300
    max_s: float = 600.0
    clock: Callable[[], float] = time.monotonic
    tell: Callable[[str], None] = lambda _: None
    plan: Plan = field(init=False)
    broken: str = field(init=False, default="")
    num_runs: int = field(init=False, default=0)
    _ends_at_s: float = field(init=False, default=0.0)

    def shrink(self, plan: Plan) -> Plan:
        """Return the smallest plan that was found. Raises ValueError: the plan breaks no promise."""
        self.plan, self._ends_at_s = plan, self.clock() + self.max_s
        self.broken = self.fails(plan)
        self.num_runs = 1
        if not self.broken:
            raise ValueError(f"seed {plan.seed} in mode {plan.mode} breaks no promise")
        self._cut_the_end()
        size = None
        while size != (size := _size(self.plan)) and not self.is_over:
            self._without_faults()
            self._without_requests()
            self._simpler()
        self._try(replace(self.plan, faults=_real(self.plan.faults)), "no placeholders of faults")
        return self.plan

    @property
    def is_over(self) -> bool:
        """Whether there may be no more runs."""
        return self.num_runs >= self.max_runs or self.clock() >= self._ends_at_s

    def _try(self, plan: Plan, what: str) -> bool:
        """Take a smaller plan if it fails in the same way."""
        if self.is_over or plan == self.plan:
            return False
        self.num_runs += 1
        broken = self.fails(plan)
        if kind_of(broken) != kind_of(self.broken):
            return False
        self.plan, self.broken = plan, broken
        self.tell(f"run {self.num_runs}: {what}; {len(_real(plan.faults))} faults, {len(plan.requests)} requests")
        return True

    def _cut_the_end(self) -> None:
        """Leave out what was to be sent after the promise was broken."""
        found = re.match(r"at ([\d.]+) s: ", self.broken)
        if found is None:
            return
        end_s = float(found[1]) - START_S
        plan = self.plan
        requests = tuple(request for request in plan.requests if request.at_s <= end_s)
        if end_s < plan.quiet_at_s:
            self._try(replace(plan, requests=requests), f"no requests after {end_s:.3f} s")

    def _without_faults(self) -> None:
        real = _real(self.plan.faults)

        def tries(left: Sequence[FaultPlan]) -> bool:
            numbers = {fault.number for fault in left}
            faults = tuple(
                fault if fault.number in numbers else replace(fault, is_taken_away=True) for fault in self.plan.faults
            )
            return self._try(replace(self.plan, faults=faults), "fewer faults")

        smallest_parts(real, tries)

    def _without_requests(self) -> None:
        def tries(left: Sequence[RequestPlan]) -> bool:
            return self._try(replace(self.plan, requests=tuple(left)), "fewer requests")

        smallest_parts(self.plan.requests, tries)

    def _simpler(self) -> None:
        for what, simpler in _simplifications(self.plan):
            self._try(simpler(self.plan), what)


def smallest_parts(parts: Sequence[T], tries: Callable[[Sequence[T]], bool]) -> Sequence[T]:
    """Return parts of which none can be left out, as far as `tries` says; it is given what would be left."""
    num_chunks = 1
    while parts:
        size = -(-len(parts) // num_chunks)
        begin, has_shrunk = 0, False
        while begin < len(parts):
            left = [*parts[:begin], *parts[begin + size :]]
            if tries(left):
                parts, has_shrunk = left, True
            else:
                begin += size
        if size == 1 and not has_shrunk:
            break
        num_chunks = min(len(parts), 2 * num_chunks) or 1
    return parts


def _simplifications(plan: Plan) -> Iterator[tuple[str, Callable[[Plan], Plan]]]:
    """Yield ways to make a plan simpler, in words; a way may change nothing."""
    yield "fair order", lambda plan: replace(plan, is_fair=True)
    yield "calm weather", lambda plan: replace(plan, weather=Weather())
    yield "one scheduler", _one_scheduler
    yield "no fronts", lambda plan: replace(plan, num_fronts=0, cell=NO_CELL)
    yield "no client goes on", lambda plan: replace(plan, num_resuming=0)
    yield "one front", lambda plan: replace(plan, num_fronts=min(1, plan.num_fronts))
    yield "one client", lambda plan: _requests(replace(plan, num_clients=1), client=0)
    for _ in plan.executors[1:]:
        yield "one executor fewer", lambda plan: replace(plan, executors=plan.executors[:-1] or plan.executors)
    for name, value in _SIMPLE_SETTINGS.items():
        yield f"{name} {value!r}", _with_setting(name, value)
    yield "no cache groups", lambda plan: _executors(plan, cache_groups=())
    yield "no saved states", lambda plan: _executors(plan, num_device_states=0, num_host_states=0)
    yield "no encoder", lambda plan: replace(plan, has_encoder=False)
    yield "no states", lambda plan: replace(plan, has_states=False)
    yield "no drafts", lambda plan: _executors(plan, max_allowance=1)
    yield "no sliding window", lambda plan: replace(plan, sliding_window_tokens=0)
    yield "learned prices", lambda plan: replace(plan, is_sending_cheap=False)
    yield "no transfers", lambda plan: _executors(plan, max_transfers=0)
    yield "no host blocks", lambda plan: _executors(plan, num_host_blocks=0)
    yield "no devices", lambda plan: _executors(plan, has_device=False)
    for name, value in _SIMPLE_REQUEST.items():
        yield f"requests with {name} {value!r}", partial(_requests, **{name: value})


def _one_scheduler(plan: Plan) -> Plan:
    settings = {**plan.settings, "max_executors": None}
    return _requests(replace(plan, num_schedulers=1, settings=settings), scheduler=0)


def _with_setting(name: str, value: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, settings={**plan.settings, name: value})


def _requests(plan: Plan, **changed: Any) -> Plan:
    return replace(plan, requests=tuple(replace(request, **changed) for request in plan.requests))


def _executors(plan: Plan, **changed: Any) -> Plan:
    return replace(plan, executors=tuple(replace(executor, **changed) for executor in plan.executors))


def _real(faults: Sequence[FaultPlan]) -> tuple[FaultPlan, ...]:
    return tuple(fault for fault in faults if not fault.is_taken_away)


def _size(plan: Plan) -> tuple[int, int]:
    return len(_real(plan.faults)), len(plan.requests)
