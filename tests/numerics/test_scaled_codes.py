"""A checkpoint in codes is the model of the numbers that its codes and scales are, and keeps its codes."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.checkpoint import scaled_codes
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.checkpoint.scaled_codes import BLOCK_BYTES, NVFP4, CodeKind, restore_codes
from executor_svc.checkpoint.weight_map import WeightMap
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.config import ExecutorConfig
from executor_svc.models.decoder import Decoder
from executor_svc.models.memory_needs import summarize_model
from executor_svc.models.quantized_linear import round_inputs
from executor_svc.models.selection import choose_model
from executor_svc.native.structs import NumberFormat
from executor_svc.worker.loading import load_worker
from octavo_shared.errors import ModelLoadError
from tests.numerics.architectures import PagedRun, compare_with_transformers, load_architecture, save_tiny_architecture
from tests.numerics.driver import RecordingSampler, StepDriver
from tests.numerics.native import LANES, packed_matrix
from tests.numerics.reference import logits_of
from tests.numerics.scaled_codes import (
    BLOCK,
    E4M3,
    FP4,
    INT8,
    LAYOUTS,
    awq,
    compressed,
    gptq,
    is_converted,
    model_opt,
    nvfp4,
    packed4,
    write_codes,
)
from tests.numerics.threaded_group import ThreadedRanks
from tests.numerics.ties import TIE
from tests.support.each_row import each_row

# Neither rows nor inputs of some matrices are whole blocks; q, k and v are joined within one.
SIZES = {"hidden_size": 160, "intermediate_size": 400, "head_dim": 24}
# Each of 2 ranks has whole blocks of inputs.
WHOLE = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 64}
DOWN = "model.layers.1.mlp.down_proj"
PROMPT = [5, 9, 23, 42, 7, 11, 80, 3, 70, 6, 33, 14, 92, 61, 8, 19, 77, 50, 2, 31]
Change = Callable[[dict[str, torch.Tensor]], object]


FOUR_BITS = [name for name, layout in LAYOUTS.items() if layout.has_4_bits]


@each_row(
    *[(name, layout) for name in ("Qwen3ForCausalLM", "LlamaForCausalLM") for layout in LAYOUTS],
    # q, k and v are stored as one
    *[("Phi3ForCausalLM", layout) for layout in ("w4a16, zeros", "gptq", "awq", "nvfp4")],
)
def test_logits_are_those_of_transformers_with_the_restored_weights(name: str, layout: str, *, tmp_path: Path) -> None:
    plain, target = tmp_path / name, tmp_path / f"{name}, {layout}"
    sizes = {"hidden_size": 160, "intermediate_size": 400} if name == "Phi3ForCausalLM" else SIZES
    reference = save_tiny_architecture(plain, name, sizes)
    restored = write_codes(plain, target, layout)
    reference.load_state_dict(restored, strict=False)
    if layout in FOUR_BITS:  # products take activations in 8 bits
        for module, linear in reference.named_modules():
            if isinstance(linear, torch.nn.Linear) and is_converted(f"{module}.weight", linear.weight):
                linear.register_forward_pre_hook(rounded_inputs)

    model, backend = load_architecture(target)
    comparison = compare_with_transformers(model, backend, reference)

    assert isinstance(model, Decoder)
    if layout in FOUR_BITS:  # what is between two codes is rounded up by one and down by the other
        assert comparison.logit_difference < 0.02
        return
    assert comparison.logit_difference < 1e-5
    assert comparison.greedy_distance < TIE


def rounded_inputs(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    return round_inputs(NumberFormat.INT4, inputs[0].flatten(0, -2)).view(inputs[0].shape)


@each_row("w4a16, zeros", "gptq", "awq", "modelopt")
def test_experts_give_the_logits_of_transformers(layout: str, *, tmp_path: Path) -> None:
    plain, target = tmp_path / f"plain, {layout}", tmp_path / layout
    reference = save_tiny_architecture(plain, "Qwen3MoeForCausalLM", {"moe_intermediate_size": 48})
    restored = write_codes(plain, target, layout)
    save_file(dict(restored), plain / "model.safetensors", metadata={"format": "pt"})
    reference = type(reference).from_pretrained(plain)

    model, backend = load_architecture(target)

    # Where another expert is chosen for an activation that is rounded, all of the logits are others.
    actual = PagedRun(model, backend).prompt_logits(PROMPT, 16)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([PROMPT])).logits[0]
    assert float((actual - expected).abs().amax(-1).median() / expected.abs().max()) < 0.1


@each_row(*FOUR_BITS)
def test_codes_of_4_bits_are_held_exactly_whole_and_in_parts(layout: str, *, tmp_path: Path) -> None:
    save_tiny_architecture(tmp_path / f"plain, {layout}", "Qwen3ForCausalLM", {**WHOLE, "intermediate_size": 400})
    restored = write_codes(tmp_path / f"plain, {layout}", tmp_path / layout, layout)
    checkpoint = Checkpoint(tmp_path / layout)
    assert checkpoint.codes is not None
    kind = checkpoint.codes.kind
    number_format = NumberFormat.NVFP4 if kind == NVFP4 else NumberFormat[f"INT4_G{kind.block_inputs}"]
    weights, matrices = WeightMap(), []
    for name, weight in restored.items():
        if not is_converted(name, weight):
            weights.ignore(name, tuple(weight.shape))
            continue
        num_outputs, num_inputs = weight.shape
        for rows, columns in (((0, num_outputs), (0, num_inputs)), ((11, 94), (0, 128)), ((1, 2), (128, num_inputs))):
            matrix = packed_matrix("widest", columns[1] - columns[0], [rows[1] - rows[0]], number_format)
            matrices.append((matrix, weight[slice(*rows), slice(*columns)]))
            if columns[1] > columns[0]:
                weights.add(name, tuple(weight.shape), matrix.weights[0], rows=(rows,), columns=columns)

    checkpoint.load_into(weights.targets, lambda _: False)

    for matrix, weight in matrices:
        assert torch.equal(matrix.rows(torch.arange(len(weight))), weight)


@each_row(*[(lanes, kind) for lanes in LANES for kind in scaled_codes.UINT4])
def test_every_code_and_zero_of_4_bits_is_multiplied_by_the_scale_of_its_block(lanes: str, kind: CodeKind) -> None:
    number_format = NumberFormat[f"INT4_G{kind.block_inputs}"]
    num_outputs, num_inputs = 101, 301
    num_blocks = -(-num_inputs // kind.block_inputs)
    random = np.random.default_rng(3)
    scales = np.exp2(random.uniform(-20, 4, (num_outputs, num_blocks, 1))).astype(np.float32)
    zeros = (np.arange(num_outputs * num_blocks) % 17).astype(np.uint8).reshape(num_outputs, num_blocks, 1)
    pairs = random.integers(0, 256, (num_outputs, num_blocks, kind.block_inputs // 2), np.uint8)
    blocks = np.concatenate([scales.view(np.uint8), zeros, pairs], -1).reshape(num_outputs, -1)
    codes = np.stack([pairs % 16, pairs // 16], -1).reshape(num_outputs, num_blocks, -1).astype(np.float32)
    weight = torch.from_numpy(((codes - zeros) * scales).reshape(num_outputs, -1)[:, :num_inputs])
    matrix = packed_matrix(lanes, num_inputs, [1, num_outputs - 1], number_format)

    for part, rows in zip(matrix.weights, (blocks[:1], blocks[1:]), strict=True):
        assert part.copy_blocks(torch.from_numpy(rows), kind.block_type, None)

    assert torch.equal(matrix.rows(torch.arange(num_outputs)), weight)
    assert np.array_equal(restore_codes(kind, blocks)[:, :num_inputs], weight.numpy())
    x = torch.from_numpy(random.standard_normal((9, num_inputs)).astype(np.float32))
    x[0] = x[0].sign()  # all codes of the activations are the largest one, and its negative
    expected = round_inputs(number_format, x).double() @ weight.double().T
    assert float((matrix(x) - expected).abs().max() / expected.abs().max()) < 1e-6
    panels = -(-num_outputs // 48) * 48
    assert matrix.num_bytes <= panels * (320 // 2 + 5 * num_blocks)


@each_row(*LANES)
def test_every_code_of_nvfp4_is_multiplied_by_both_of_its_scales(lanes: str) -> None:
    num_outputs, num_inputs, num_blocks = 101, 304, 10
    random = np.random.default_rng(3)
    of_rows = np.exp2(random.uniform(-20, 4, (num_outputs, 1, 1))).astype(np.float32).repeat(num_blocks, 1)
    numbers = np.arange(num_outputs * num_blocks * 2).reshape(num_outputs, num_blocks, 2) % 254
    scales = (numbers + (numbers > 126)).astype(np.uint8)  # 0x7f and 0xff are NaN
    pairs = random.integers(0, 256, (num_outputs, num_blocks, 16), np.uint8)
    blocks = np.concatenate([of_rows.view(np.uint8), scales, pairs], -1).reshape(num_outputs, -1)
    values = FP4[np.stack([pairs % 16, pairs // 16], -1)].reshape(num_outputs, num_blocks, 2, 16)
    weight = (values * E4M3[scales][..., None]).reshape(num_outputs, num_blocks, 32) * of_rows
    weight = torch.from_numpy(weight.reshape(num_outputs, -1)[:, :num_inputs])
    matrix = packed_matrix(lanes, num_inputs, [1, num_outputs - 1], NumberFormat.NVFP4)

    for part, rows in zip(matrix.weights, (blocks[:1], blocks[1:]), strict=True):
        assert part.copy_blocks(torch.from_numpy(rows), NVFP4.block_type, None)

    assert torch.equal(matrix.rows(torch.arange(num_outputs)), weight)
    assert np.array_equal(restore_codes(NVFP4, blocks)[:, :num_inputs], weight.numpy())
    x = torch.from_numpy(random.standard_normal((9, num_inputs)).astype(np.float32))
    x[0] = x[0].sign()  # all codes of the activations are the largest one, and its negative
    expected = round_inputs(NumberFormat.NVFP4, x).double() @ weight.double().T
    assert float(((matrix(x) - expected).abs().amax(0) / expected.abs().amax(0)).max()) < 1e-6
    panels = -(-num_outputs // 48) * 48
    assert matrix.num_bytes <= panels * (320 // 2 + 320 // 16 + 4)
    blocks[0, 4] = 0x7F
    assert not matrix.weights[0].copy_blocks(torch.from_numpy(blocks[:1]), NVFP4.block_type, None)


@each_row(*[(lanes, kind) for lanes in LANES for kind in (scaled_codes.E4M3, scaled_codes.INT8)])
def test_every_code_is_held_exactly_and_multiplied_by_the_scale_of_its_block(lanes: str, kind: CodeKind) -> None:
    is_fp8 = kind == scaled_codes.E4M3
    number_format, values_of = (NumberFormat.FP8, E4M3) if is_fp8 else (NumberFormat.INT8_A32, INT8)
    num_outputs, num_inputs, num_blocks = 101, 301, 3
    random = np.random.default_rng(3)
    codes = random.permutation(np.arange(num_outputs * num_blocks * 128) % (254 if is_fp8 else 256)).astype(np.uint8)
    codes += is_fp8 & (codes > 126)  # 0x7f and 0xff are NaN
    codes = codes.reshape(num_outputs, num_blocks, 128)
    scales = np.exp2(random.uniform(-20, 4, (num_outputs, num_blocks, 1))).astype(np.float32)
    blocks = np.concatenate([scales.view(np.uint8), codes], -1).reshape(num_outputs, num_blocks * BLOCK_BYTES)
    weight = torch.from_numpy((values_of[codes] * scales).reshape(num_outputs, -1)[:, :num_inputs])
    matrix = packed_matrix(lanes, num_inputs, [1, num_outputs - 1], number_format)

    for part, rows in zip(matrix.weights, (blocks[:1], blocks[1:]), strict=True):
        assert part.copy_blocks(torch.from_numpy(rows), kind.block_type, None)

    assert torch.equal(matrix.rows(torch.arange(num_outputs)), weight)
    assert torch.equal(matrix(torch.eye(num_inputs)).T, weight)
    assert np.array_equal(restore_codes(kind, blocks)[:, :num_inputs], weight.numpy())
    x = torch.from_numpy(random.standard_normal((9, num_inputs)).astype(np.float32))
    expected = x.double() @ weight.double().T
    assert float((matrix(x) - expected).abs().max() / expected.abs().max()) < 1e-6
    assert matrix.num_bytes < 1.1 * 144 * (num_inputs + 4 * num_blocks)  # a byte a weight


@each_row(
    ("blocks", 512, 2),
    ("channels", 512, 2),
    ("w8a8", 512, 2),
    ("w8a16, groups", 512, 2),
    ("w8a16", 402, 2),
    ("gptq of 8 bits", 512, 2),
    ("gptq_v2 of 8 bits, rows", 512, 4),
    *((layout, 512, 2) for layout in FOUR_BITS),
    *((layout, 512, 4) for layout in ("w4a16, zeros", "gptq, rows", "awq, groups of 32", "nvfp4")),
)
def test_ranks_give_the_tokens_of_one_process(
    layout: str, num_inputs: int, num_ranks: int, *, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, target = tmp_path / f"plain, {layout}, {num_ranks}", tmp_path / f"{layout}, {num_ranks}"
    save_tiny_architecture(plain, "Qwen3ForCausalLM", {**WHOLE, "intermediate_size": num_inputs})
    write_codes(plain, target, layout)
    config = ExecutorConfig.model_validate({"model": str(target), "block_size_tokens": 4, "num_device_blocks": 100})
    monkeypatch.setattr("executor_svc.worker.assembly.Sampler", RecordingSampler)
    prompts = [[5, 9, 23, 42, 7, 11, 80, 3], [70, 6]]
    expected = StepDriver(load_worker(config)).generate(prompts, num_new_tokens=8, chunk_size=5)

    with ExitStack() as stack:
        ranks = ThreadedRanks(config, num_ranks)
        stack.callback(ranks.close)
        assert StepDriver(ranks).generate(prompts, num_new_tokens=8, chunk_size=5) == expected


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("codes")
    save_tiny_architecture(directory / "plain", "Qwen3ForCausalLM", {**SIZES, "intermediate_size": 256})
    of_8_bits = ("blocks", "w8a8", "w8a16", "gptq of 8 bits")
    for layout in (*of_8_bits, "w4a16", "w4a16, zeros", "gptq", "awq", "nvfp4", "modelopt"):
        write_codes(directory / "plain", directory / layout, layout)
    return directory / "blocks"


def refused(directory: Path, **settings: object) -> str:
    config = ExecutorConfig.model_validate({"model": str(directory), "num_device_blocks": 8, **settings})
    with pytest.raises(ModelLoadError) as error:
        load_worker(config)
    return str(error.value).replace(f"{directory}/", "").replace(str(directory), "MODEL")


def put(name: str, place: tuple[int, int], value: float) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        is_code = name.endswith(".weight")
        (tensors[name].view(torch.uint8) if is_code else tensors[name])[place] = value

    return change


def replaced(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({name: change(tensors[name])})


OF_DOWN = f"model.safetensors: the tensor {DOWN}.weight "
SCALE = f"{DOWN}.weight_scale_inv"
OF_PACKED = f"model.safetensors: the tensor {DOWN}.weight_packed "
OF_Q = f"model.safetensors: the tensor {DOWN}.qweight "
ACT_ORDER = (
    "has its inputs in groups out of order (act-order: {0}), which no kernel has; use a checkpoint without desc_act or "
    "actorder: group"
)


@each_row(
    ("blocks", lambda tensors: tensors.pop(SCALE), f"{OF_DOWN}is F8_E4M3, but its scale {SCALE} is missing"),
    (
        "blocks",
        replaced(SCALE, lambda scale: scale[:1]),
        f"{OF_DOWN}has a scale {SCALE} with shape [1, 2]; it must be [2, 2]",
    ),
    (
        "blocks",
        replaced(SCALE, lambda scale: scale.to(torch.int32)),
        f"{OF_DOWN}has a scale {SCALE} in int32; it must be in float32, bfloat16 or float16",
    ),
    ("blocks", put(SCALE, (1, 1), float("nan")), f"{OF_DOWN}has nan in its scale {SCALE}; weights must be finite"),
    ("blocks", put(SCALE, (0, 1), float("-inf")), f"{OF_DOWN}has -inf in its scale {SCALE}; weights must be finite"),
    ("blocks", put(SCALE, (0, 1), 1e36), f"{OF_DOWN}has 1e+36 in its scale {SCALE}; weights must be finite"),
    (
        "blocks",
        put(f"{DOWN}.weight", (159, 255), 0x7F),
        f"{OF_DOWN}has the code 0x7f or 0xff, which is NaN; weights must be finite",
    ),
    (
        "blocks",
        put(f"{DOWN}.weight", (0, 0), 0xFF),
        f"{OF_DOWN}has the code 0x7f or 0xff, which is NaN; weights must be finite",
    ),
    (
        "blocks",
        replaced("model.norm.weight", lambda norm: norm.to(torch.float8_e4m3fn)),
        "model.safetensors: the tensor model.norm.weight is F8_E4M3 with shape [160]; only a matrix may be",
    ),
    (
        "blocks",
        lambda tensors: tensors.update({f"{DOWN}.other": torch.ones(1)}),
        f"model.safetensors contains the tensor {DOWN}.other, which the model does not have",
    ),
    (
        "blocks",
        replaced(f"{DOWN}.weight", lambda weight: weight.view(torch.int8)),
        f"model.safetensors contains the tensor {SCALE}, which the model does not have",
    ),
    (
        "blocks",
        replaced("lm_head.weight", lambda weight: weight.to(torch.int8)),
        "model.safetensors: the tensor lm_head.weight is I8, and config.json does not say what its codes stand for; it "
        "must be F32, F16 or BF16",
    ),
    (
        "w8a8",
        lambda tensors: tensors.pop(f"{DOWN}.weight_scale"),
        f"{OF_DOWN}is I8, but its scale {DOWN}.weight_scale is missing",
    ),
    (
        "w8a8",
        replaced(f"{DOWN}.weight_scale", lambda scale: scale.repeat(1, 2)),
        f"{OF_DOWN}has a scale {DOWN}.weight_scale with shape [160, 2]; it must be [160, 1]",
    ),
    (
        "w8a8",
        lambda tensors: tensors.update({f"{DOWN}.weight_zero_point": torch.ones(160, 1, dtype=torch.float32)}),
        f"model.safetensors contains the tensor {DOWN}.weight_zero_point, which the model does not have",
    ),
    (
        "w8a16",
        put(f"{DOWN}.weight_scale", (0, 0), float("inf")),
        f"{OF_PACKED}has inf in its scale {DOWN}.weight_scale; weights must be finite",
    ),
    (
        "w8a16",
        lambda tensors: tensors.update({f"{DOWN}.weight_g_idx": torch.zeros(256, dtype=torch.int32)}),
        f"model.safetensors contains the tensor {DOWN}.weight_g_idx, which the model does not have",
    ),
    (
        "w8a16",
        lambda tensors: tensors.pop(f"{DOWN}.weight_shape"),
        f"{OF_PACKED}is packed, but its shape {DOWN}.weight_shape is missing",
    ),
    (
        "w8a16",
        replaced(f"{DOWN}.weight_shape", lambda shape: shape + 4),
        f"{OF_PACKED}has the shape [160, 64], four codes in each int32, but {DOWN}.weight_shape is [164, 260]",
    ),
    (
        "w8a16",
        replaced(f"{DOWN}.weight_shape", lambda shape: torch.tensor([160, 255])),
        f"model.safetensors contains the tensor {DOWN}.weight_packed with shape [160, 255]; config.json requires "
        "[160, 256]",
    ),
    (
        "w4a16",
        replaced(f"{DOWN}.weight_packed", lambda words: words[:, :31].contiguous()),
        f"{OF_PACKED}has the shape [160, 31], eight codes in each int32, but {DOWN}.weight_shape is [160, 256]",
    ),
    (
        "w4a16",
        lambda tensors: tensors.pop(f"{DOWN}.weight_scale"),
        f"{OF_PACKED}is U4, but its scale {DOWN}.weight_scale is missing",
    ),
    (
        "w4a16",
        replaced(f"{DOWN}.weight_g_idx", lambda order: order.flip(0)),
        f"{OF_PACKED}{ACT_ORDER.format(f'{DOWN}.weight_g_idx')}",
    ),
    (
        "w4a16",
        lambda tensors: tensors.pop(f"{DOWN}.weight_g_idx"),
        f"{OF_PACKED}has groups of inputs in any order, but {DOWN}.weight_g_idx, which tells it, is missing",
    ),
    (
        "w4a16",
        lambda tensors: tensors.update({f"{DOWN}.weight_zero_point": torch.ones(20, 2, dtype=torch.int32)}),
        f"{OF_PACKED}has zeros {DOWN}.weight_zero_point, but config.json says that it is symmetric",
    ),
    (
        "w4a16, zeros",
        lambda tensors: tensors.pop(f"{DOWN}.weight_zero_point"),
        f"{OF_PACKED}is U4, but its zeros {DOWN}.weight_zero_point are missing",
    ),
    (
        "w4a16, zeros",
        replaced(f"{DOWN}.weight_zero_point", lambda zeros: zeros.to(torch.int8)),
        f"{OF_PACKED}has zeros {DOWN}.weight_zero_point in int8 with shape [20, 4]; they must be in int32 with shape "
        "[20, 4]",
    ),
    (
        "gptq",
        put(f"{DOWN}.scales", (1, 3), float("nan")),
        f"{OF_Q}has nan in its scale {DOWN}.scales; weights must be finite",
    ),
    (
        "gptq",
        replaced(f"{DOWN}.scales", lambda scales: scales.T.contiguous()),
        f"{OF_Q}has a scale {DOWN}.scales with shape [160, 2]; it must be [2, 160]",
    ),
    (
        "gptq",
        replaced(f"{DOWN}.qweight", lambda words: words[:, :159].contiguous()),
        f"{OF_Q}has a scale {DOWN}.scales with shape [2, 160]; it must be [2, 159]",
    ),
    ("gptq", replaced(f"{DOWN}.g_idx", lambda order: order.flip(0)), f"{OF_Q}{ACT_ORDER.format(f'{DOWN}.g_idx')}"),
    (
        "gptq",
        replaced(f"{DOWN}.g_idx", lambda order: order * 2),
        f"{OF_Q}has the group 2 in {DOWN}.g_idx; there are groups 0 to 1",
    ),
    (
        "gptq",
        replaced(f"{DOWN}.g_idx", lambda order: order[1:]),
        f"{OF_Q}has groups {DOWN}.g_idx in int32 with shape [255]; they must be integers with shape [256]",
    ),
    (
        "gptq",
        replaced(f"{DOWN}.bias", torch.ones_like),
        f"model.safetensors contains the tensor {DOWN}.bias, which the model does not have",
    ),
    (
        "gptq",
        replaced(f"{DOWN}.qweight", lambda words: words[None]),
        f"{OF_Q}is U4 with shape [1, 32, 160]; only a matrix may be",
    ),
    (
        "gptq of 8 bits",
        replaced(f"{DOWN}.qzeros", lambda zeros: zeros - 1),
        f"{OF_Q}has the zero 127 in {DOWN}.qzeros; of codes of 8 bits it must be 128",
    ),
    (
        "gptq of 8 bits",
        replaced(f"{DOWN}.qzeros", lambda zeros: zeros[:, :39].contiguous()),
        f"{OF_Q}has zeros {DOWN}.qzeros in int32 with shape [2, 39]; they must be in int32 with shape [2, 40]",
    ),
    (
        "gptq of 8 bits",
        replaced(f"{DOWN}.qweight", lambda words: words[:63]),
        f"{OF_Q}has groups {DOWN}.g_idx in int32 with shape [256]; they must be integers with shape [252]",
    ),
    (
        "gptq of 8 bits",
        replaced(f"{DOWN}.g_idx", lambda order: order.flip(0)),
        f"{OF_Q}{ACT_ORDER.format(f'{DOWN}.g_idx')}",
    ),
    (
        "awq",
        replaced(f"{DOWN}.qzeros", lambda zeros: zeros[:1]),
        f"{OF_Q}has zeros {DOWN}.qzeros in int32 with shape [1, 20]; they must be in int32 with shape [2, 20]",
    ),
    (
        "awq",
        replaced(f"{DOWN}.qweight", lambda words: words[:128]),
        f"{OF_Q}has a scale {DOWN}.scales with shape [2, 160]; it must be [1, 160]",
    ),
    (
        "awq",
        lambda tensors: (
            tensors.update({"model.layers.1.mlp.up_proj.weight": torch.ones(256, 160)})
            or tensors.pop("model.layers.1.mlp.up_proj.qweight")
        ),
        "model.layers.1.mlp.up_proj is not in codes of 4 bits, but model.layers.1.mlp.gate_proj is: both must be, or "
        "neither",
    ),
    (
        "nvfp4",
        lambda tensors: tensors.pop(f"{DOWN}.weight_scale"),
        f"{OF_PACKED}is NVFP4, but its scale {DOWN}.weight_scale is missing",
    ),
    (
        "nvfp4",
        lambda tensors: tensors.pop(f"{DOWN}.weight_global_scale"),
        f"{OF_PACKED}is NVFP4, but its scale {DOWN}.weight_global_scale is missing",
    ),
    (
        "nvfp4",
        replaced(f"{DOWN}.weight_global_scale", torch.zeros_like),
        f"{OF_PACKED}has inf in its scale {DOWN}.weight_global_scale, inverted; weights must be finite",
    ),
    (
        "nvfp4",
        replaced(f"{DOWN}.weight_scale", lambda scale: scale[:, :1].contiguous()),
        f"{OF_PACKED}has a scale {DOWN}.weight_scale in float8_e4m3fn with shape [160, 1]; it must be in float8_e4m3fn "
        "with shape [160, 16]",
    ),
    (
        "modelopt",
        replaced(f"{DOWN}.weight_scale", lambda scale: scale.float()),
        f"{OF_DOWN}has a scale {DOWN}.weight_scale in float32 with shape [160, 16]; it must be in float8_e4m3fn with "
        "shape [160, 16]",
    ),
    (
        "modelopt",
        replaced(f"{DOWN}.weight_scale", lambda scale: torch.full_like(scale.float(), torch.nan).to(scale.dtype)),
        f"{OF_DOWN}has nan in its scale {DOWN}.weight_scale; weights must be finite",
    ),
    (
        "modelopt",
        replaced(f"{DOWN}.weight_scale_2", lambda scale: scale.repeat(2)),
        f"{OF_DOWN}has a scale {DOWN}.weight_scale_2 with shape [2]; it must be [1]",
    ),
)
def test_a_damaged_checkpoint_is_refused_with_file_and_tensor(
    layout: str, change: Change, sentence: str, *, checkpoint: Path, tmp_path: Path
) -> None:
    for file in checkpoint.with_name(layout).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = load_file(tmp_path / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in stored.items()}
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    assert refused(tmp_path) == sentence


@each_row(("blocks", "F8_E4M3"), ("w8a8", "I8"), ("w4a16", "U4"), ("modelopt", "NVFP4"))
def test_a_router_in_codes_is_refused(
    layout: str, kind: str, *, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.numerics.scaled_codes.is_converted", lambda name, _: name.endswith("mlp.gate.weight"))
    save_tiny_architecture(tmp_path / f"plain, {layout}", "Qwen3MoeForCausalLM", {})
    write_codes(tmp_path / f"plain, {layout}", tmp_path / layout, layout)

    assert refused(tmp_path / layout) == (
        f"model.safetensors: the tensor model.layers.0.mlp.gate.weight{'_packed' * (kind == 'U4')} is {kind}; there it "
        "must be F32, F16 or BF16"
    )


ACCEPTED = (
    "; codes may be E4M3 or symmetric integers of 8 bits, with a scale for each tensor, channel, block of [128, 128], "
    "or group of 128 inputs or a multiple of that; or integers of 4 bits in int32, with a scale for each channel, or "
    "group of 32 inputs or a multiple of that; or E2M1 with a scale for each group of 16 inputs and a tensor (NVFP4)"
)
GROUP_0 = " config_groups group_0"
INT = ("int-quantized", "pack-quantized")


def two_groups(*sizes: int) -> Mapping[str, Any]:
    each = [compressed("group", INT[1], group_size=size)["config_groups"]["group_0"] for size in sizes]
    return {**compressed("group", INT[1]), "config_groups": {f"group_{number}": of for number, of in enumerate(each)}}


@each_row(
    ({**BLOCK, "weight_block_size": [64, 128]}, f" weight_block_size [64, 128]{ACCEPTED}"),
    ({**BLOCK, "fmt": "e5m2"}, f" fmt 'e5m2'{ACCEPTED}"),
    (compressed("group"), f"{GROUP_0} group_size None{ACCEPTED}"),
    (compressed("token"), f"{GROUP_0} strategy 'token'{ACCEPTED}"),
    (compressed("channel", num_bits=4), f"{GROUP_0} num_bits 4{ACCEPTED}"),
    (compressed("channel", type="int"), f"{GROUP_0} type 'int'{ACCEPTED}"),
    (compressed("block", block_structure=[128, 64]), f"{GROUP_0} block_structure [128, 64]{ACCEPTED}"),
    ({**compressed("channel"), "config_groups": {}}, f" config_groups {{}}{ACCEPTED}"),
    ({**compressed("channel"), "config_groups": {"g": 1}}, f" config_groups g weights None{ACCEPTED}"),
    (compressed("channel", INT[0], num_bits=4), f"{GROUP_0} num_bits 4{ACCEPTED}"),
    (compressed("channel", INT[1], num_bits=3), f"{GROUP_0} num_bits 3{ACCEPTED}"),
    (packed4("tensor"), f"{GROUP_0} strategy 'tensor'{ACCEPTED}"),
    (packed4("group", group_size=16), f"{GROUP_0} group_size 16{ACCEPTED}"),
    (gptq(bits=3), f" bits 3{ACCEPTED}"),
    (gptq(group_size=16), f" group_size 16{ACCEPTED}"),
    *((gptq(bits=8, group_size=size), f" group_size {size}{ACCEPTED}") for size in (32, 64)),
    (awq(bits=8), f" bits 8{ACCEPTED}"),
    (gptq(checkpoint_format="marlin"), f" checkpoint_format 'marlin'{ACCEPTED}"),
    (
        gptq(dynamic={"+:down": {"bits": 8}}),
        " dynamic {'+:down': {'bits': 8}}; all modules in codes must have the same",
    ),
    (awq(version="gemv"), f" version 'gemv'{ACCEPTED}"),
    (awq(zero_point=False), f" zero_point False{ACCEPTED}"),
    (awq(group_size=True), f" group_size True{ACCEPTED}"),
    *((compressed("channel", kind, symmetric=False), f"{GROUP_0} symmetric False{ACCEPTED}") for kind in INT),
    *((compressed("channel", kind, actorder="group"), f"{GROUP_0} actorder 'group'{ACCEPTED}") for kind in INT),
    *((compressed("group", kind, group_size=64), f"{GROUP_0} group_size 64{ACCEPTED}") for kind in INT),
    (two_groups(128, 384), f" config_groups group_1 group_size 384 beside 128{ACCEPTED}"),
    ({**compressed("channel", INT[0]), "transform_config": {"R1": {}}}, f" transform_config {{'R1': {{}}}}{ACCEPTED}"),
    (nvfp4(group_size=32), f"{GROUP_0} group_size 32{ACCEPTED}"),
    (nvfp4(type="int"), f"{GROUP_0} type 'int'{ACCEPTED}"),
    ({**nvfp4(), "config_groups": {}}, f" config_groups {{}}{ACCEPTED}"),
    (model_opt(group_size=32), f" group_size 32{ACCEPTED}"),
    *((model_opt(quant_algo=kind), "MODEL are quantized with modelopt, ") for kind in ("FP8", "NVFP4_AWQ")),
    *(
        ({**compressed("channel"), "format": kind}, f"MODEL are quantized with compressed-tensors ({kind}), ")
        for kind in ("mixed-precision", "mxfp4-pack-quantized", "marlin-24")
    ),
    *(
        ({**BLOCK, "quant_method": method}, f"MODEL are quantized with {method}, which Octavo does not read; ")
        for method in ("fbgemm_fp8", "bitsandbytes", "mxfp4")
    ),
)
def test_other_kinds_are_refused_by_name(
    settings: Mapping[str, Any], sentence: str, *, checkpoint: Path, tmp_path: Path
) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))

    assert sentence in refused(tmp_path)
    with pytest.raises(ModelLoadError):  # `octavo list` leaves it out
        summarize_model(tmp_path)


def test_modelopt_tells_of_nvfp4_in_a_file_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.with_name("modelopt").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": told}))

    assert summarize_model(tmp_path).formats[0] == "NVFP4"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {**told, "group_size": 32}}))
    assert f"hf_quant_config.json has in quantization group_size 32{ACCEPTED}" in refused(tmp_path)


def test_ranks_that_would_cut_a_block_are_refused(tmp_path: Path) -> None:
    save_tiny_architecture(tmp_path / "plain", "LlamaForCausalLM", {**WHOLE, "intermediate_size": 320})
    write_codes(tmp_path / "plain", tmp_path / "blocks")
    config = ExecutorConfig.model_validate({"model": str(tmp_path / "blocks"), "num_device_blocks": 8})

    with pytest.raises(
        ModelLoadError, match=r"down_proj.weight cannot .* inputs \d+ to \d+, which are not whole blocks of 128;"
    ):
        ThreadedRanks(config, 2)


FIRST = "model.safetensors: the tensor model.layers.0.mlp.down_proj.weight is F8_E4M3, which "


@each_row(
    (
        {"cpu_kernels": "torch"},
        f"{FIRST}needs the kernels in C on a CPU, but cpu_kernels is torch; set --allow-requantization to round it to "
        "int8-a8, or use the unquantized checkpoint",
    ),
    (
        {"quantization": "int8"},
        f"quantization is int8, but {FIRST}is quantized already; remove --quantization",
    ),
)
def test_without_the_kernels_or_with_another_quantization_it_is_refused(
    settings: Mapping[str, Any], sentence: str, *, checkpoint: Path
) -> None:
    assert refused(checkpoint, **settings) == sentence


def test_a_gpu_without_triton_refuses_it(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_svc.models.kernels.has_triton", lambda: False)
    config = ExecutorConfig.model_validate({"model": str(checkpoint), "dtype": "float32", "allow_requantization": True})
    with pytest.raises(
        ModelLoadError, match=r"needs Triton on a GPU, but Triton is not installed; use the unquantized checkpoint$"
    ):
        choose_model(ModelDirectory(checkpoint), config, torch.device("cuda"))


@each_row(
    ("blocks", "fp8", "F8_E4M3", 1),
    ("w8a16", "int8-a32", "I8", 0.5),
    ("awq", "int4_g128", "U4", 1),
    ("nvfp4", "nvfp4", "NVFP4", 1),
)
def test_it_is_rounded_where_that_is_allowed_and_the_error_is_told(
    layout: str,
    held: str,
    stored: str,
    most: float,
    *,
    checkpoint: Path,
    recorder: RecordingSampler,
    capsys: pytest.CaptureFixture[str],
) -> None:
    exact = logits_of(checkpoint.with_name(layout), recorder)
    assert f"weights in float32, {held}\n" in capsys.readouterr().out

    rounded = logits_of(checkpoint.with_name(layout), recorder, cpu_kernels="torch", allow_requantization=True)

    told = re.search(rf"weights in {stored} were rounded to int8-a8: .* error is ([\d.]+)%", capsys.readouterr().out)
    assert told is not None
    assert 0 < float(told[1]) < most
    assert 0 < float((rounded - exact).norm() / exact.norm()) < 5e-2


@each_row(
    ("blocks", "F8_E4M3", 8.25),
    ("w8a8", "I8", 8.25),
    ("w8a16", "I8", 8.25),
    ("w4a16", "U4", 4 + 40 / 128),
    ("w4a16, zeros", "U4", 4 + 40 / 32),
    ("gptq", "U4", 4 + 40 / 128),
    ("awq", "U4", 4 + 40 / 128),
    ("gptq of 8 bits", "I8", 8.25),
    ("nvfp4", "NVFP4", 4.5),
    ("modelopt", "NVFP4", 4.5),
)
def test_a_weight_takes_what_its_codes_and_scales_take(
    layout: str, kind: str, bits: float, *, checkpoint: Path
) -> None:
    directory = checkpoint.with_name(layout)

    summary = summarize_model(directory)

    stored = load_file(directory / "model.safetensors")
    plain = load_file(directory.with_name("plain") / "model.safetensors")
    codes = sum(tensor.numel() for name, tensor in plain.items() if is_converted(name, tensor))
    # Of GPTQ with a bias of zeros for each map, which `octavo list` cannot tell from others.
    others = [t for name, t in stored.items() if t.is_floating_point() and (name in plain or name.endswith("bias"))]
    of_numbers = [tensor for tensor in others if tensor.element_size() > 1]
    assert summary.formats[0] == kind
    assert summary.held_bytes == int((codes * bits + sum(32 * tensor.numel() for tensor in of_numbers)) / 8)


def test_the_kernels_are_found_once(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = ExecutorConfig.model_validate({"model": str(checkpoint), "dtype": "float32"})
    with caplog.at_level("INFO"):
        choose_model(ModelDirectory(checkpoint), config, torch.device("cpu"))

    assert [record.getMessage().split()[0] for record in caplog.records].count("event=kernel_library") == 1
