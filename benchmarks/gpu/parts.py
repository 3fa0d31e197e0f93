"""The parts of `make gpu-check`, the most telling first: what no CPU can show, then correctness, then speed.

Those that only check run several at once, so that kernels are compiled in parallel; those that measure run alone.
"""

import json
from collections.abc import Sequence

from benchmarks.gpu.part import Part

DEVICE, KERNELS = "tests/device/test_generation.py", "tests/kernels"


def _tests(name: str, about: str, limit_s: float, on_a_card: Sequence[str], rehearsed: Sequence[str]) -> Part:
    """Return a part that runs tests: all of them on a card, and one or a few in a rehearsal."""
    arguments = (json.dumps(on_a_card), json.dumps(rehearsed))
    return Part(name, about, "benchmarks.gpu.test_files:run_tests", limit_s, arguments)


def _measured(name: str, about: str, limit_s: float, function: str = "") -> Part:
    return Part(name, about, f"benchmarks.gpu.speed:{function or name}", limit_s, is_alone=True)


PARTS: Sequence[Part] = (
    _tests(
        "generation",
        "greedy tokens through scheduler's core, worker, kernels and graphs are those of transformers",
        90,
        [DEVICE, "-k", "greedy"],
        [f"{DEVICE}::test_greedy_tokens_are_those_of_transformers[llama-triton]"],
    ),
    _tests(
        "attention-kernels",
        "attention, and the write of keys and values, beside float64",
        120,
        [f"{KERNELS}/test_triton_attention.py", f"{KERNELS}/test_key_value_write.py", "-k", "not random_steps"],
        [f"{KERNELS}/test_triton_attention.py", "-k", "test_a_window_begins_anywhere"],
    ),
    _tests(
        "dense-kernels",
        "norms, activations, rotation and products beside float64",
        90,
        [f"{KERNELS}/test_dense_kernels.py", f"{KERNELS}/test_row_kernels.py", f"{KERNELS}/test_matmul.py"],
        [f"{KERNELS}/test_row_kernels.py"],
    ),
    _tests(
        "sampling-kernels",
        "sampling on the device draws what the reference draws",
        90,
        [f"{KERNELS}/test_device_sampling.py"],
        [f"{KERNELS}/test_device_sampling.py", "-k", "greedy"],
    ),
    _tests(
        "invariant-kernels",
        "kernels of --numerics invariant: the same bits in every batch",
        120,
        [f"{KERNELS}/test_invariant_attention.py", f"{KERNELS}/test_invariant_model.py"],
        [f"{KERNELS}/test_invariant_attention.py", "-k", "decode"],
    ),
    _tests(
        "more-generation",
        "batches, steps in flight, preemption, 16 bits, invariant numerics",
        120,
        [DEVICE, "-k", "not greedy"],
        [DEVICE, "-k", "preempts"],
    ),
    _measured("stream", "a decode step of one sequence of an 8B shape beside the bandwidth limit", 60),
    _measured("attention", "decode attention as a share of the copy bandwidth", 60),
    _measured("sampling", "sampling of 256 rows: greedy, top-p alone, every filter", 30),
    _measured("invariance", "all logits of a sequence, bit for bit, alone, in chunks and in batches", 60),
    _measured("throughput", "256 ragged sequences beside transformers' static batches", 90),
    _measured("invariance-cost", "steps with --numerics invariant beside fast ones", 90, "invariance_cost"),
    _tests(
        "random-steps",
        "attention on thousands of random steps beside float64",
        240,
        [f"{KERNELS}/test_triton_attention.py", "-k", "random_steps"],
        [f"{KERNELS}/test_triton_attention.py::test_random_steps[0]"],
    ),
)
