"""What happens in a run, drawn from its seed before it begins: who is there, what is asked, what breaks.

A swarm (Groce et al. 2012, "Swarm testing"): each seed leaves some kinds of requests and of faults out, so that the
others meet undisturbed. A plan is a value; `shrink.py` takes parts of it away.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.simulation.network.link import Weather
from tests.simulation.shapes import KINDS, MAX_MODEL_LEN, NUM_SHAPES, shape

SAFETY, LIVENESS = "safety", "liveness"
MODES = (SAFETY, LIVENESS)

# Seeds that follow each other share shapes, whose answers are then computed alone once.
SEEDS_OF_A_GROUP = 25
_SHAPES_OF_A_GROUP = 50

# Output tokens of a request that fills a small cache while it runs, all its sequences together.
_MANY_TOKENS = 24

# Faults by what they strike; `faults.py` has what each one does.
EXECUTOR_FAULTS = (
    "kill_executor",
    "power_off_executor",
    "stall_executor",
    "drain_executor",
    "shrink_executor",
    "change_numerics",
    "break_executor",
    "fail_step",
    "hang_step",
    "slow_steps",
    "answer_nonsense",
    "forget_address",
)
SCHEDULER_FAULTS = ("kill_scheduler", "power_off_scheduler", "stall_scheduler", "drain_scheduler")
LINK_FAULTS = ("reset_link", "cut_link", "cut_client", "bad_weather")
CLIENT_FAULTS = ("kill_client", "stall_client")
# What stands in place of a fault that was taken away: the draws of the loop stay what they were until then.
NOTHING = "nothing"
FAULTS = (*EXECUTOR_FAULTS, *SCHEDULER_FAULTS, *LINK_FAULTS, *CLIENT_FAULTS)

# How much longer than its duration says an executor is broken: it is tried several times.
BROKEN_AT_LEAST_S = 5.0


@dataclass(frozen=True, slots=True)
class ExecutorPlan:
    """One executor; the names are those of `FakeWorker`.

    `has_device`: whether a device computes its steps, while later ones are launched, or its own thread does.
    """

    address: str
    block_size_tokens: int
    num_device_blocks: int
    num_host_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    step_ms: float
    token_us: float
    load_s: float
    has_device: bool = False


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request: when it is sent, to which scheduler, and what its client does then.

    Attributes:
        number: Of the request in this run.
        leaves_after: After so many events the client leaves; 0: it stays.
        aborts_after: After so many events another call aborts it; 0: none does.
        timeout_s: Its deadline; None: none.
        reads_every_s: Between two events the client does something else for so long.
        is_duplicate: Whether it has the id of the request before.
        max_retries: How often its client sends it again, under another id, if there was nobody to compute it.
    """

    number: int
    at_s: float
    scheduler: int
    shape: int
    client: int
    priority: int = 0
    leaves_after: int = 0
    aborts_after: int = 0
    timeout_s: float | None = None
    reads_every_s: float = 0.0
    is_duplicate: bool = False
    max_retries: int = 0


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """One fault: when it begins, how long it lasts, whom it strikes (counted from 0, modulo how many there are)."""

    number: int
    at_s: float
    kind: str
    target: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run.

    Attributes:
        seed: What it was drawn from; also that of the order of things.
        mode: SAFETY: faults never stop. LIVENESS: at `quiet_at_s` all is healed, and then everything has to end.
        quiet_at_s: When the last fault begins, or all is healed, in seconds from the start.
        settings: Of the schedulers.
        is_fair: Whether what has been ready for longest runs first.
    """

    seed: int
    mode: str
    quiet_at_s: float
    is_fair: bool
    num_schedulers: int
    num_clients: int
    sliding_window_tokens: int
    settings: Mapping[str, Any]
    weather: Weather
    executors: tuple[ExecutorPlan, ...]
    requests: tuple[RequestPlan, ...] = field(repr=False)
    faults: tuple[FaultPlan, ...] = field(repr=False)


def draw_plan(seed: int, mode: str) -> Plan:
    """Return the plan of a seed."""
    workload, faults = random.Random(f"workload {seed}"), random.Random(f"faults {seed} {mode}")
    is_tight = workload.random() < 0.5  # small caches, and bursts of requests that grow: some make room for others
    executors = _draw_executors(workload, is_tight=is_tight)
    num_schedulers = min(len(executors), workload.choice((1, 1, 1, 2)))
    num_clients = workload.randint(1, 4)
    quiet_at_s = workload.choice((30.0, 40.0, 60.0))
    return Plan(
        seed=seed,
        mode=mode,
        quiet_at_s=quiet_at_s,
        is_fair=workload.random() < 0.15,
        num_schedulers=num_schedulers,
        num_clients=num_clients,
        sliding_window_tokens=workload.choice((0, 0, 0, 24)),
        settings=_draw_settings(workload, len(executors), num_schedulers),
        weather=_draw_weather(workload),
        executors=executors,
        requests=_draw_requests(workload, seed, num_schedulers, num_clients, quiet_at_s, is_tight=is_tight),
        faults=_draw_faults(faults, quiet_at_s),
    )


def _draw_executors(draw: random.Random, *, is_tight: bool) -> tuple[ExecutorPlan, ...]:
    num_executors = draw.choice((1, 1, 2, 2, 2, 3, 3, 4, 5, 8))
    are_equal = draw.random() < 0.4
    step_ms, block_size = draw.choice((20.0, 40.0) if is_tight else (5.0, 10.0, 20.0, 40.0)), draw.choice((4, 8, 16))
    host_blocks = draw.choice((0, 16, 48) if is_tight else (0, 0, 16, 48))
    first: dict[str, Any] = {}
    executors = []
    for number in range(num_executors):
        if not first or not are_equal:
            own_size = block_size if draw.random() < 0.8 else draw.choice((4, 8, 16))
            first = {
                "block_size_tokens": own_size,
                # The smallest pool holds the longest sequence once, and little more.
                "num_device_blocks": draw.choice((MAX_MODEL_LEN, 200) if is_tight else (200, 320, 1200)) // own_size
                + draw.randint(1, 3),
                "num_host_blocks": host_blocks,
                "max_num_seqs": draw.choice((8, 16) if is_tight else (4, 6, 8, 16)),
                "max_num_batched_tokens": draw.choice((16, 32, 64, 256)),
                "step_ms": step_ms * draw.choice((0.5, 1.0, 2.0)),
                "token_us": draw.choice((0.0, 100.0)),
                "has_device": draw.random() < 0.3,
            }
        executors.append(ExecutorPlan(f"executor{number}:1", load_s=draw.uniform(0.05, 1.0), **first))
    return tuple(executors)


def _draw_settings(draw: random.Random, num_executors: int, num_schedulers: int) -> dict[str, Any]:
    # Each finds one executor at least; if they may have more than their part, they take what another one loses.
    most = (
        None if num_schedulers == 1 else num_executors // num_schedulers + (num_executors > 2 and draw.random() < 0.5)
    )
    return {
        "policy": draw.choice(("fcfs", "priority")),
        "preemption_mode": draw.choice(("auto", "recompute", "swap")),
        "prefill_mode": draw.choice(("chunked", "chunked", "first")),
        "prefix_caching": draw.random() < 0.8,
        "steps_in_flight": draw.choice(("auto", "1", "2", "4")),
        "check_batch_table": draw.random() < 0.8,
        "lease_s": draw.choice((2.0, 5.0, 10.0)),
        "orphan_timeout_s": draw.choice((5.0, 30.0)),
        "max_waiting_requests": draw.choice((4, 1000, 1000)),
        "tenant_weights": draw.choice(((), ("a=1", "b=3", "c=0.5"))),
        "long_prefill_threshold": draw.choice((0, 16)),
        "watermark": draw.choice((0.0, 0.01, 0.1)),
        "resolve_interval_s": 1.0,
        "max_executors": most,
        "max_beam_width": 8,
        "step_timeout_s": 60.0,
    }


def _draw_weather(draw: random.Random) -> Weather:
    return Weather(
        latency_s=draw.choice((0.0001, 0.0005, 0.005)),
        jitter_s=draw.choice((0.0001, 0.001, 0.01)),
        rare_delay_s=draw.choice((0.0, 0.2, 2.0)),
        rare_one_in=draw.choice((50, 200, 1000)),
        window_bytes=draw.choice((400, 4_000, 65_536)),
    )


def _draw_requests(
    draw: random.Random, seed: int, num_schedulers: int, num_clients: int, until_s: float, *, is_tight: bool
) -> tuple[RequestPlan, ...]:
    group = random.Random(f"group {seed // SEEDS_OF_A_GROUP}")
    kinds = {kind for kind in KINDS if draw.random() < 0.7} or {"plain"}
    shapes = [number for number in group.sample(range(NUM_SHAPES), _SHAPES_OF_A_GROUP) if shape(number).kind in kinds]
    shapes = shapes or [number for number in range(NUM_SHAPES) if shape(number).kind in kinds][:20]
    if is_tight:
        shapes = [number for number in shapes if shape(number).num_output_tokens >= _MANY_TOKENS] or shapes
    num_requests = draw.choice((60, 90, 140))
    is_bursty, has_deadlines, has_leavers = (draw.random() < 0.4 for _ in range(3))
    has_slow_readers, has_aborts = (draw.random() < 0.3 for _ in range(2))
    bursts = [draw.uniform(0.0, until_s) for _ in range(4)]
    requests = []
    for number in range(num_requests):
        at_s = draw.uniform(0.0, until_s)
        if is_bursty or is_tight:
            at_s = min(until_s, max(0.0, draw.choice(bursts) + draw.gauss(0.0, 0.1)))
        requests.append(
            RequestPlan(
                number=number,
                at_s=at_s,
                scheduler=draw.randrange(num_schedulers),
                shape=draw.choice(shapes),
                client=draw.randrange(num_clients),
                priority=draw.choice((0, 0, 1, 5)),
                leaves_after=draw.randint(1, 12) if has_leavers and draw.random() < 0.2 else 0,
                aborts_after=draw.randint(1, 12) if has_aborts and draw.random() < 0.2 else 0,
                timeout_s=draw.choice((0.05, 0.5, 3.0)) if has_deadlines and draw.random() < 0.3 else None,
                reads_every_s=draw.choice((0.05, 0.5)) if has_slow_readers and draw.random() < 0.2 else 0.0,
                is_duplicate=number > 0 and draw.random() < 0.02,
                max_retries=draw.choice((0, 8, 20)),
            )
        )
    if draw.random() < 0.2:
        for poison, number in enumerate(draw.sample(range(num_requests), draw.randint(1, 3)), NUM_SHAPES):
            requests[number] = replace(requests[number], shape=poison, max_retries=0)
    return tuple(requests)


def _draw_faults(draw: random.Random, until_s: float) -> tuple[FaultPlan, ...]:
    kinds = [kind for kind in FAULTS if draw.random() < 0.4] or ["kill_executor"]
    num_faults = draw.randint(14, 30)
    return tuple(
        FaultPlan(
            number=number,
            at_s=draw.uniform(0.5, until_s),
            kind=draw.choice(kinds),
            target=draw.randrange(8),
            duration_s=draw.choice((0.02, 0.3, 0.3, 1.0, 1.0, 2.5, 2.5, 6.0, 12.0)),
        )
        for number in range(num_faults)
    )
