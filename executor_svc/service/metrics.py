"""The executor's metrics, the same for a model and for the fake one.

Their names, types and meanings are the constants below; docs/metrics.md is made from them.
"""

from collections.abc import Iterator

from executor_svc.service.step_meter import StepMeter
from executor_svc.transfers.meter import TransferMeter, by_direction
from executor_svc.transfers.pending import Reason
from octavo_shared.process.metric import Family, Metric
from octavo_shared.step_wire.executor_info import ExecutorInfo

ATTACHED = Metric(
    "octavo_executor_attached", "gauge", "1 while a scheduler is attached, else 0; 0 while the model loads."
)
BUSY = Metric(
    "octavo_executor_busy_seconds_total",
    "counter",
    "Total time of steps, in seconds: device time on a GPU, else wall time.",
)
IDLE = Metric(
    "octavo_executor_idle_ratio",
    "gauge",
    "Fraction of the last 60 s (or since the start) without a running step, 0 to 1.",
)
STEPS = Metric("octavo_executor_steps_total", "counter", "Steps that returned a result.")
STEP_DURATION = Metric(
    "octavo_executor_step_duration_seconds",
    "histogram",
    "Duration of a step, in seconds: device time on a GPU, else wall time.",
)
TOKENS = Metric(
    "octavo_executor_tokens_total",
    "counter",
    "Tokens computed. prefill: of prompts and recomputed tokens; decode: one per sequence and step.",
    ("kind",),
)
TRANSFERRED_BLOCKS = Metric(
    "octavo_executor_transferred_blocks_total",
    "counter",
    "Blocks that went to other executors (sent) and came from them (received).",
    ("direction",),
)
TRANSFERRED_BYTES = Metric(
    "octavo_executor_transferred_bytes_total", "counter", "Bytes of these blocks.", ("direction",)
)
TRANSFER_SECONDS = Metric(
    "octavo_executor_transfer_seconds_total",
    "counter",
    "Time of their transfers, each from the step that began it to its end, in seconds.",
    ("direction",),
)
CANCELLED_TRANSFERS = Metric(
    "octavo_executor_transfers_cancelled_total",
    "counter",
    "Transfers that were cancelled. asked, attach: by the scheduler; drain: this executor ended; peer: the other one "
    "ended it or broke off; difference: their blocks differ; silence: nothing came for 30 s; fault: an error here.",
    ("reason",),
)
INFO = Metric(
    "octavo_executor_info",
    "gauge",
    "Always 1; the labels describe what the executor runs. Absent while the model loads.",
    (
        "model_id",
        "dtype",
        "block_size_tokens",
        "num_device_blocks",
        "num_host_blocks",
        "max_model_len",
        "tp_size",
        "numerics_id",
    ),
)

METRICS = (
    *(ATTACHED, BUSY, IDLE, STEPS, STEP_DURATION, TOKENS),
    *(TRANSFERRED_BLOCKS, TRANSFERRED_BYTES, TRANSFER_SECONDS, CANCELLED_TRANSFERS, INFO),
)


def executor_families(
    meter: StepMeter, transfers: TransferMeter, info: ExecutorInfo | None, *, is_attached: bool
) -> Iterator[Family]:
    """Yield the metrics of an executor as they are now; `info` None: the model is loading."""
    yield ATTACHED.single(is_attached)
    yield BUSY.single(meter.busy_s)
    yield IDLE.single(meter.idle_ratio())
    yield STEPS.single(meter.num_steps)
    yield STEP_DURATION.histogram_family({(): meter.durations})
    yield TOKENS.family({("prefill",): meter.num_prefill_tokens, ("decode",): meter.num_decode_tokens})
    yield TRANSFERRED_BLOCKS.family(by_direction(transfers.num_blocks))
    yield TRANSFERRED_BYTES.family(by_direction(transfers.num_bytes))
    yield TRANSFER_SECONDS.family(by_direction(transfers.seconds))
    yield CANCELLED_TRANSFERS.family({(reason.value,): transfers.num_cancelled[reason] for reason in Reason})
    described = {} if info is None else {tuple(str(getattr(info, label)) for label in INFO.labels): 1.0}
    yield INFO.family(described)
