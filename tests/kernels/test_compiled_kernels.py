"""The attention kernels compile for 8.0, 9.0 and 10.0, spill few registers, and leave room for enough programs."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest

from executor_svc.triton_kernels.tiles import resident_programs
from tests.kernels.compile_kernels import Case, CompiledKernel

# By capability: shared memory of a multiprocessor and of a program, in bytes.
# Source: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
SHARED_BYTES = {80: (164 * 1024, 163 * 1024), **dict.fromkeys((90, 100), (228 * 1024, 227 * 1024))}
# A program takes so much more than it asks for.
RESERVED_SHARED_BYTES = 1024
REGISTERS = 64 * 1024
MAX_THREADS = 2048

# The budget of shared memory of a program, in bytes; by kernel, number of bits, capability. Tables in `tiles.py`
# that are for any device must keep below 99 KiB.
SHARED_BUDGET = {
    ("decode_kernel", 16): {80: 81 * 1024, 90: 81 * 1024},
    ("decode_kernel", 32): {80: 84 * 1024, 90: 84 * 1024},
    ("prefill_kernel", 16): {80: 99 * 1024, 90: 132 * 1024},
    ("prefill_kernel", 32): {80: 99 * 1024, 90: 99 * 1024},
    ("attend_kernel", 16): {80: 99 * 1024, 90: 99 * 1024},
    ("attend_kernel", 32): {80: 99 * 1024, 90: 99 * 1024},
}
# Of a latent cache of 64 + 512 numbers. One program runs on a multiprocessor at once.
SHARED_BUDGET_LATENT = {80: 99 * 1024, 90: 132 * 1024, 100: 143 * 1024}
# Kernels without tiles of keys: any number of small programs.
SMALL_KERNELS = ("key_value_write_kernel", "block_copy_kernel", "reduce_kernel", "fold_kernel")
FAST_KERNELS = [*SMALL_KERNELS[:3], "reduce_kernel", *["decode_kernel"] * 2, *["prefill_kernel"] * 2]
# Bytes of spilled registers of a thread: none where it matters.
MAX_STACK_BYTES = {16: 0, 32: 64}
# The states of a split and of those before it fill the registers; a group of 7 heads on 8.0 and
# heads of 256 numbers with all options on 10.0 spill the most.
MAX_STACK_BYTES_INVARIANT = {80: 232, 90: 40, 100: 224}
# Of a cache in another format than the model's; float32 is multiplied without tensor cores.
MAX_STACK_BYTES_CONVERTED = {16: 16, 32: 200}
MAX_STACK_BYTES_INVARIANT_CONVERTED = {16: 224, 32: 352}
MAX_STACK_BYTES_LATENT = {"prefill_kernel": 0, "decode_kernel": 0, "attend_kernel": 168}

QUICK = [
    Case(80, "float16", 128, 16, has_options=True, has_invariant=False),
    Case(90, "bfloat16", 128, 16, has_options=False),
    Case(80, "bfloat16", 128, 16, has_options=False, cache="int8"),
    Case(90, "bfloat16", 128, 16, has_options=True, cache="fp8_e4m3", has_invariant=False),
    Case(100, "bfloat16", 128, 16, has_options=False),
    Case(100, "bfloat16", 128, 16, has_options=True),
    Case(100, "float16", 64, 16, has_options=False),
    Case(100, "bfloat16", 256, 16, has_options=True),
    Case(100, "float32", 128, 16, has_options=True),
    Case(80, "bfloat16", 64, 16, has_options=False, group=1, has_distance_biases=True),
    Case(100, "bfloat16", 128, 16, has_options=False, cache="int8"),
    Case(100, "bfloat16", 128, 16, has_options=False, cache="fp8_e4m3"),
]
# Formats that a card of 8.0 and one of 9.0 have beside the model's own.
OTHER_CACHES = [
    *(("bfloat16", cache) for cache in ("float16", "float32", "int8", "fp8_e4m3", "fp8_e5m2")),
    *(("float16", cache) for cache in ("bfloat16", "int8", "fp8_e4m3")),
    *(("float32", cache) for cache in ("bfloat16", "int8", "fp8_e5m2")),
]


def compile_in_another_process(cases: Sequence[Case], cache: Path) -> list[CompiledKernel]:
    """Compile where Triton was imported without its interpreter, and with an empty cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_kernels", *(json.dumps(asdict(case)) for case in cases)],
        cwd=Path(__file__).parents[2],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    return [CompiledKernel(**{**kernel, "case": Case(**kernel["case"])}) for kernel in kernels]


def num_wanted(name: str, case: Case) -> int:
    """Return how many programs must fit on a multiprocessor at once: decodes hide the latency of memory."""
    if name in ("prefill_kernel", "attend_kernel") or case.itemsize == 4 or case.group > 32 or case.value_begin:
        return 1
    if case.group > 16:
        return 2  # the results of many heads fill the registers
    if case.cache in {"bfloat16", "float16"} - {case.dtype}:
        return 2  # so do wide tiles of which each number is converted
    return resident_programs(case.value_dim, 2, divmod(case.capability, 10))


def check(kernel: CompiledKernel) -> None:
    capability, num_bits = kernel.case.capability, 32 if kernel.case.itemsize == 4 else 16
    num_shared, most_shared = SHARED_BYTES[capability]
    registers = -(-kernel.registers // 8) * 8 * kernel.num_threads
    num_resident = min(
        num_shared // (kernel.shared_bytes + RESERVED_SHARED_BYTES),
        REGISTERS // registers,
        MAX_THREADS // kernel.num_threads,
    )
    assert kernel.registers <= 255, kernel
    assert kernel.local_bytes == 0, kernel
    cache_itemsize = kernel.case.cache_dtype.itemsize
    is_invariant = kernel.name == "attend_kernel"
    most_stack = MAX_STACK_BYTES_INVARIANT[capability] if is_invariant else MAX_STACK_BYTES[num_bits]
    if kernel.case.cache not in ("", kernel.case.dtype):
        converted = MAX_STACK_BYTES_INVARIANT_CONVERTED if is_invariant else MAX_STACK_BYTES_CONVERTED
        most_stack = max(most_stack, converted[num_bits])
    if kernel.case.value_begin:
        most_stack = MAX_STACK_BYTES_LATENT.get(kernel.name, 0)
    assert kernel.stack_bytes <= most_stack, kernel
    assert kernel.shared_bytes <= most_shared, kernel
    # A warp of the fold reads a head at a time, of 64 numbers 8 bytes a thread.
    assert kernel.num_wide_copies + kernel.num_wide_loads > 0 or kernel.name == "fold_kernel", kernel
    if kernel.name in SMALL_KERNELS:
        assert num_resident >= (2 if kernel.case.value_begin else 4), kernel
        return
    budget = SHARED_BUDGET_LATENT if kernel.case.value_begin else SHARED_BUDGET[kernel.name, num_bits]
    assert kernel.shared_bytes <= budget.get(capability, budget[90]), kernel
    assert num_resident >= num_wanted(kernel.name, kernel.case), kernel
    assert kernel.num_narrow_loads == 0, kernel
    if kernel.case.value_begin:
        return
    # Keys and values go to shared memory in pieces of 16 bytes, some tiles ahead; queries in pieces of 16 bytes.
    assert kernel.num_wide_copies >= (2 if cache_itemsize == 1 else 4), kernel
    if kernel.name in ("prefill_kernel", "attend_kernel"):
        assert (kernel.num_warpgroup_products > 0) == (capability == 90 and num_bits == 16), kernel


def check_all(cases: Sequence[Case], cache: Path) -> None:
    kernels = compile_in_another_process(cases, cache)
    for case in cases:
        ours = [kernel for kernel in kernels if kernel.case == case]
        # Decodes and chunks are there twice: with and without splits. The invariant one is there for decodes of several
        # programs a row, decodes of one, and a chunk: all are one machine code, and so one order of sums.
        invariant = ["fold_kernel", *["attend_kernel"] * 3] if case.has_invariant else []
        assert sorted(kernel.name for kernel in ours) == sorted([*FAST_KERNELS, *invariant])
        assert len({kernel.digest for kernel in ours if kernel.name == "attend_kernel"}) == case.has_invariant
    for kernel in kernels:
        check(kernel)


@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK)
def test_kernels_keep_within_their_budgets(case: Case, tmp_path: Path) -> None:
    check_all([case], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("capability", [80, 90])
def test_all_kernels_keep_within_their_budgets(capability: int, dtype: str, head_dim: int, tmp_path: Path) -> None:
    check_all(
        [
            Case(capability, dtype, head_dim, block_size, has_options)
            for block_size, has_options in product((16, 128), (False, True))
        ],
        tmp_path,
    )


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("dtype", "cache"), OTHER_CACHES)
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_of_every_cache_keep_within_their_budgets(
    capability: int, dtype: str, cache: str, head_dim: int, tmp_path: Path
) -> None:
    check_all([Case(capability, dtype, head_dim, 16, has_options=False, cache=cache)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("head_dim", "group"), [(128, 1), (128, 7), (128, 24), (64, 71)])
def test_groups_of_every_size_keep_within_the_budgets(
    head_dim: int, group: int, capability: int, tmp_path: Path
) -> None:
    check_all([Case(capability, "bfloat16", head_dim, 16, has_options=False, group=group)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("dtype", "group", "cache"),
    [("bfloat16", 16, ""), ("bfloat16", 128, ""), ("bfloat16", 16, "int8"), ("float16", 16, "fp8_e4m3")],
)
def test_kernels_of_latent_caches_keep_within_their_budgets(
    dtype: str, group: int, cache: str, capability: int, tmp_path: Path
) -> None:
    check_all([Case(capability, dtype, 576, 16, has_options=False, group=group, cache=cache, value_begin=64)], tmp_path)


# The kernels for sampling and for the dense part ---------------------------------------------------------

SHARED_BYTES_OF_ALL = 48 * 1024  # that every device has
SHARED_BYTES_OF_PRODUCTS = 99 * 1024  # that a program may have on every device


@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(100, marks=pytest.mark.slow)]
)
def test_kernels_fit_a_device(capability: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_cases_sampling_dense", str(capability)],
        cwd=Path(__file__).parents[2],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    needs = json.loads(done.stdout)
    assert len(needs) >= 20
    for case in needs:
        assert 0 < case["registers"] <= 255, case
        assert case["spilled"] == 0, case
        is_product = case["name"].startswith(("matmul_kernel", "coded_matmul_kernel", "expert_product_kernel"))
        most = SHARED_BYTES_OF_PRODUCTS if is_product else SHARED_BYTES_OF_ALL
        if case["name"].startswith("matmul_kernel 4096 4096 128 256"):  # for this capability alone
            most = SHARED_BYTES[capability][1]
        assert case["shared"] <= most, case
    # Whatever the tile, an instruction adds up as many inputs: the bits of `--numerics invariant` rest on it.
    products = [case["products"] for case in needs if case["name"].startswith("matmul_kernel 4096 4096")]
    products += [case["products"] for case in needs if case["name"].startswith("matmul_kernel 28672")]
    assert products == ([["k16"], ["k16"]] if capability < 100 else [[]])
