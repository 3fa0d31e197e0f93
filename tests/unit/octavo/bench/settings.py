"""Loads for tests: small, and each field can be given."""

from typing import Any

from octavo.bench.config import BenchConfig, parse_lengths


def bench_config(**fields: Any) -> BenchConfig:
    """Return a closed loop of 4 clients with 8 requests, or as the fields say; lengths may be given as text."""
    defaults: dict[str, Any] = {
        "rate": None,
        "burstiness": 1.0,
        "concurrency": None if "rate" in fields else 4,
        "num_requests": 8,
        "duration_s": None,
        "warmup": 0,
        "seed": 0,
        "input_len": "16",
        "output_len": "4",
        "dataset": None,
        "shared_prefix_len": 0,
        "num_prefixes": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "timeout_s": 60.0,
        "slo": None,
    }
    values = {**defaults, **fields}
    for name in ("input_len", "output_len"):
        values[name] = parse_lengths(values[name])
    return BenchConfig(**values)
