"""Metrics under vLLM's names for gateways and autoscalers, of a scheduler and of a front alike.

The endpoint picker of the Gateway API inference extension reads these four. They show everything behind an
`EngineClient` as one engine.
"""

from collections.abc import Iterator

from octavo_shared.process.metric import Family, Metric
from scheduler_svc.request.engine_client import EngineClient

_LABELS = ("model_name", "engine")

WAITING = Metric(
    "vllm:num_requests_waiting", "gauge", "Requests that wait for a place in a batch, or for an executor.", _LABELS
)
RUNNING = Metric("vllm:num_requests_running", "gauge", "Requests in the batch of an executor.", _LABELS)
KV_USAGE = Metric(
    "vllm:kv_cache_usage_perc",
    "gauge",
    "Fraction of the device blocks of all executors in use by requests, 0 to 1.",
    _LABELS,
)
CACHE_CONFIG = Metric(
    "vllm:cache_config_info",
    "gauge",
    "Always 1; the labels have the block size in tokens and the number of blocks of all executors.",
    (*_LABELS, "block_size", "num_gpu_blocks"),
)
METRICS = (WAITING, RUNNING, KV_USAGE, CACHE_CONFIG)


def vllm_families(*engines: EngineClient) -> Iterator[Family]:
    """Yield the metrics of each model, labelled with its name.

    A model without an attached executor has none: a picker would think that it has the least to do.
    """
    known = {
        (engine.model.name, "0"): (engine.model.info.block_size_tokens, engine.load)
        for engine in engines
        if engine.model is not None and engine.load.num_cache_tokens
    }
    if not known:
        return
    loads = {labels: load for labels, (_, load) in known.items()}
    yield WAITING.family({labels: load.num_waiting for labels, load in loads.items()})
    yield RUNNING.family({labels: load.num_running for labels, load in loads.items()})
    yield KV_USAGE.family(
        {labels: load.num_used_cache_tokens / load.num_cache_tokens for labels, load in loads.items()}
    )
    yield CACHE_CONFIG.family(
        {
            (*labels, str(block_size), str(load.num_cache_tokens // block_size)): 1
            for labels, (block_size, load) in known.items()
        }
    )
