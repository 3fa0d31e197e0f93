"""The executor's metrics, the same for a model and for the fake one.

Their names, types and meanings are the constants below; docs/metrics.md is made from them.
"""

from collections.abc import Iterator

from executor_svc.service.step_meter import StepMeter
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

METRICS = (ATTACHED, BUSY, IDLE, STEPS, STEP_DURATION, TOKENS, INFO)


def executor_families(meter: StepMeter, info: ExecutorInfo | None, *, is_attached: bool) -> Iterator[Family]:
    """Yield the metrics of an executor as they are now; `info` None: the model is loading."""
    yield ATTACHED.single(is_attached)
    yield BUSY.single(meter.busy_s)
    yield IDLE.single(meter.idle_ratio())
    yield STEPS.single(meter.num_steps)
    yield STEP_DURATION.histogram_family({(): meter.durations})
    yield TOKENS.family({("prefill",): meter.num_prefill_tokens, ("decode",): meter.num_decode_tokens})
    described = {} if info is None else {tuple(str(getattr(info, label)) for label in INFO.labels): 1.0}
    yield INFO.family(described)
