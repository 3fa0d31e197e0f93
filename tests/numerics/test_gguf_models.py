"""A model in a GGUF file is the model: its logits are those of the same weights in safetensors, bit for bit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as FileType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file

from executor_svc.config import ExecutorConfig
from executor_svc.worker.loading import load_worker
from octavo_shared.step_wire.step import TableDelta
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.driver import RecordingSampler, StepDriver
from tests.numerics.reference import random_prompt
from tests.support.gguf_files import of_type, write_gguf_of

FACTORS = np.linspace(1, 4, 4, dtype=np.float32)

# Rows of blocks are multiples of 32.
SIZES = {"intermediate_size": 64}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": {"sliding_window": 9, "query_pre_attn_scalar": 8, "head_dim": 8},
    "Gemma3ForCausalLM": {"sliding_window": 9, "query_pre_attn_scalar": 8, "head_dim": 8, "num_hidden_layers": 7},
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 9},
    "MixtralForCausalLM": {},
    "Phi3ForCausalLM": {"sliding_window": 11},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {"norm_topk_prob": True, "moe_intermediate_size": 32},
}


def save(directory: Path, name: str, settings: Mapping[str, Any], kind: FileType) -> Path:
    """Save a model whose matrices are those that a type has."""
    save_tiny_architecture(directory, name, {**SIZES, **settings})
    path = directory / "model.safetensors"
    keep = of_type(FileType.F32)(name, np.zeros(1))
    weights = {
        each: values
        if values.ndim == 1 or each.endswith("gate.weight") or kind == keep
        else dequantize(quantize(values, kind), kind)
        for each, values in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    return directory


def logits_of(model: Path, recorder: RecordingSampler, **settings: object) -> torch.Tensor:
    """Return those of a prompt, and of a token more."""
    config = ExecutorConfig.model_validate({"model": str(model), "num_device_blocks": 64, **settings})
    driver = StepDriver(load_worker(config))
    driver.prefill([random_prompt(30)], num_new_tokens=2)
    logits = [recorder.logits]
    driver.execute(TableDelta())
    return torch.cat([*logits, recorder.logits])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_the_bits_of_safetensors(name: str, tmp_path: Path, recorder: RecordingSampler) -> None:
    for kind, settings in ((FileType.F32, {}), (FileType.Q8_0, {"quantization": "int8-a8"})):
        directory = save(tmp_path / kind.name, name, FAMILIES[name], kind)
        file = write_gguf_of(directory, tmp_path / f"{kind.name}.gguf", of_type(kind))

        assert torch.equal(logits_of(file, recorder), logits_of(directory, recorder, **settings)), kind.name
