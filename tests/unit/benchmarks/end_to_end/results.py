"""A result by hand, with round numbers."""

from typing import Any

from benchmarks.end_to_end.engines import class_of
from benchmarks.end_to_end.result import EngineRecord, Limits, Model, Result, RunRecord
from octavo.bench.provenance import Machine

MACHINE = Machine(processor="A CPU", kind="a-cpu-2-cores", cores=2, memory_gib=24, instructions="AVX2")
MODEL = Model(name="m", num_parameters=1000, vocab_size=97, prefill_flops=1000, head_flops=100, attention_flops=0)
LIMITS = Limits(read_gb_per_s=[9.0, 10.0], fma_gflop_per_s=[100.0, 90.0], gemm_gflop_per_s=[])


def engine(product: str, number_format: str, number_class: str | None = None, **changes: Any) -> EngineRecord:
    fields = {
        "name": f"{product} {number_format}",
        "product": product,
        "number_format": number_format,
        "number_class": number_class or class_of(number_format),
        "versions": {product.lower(): "1.0"},
        "settings": {},
        "weight_bytes": 1_000_000,
        "start_s": 1.0,
    }
    return EngineRecord.model_validate(fields | changes)


def run(engine: str, workload: str, seconds: float, **changes: Any) -> RunRecord:
    fields = {
        "engine": engine,
        "workload": workload,
        "round": 1,
        "seconds": seconds,
        "first_token_s": [seconds / 2],
        "output_tokens": 101,
        "foreign_share": 0.0,
        "idle_engines_s": 0.0,
        "is_spoiled": False,
    }
    return RunRecord.model_validate(fields | changes)


def result(engines: list[EngineRecord], runs: list[RunRecord], **changes: Any) -> Result:
    fields: dict[str, Any] = {
        "date": "2026-11-22",
        "commit": "abc",
        "command": "python -m benchmarks.end_to_end",
        "minutes": 1.0,
        "machine": MACHINE,
        "num_threads": 2,
        "python": "3.11.7",
        "model": MODEL,
        "limits": LIMITS,
        "engines": engines,
        "missing": {},
        "runs": runs,
    }
    return Result.model_validate(fields | changes)
