"""The parts of `make gpu-check`, the most telling first: what no CPU can show, then correctness, then speed.

Parts that only check run several at once, and long ones are cut into shares, so that kernels are compiled in parallel;
parts that measure run alone.
"""

import json
from collections.abc import Sequence

from benchmarks.gpu.part import Part

DEVICE, KERNELS = "tests/device", "tests/kernels"
GENERATION, ATTENTION = f"{DEVICE}/test_generation.py", f"{KERNELS}/test_triton_attention.py"
POOLS = "tests/unit/executor_svc/cache/test_cache_engine.py"
SERVICE_NEEDS = ("grpc", "grpc_health", "grpc_reflection", "google.rpc", "pydantic", "prometheus_client")


def _tests(
    name: str,
    about: str,
    limit_s: float,
    on_a_card: Sequence[str],
    rehearsed: Sequence[str],
    num_shards: int = 1,
    needs: tuple[str, ...] = (),
) -> list[Part]:
    """Return parts that run tests: all of them on a card, and one or a few in a rehearsal."""
    words = (json.dumps([*on_a_card, "-m", "not slow"]), json.dumps(rehearsed))
    numbers = range(1, num_shards + 1)
    return [
        Part(
            name if num_shards == 1 else f"{name}-{number}",
            about if num_shards == 1 else f"{about} ({number} of {num_shards})",
            "benchmarks.gpu.test_files:run_tests",
            limit_s,
            (*words, f"{number}/{num_shards}"),
            needs=needs,
        )
        for number in numbers
    ]


def _measured(name: str, about: str, limit_s: float, module: str = "measurements") -> Part:
    figures = f"{module}:{name.replace('-', '_')}_figures"
    return Part(name, about, "benchmarks.gpu.measurements:measure", limit_s, (figures,), is_alone=True)


PARTS: Sequence[Part] = (
    *_tests(
        "generation",
        "greedy tokens through planner, worker, kernels and graphs equal transformers'; 8-bit caches",
        120,
        [GENERATION, "-k", "greedy or 8_bits"],
        [GENERATION, "-k", "(greedy and llama-triton) or (8_bits and triton)"],
    ),
    *_tests(
        "requests",
        "log-probabilities, penalties, masks, top-p, outputs that share blocks, beams, swaps: as the reference",
        120,
        [f"{DEVICE}/test_requests.py"],
        [f"{DEVICE}/test_requests.py", "-k", "prompt or share or beams or swaps"],
    ),
    *_tests(
        "device",
        "swaps, and blocks of transfers, in streams of their own; the pinned pool; a device that is lost",
        60,
        [f"{DEVICE}/test_device.py", POOLS],
        [f"{DEVICE}/test_device.py", POOLS, "-k", "not pinned"],
    ),
    *_tests(
        "attention-kernels",
        "attention, and the write of keys and values, beside float64",
        150,
        [
            *(f"{KERNELS}/test_{name}.py" for name in ("cache_formats", "triton_attention", "key_value_write")),
            *("-k", "not random_steps"),
        ],
        [f"{KERNELS}/test_cache_formats.py", ATTENTION, "-k", "number_of_query_heads or written"],
        num_shards=5,
    ),
    *_tests(
        "dense-kernels",
        "norms, activations, experts and products beside float64; copies of blocks",
        120,
        [
            f"{KERNELS}/test_{name}.py"
            for name in ("dense_kernels", "row_kernels", "matmul", "block_copy", "expert_products", "expert_graphs")
        ],
        [f"{KERNELS}/test_row_kernels.py", f"{KERNELS}/test_block_copy.py"],
    ),
    *_tests(
        "sampling-kernels",
        "sampling on the device draws what the reference draws",
        90,
        [f"{KERNELS}/test_device_sampling.py"],
        [f"{KERNELS}/test_device_sampling.py", "-k", "greedy"],
    ),
    *_tests(
        "models",
        "int8, a model by transformers' code",
        90,
        [f"{DEVICE}/test_models.py"],
        [f"{DEVICE}/test_models.py"],
    ),
    *_tests(
        "service",
        "scheduler and executor over gRPC answer as the reference",
        120,
        [f"{DEVICE}/test_service.py"],
        [f"{DEVICE}/test_service.py"],
        needs=SERVICE_NEEDS,
    ),
    _measured("steps", "an 8B shape: decodes of 1, 32 and 256, prompts of 2k and 8k, both in a step; captures", 120),
    _measured("attention", "decode attention as a share of the copy bandwidth", 60),
    *_tests(
        "more-generation",
        "batches, steps in flight, preemption, 16 bits, invariant numerics; plans of steps",
        120,
        [GENERATION, f"{KERNELS}/test_triton_plans.py", "-k", "not greedy and not 8_bits"],
        [GENERATION, "-k", "preempts"],
    ),
    *_tests(
        "invariant-kernels",
        "kernels of --numerics invariant: the same bits in every batch",
        120,
        [f"{KERNELS}/test_invariant_attention.py", f"{KERNELS}/test_invariant_model.py"],
        [f"{KERNELS}/test_invariant_attention.py", "-k", "decode"],
    ),
    *_tests(
        "libraries",
        "flash-attn and xformers, where they are installed, beside float64",
        60,
        [f"{DEVICE}/test_libraries.py"],
        [f"{DEVICE}/test_libraries.py"],
    ),
    _measured("invariance", "all logits of a sequence, bit for bit, alone, in chunks and in batches", 60, "invariance"),
    _measured("sampling", "sampling of 256 rows: greedy, top-p alone, every filter", 30),
    _measured("contexts", "decodes at contexts of 2k: 1 B and 8 B, 32 and 256 rows; experts", 150, "workloads"),
    _measured("workloads", "nano-vllm's benchmark, and 1,000 requests as long as ShareGPT's, 8 B", 150, "workloads"),
    _measured("throughput", "256 ragged sequences beside transformers' static batches", 90),
    Part(
        "memcheck",
        "tests of kernels under compute-sanitizer: reads and writes beside memory",
        "benchmarks.gpu.test_files:sanitize",
        120,
        ("memcheck",),
    ),
    Part(
        "racecheck",
        "tests of kernels under compute-sanitizer: races in shared memory",
        "benchmarks.gpu.test_files:sanitize",
        120,
        ("racecheck",),
    ),
    _measured("invariance-cost", "steps with --numerics invariant beside fast ones", 90, "invariance"),
    *_tests(
        "random-steps",
        "attention on thousands of random steps beside float64",
        240,
        [ATTENTION, "-k", "random_steps"],
        [f"{ATTENTION}::test_random_steps[{seed}]" for seed in (0, 10, 20)],
        num_shards=3,
    ),
)
