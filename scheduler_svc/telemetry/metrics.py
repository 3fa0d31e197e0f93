"""The scheduler's metrics: what `Meter` counted, and what the engine's state shows at the moment of a scrape.

Their names, types and meanings are the constants below; docs/metrics.md is made from them. The values of labels
are known beforehand, or addresses of the fleet's current executors.
"""

from collections import Counter
from collections.abc import Iterator

from octavo_shared.process.metric import Family, LabelValues, Metric, metrics_in
from octavo_shared.step_wire.step import PoolingTask, RowFlag
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.engine.engine import Engine
from scheduler_svc.executors.driver import ExecutorDriver
from scheduler_svc.telemetry.vllm_metrics import vllm_families

_EXECUTOR = ("executor",)

WAITING = Metric(
    "octavo_requests_waiting",
    "gauge",
    "Waiting requests: for a slot, for an executor, or for the tokenizer.",
)
RUNNING = Metric("octavo_requests_running", "gauge", "Running requests: those in the batch of an executor.", _EXECUTOR)
SWAPPED = Metric(
    "octavo_requests_swapped", "gauge", "Preempted requests whose blocks are in the host cache of their executor."
)
KV_USAGE = Metric(
    "octavo_kv_cache_usage_ratio",
    "gauge",
    "Fraction of device blocks in use by requests, 0 to 1, of the fullest cache group; unused cached prefixes do not "
    "count.",
    _EXECUTOR,
)
KV_BLOCKS = Metric(
    "octavo_kv_cache_blocks",
    "gauge",
    "Device blocks of all cache groups by state: used by requests, cached (unused, but holding a prefix), or free.",
    (*_EXECUTOR, "state"),
)
SAVED_STATES = Metric(
    "octavo_saved_states",
    "gauge",
    "Blocks for saved states of hybrids by state: saving (being written), saved (a prefix is found up to it), or free.",
    (*_EXECUTOR, "state"),
)
QUERIED_TOKENS = Metric(
    "octavo_prefix_cache_queried_tokens_total",
    "counter",
    "Prompt tokens looked up in the prefix cache, of requests that got their first token.",
)
HIT_TOKENS = Metric(
    "octavo_prefix_cache_hit_tokens_total", "counter", "Prompt tokens found in the prefix cache, and not computed."
)
MOVED_HIT_TOKENS = Metric(
    "octavo_prefix_cache_moved_tokens_total",
    "counter",
    "Those of the found prompt tokens whose blocks came from another place, by place: the host cache of its "
    "executor, or another executor.",
    ("place",),
)
ENCODER_TOKENS = Metric(
    "octavo_encoder_tokens_total",
    "counter",
    "Tokens of inputs of the model's encoder, of requests that got their first token, by outcome: computed, or found "
    "because another request had the same input.",
    ("outcome",),
)
HOST_BLOCKS = Metric(
    "octavo_host_cache_blocks",
    "gauge",
    "Host blocks of all cache groups by state: used by preempted requests, copied (holding a prefix), or free.",
    (*_EXECUTOR, "state"),
)
COPIED_BLOCKS = Metric(
    "octavo_host_cache_copied_blocks_total", "counter", "Blocks with a prefix that were copied to the host.", _EXECUTOR
)
TRANSFERS = Metric(
    "octavo_block_transfers_total",
    "counter",
    "Transfers of blocks from one executor to another, by outcome: arrived, or cancelled; then it was computed.",
    ("outcome",),
)
TRANSFERRED_TOKENS = Metric(
    "octavo_block_transfer_tokens_total", "counter", "Tokens whose blocks came from another executor."
)
TRANSFERS_IN_FLIGHT = Metric("octavo_block_transfers_in_flight", "gauge", "Transfers of blocks that are on their way.")
PREEMPTIONS = Metric(
    "octavo_preemptions_total",
    "counter",
    "Preemptions, by what happened to the blocks.",
    ("mode",),
)
POOLED = Metric(
    "octavo_pooling_requests_total", "counter", "Requests that got their vector or their scores, by task.", ("task",)
)
POOLED_TOKENS = Metric("octavo_pooling_tokens_total", "counter", "Tokens of the texts of these requests.")
TIME_TO_FIRST_TOKEN = Metric(
    "octavo_time_to_first_token_seconds",
    "histogram",
    "Time from a request's arrival (validated and tokenized) to its first token, in seconds.",
)
INTER_TOKEN_LATENCY = Metric(
    "octavo_inter_token_latency_seconds",
    "histogram",
    "Time between two steps that produced tokens of a request, in seconds; all outputs of a request count together.",
)
QUEUE_TIME = Metric(
    "octavo_request_queue_seconds",
    "histogram",
    "Time from a request's arrival to its first admission, in seconds.",
)
REQUEST_DURATION = Metric(
    "octavo_request_duration_seconds",
    "histogram",
    "Time from a request's arrival to its last token, in seconds, of requests that finished.",
)
STEP_DURATION = Metric(
    "octavo_step_duration_seconds",
    "histogram",
    "Duration of a step by phase, in seconds. schedule: the scheduling decision; wait: network and queueing before "
    "the executor's device; execute: as measured by the executor; process: handling the result, including scheduling "
    "and sending the next step.",
    ("phase",),
)
STEP_TURNAROUND = Metric(
    "octavo_step_turnaround_seconds",
    "histogram",
    "Time from the arrival of a step's result to the start of sending the step based on it, in seconds.",
)
PROMPT_TOKENS = Metric("octavo_prompt_tokens_total", "counter", "Prompt tokens of requests that got their first token.")
OUTPUT_TOKENS = Metric(
    "octavo_output_tokens_total", "counter", "Tokens sampled, over all outputs; for a beam search those of its answer."
)
FINISHED = Metric(
    "octavo_requests_finished_total",
    "counter",
    "Finished requests, by finish reason of the first output.",
    ("finish_reason",),
)
ERRORS = Metric(
    "octavo_request_errors_total",
    "counter",
    "Accepted requests that failed, by gRPC status code; ABORTED: Abort was called, or the client disconnected. "
    "Refused requests are in octavo_requests_refused_total.",
    ("code",),
)
NOT_FINITE = Metric(
    "octavo_requests_not_finite_total",
    "counter",
    "Requests that failed because the model's logits were NaN or infinite, or every token was ruled out.",
)
GRAMMAR_FAILURES = Metric(
    "octavo_requests_grammar_failed_total",
    "counter",
    "Requests that failed because an output could not follow its grammar any further. no_token_allowed: the grammar "
    "and the request's other rules left no token; grammar_limit: it took too much time or memory; grammar_failed: the "
    "executor could not compile it, or a continued answer did not follow it.",
    ("reason",),
)
GRAMMAR_SLOTS = Metric(
    "octavo_grammar_slots",
    "gauge",
    "Grammar slots of an executor by state: used (a running request follows the grammar), cached (its grammar stays "
    "until the slot is wanted), or empty.",
    (*_EXECUTOR, "state"),
)
GRAMMAR_LOADS = Metric(
    "octavo_grammar_loads_total",
    "counter",
    "Grammars that were sent to the attached executors; one that is still in a slot is not sent again.",
    _EXECUTOR,
)
GRAMMAR_WAITS = Metric(
    "octavo_grammar_slot_waits_total",
    "counter",
    "Requests that waited because running ones used all grammar slots; --max-grammar-slots of the executors sets their "
    "number.",
)
STEPS_IN_FLIGHT = Metric(
    "octavo_steps_in_flight",
    "gauge",
    "Current limit of steps in flight to an executor (--steps-in-flight).",
    _EXECUTOR,
)
ROUND_TRIP = Metric(
    "octavo_executor_round_trip_seconds",
    "gauge",
    "Shortest recent round trip to an executor, in seconds: of heartbeats and of steps that did not queue there.",
    _EXECUTOR,
)
VOID_ROWS = Metric(
    "octavo_void_rows_total",
    "counter",
    "Wasted sample rows: computed for sequences that had already finished, because several steps were in flight.",
)
DRAFTS = Metric("octavo_draft_tokens_total", "counter", "Draft tokens that executors computed.")
ACCEPTED_DRAFTS = Metric(
    "octavo_accepted_draft_tokens_total", "counter", "Draft tokens that were right: each saved a step of its sequence."
)
EXECUTORS = Metric(
    "octavo_executors",
    "gauge",
    "Executors by state: attached, leaving (attached, accepts no new requests), connecting, or spare (beyond "
    "--max-executors, not connected).",
    ("state",),
)
PAUSED = Metric("octavo_paused", "gauge", "1 while the fleet is paused: requests wait until it is resumed.")
WEIGHT_UPDATES = Metric("octavo_weight_updates_total", "counter", "Updates of the weights that have succeeded.")
LOSSES = Metric("octavo_executor_losses_total", "counter", "Executors lost while attached.")
RECOVERED = Metric(
    "octavo_requests_recovered_total",
    "counter",
    "Requests that finished although an executor that ran them was lost.",
)
LOOP_LAG = Metric(
    "octavo_event_loop_lag_max_seconds",
    "gauge",
    "Longest stall of the scheduler's event loop in the last minute, in seconds; all streams pause during a stall.",
)
STEP_LOG = Metric(
    "octavo_step_log_recording",
    "gauge",
    "1 while recording (--step-log); 0 without a step log, or after it stopped because the disk was full or too slow.",
)
TENANT_REQUESTS = Metric(
    "octavo_tenant_requests_total",
    "counter",
    "Accepted requests that ended, by tenant: the first 50 by name, the rest as other; empty: the request named none.",
    ("tenant",),
)
TENANT_OUTPUT_TOKENS = Metric(
    "octavo_tenant_output_tokens_total",
    "counter",
    "Output tokens of requests that ended, by tenant as above; those behind a stop string do not count.",
    ("tenant",),
)
ADAPTER_REQUESTS = Metric(
    "octavo_adapter_requests_total",
    "counter",
    "Accepted requests with an adapter that ended, by adapter: the first 50 by name, the rest as other.",
    ("adapter",),
)
ADAPTER_OUTPUT_TOKENS = Metric(
    "octavo_adapter_output_tokens_total",
    "counter",
    "Output tokens of requests with an adapter that ended, by adapter as above; those behind a stop string do not "
    "count.",
    ("adapter",),
)
FRONTS = Metric(
    "octavo_fronts_joined",
    "gauge",
    "Fronts that have joined, by kind: own (--fronts), or standalone (absent without --engine-listen).",
    ("kind",),
)

METRICS = metrics_in(globals())

# Finish reasons and status codes that have series from the start: a rate needs the zero before the first one.
_FINISH_REASONS = ("stop", "length")
_ERROR_CODES = ("ABORTED", "INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
_REASONS = {flag: flag.name.lower() for flag in RowFlag if flag is not RowFlag.NOT_FINITE}
_EXECUTOR_STATES = ("attached", "leaving", "connecting", "spare")


def scheduler_families(engine: Engine) -> Iterator[Family]:
    """Yield the metrics of a scheduler as they are now."""
    drivers = list(engine.drivers.values())
    planners = {driver.address: driver.planner for driver in drivers if driver.planner is not None}
    running = {address: len(planner.batch.with_slots) for address, planner in planners.items()}
    yield WAITING.single(engine.waiting.num_waiting)
    yield RUNNING.family(by_label(running))
    yield SWAPPED.single(sum(len(planner.swapped) for planner in planners.values()))
    yield from _cache_families(planners)
    yield from _grammar_families(engine, planners)
    transfers = engine.fleet.dispatcher.transfers
    outcomes = {"arrived": transfers.num_arrived, "cancelled": transfers.num_cancelled}
    yield TRANSFERS.family(by_label(outcomes))
    yield TRANSFERRED_TOKENS.single(transfers.num_tokens)
    yield TRANSFERS_IN_FLIGHT.single(len(transfers))
    yield PREEMPTIONS.family(by_label({mode.value: num for mode, num in engine.fleet.num_preemptions.items()}))
    yield from _in_flight_families(engine)
    states = Counter(dict.fromkeys(_EXECUTOR_STATES, 0))
    states.update(map(_state_of, drivers))
    yield EXECUTORS.family(by_label(states))
    yield from _counted_families(engine)
    yield from vllm_families(engine)


def by_label(values: dict[str, int] | dict[str, float]) -> dict[LabelValues, float]:
    """Return the values of a metric with one label."""
    return {(label,): value for label, value in values.items()}


def _cache_families(planners: dict[str, ExecutorPlanner]) -> Iterator[Family]:
    pools = {address: planner.blocks.fullest for address, planner in planners.items()}
    yield KV_USAGE.family({(address,): pool.num_used_blocks / pool.num_blocks for address, pool in pools.items()})
    blocks: dict[LabelValues, float] = {}
    for address, planner in planners.items():
        allocators = [group.allocator for group in planner.blocks.wanted]
        num_cached = sum(pool.num_cached_blocks for pool in allocators)
        blocks[address, "used"] = sum(pool.num_used_blocks for pool in allocators)
        blocks[address, "cached"] = num_cached
        blocks[address, "free"] = sum(pool.num_free_blocks for pool in allocators) - num_cached
    yield KV_BLOCKS.family(blocks)
    on_host: dict[LabelValues, float] = {}
    for address, planner in planners.items():
        hosts = [group.host.allocator for group in planner.blocks.groups]
        num_copied = sum(host.num_cached_blocks for host in hosts)
        on_host[address, "used"] = sum(host.num_used_blocks for host in hosts)
        on_host[address, "copied"] = num_copied
        on_host[address, "free"] = sum(host.num_free_blocks for host in hosts) - num_copied
    yield HOST_BLOCKS.family(on_host)
    yield COPIED_BLOCKS.family({(address,): planner.blocks.num_copied_blocks for address, planner in planners.items()})
    saved: dict[LabelValues, float] = {}
    for address, planner in planners.items():
        if planner.blocks.states is not None:
            states = planner.blocks.states.allocator
            saved[address, "saving"], saved[address, "saved"] = states.num_used_blocks, states.num_cached_blocks
            saved[address, "free"] = states.num_free_blocks - states.num_cached_blocks
    yield SAVED_STATES.family(saved)


def _grammar_families(engine: Engine, planners: dict[str, ExecutorPlanner]) -> Iterator[Family]:
    grammar_slots = {address: planner.batch.things.grammars for address, planner in planners.items()}
    states: dict[LabelValues, float] = {}
    for address, slots in grammar_slots.items():
        states[address, "used"] = slots.num_in_use
        states[address, "cached"] = slots.num_loaded - slots.num_in_use
        states[address, "empty"] = slots.num_slots - slots.num_loaded
    yield GRAMMAR_SLOTS.family(states)
    yield GRAMMAR_LOADS.family(by_label({address: slots.num_loads for address, slots in grammar_slots.items()}))
    yield GRAMMAR_WAITS.single(engine.fleet.dispatcher.num_grammar_waits)


def _in_flight_families(engine: Engine) -> Iterator[Family]:
    limits = {driver.address: driver.in_flight for driver in engine.drivers.values() if driver.planner is not None}
    yield STEPS_IN_FLIGHT.family(by_label({address: limit.limit for address, limit in limits.items()}))
    round_trips = {address: limit.round_trip_s for address, limit in limits.items()}
    yield ROUND_TRIP.family({(address,): value for address, value in round_trips.items() if value is not None})
    yield VOID_ROWS.single(engine.meter.num_void_rows)
    yield DRAFTS.single(engine.meter.num_drafts)
    yield ACCEPTED_DRAFTS.single(engine.meter.num_accepted_drafts)


def _counted_families(engine: Engine) -> Iterator[Family]:
    meter = engine.meter
    yield QUERIED_TOKENS.single(meter.num_queried_tokens)
    yield HIT_TOKENS.single(meter.num_hit_tokens)
    yield MOVED_HIT_TOKENS.family(by_label(meter.num_hit_tokens_of))
    yield ENCODER_TOKENS.family(by_label(meter.num_encoder_tokens_of))
    yield PROMPT_TOKENS.single(meter.num_prompt_tokens)
    yield OUTPUT_TOKENS.single(meter.num_output_tokens)
    yield POOLED.family(by_label({task.name.lower(): meter.num_pooled[task] for task in PoolingTask}))
    yield POOLED_TOKENS.single(meter.num_pooled_tokens)
    yield TIME_TO_FIRST_TOKEN.histogram_family({(): meter.time_to_first_token})
    yield INTER_TOKEN_LATENCY.histogram_family({(): meter.inter_token_latency})
    yield QUEUE_TIME.histogram_family({(): meter.queue_time})
    yield REQUEST_DURATION.histogram_family({(): meter.request_duration})
    yield STEP_DURATION.histogram_family({(phase,): counts for phase, counts in meter.step_durations.items()})
    yield STEP_TURNAROUND.histogram_family({(): meter.step_turnaround})
    yield FINISHED.family(by_label(dict.fromkeys(_FINISH_REASONS, 0) | meter.num_finished))
    yield ERRORS.family(by_label(dict.fromkeys(_ERROR_CODES, 0) | meter.num_errors))
    yield NOT_FINITE.single(meter.num_flagged[RowFlag.NOT_FINITE])
    yield GRAMMAR_FAILURES.family(by_label({reason: meter.num_flagged[flag] for flag, reason in _REASONS.items()}))
    yield PAUSED.single(int(engine.weights.mode is not None))
    yield WEIGHT_UPDATES.single(engine.weights.num_updates)
    yield LOSSES.single(meter.num_executor_losses)
    yield RECOVERED.single(meter.num_recovered)
    yield TENANT_REQUESTS.family(by_label(meter.num_requests_of))
    yield TENANT_OUTPUT_TOKENS.family(by_label(meter.num_output_tokens_of))
    yield ADAPTER_REQUESTS.family(by_label(meter.num_requests_with))
    yield ADAPTER_OUTPUT_TOKENS.family(by_label(meter.num_output_tokens_with))


def _state_of(driver: ExecutorDriver) -> str:
    if driver.planner is None:
        return "spare" if driver.is_spare else "connecting"
    return "attached" if driver.planner.takes_groups else "leaving"
