"""A run as a value: who is there, what is asked, what breaks. Next: `draw.py`, which draws plans, and `run.py`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.simulation.network.link import Weather

SAFETY, LIVENESS = "safety", "liveness"
MODES = (SAFETY, LIVENESS)

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
# Where there are fronts. Those of cores leave the fronts alone; of a twin there are two for a while that have one name.
ENGINE_FAULTS = ("kill_engine", "power_off_engine", "twin_engine")
FRONT_FAULTS = (
    "kill_front",
    "power_off_front",
    "stall_front",
    "slow_front",
    "drain_front",
    "cut_front",
    "reset_front",
    "twin_front",
)
# Where executors send blocks to each other: an operator drains one, or the way between two is gone.
TRANSFER_FAULTS = ("empty_executor", "cut_executors", "reset_executors")
# Where the fronts find the schedulers of a cell by a name: it has not the address of one that lives.
CELL_FAULTS = ("forget_engine",)
# What an operator does with the weights of a fleet (`weights.py`).
WEIGHT_FAULTS = ("update_weights", "pause_fleet", "sleep_fleet")
# Of which no client learns whose request was accepted: fronts and executors live, and their core is there again soon.
SEAMLESS_FAULTS = ("kill_engine", "stall_scheduler", "stall_front", "slow_front", "reset_front")
FAULTS = (
    *EXECUTOR_FAULTS,
    *SCHEDULER_FAULTS,
    *LINK_FAULTS,
    *CLIENT_FAULTS,
    *ENGINE_FAULTS,
    *FRONT_FAULTS,
    *CELL_FAULTS,
    *TRANSFER_FAULTS,
    *WEIGHT_FAULTS,
)

# How the fronts of a cell find its schedulers: each front joins all of them. NO_CELL: each has a scheduler of its own.
NO_CELL = ""
BY_LIST, BY_NAME = "list", "name"

# When a fault may wait for a moment in which its target is busy with something rare (`moments.py`).
NO_MOMENT = ""
WHILE_DRAINED = "it is drained"
WHILE_RESUMED = "its stream is resumed"
TRANSFER_MOMENTS = (
    "a transfer has begun",
    "the first blocks of a transfer are on their way",
    "a transfer has arrived and is not told",
)
MOMENTS = (
    "blocks are in its host pool",
    "preempted groups wait there",
    "two steps are under way",
    WHILE_DRAINED,
    WHILE_RESUMED,
    "suspects are parked",
    *TRANSFER_MOMENTS,
)

# One of so many requests is sent on a stream that it shares with others.
REQUESTS_PER_STREAMED = 3

# What is sent when all is well again has its number and this.
FIRST_LAST_NUMBER = 1000

# How much longer than its duration says an executor is broken: it is tried several times.
BROKEN_AT_LEAST_S = 5.0


@dataclass(frozen=True, slots=True)
class ExecutorPlan:
    """One executor; the names are those of `FakeWorker`.

    `has_device`: whether a device computes its steps, while later ones are launched, or its own thread does.
    `max_allowance`: most tokens that a sequence may get in a step.
    `cache_groups`: of each cache group the window in tokens, 0: none, and the device blocks; empty: it offers none.
    `num_device_states`, `num_host_states`: how many it saves, if the model has states.
    `num_encoder_blocks`: of the encoder's output, if the model has an encoder.
    `max_transfers`: so many may be pending.
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
    max_allowance: int = 1
    cache_groups: tuple[tuple[int, int], ...] = ()
    num_device_states: int = 0
    num_host_states: int = 0
    max_transfers: int = 0
    num_encoder_blocks: int = 0


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

    @property
    def is_streamed(self) -> bool:
        """Whether it is sent on a stream that it shares with others: nothing on it is continued."""
        return self.number % REQUESTS_PER_STREAMED == 0


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """One fault.

    Attributes:
        number: Of the fault in this run; they come in this order.
        at_s: When it comes at the latest.
        after_steps: It comes as soon as executors have run so many steps: who works is struck more often.
        delay_s: It begins so long after it came.
        moment: One of `MOMENTS`, for which it waits a little then, or NO_MOMENT.
        target: Whom it strikes, counted from 0, modulo how many there are.
        duration_s: How long it lasts.
        is_taken_away: Whether nothing happens when its moment comes: until then all is as it was.
    """

    number: int
    at_s: float
    after_steps: int
    delay_s: float
    moment: str
    kind: str
    target: int
    duration_s: float
    is_taken_away: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run.

    Attributes:
        seed: What it was drawn from; also that of the order of things.
        mode: SAFETY: faults never stop. LIVENESS: after the last one all is healed, and then everything has to end.
        quiet_at_s: When the last fault begins at the latest, in seconds from the start.
        num_steps, num_faults: When executors have run so many steps, and so many faults have struck, that is enough.
        settings: Of the schedulers.
        drain_s: How long a process may take that ends in order.
        num_fronts: Of each scheduler, or of the cell; 0: clients call schedulers themselves.
        cell: NO_CELL, BY_LIST or BY_NAME.
        has_states: Whether the model keeps a state of each sequence, beside what it caches.
        has_encoder: Whether the model has an encoder: requests have inputs for it (`Shape.with_encoder`).
        num_resuming: So many of the clients, the first ones, go on with an answer whose call was cut.
        updates_weights: Whether executors take other weights.
        is_sending_cheap: Whether schedulers learn nothing of what transfers take, and expect little.
        num_open: No request is sent while clients wait for so many others.
        is_fair: Whether what has been ready for longest runs first.
    """

    seed: int
    mode: str
    quiet_at_s: float
    num_steps: int
    num_faults: int
    num_open: int
    is_fair: bool
    num_schedulers: int
    num_fronts: int
    cell: str
    num_clients: int
    num_resuming: int
    sliding_window_tokens: int
    drain_s: float
    settings: Mapping[str, Any]
    weather: Weather
    executors: tuple[ExecutorPlan, ...]
    requests: tuple[RequestPlan, ...] = field(repr=False)
    faults: tuple[FaultPlan, ...] = field(repr=False)
    has_states: bool = False
    has_encoder: bool = False
    is_sending_cheap: bool = False
    updates_weights: bool = False

    @property
    def is_seamless(self) -> bool:
        """Whether no accepted request may end because of a fault."""
        kinds = {fault.kind for fault in self.faults if not fault.is_taken_away}
        return (
            self.num_fronts > 0 and (self.cell != NO_CELL or self.num_schedulers == 1) and kinds <= set(SEAMLESS_FAULTS)
        )


def shortened(plan: Plan, num_steps: int = 100, num_faults: int = 4) -> Plan:
    """Return a plan of the same things that has enough earlier: for the tests of every commit."""
    return replace(plan, num_steps=num_steps, num_faults=num_faults)
