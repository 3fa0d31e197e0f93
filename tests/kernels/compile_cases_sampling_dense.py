"""What the kernels for sampling and for the dense part are compiled for: representative calls. It needs no GPU.

A case is a kernel, the types of its arguments, its constants, its number of warps, and that of its stages.

`python -m tests.kernels.compile_cases_sampling_dense 80 90` compiles all of them for those compute capabilities and
prints what each needs. TRITON_INTERPRET must not be set.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from executor_svc.models.coded_linear import CODED_FORMATS, empty_weight
from executor_svc.native.structs import NumberFormat
from executor_svc.sampler.device_sampling import (
    NUM_PIVOTS,
    NUM_WARPS,
    NUM_WARPS_OF_PART,
    PART,
    PARTS_OF_PROGRAM,
    TILE,
)
from executor_svc.triton_kernels import coded_matmul, log_total
from executor_svc.triton_kernels.coded_matmul import (
    NARROW_ROWS,
    TILE_INPUTS,
    coded_matmul_kernel,
    coded_tile,
    rows_of_tile,
    stages_of,
    sum_parts_kernel,
    warps_of,
)
from executor_svc.triton_kernels.dense import ACTIVATION_TILE, activation_kernel, norm_kernel, num_warps_of_norm
from executor_svc.triton_kernels.expert_products import (
    SCAN_TILE,
    SUM_TILE,
    count_kernel,
    expert_product_kernel,
    expert_tile,
    group_kernel,
    weighted_sum_kernel,
)
from executor_svc.triton_kernels.log_total import log_total_kernel
from executor_svc.triton_kernels.matmul import GROUP_ROWS, MatmulTile, large_tile, matmul_kernel, matmul_tile
from executor_svc.triton_kernels.routing import route_kernel
from executor_svc.triton_kernels.sampling import sample_rows
from executor_svc.triton_kernels.sampling_candidates import gather_parts, measure_parts, weigh_parts

Case = tuple[Any, Mapping[str, str], Mapping[str, Any], int, int]


def compile_cases(capability: int) -> list[Case]:
    """Return the cases; 80 is capability 8.0."""
    large = large_tile((capability // 10, capability % 10))
    return [
        *_sampling(128_256),
        *_sampling(2**20),
        _norm(4096, "bf16", "bf16"),
        _norm(2560, "bf16", "fp32"),
        _norm(16_384, "fp16", "fp16"),
        _norm(5120, "bf16", "bf16", is_layer_norm=True),
        _norm(3072, "bf16", "bf16", has_addend=False),
        *(_activation(name, "bf16") for name in ("silu", "gelu", "gelu_tanh")),
        _activation("relu", "fp16", has_up=False),
        _matmul(28_672, 4096, "bf16"),
        *([] if large is None else [_matmul(4096, 4096, "bf16", large)]),
        _matmul(4096, 2000, "fp32", has_bias=True),
        *(_coded(each, 4096, 4096, num_rows, "bf16") for each in CODED_FORMATS for num_rows in (1, 17)),
        _coded(NumberFormat.FP8, 28_672, 2000, 17, "fp16"),
        _coded(NumberFormat.INT4_G128, 28_672, 4096, 17, "fp32"),
        _sum_parts(),
        _route(has_correction_bias=False),
        _route(has_correction_bias=True),
        _log_total(),
        (count_kernel, {"chosen": "*i32", "counts": "*i32", "num_choices": "i32"}, {"TILE": SCAN_TILE}, 4, 3),
        _group(),
        _expert_product(1536, 2048, 8, "bf16"),
        _expert_product(28_672, 4096, 2, "fp16"),
        _expert_product(5760, 2880, 4, "bf16", has_bias=True),
        _expert_product(1536, 2000, 8, "fp32"),
        _weighted_sum(),
    ]


def _sampling(vocab_size: int) -> list[Case]:
    padded = {"PARTS_PADDED": triton.next_power_of_2(triton.cdiv(vocab_size, PART))}
    rows = {"logits": "*fp32", "row_stride": "i32", "size": "i32", "choices": "*fp64", "num_columns": "i32"}
    rows |= {"parts": "*fp64"}
    counts = {"counts": "*i32"}
    found = {"candidates": "*fp32", "token_ids": "*i32", "capacity": "i32"}
    drawn = {"num_parts": "i32", "sampled": "*i64"}
    return [
        (measure_parts, rows | counts, {"TILE": PART}, NUM_WARPS_OF_PART, 3),
        (weigh_parts, rows | counts, {"TILE": PART, **padded}, NUM_WARPS_OF_PART, 3),
        (
            gather_parts,
            rows | counts | found | {"num_parts": "i32"},
            {"TILE": PART, **padded, "PARTS_OF_PROGRAM": PARTS_OF_PROGRAM},
            NUM_WARPS_OF_PART,
            3,
        ),
        (
            sample_rows,
            rows | found | drawn,
            {"PART": PART, **padded, "TILE": TILE, "NUM_PIVOTS": NUM_PIVOTS},
            NUM_WARPS,
            3,
        ),
    ]


def _norm(size: int, dtype: str, weight_dtype: str, *, is_layer_norm: bool = False, has_addend: bool = True) -> Case:
    size_padded = 1 << (size - 1).bit_length()
    types = {"residual": f"*{dtype}", "residual_stride": "i32", "addend_stride": "i32", "weight": f"*{weight_dtype}"}
    types |= {"normed": f"*{dtype}", "epsilon": "fp32"}
    constants: dict[str, Any] = {"SIZE": size, "SIZE_PADDED": size_padded, "IS_LAYER_NORM": is_layer_norm}
    for name, dtype_or_none in (
        ("addend", dtype if has_addend else None),
        ("bias", weight_dtype if is_layer_norm else None),
    ):
        if dtype_or_none is None:
            constants[name] = None
        else:
            types[name] = f"*{dtype_or_none}"
    return norm_kernel, types, constants, num_warps_of_norm(size_padded), 3


def _activation(name: str, dtype: str, *, has_up: bool = True) -> Case:
    types = {"gate": f"*{dtype}", "gate_stride": "i32", "up_stride": "i32", "output": f"*{dtype}", "size": "i32"}
    constants: dict[str, Any] = {"ACTIVATION": name, "TILE": ACTIVATION_TILE}
    if has_up:
        types["up"] = f"*{dtype}"
    else:
        constants["up"] = None
    return activation_kernel, types, constants, 4, 3


def _matmul(
    num_outputs: int, num_inputs: int, dtype: str, tile: MatmulTile | None = None, *, has_bias: bool = False
) -> Case:
    tile = tile or matmul_tile(num_outputs, 4 if dtype == "fp32" else 2)
    types = {"x": f"*{dtype}", "x_stride": "i32", "weight": f"*{dtype}", "output": f"*{dtype}", "num_rows": "i32"}
    constants: dict[str, Any] = {"NUM_OUTPUTS": num_outputs, "NUM_INPUTS": num_inputs, "TILE_ROWS": tile.num_rows}
    constants |= {"TILE_COLUMNS": tile.num_columns, "TILE_INPUTS": tile.num_inputs, "GROUP_ROWS": GROUP_ROWS}
    if has_bias:
        types["bias"] = f"*{dtype}"
    else:
        constants["bias"] = None
    return matmul_kernel, types, constants, tile.num_warps, tile.num_stages


def _coded(number_format: NumberFormat, num_outputs: int, num_inputs: int, num_rows: int, dtype: str) -> Case:
    weight = empty_weight(CODED_FORMATS[number_format], num_outputs, num_inputs, torch.device("meta"))
    tile, tile_rows = coded_tile(num_outputs, num_inputs), rows_of_tile(num_rows)
    is_split = tile.num_parts > 1 and tile_rows == NARROW_ROWS
    of_scales = "*u8" if weight.scales.dtype == torch.uint8 else "*fp32"
    types = {"x": f"*{dtype}", "x_stride": "i32", "codes": "*u8", "scales": of_scales, "num_rows": "i32"}
    types["output"] = "*fp32" if is_split else f"*{dtype}"
    constants: dict[str, Any] = {"KIND": weight.kind, "NUM_OUTPUTS": num_outputs, "NUM_INPUTS": num_inputs}
    constants |= {"NUM_GROUPS": len(weight.scales), "GROUP_INPUTS": weight.group_inputs, "TILE_ROWS": tile_rows}
    constants |= {"TILE_COLUMNS": tile.num_columns, "TILE_INPUTS": TILE_INPUTS, "PART_INPUTS": tile.part_inputs}
    constants |= {"NUM_PARTS": tile.num_parts, "IS_SPLIT": is_split, "bias": None}
    for name, tensor, kind in (("zeros", weight.zeros, "*u8"), ("row_scales", weight.row_scales, "*fp32")):
        if tensor is None:
            constants[name] = None
        else:
            types[name] = kind
    stages = stages_of(tile_rows, 4 if dtype == "fp32" else 2)
    return coded_matmul_kernel, types, constants, warps_of(tile_rows), stages


def _sum_parts() -> Case:
    types = {"parts": "*fp32", "bias": "*bf16", "output": "*bf16", "size": "i32"}
    return sum_parts_kernel, types, {"NUM_OUTPUTS": 4096, "NUM_PARTS": 4, "TILE": coded_matmul.SUM_TILE}, 4, 3


def _route(*, has_correction_bias: bool) -> Case:
    types = {"scores": "*bf16", "weights": "*bf16", "chosen": "*i32"}
    constants: dict[str, Any] = {"NUM_EXPERTS": 60, "EXPERTS_PADDED": 64, "NUM_CHOSEN": 8, "CHOSEN_PADDED": 8}
    constants |= {"IS_NORMALIZED": True, "IS_SIGMOID": has_correction_bias, "SUM_EPSILON": 1e-6, "SCALE": 1.0}
    constants |= {"NUM_GROUPS": 6, "NUM_CHOSEN_GROUPS": 4 if has_correction_bias else 6, "expert_scales": None}
    if has_correction_bias:
        types["correction_bias"] = "*fp32"
    else:
        constants["correction_bias"] = None
    return route_kernel, types, constants, 1, 3


def _group() -> Case:
    names = ("chosen", "counts", "tile_experts", "tile_choices")
    constants = {"NUM_EXPERTS": 128, "EXPERTS_PADDED": 128, "TILE_ROWS": 64, "TILE": SCAN_TILE}
    return group_kernel, {**dict.fromkeys(names, "*i32"), "num_choices": "i32", "num_tiles": "i32"}, constants, 4, 3


def _expert_product(num_outputs: int, num_inputs: int, num_chosen: int, dtype: str, *, has_bias: bool = False) -> Case:
    tile = expert_tile(num_outputs, num_chosen, 4 if dtype == "fp32" else 2)
    types = dict.fromkeys(("x", "weights", "output", *(("biases",) if has_bias else ())), f"*{dtype}")
    types |= {"tile_experts": "*i32", "tile_choices": "*i32", "num_tiles": "i32"}
    constants: dict[str, Any] = {"CHOICES_OF_ROW": num_chosen, "NUM_OUTPUTS": num_outputs, "NUM_INPUTS": num_inputs}
    constants |= {"TILE_ROWS": tile.num_rows, "TILE_COLUMNS": tile.num_columns, "TILE_INPUTS": tile.num_inputs}
    if not has_bias:
        constants["biases"] = None
    return expert_product_kernel, types, constants, tile.num_warps, tile.num_stages


def _weighted_sum() -> Case:
    types = dict.fromkeys(("outputs", "weights", "shared", "shared_gates", "result"), "*bf16") | {"chosen": "*i32"}
    return weighted_sum_kernel, types, {"NUM_CHOSEN": 6, "CHOSEN_PADDED": 8, "SIZE": 2048, "TILE": SUM_TILE}, 4, 3


def _log_total() -> Case:
    types = {"logits": "*fp32", "row_stride": "i32", "size": "i32", "totals": "*fp64"}
    return log_total_kernel, types, {"TILE": log_total.TILE}, log_total.NUM_WARPS, 3


def needs_of(case: Case, capability: int) -> dict[str, Any]:
    """Compile a case; return its name, and registers a thread, spilled bytes, and bytes of shared memory."""
    kernel, types, constants, num_warps, num_stages = case
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    # Pointers, sizes and strides are multiples of 16, as they are for most models.
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] in "*i"}
    options = {"num_warps": num_warps, "num_stages": num_stages}
    source = ASTSource(kernel, signature, dict(constants), aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [str(dump), "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "name": " ".join([kernel.__name__, *map(str, constants.values())]),
        "registers": numbers["REG"],
        "spilled": numbers["STACK"] + numbers["LOCAL"],
        "shared": compiled.metadata.shared,
        # Of products: the shapes of an instruction, whose last number is how many inputs it adds up.
        "products": sorted(set(re.findall(r"(?:mma|wgmma)\S*\.m\d+n\d+(k\d+)\.", compiled.asm["ptx"]))),
    }


if __name__ == "__main__":
    capabilities = map(int, sys.argv[1:])
    print(json.dumps([needs_of(case, each) for each in capabilities for case in compile_cases(each)]))
