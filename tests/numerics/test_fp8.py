"""A checkpoint in FP8 is the model of the numbers that its codes and scales stand for, and keeps its codes."""

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

from executor_svc.checkpoint.fp8 import BLOCK_BYTES, FP8_BLOCK, restore_fp8
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.config import ExecutorConfig
from executor_svc.models.decoder import Decoder
from executor_svc.models.memory_needs import summarize_model
from executor_svc.models.selection import choose_model
from executor_svc.native.structs import NumberFormat
from executor_svc.worker.loading import load_worker
from octavo_shared.errors import ModelLoadError
from tests.numerics.architectures import compare_with_transformers, load_architecture, save_tiny_architecture
from tests.numerics.driver import RecordingSampler, StepDriver
from tests.numerics.fp8 import BLOCK, LAYOUTS, VALUES, compressed, write_fp8
from tests.numerics.native import LANES, packed_matrix
from tests.numerics.reference import logits_of
from tests.numerics.threaded_group import ThreadedRanks
from tests.numerics.ties import TIE
from tests.support.each_row import each_row

# Neither rows nor inputs of some matrices are whole blocks; q, k and v are joined within one.
SIZES = {"hidden_size": 160, "intermediate_size": 400, "head_dim": 24}
# Each of 2 ranks has whole blocks of inputs.
WHOLE = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 64}
DOWN = "model.layers.1.mlp.down_proj"
Change = Callable[[dict[str, torch.Tensor]], object]


@each_row(*[(name, layout) for name in ("Qwen3ForCausalLM", "LlamaForCausalLM") for layout in LAYOUTS])
def test_logits_are_those_of_transformers_with_the_restored_weights(name: str, layout: str, *, tmp_path: Path) -> None:
    plain, target = tmp_path / name, tmp_path / f"{name}, {layout}"
    reference = save_tiny_architecture(plain, name, SIZES)
    restored = write_fp8(plain, target, layout)
    reference.load_state_dict(restored, strict=False)

    model, backend = load_architecture(target)
    comparison = compare_with_transformers(model, backend, reference)

    assert isinstance(model, Decoder)
    assert comparison.logit_difference < 1e-5
    assert comparison.greedy_distance < TIE


@each_row(*LANES)
def test_every_code_is_held_exactly_and_multiplied_by_the_scale_of_its_block(lanes: str) -> None:
    num_outputs, num_inputs, num_blocks = 101, 301, 3
    random = np.random.default_rng(3)
    codes = random.permutation(np.arange(num_outputs * num_blocks * 128) % 254).astype(np.uint8)
    codes += (codes > 126).astype(np.uint8)  # 0x7f and 0xff are NaN
    codes = codes.reshape(num_outputs, num_blocks, 128)
    scales = np.exp2(random.uniform(-20, 4, (num_outputs, num_blocks, 1))).astype(np.float32)
    blocks = np.concatenate([scales.view(np.uint8), codes], -1).reshape(num_outputs, num_blocks * BLOCK_BYTES)
    weight = torch.from_numpy((VALUES[codes] * scales).reshape(num_outputs, -1)[:, :num_inputs])
    matrix = packed_matrix(lanes, num_inputs, [1, num_outputs - 1], NumberFormat.FP8)

    for part, rows in zip(matrix.weights, (blocks[:1], blocks[1:]), strict=True):
        assert part.copy_blocks(torch.from_numpy(rows), FP8_BLOCK, None)

    assert torch.equal(matrix.rows(torch.arange(num_outputs)), weight)
    assert torch.equal(matrix(torch.eye(num_inputs)).T, weight)
    assert np.array_equal(restore_fp8(blocks)[:, :num_inputs], weight.numpy())
    x = torch.from_numpy(random.standard_normal((9, num_inputs)).astype(np.float32))
    expected = x.double() @ weight.double().T
    assert float((matrix(x) - expected).abs().max() / expected.abs().max()) < 1e-6
    assert matrix.num_bytes < 1.1 * 144 * (num_inputs + 4 * num_blocks)  # a byte a weight


@each_row("blocks", "channels")
def test_ranks_give_the_tokens_of_one_process(layout: str, *, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_architecture(tmp_path / "plain", "Qwen3ForCausalLM", WHOLE)
    target = tmp_path / layout
    write_fp8(tmp_path / "plain", target, layout)
    config = ExecutorConfig.model_validate({"model": str(target), "block_size_tokens": 4, "num_device_blocks": 100})
    monkeypatch.setattr("executor_svc.worker.assembly.Sampler", RecordingSampler)
    prompts = [[5, 9, 23, 42, 7, 11, 80, 3], [70, 6]]
    expected = StepDriver(load_worker(config)).generate(prompts, num_new_tokens=8, chunk_size=5)

    with ExitStack() as stack:
        ranks = ThreadedRanks(config, 2)
        stack.callback(ranks.close)
        assert StepDriver(ranks).generate(prompts, num_new_tokens=8, chunk_size=5) == expected


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fp8")
    save_tiny_architecture(directory / "plain", "Qwen3ForCausalLM", {**SIZES, "intermediate_size": 256})
    write_fp8(directory / "plain", directory / "blocks")
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


OF_DOWN = f"model.safetensors: the tensor {DOWN}.weight "
SCALE = f"{DOWN}.weight_scale_inv"


@each_row(
    (lambda tensors: tensors.pop(SCALE), f"{OF_DOWN}is F8_E4M3, but its scale {SCALE} is missing"),
    (
        lambda tensors: tensors.update({SCALE: tensors[SCALE][:1]}),
        f"{OF_DOWN}has a scale {SCALE} with shape [1, 2]; it must be [2, 2]",
    ),
    (
        lambda tensors: tensors.update({SCALE: tensors[SCALE].to(torch.int32)}),
        f"{OF_DOWN}has a scale {SCALE} in int32; it must be in float32, bfloat16 or float16",
    ),
    (put(SCALE, (1, 1), float("nan")), f"{OF_DOWN}has nan in its scale {SCALE}; weights must be finite"),
    (put(SCALE, (0, 1), float("-inf")), f"{OF_DOWN}has -inf in its scale {SCALE}; weights must be finite"),
    (
        put(f"{DOWN}.weight", (159, 255), 0x7F),
        f"{OF_DOWN}has the code 0x7f or 0xff, which is NaN; weights must be finite",
    ),
    (put(f"{DOWN}.weight", (0, 0), 0xFF), f"{OF_DOWN}has the code 0x7f or 0xff, which is NaN; weights must be finite"),
    (
        lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].to(torch.float8_e4m3fn)}),
        "model.safetensors: the tensor model.norm.weight is F8_E4M3 with shape [160]; only a matrix may be",
    ),
    (
        lambda tensors: tensors.update({f"{DOWN}.other": torch.ones(1)}),
        f"model.safetensors contains the tensor {DOWN}.other, which the model does not have",
    ),
)
def test_a_damaged_checkpoint_is_refused_with_file_and_tensor(
    change: Change, sentence: str, *, checkpoint: Path, tmp_path: Path
) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = {name: tensor.clone() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    assert refused(tmp_path) == sentence


ACCEPTED = "; FP8 is read with E4M3 codes and a scale for each tensor, channel or block of [128, 128]"


@each_row(
    ({**BLOCK, "weight_block_size": [64, 128]}, f" weight_block_size [64, 128]{ACCEPTED}"),
    ({**BLOCK, "fmt": "e5m2"}, f" fmt 'e5m2'{ACCEPTED}"),
    (compressed("group"), f" config_groups group_0 strategy 'group'{ACCEPTED}"),
    (compressed("channel", num_bits=4), f" config_groups group_0 num_bits 4{ACCEPTED}"),
    (compressed("channel", type="int"), f" config_groups group_0 type 'int'{ACCEPTED}"),
    (compressed("block", block_structure=[128, 64]), f" config_groups group_0 block_structure [128, 64]{ACCEPTED}"),
    ({**compressed("channel"), "config_groups": {}}, f" config_groups {{}}{ACCEPTED}"),
    ({**compressed("channel"), "config_groups": {"g": 1}}, f" config_groups g weights None{ACCEPTED}"),
    (
        {**compressed("channel"), "format": "pack-quantized"},
        "MODEL are quantized with compressed-tensors (pack-quantized), ",
    ),
    ({**BLOCK, "quant_method": "fbgemm_fp8"}, "MODEL are quantized with fbgemm_fp8, which Octavo does not read; "),
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


def test_ranks_that_would_cut_a_block_are_refused(tmp_path: Path) -> None:
    save_tiny_architecture(tmp_path / "plain", "LlamaForCausalLM", {**WHOLE, "intermediate_size": 320})
    write_fp8(tmp_path / "plain", tmp_path / "blocks")
    config = ExecutorConfig.model_validate({"model": str(tmp_path / "blocks"), "num_device_blocks": 8})

    with pytest.raises(ModelLoadError, match=r"down_proj.weight cannot .* inputs \d+ to \d+, and blocks have 128"):
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


def test_a_gpu_refuses_it_and_names_what_works(checkpoint: Path) -> None:
    config = ExecutorConfig.model_validate({"model": str(checkpoint), "dtype": "float32", "allow_requantization": True})
    with pytest.raises(ModelLoadError, match=r"a CPU, but device is cuda; use the unquantized checkpoint$"):
        choose_model(ModelDirectory(checkpoint), config, torch.device("cuda"))


def test_it_is_rounded_where_that_is_allowed_and_the_error_is_told(
    checkpoint: Path, recorder: RecordingSampler, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = logits_of(checkpoint, recorder)
    assert "weights in float32, fp8\n" in capsys.readouterr().out

    rounded = logits_of(checkpoint, recorder, cpu_kernels="torch", allow_requantization=True)

    told = re.search(r"weights in F8_E4M3 were rounded to int8-a8: .* error is ([\d.]+)%", capsys.readouterr().out)
    assert told is not None
    assert 0 < float(told[1]) < 1
    assert 0 < float((rounded - exact).norm() / exact.norm()) < 5e-2


def test_a_weight_takes_what_its_codes_and_scales_take(checkpoint: Path) -> None:
    summary = summarize_model(checkpoint)

    tensors = load_file(checkpoint / "model.safetensors")
    codes = sum(tensor.numel() for tensor in tensors.values() if tensor.dtype == torch.float8_e4m3fn)
    others = sum(tensor.numel() for tensor in tensors.values()) - codes
    assert summary.formats[0] == "F8_E4M3"
    assert summary.held_bytes == int(codes * 8.25 / 8 + others * 4)
