"""Hybrids in GGUF files: their value heads in the order of llama.cpp, and layers for drafts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as FileType

from executor_svc.config import ExecutorConfig
from executor_svc.worker.loading import load_worker
from octavo_shared.errors import ModelLoadError
from tests.numerics.driver import RecordingSampler
from tests.numerics.gguf_models import FAMILIES, save
from tests.numerics.reference import assert_close, logits_of
from tests.support.each_row import each_row
from tests.support.gguf_files import of_type, write_gguf_of


@each_row("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
def test_value_heads_in_the_order_of_llama_cpp_are_served_by_their_key_heads(
    name: str, *, tmp_path: Path, recorder: RecordingSampler
) -> None:
    """The sum over heads has another order, so not the same bits. Layers behind the model's are for drafts."""
    settings = {**FAMILIES[name], "linear_num_value_heads": 8}
    directory = save(tmp_path / "model", name, settings, FileType.F32)
    architecture = {"Qwen3_5ForCausalLM": "qwen35", "Qwen3_5MoeForCausalLM": "qwen35moe"}[name]
    file = write_gguf_of(
        directory,
        tmp_path / "m.gguf",
        of_type(FileType.F32),
        changes={f"{architecture}.block_count": 4, f"{architecture}.nextn_predict_layers": 1},
        more_tensors={"blk.3.nextn.eh_proj.weight": np.zeros((32, 64), np.float32)},
    )

    assert_close(logits_of(file, recorder), logits_of(directory, recorder))
    with pytest.raises(ModelLoadError, match=r"a delta net in the order of llama.cpp, which is not divisible among"):
        load_worker(ExecutorConfig.model_validate({"model": str(file), "tp": 2}))


def test_nemotron_h_without_experts_has_the_bits_of_safetensors(tmp_path: Path, recorder: RecordingSampler) -> None:
    kinds = ["linear_attention", "mlp", "mlp", "full_attention", "linear_attention", "mlp"]
    settings = {**FAMILIES[NEMOTRON], "layers_block_type": kinds}
    directory = save(tmp_path / "model", NEMOTRON, settings, FileType.F32)
    file = write_gguf_of(directory, tmp_path / "m.gguf", of_type(FileType.F32))

    assert torch.equal(logits_of(file, recorder), logits_of(directory, recorder))


QWEN, LFM2, LFM2_MOE = "Qwen3_5ForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM"
GRANITE, NEMOTRON = "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM"


@each_row(
    (QWEN, {"qwen35.rope.dimension_sections": [1, 1, 1, 1]}, {}, "it must be three sections"),
    (QWEN, {"qwen35.attention.recurrent_layers": [1, 0, 1]}, {}, "it must be a list of true and false"),
    (
        QWEN,
        {},
        {"blk.0.ssm_a": np.zeros(4, np.float32)},
        "m.gguf: the tensor blk.0.ssm_a has a value that is not below",
    ),
    (QWEN, {}, {"blk.0.ssm_dt.bias": np.zeros(3, np.float32)}, r"ssm_dt.bias has the shape \[3\]; its "),
    (LFM2, {"lfm2.attention.head_count_kv": 2}, {}, "head_count_kv 2; it must be a list of whole numbers"),
    (LFM2, {"lfm2.attention.head_count_kv": [0, 1, 2]}, {}, "it must be a list of one number, with 0 for layers that"),
    (LFM2, {"lfm2.attention.head_count_kv": [0, 2]}, {}, "2 layer_types for 3 layers"),
    (LFM2, {}, {"blk.0.shortconv.conv.bias": np.zeros(64, np.float32)}, "conv.bias, which the model does not have"),
    (LFM2, {}, {"blk.0.shortconv.conv.weight": np.zeros((64, 4), np.float32)}, r"has the shape \[64, 4\]; its "),
    (LFM2_MOE, {"lfm2moe.expert_gating_func": 1}, {}, r"expert_gating_func 1; it must be 2 \(sigmoid\)"),
    (LFM2_MOE, {"lfm2moe.expert_weights_norm": False}, {}, "expert_weights_norm False, which is not supported"),
    (LFM2_MOE, {}, {"blk.1.exp_probs_b.bias": np.zeros(4, np.float32)}, r"exp_probs_b.bias has the shape \[4\]; its "),
    (GRANITE, {"granitehybrid.attention.head_count_kv": [0, 2]}, {}, "it must be 0 or the same number for each layer"),
    (GRANITE, {"granitehybrid.attention.head_count_kv": [0, 2, 4]}, {}, "it must be 0 or the same number for each"),
    (GRANITE, {"granitehybrid.attention.head_count_kv": 2}, {}, "it must be a list of whole numbers"),
    (
        NEMOTRON,
        {"nemotron_h_moe.attention.head_count_kv": [0, 4, 4, 0, 0]},
        {},
        "0 or one number for each layer, beside",
    ),
    (NEMOTRON, {"nemotron_h_moe.feed_forward_length": [0, 32, 0, 0]}, {}, "0 or one number for each layer, beside"),
    (NEMOTRON, {"nemotron_h_moe.moe_latent_size": 16}, {}, "moe_latent_size 16, which is not supported"),
    (GRANITE, {"granitehybrid.ssm.state_size": 12}, {}, r"ssm_in.weight has the shape \[180, 32\]; its metadata"),
)
def test_bad_input_is_refused_by_name(
    name: str, changes: dict[str, Any], tensors: dict[str, Any], message: str, *, tmp_path: Path
) -> None:
    directory = save(tmp_path / "model", name, FAMILIES[name], FileType.F32)
    file = write_gguf_of(directory, tmp_path / "m.gguf", of_type(FileType.F32), changes=changes, more_tensors=tensors)

    with pytest.raises(ModelLoadError, match=message):
        load_worker(ExecutorConfig.model_validate({"model": str(file), "num_device_blocks": 8}))


@each_row(
    (QWEN, {"linear_conv_kernel_dim": 32}, "blk.0.ssm_conv1d.weight"),
    (LFM2, {"conv_L_cache": 32}, "blk.0.shortconv.conv.weight"),
)
def test_a_quantized_convolution_is_refused(
    name: str, settings: dict[str, Any], tensor: str, *, tmp_path: Path
) -> None:
    directory = save(tmp_path / "model", name, {**FAMILIES[name], **settings}, FileType.F32)
    file = write_gguf_of(
        directory, tmp_path / "m.gguf", lambda each, _: FileType.Q8_0 if each == tensor else FileType.F32
    )

    with pytest.raises(ModelLoadError, match=f"the tensor {tensor} is Q8_0; a convolution must be F32, F16 or BF16"):
        load_worker(ExecutorConfig.model_validate({"model": str(file), "num_device_blocks": 8}))


def test_a_part_of_key_heads_that_lacks_a_row_is_refused(tmp_path: Path) -> None:
    directory = save(tmp_path / "model", "Qwen3NextForCausalLM", FAMILIES["Qwen3NextForCausalLM"], FileType.F32)
    short = {"blk.0.ssm_ba.weight": np.zeros((15, 32), np.float32)}
    file = write_gguf_of(directory, tmp_path / "m.gguf", of_type(FileType.F32), more_tensors=short)

    with pytest.raises(ModelLoadError, match=r"blk.0.ssm_ba.weight has 15 rows; its metadata require 16"):
        load_worker(ExecutorConfig.model_validate({"model": str(file), "num_device_blocks": 8}))
