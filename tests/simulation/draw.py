"""Plans are drawn from seeds.

A swarm (Groce et al. 2012, "Swarm testing"): each seed leaves some kinds of requests and of faults out, so that the
others meet undisturbed. A plan is a value (`plan.py`); `shrink.py` takes parts of it away.
"""

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from tests.simulation.network.link import Weather
from tests.simulation.plan import (
    BY_LIST,
    BY_NAME,
    CELL_FAULTS,
    CLIENT_FAULTS,
    ENGINE_FAULTS,
    EXECUTOR_FAULTS,
    FRONT_FAULTS,
    LINK_FAULTS,
    LIVENESS,
    MOMENTS,
    NO_CELL,
    NO_MOMENT,
    SAFETY,
    SCHEDULER_FAULTS,
    SEAMLESS_FAULTS,
    TRANSFER_FAULTS,
    TRANSFER_MOMENTS,
    WEIGHT_FAULTS,
    WHILE_DRAINED,
    WHILE_RESUMED,
    ExecutorPlan,
    FaultPlan,
    Plan,
    RequestPlan,
)
from tests.simulation.shapes import KINDS, MAX_ENCODER_TOKENS, MAX_MODEL_LEN, NUM_FAMILIES, NUM_SHAPES, shape

# Seeds that follow each other share shapes, whose answers are then computed alone once.
SEEDS_OF_A_GROUP = 25
_SHAPES_OF_A_GROUP = 50

# A run has enough of both sooner or later, and ends then: how much is drawn.
LONGEST_S = 400.0
_NUM_STEPS = {SAFETY: (300, 400), LIVENESS: (150, 250)}  # what has not ended goes on when all is healed
_NUM_FAULTS = (10, 14)
_MOST_FAULTS = 60  # not all of them find what they would strike

# What comes right after some faults, if their target is struck twice, and when.
_AFTER = {
    "drain_executor": ("kill_executor", "power_off_executor", "stall_executor"),
    "drain_scheduler": ("kill_scheduler", "power_off_scheduler", "stall_scheduler"),
    "stall_scheduler": ("reset_link", "reset_link", "cut_client"),
    "reset_link": ("kill_executor", "stall_executor", "cut_link", "reset_link"),
    "cut_link": ("kill_executor", "stall_scheduler"),
    "kill_engine": ("kill_engine", "reset_front", "kill_front"),
    "forget_engine": ("kill_engine", "power_off_engine", "drain_scheduler"),
    "power_off_front": ("kill_front", "stall_scheduler"),
    "cut_front": ("kill_front", "reset_front"),
    "reset_front": ("reset_front", "stall_front"),
    "empty_executor": ("kill_executor", "stall_executor", "cut_executors"),
}
_MOMENT_AFTER = {
    "drain_executor": WHILE_DRAINED,
    "drain_scheduler": WHILE_DRAINED,
    "reset_link": WHILE_RESUMED,
}

_MOMENTS = tuple(moment for moment in MOMENTS if moment not in TRANSFER_MOMENTS)

# Two fifths of the seeds have fronts, and a quarter of those only faults of which no client may learn.
_NUM_FRONTS = (0, 0, 0, 1, 2)
_SEAMLESS_SHARE = 0.25

# So many of those with fronts are cells: so many fronts join all of so many schedulers.
_CELL_SHARE = 0.4
_CELL_FRONTS = (1, 2, 2, 3)
_CELL_SCHEDULERS = (2, 2, 3)

# Where there are no fronts.
_FAULTS = (*EXECUTOR_FAULTS, *SCHEDULER_FAULTS, *LINK_FAULTS, *CLIENT_FAULTS)

# How long a fault lasts; and a stall in which a lease may run out.
_DURATIONS_S = (0.02, 0.3, 0.3, 1.0, 1.0, 2.5, 2.5, 6.0, 12.0)
_LONGER_S = (2.5, 6.0, 6.0, 12.0)

# The mean between two faults: of steps, and of time at most, which has doubled after a while: then some work is done.
_FAULT_GAPS_STEPS = (12, 18, 25)
_FAULT_GAPS_S = (2.0, 3.0, 5.0)
_CALMER_AFTER_S = 20.0

# How many different requests break executors.
_NUM_POISONS = 3

# Output tokens of a request that fills a small cache while it runs, all its sequences together.
_MANY_TOKENS = 24


# Of the seeds have executors that draft.
_DRAFTS_SHARE = 0.4

# Of the seeds have a model whose layers differ in their caches: the windows of its groups, and how many blocks a pool
# has more than its longest sequence takes of it.
_GROUPS_SHARE = 0.4
_WINDOWS = (4, 8, 16, 24, 40)
_MORE_BLOCKS = (0, 0, 2, 8, 40)
# Of its executors know nothing of groups.
_UNGROUPED_SHARE = 0.15

# Of the seeds have a model with states, and most of its executors save some: few, or more than they need.
_STATES_SHARE = 0.25
_DEVICE_STATES = (0, 1, 2, 3, 4, 8, 32, 100)
_HOST_STATES = (0, 2, 8, 32)
# Of them swap their sequences, out of pools that hold little more than the longest one, and states with them.
_STATES_SWAP_SHARE = 0.6
_SWAPPED_BLOCKS = (24, 48, 96)
# Of them have blocks as small as can be: states are saved some blocks apart, and sequences are short here.
_SMALL_BLOCKS_SHARE = 0.7
_SMALL_BLOCK = 4


# Of the seeds have a model with an encoder, whose pools hold so many blocks more than the longest input takes. Of them
# swap their sequences, as those with states do.
_ENCODER_SHARE = 0.3
_MORE_ENCODER_BLOCKS = (0, 0, 1, 3, 8, 30)
_ENCODER_SWAP_SHARE = 0.4

# Of the seeds have executors that send each other blocks; with tokens that take time, as only then it pays.
_TRANSFERS_SHARE = 0.5
_MAX_TRANSFERS = (0, 1, 4, 4, 16)
_TOKENS_US = (1_000.0, 4_000.0)
# Of them have many prompts that begin alike, and executors that are all alike; and expect each transfer to cost little.
_MORE_ALIKE_SHARE = 0.5
_ALIKE_SHARE = 0.8
_CHEAP_SHARE = 0.6

# Of the seeds have pools on the host that are too small for all prefixes.
_HOST_PREFIXES_SHARE = 0.3
_HOST_BLOCKS = (3, 6, 12, 24)
# Of the seeds have schedulers that do without prefixes on the host, and without transfers.
_SWITCHED_OFF_SHARE = 0.1

# Of the seeds have a fleet whose weights change, where one scheduler has all executors; in place of so many faults.
_WEIGHTS_SHARE = 0.4
_CHANGES_SHARE = 0.35


@dataclass(frozen=True, slots=True)
class Load:
    """What a seed puts its executors under.

    Attributes:
        is_tight: Small caches, and bursts of requests that grow: some make room for others.
        swaps: They do so by way of the host pool.
        is_alike: Most prompts begin alike: much is shared, also with those that were moved to the host pool.
        is_choppy: Outputs end at stop strings, while their groups are preempted and move: small caches, no host pool.
        poison_share: Of the requests break executors.
        has_rivals: Two schedulers would have more executors than there are; one takes over what the other one loses.
    """

    is_tight: bool
    swaps: bool
    is_alike: bool
    is_choppy: bool
    poison_share: float
    has_rivals: bool


def draw_plan(seed: int, mode: str) -> Plan:
    """Return the plan of a seed."""
    workload, faults = random.Random(f"workload {seed}"), random.Random(f"faults {seed} {mode}")
    is_choppy = workload.random() < 0.1
    load = Load(
        is_tight=is_choppy or workload.random() < 0.5,
        swaps=not is_choppy and workload.random() < 0.4,
        is_alike=not is_choppy and workload.random() < 0.3,
        is_choppy=is_choppy,
        poison_share=workload.choice((0.0, 0.0, 0.0, 0.03, 0.1)),
        has_rivals=not is_choppy and workload.random() < 0.15,
    )
    links = random.Random(f"front {seed}")
    num_fronts = links.choice(_NUM_FRONTS)
    is_seamless = num_fronts > 0 and links.random() < _SEAMLESS_SHARE
    if is_seamless:
        load = replace(load, poison_share=0.0, has_rivals=False)
    transfers = random.Random(f"transfers {seed}")
    has_transfers = transfers.random() < _TRANSFERS_SHARE
    if has_transfers and not load.is_choppy:  # prefixes are evicted here and there, and wanted again
        load = replace(load, is_tight=True, is_alike=load.is_alike or transfers.random() < _MORE_ALIKE_SHARE)
    executors = _draw_executors(workload, load)
    if has_transfers:
        executors = _with_transfers(executors, transfers)
    num_schedulers = 2 if load.has_rivals else min(len(executors), workload.choice((1, 1, 1, 2)))
    num_schedulers = 1 if is_seamless or (has_transfers and not load.has_rivals) else num_schedulers
    cells, cell = random.Random(f"cell {seed}"), NO_CELL
    if num_fronts > 0 and cells.random() < _CELL_SHARE:
        cell, num_fronts = cells.choice((BY_LIST, BY_NAME, BY_NAME)), cells.choice(_CELL_FRONTS)
        executors = _at_least(2, executors)
        num_schedulers = min(len(executors), cells.choice(_CELL_SCHEDULERS))
    drafts = random.Random(f"drafts {seed}")
    if drafts.random() < _DRAFTS_SHARE:  # some of a fleet may draft more than others, or nothing
        executors = tuple(replace(executor, max_allowance=drafts.choice((1, 2, 4, 8))) for executor in executors)
    num_clients = workload.randint(1, 4)
    plan = Plan(
        seed=seed,
        mode=mode,
        quiet_at_s=LONGEST_S,
        num_steps=faults.randint(*_NUM_STEPS[mode]),
        num_faults=faults.randint(*_NUM_FAULTS),
        num_open=workload.choice((8, 12) if load.is_tight or load.is_alike else (12, 20, 40)),
        is_fair=workload.random() < 0.15,
        num_schedulers=num_schedulers,
        num_fronts=num_fronts,
        cell=cell,
        num_clients=num_clients,
        num_resuming=random.Random(f"resume {seed}").choice((0, 0, 1, num_clients)),
        sliding_window_tokens=workload.choice((0, 0, 0, 24)),
        drain_s=workload.choice((0.2, 1.0, 5.0)),
        settings=_draw_settings(workload, load, len(executors), num_schedulers),
        weather=_draw_weather(workload),
        executors=executors,
        requests=_draw_requests(workload, load, seed, num_schedulers, num_clients),
        faults=_draw_faults(
            faults,
            load,
            _fault_kinds(num_fronts, cell, is_seamless=is_seamless, has_transfers=has_transfers),
            has_transfers=has_transfers,
        ),
    )
    encoders = random.Random(f"encoder {seed}")
    plan = _with_encoder(plan, encoders) if encoders.random() < _ENCODER_SHARE else plan
    groups = random.Random(f"groups {seed}")
    plan = _with_groups(plan, groups) if groups.random() < _GROUPS_SHARE else plan
    states = random.Random(f"states {seed}")
    plan = _with_states(plan, states) if states.random() < _STATES_SHARE else plan
    plan = _with_tiers(plan, transfers, has_transfers=has_transfers)
    weights = random.Random(f"weights {seed} {mode}")
    return _with_weights(plan, weights) if weights.random() < _WEIGHTS_SHARE else plan


def _draw_executors(draw: random.Random, load: Load) -> tuple[ExecutorPlan, ...]:
    num_executors = draw.choice((1, 1, 2, 2, 2, 3, 3, 4, 5, 8))
    if load.has_rivals or load.is_choppy:
        num_executors = draw.choice((2, 2, 3) if load.is_choppy else (3, 3, 4, 5))
    are_equal = draw.random() < 0.4
    step_ms = draw.choice((20.0, 40.0) if load.is_tight else (5.0, 10.0, 20.0, 40.0))
    block_size = draw.choice((4,) if load.is_alike else (4, 8, 16))
    # The smallest pool holds the longest sequence once, and little more.
    pools_tokens: tuple[int, ...] = (MAX_MODEL_LEN, 200) if load.is_tight else (200, 320, 1200)
    if load.is_choppy:
        pools_tokens = (MAX_MODEL_LEN,)
    host_blocks = draw.choice((12, 24, 48) if load.swaps else (0,) if load.is_choppy else (0, 0, 16))
    first: dict[str, Any] = {}
    executors = []
    for number in range(num_executors):
        if not first or not are_equal:
            own_size = block_size if draw.random() < 0.8 else draw.choice((4, 8, 16))
            first = {
                "block_size_tokens": own_size,
                "num_device_blocks": draw.choice(pools_tokens) // own_size + draw.randint(1, 3),
                "num_host_blocks": host_blocks,
                "max_num_seqs": 16 if load.is_choppy else draw.choice((8, 16) if load.is_tight else (4, 6, 8, 16)),
                "max_num_batched_tokens": draw.choice((16, 32, 64, 256)),
                "step_ms": step_ms * draw.choice((0.5, 1.0, 2.0)),
                "token_us": draw.choice((0.0, 100.0)),
                "has_device": draw.random() < 0.3,
            }
        executors.append(ExecutorPlan(f"executor{number}:1", load_s=draw.uniform(0.05, 1.0), **first))
    return tuple(executors)


def _at_least(num_executors: int, executors: tuple[ExecutorPlan, ...]) -> tuple[ExecutorPlan, ...]:
    more = (replace(executors[0], address=f"executor{number}:1") for number in range(len(executors), num_executors))
    return (*executors, *more)


def _with_transfers(executors: tuple[ExecutorPlan, ...], draw: random.Random) -> tuple[ExecutorPlan, ...]:
    """Return executors of which two at least may send each other blocks, if they have the same ones."""
    executors = _at_least(draw.choice((2, 3, 4)), executors)
    if draw.random() < _ALIKE_SHARE:
        executors = tuple(
            replace(executors[0], address=executor.address, load_s=executor.load_s) for executor in executors
        )
    token_us = draw.choice(_TOKENS_US)
    most = [draw.choice(_MAX_TRANSFERS[1:]) for _ in range(2)] + [draw.choice(_MAX_TRANSFERS) for _ in executors[2:]]
    return tuple(
        replace(executor, token_us=token_us, max_transfers=max_transfers)
        for executor, max_transfers in zip(executors, most, strict=True)
    )


def _with_tiers(plan: Plan, draw: random.Random, *, has_transfers: bool) -> Plan:
    """Return a plan in which some pools on the host hold little, and some schedulers use no tiers."""
    executors = plan.executors
    if draw.random() < _HOST_PREFIXES_SHARE:
        executors = tuple(replace(executor, num_host_blocks=draw.choice(_HOST_BLOCKS)) for executor in executors)
    settings = {name: draw.random() >= _SWITCHED_OFF_SHARE for name in ("host_prefixes", "block_transfers")}
    settings["prefix_caching"] = plan.settings["prefix_caching"] or has_transfers
    is_cheap = draw.random() < _CHEAP_SHARE
    return replace(plan, executors=executors, settings={**plan.settings, **settings}, is_sending_cheap=is_cheap)


def _with_weights(plan: Plan, draw: random.Random) -> Plan:
    """Return a plan in which an operator changes weights, unless it has several schedulers, or may tell no client."""
    if plan.num_schedulers > 1 or plan.is_seamless:
        return plan
    faults = tuple(
        replace(fault, kind=draw.choice((WEIGHT_FAULTS[0], *WEIGHT_FAULTS)))
        if draw.random() < _CHANGES_SHARE
        else fault
        for fault in plan.faults
    )
    return replace(plan, faults=faults, updates_weights=True)


def _with_groups(plan: Plan, draw: random.Random) -> Plan:
    """Return a plan whose model has layers that see different windows; most of its executors have groups for them."""
    window, other = draw.sample(_WINDOWS, 2)
    windows = draw.choice(((0, window), (0, window), (0, window), (window, 0), (window,), (window, other)))
    executors = []
    for executor in plan.executors:
        groups = []
        for seen in windows:
            size, most = executor.block_size_tokens, executor.num_device_blocks
            if seen:  # the smallest pool holds the longest sequence: its window and one step's chunk
                fewest = -(-(seen + executor.max_num_batched_tokens) // size) + 2
                most = min(fewest, -(-MAX_MODEL_LEN // size)) + draw.choice(_MORE_BLOCKS)
            groups.append((seen, most))
        has_groups = draw.random() >= _UNGROUPED_SHARE
        executors.append(replace(executor, cache_groups=tuple(groups) if has_groups else ()))
    return replace(plan, executors=tuple(executors), sliding_window_tokens=0 if 0 in windows else max(windows))


def _with_states(plan: Plan, draw: random.Random) -> Plan:
    """Return a plan whose model has states, of which each executor saves some, few or none."""
    has_small_blocks = draw.random() < _SMALL_BLOCKS_SHARE
    plan = _swapping(plan, draw) if draw.random() < _STATES_SWAP_SHARE else plan
    executors = tuple(
        replace(
            _with_small_blocks(executor) if has_small_blocks else executor,
            num_device_states=draw.choice(_DEVICE_STATES),
            num_host_states=draw.choice(_HOST_STATES) if executor.num_host_blocks else 0,
        )
        for executor in plan.executors
    )
    return replace(plan, has_states=True, executors=executors)


def _swapping(plan: Plan, draw: random.Random) -> Plan:
    """Return a plan that swaps its sequences, out of pools that hold little more than the longest one."""
    executors = tuple(
        replace(
            executor,
            num_device_blocks=min(executor.num_device_blocks, MAX_MODEL_LEN // executor.block_size_tokens + 3),
            num_host_blocks=draw.choice(_SWAPPED_BLOCKS),
            max_num_seqs=max(8, executor.max_num_seqs),
        )
        for executor in plan.executors
    )
    settings = {**plan.settings, "preemption_mode": "swap", "prefix_caching": True, "watermark": 0.0}
    return replace(plan, executors=executors, settings=settings)


def _with_encoder(plan: Plan, draw: random.Random) -> Plan:
    """Return a plan whose model has an encoder; each executor has room for the longest input, and little more."""
    plan = _swapping(plan, draw) if draw.random() < _ENCODER_SWAP_SHARE else plan
    executors = tuple(
        replace(
            executor,
            num_encoder_blocks=-(-MAX_ENCODER_TOKENS // executor.block_size_tokens) + draw.choice(_MORE_ENCODER_BLOCKS),
            max_num_batched_tokens=max(MAX_ENCODER_TOKENS, executor.max_num_batched_tokens),
        )
        for executor in plan.executors
    )
    return replace(plan, has_encoder=True, executors=executors)


def _with_small_blocks(executor: ExecutorPlan) -> ExecutorPlan:
    """Return an executor with smaller blocks, for as many tokens."""
    ratio = executor.block_size_tokens // _SMALL_BLOCK
    return replace(
        executor,
        block_size_tokens=_SMALL_BLOCK,
        num_device_blocks=executor.num_device_blocks * ratio,
        num_encoder_blocks=executor.num_encoder_blocks * ratio,
        cache_groups=tuple((window, num_blocks * ratio) for window, num_blocks in executor.cache_groups),
    )


def _draw_settings(draw: random.Random, load: Load, num_executors: int, num_schedulers: int) -> dict[str, Any]:
    # Each finds one executor at least; if they may have more than their part, they take what another one loses.
    may_have_more = load.has_rivals or (num_executors > 2 and draw.random() < 0.5)
    most = None
    if num_schedulers > 1:
        most = min(num_executors // num_schedulers + may_have_more, (num_executors - 1) // (num_schedulers - 1))
    return {
        "policy": draw.choice(("fcfs", "priority")),
        "preemption_mode": draw.choice(("auto", "swap", "swap") if load.swaps else ("auto", "recompute")),
        "prefill_mode": draw.choice(("chunked", "chunked", "first")),
        "prefix_caching": load.is_alike or draw.random() < 0.8,
        "steps_in_flight": draw.choice(("auto", "1", "2", "4")),
        "check_batch_table": draw.random() < 0.8,
        "lease_s": 2.0 if load.has_rivals else draw.choice((2.0, 5.0, 10.0)),
        "orphan_timeout_s": draw.choice((5.0, 30.0)),
        "max_waiting_requests": draw.choice((4, 1000, 1000)),
        "tenant_weights": draw.choice(({}, {"a": 1.0, "b": 3.0, "c": 0.5})),
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
    draw: random.Random, load: Load, seed: int, num_schedulers: int, num_clients: int
) -> tuple[RequestPlan, ...]:
    shapes = _draw_shapes(draw, load, seed)
    is_bursty, has_deadlines, has_leavers = (draw.random() < 0.4 for _ in range(3))
    has_slow_readers, has_aborts = (draw.random() < 0.3 for _ in range(2))
    requests: list[RequestPlan] = []
    for number, at_s in enumerate(_draw_times(draw, is_bursty=is_bursty or load.is_tight)):
        is_poison = draw.random() < load.poison_share
        requests.append(
            RequestPlan(
                number=number,
                at_s=at_s,
                scheduler=draw.randrange(num_schedulers),
                shape=NUM_SHAPES + draw.randrange(_NUM_POISONS) if is_poison else draw.choice(shapes),
                client=draw.randrange(num_clients),
                priority=draw.choice((0, 0, 1, 5)),
                leaves_after=draw.randint(1, 12) if has_leavers and draw.random() < 0.2 else 0,
                aborts_after=draw.randint(1, 12) if has_aborts and draw.random() < 0.2 else 0,
                timeout_s=draw.choice((0.05, 0.5, 3.0)) if has_deadlines and draw.random() < 0.3 else None,
                reads_every_s=draw.choice((0.05, 0.5)) if has_slow_readers and draw.random() < 0.2 else 0.0,
                is_duplicate=number > 0 and draw.random() < 0.02,
                max_retries=0 if is_poison else draw.choice((0, 8, 20)),
            )
        )
    return tuple(requests)


def _draw_shapes(draw: random.Random, load: Load, seed: int) -> list[int]:
    group = random.Random(f"group {seed // SEEDS_OF_A_GROUP}")
    kinds = {kind for kind in KINDS if draw.random() < 0.7} or {"plain"}
    shapes = [number for number in group.sample(range(NUM_SHAPES), _SHAPES_OF_A_GROUP) if shape(number).kind in kinds]
    shapes = shapes or [number for number in range(NUM_SHAPES) if shape(number).kind in kinds][:20]
    if load.is_choppy:
        return group.sample(
            [number for number in range(NUM_SHAPES) if len(shape(number).options.get("stop", ())) > 3], 20
        )
    if load.is_alike:
        counts = Counter(number % NUM_FAMILIES for number in shapes)
        families = [family for family, _ in counts.most_common(2)]
        shapes = [number for number in shapes if number % NUM_FAMILIES in families]
        endless = [number for number in range(NUM_SHAPES) if shape(number).kind == "unbounded"]
        shapes += group.sample(endless, 2)  # they fill a pool for themselves
    if load.is_tight:
        return [number for number in shapes if shape(number).num_output_tokens >= _MANY_TOKENS] or shapes
    return shapes


def _draw_times(draw: random.Random, *, is_bursty: bool) -> list[float]:
    """Return when requests are sent, ascending: at any time, or many at once and then none."""
    gap_s, times, at_s = draw.choice((0.2, 0.4, 0.7)), [], 0.0
    while at_s < LONGEST_S:
        burst = draw.randint(5, 30) if is_bursty else 1
        times += [at_s + abs(draw.gauss(0.0, 0.1)) for _ in range(burst)]
        at_s += draw.expovariate(1.0 / (burst * gap_s))
    return sorted(times)


def _fault_kinds(num_fronts: int, cell: str, *, is_seamless: bool, has_transfers: bool) -> tuple[str, ...]:
    """Return the kinds of which some are drawn."""
    if is_seamless:
        return SEAMLESS_FAULTS
    kinds = (*_FAULTS, *TRANSFER_FAULTS) if has_transfers else _FAULTS
    if not num_fronts:
        return kinds
    return (*kinds, *ENGINE_FAULTS, *FRONT_FAULTS, *(CELL_FAULTS if cell == BY_NAME else ()))


def _draw_faults(
    draw: random.Random, load: Load, all_kinds: tuple[str, ...], *, has_transfers: bool
) -> tuple[FaultPlan, ...]:
    kinds = [kind for kind in all_kinds if draw.random() < 0.4] or [all_kinds[0]]
    kinds += ["stall_scheduler"] * 6 if load.has_rivals else []
    kinds += [kind for kind in TRANSFER_FAULTS if kind in all_kinds]
    others = [kind for kind in kinds if kind not in SCHEDULER_FAULTS] or kinds  # nobody works without a scheduler
    gap_s, gap_steps = draw.choice(_FAULT_GAPS_S), draw.choice(_FAULT_GAPS_STEPS)
    waits, comes_twice = draw.random() < 0.5 or has_transfers, load.has_rivals or draw.random() < 0.5
    faults: list[FaultPlan] = []
    at_s, after_steps = 0.0, 0.0
    while len(faults) < _MOST_FAULTS:
        former = faults[-1] if faults and comes_twice and draw.random() < 0.4 else None
        if former is None:
            kind = draw.choice(kinds if draw.random() < 0.5 else others)
            at_s += draw.expovariate(1.0 / gap_s) * (1.0 + at_s / _CALMER_AFTER_S)
            after_steps += draw.expovariate(1.0 / gap_steps)
        else:
            kind = draw.choice([kind for kind in _AFTER.get(former.kind, ()) if kind in all_kinds] or kinds)
        faults.append(
            FaultPlan(
                number=len(faults),
                at_s=at_s,
                after_steps=int(after_steps),
                delay_s=_draw_delay(draw, former),
                moment=_draw_moment(draw, load, former, waits=waits, has_transfers=has_transfers),
                kind=kind,
                target=draw.randrange(8) if former is None else former.target,
                duration_s=draw.choice(_LONGER_S if load.has_rivals and kind == "stall_scheduler" else _DURATIONS_S),
            )
        )
    return tuple(faults)


def _draw_delay(draw: random.Random, former: FaultPlan | None) -> float:
    if former is None:
        return draw.uniform(0.0, 0.1)
    return 0.0 if former.kind in _MOMENT_AFTER else draw.uniform(0.0, 0.5)


def _draw_moment(draw: random.Random, load: Load, former: FaultPlan | None, *, waits: bool, has_transfers: bool) -> str:
    if former is not None:
        return _MOMENT_AFTER.get(former.kind, NO_MOMENT)
    if not waits or draw.random() < 0.5:
        return NO_MOMENT
    if has_transfers and draw.random() < 0.5:
        return draw.choice(TRANSFER_MOMENTS)
    return draw.choice(_MOMENTS[:2] if load.swaps and draw.random() < 0.5 else _MOMENTS)
