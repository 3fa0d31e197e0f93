"""A checkpoint in codes on a GPU is the model of the numbers that its codes and scales are."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from executor_svc.attention.torch_backend import TorchAttentionBackend
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.models.coded_linear import CodedLinear, RestoredPart
from executor_svc.models.decoder import Decoder
from executor_svc.models.dense import MatrixRole, MatrixStack
from executor_svc.models.families import parse_config
from executor_svc.models.file_formats import ScaledFormats
from executor_svc.models.triton_dense import TritonDense
from executor_svc.native.structs import NumberFormat
from tests.kernels.device import DEVICE, SLOW_IF_INTERPRETED
from tests.numerics.architectures import PagedRun, save_tiny_architecture
from tests.numerics.scaled_codes import write_codes
from tests.support.each_row import each_row

DENSE, EXPERTS = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
# Inputs are no whole groups, and q, k and v are joined within a tile.
SIZES = {DENSE: {"hidden_size": 160, "intermediate_size": 400, "head_dim": 24}, EXPERTS: {"moe_intermediate_size": 48}}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="compares with what a CPU computes")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (DENSE, "blocks"),
        (DENSE, "gptq"),
        (EXPERTS, "nvfp4"),
        *(
            pytest.param(DENSE, layout, marks=SLOW_IF_INTERPRETED)
            for layout in ("w8a16", "w4a16, zeros", "awq", "nvfp4")
        ),
        pytest.param(EXPERTS, "awq", marks=SLOW_IF_INTERPRETED),
    ],
)
def test_logits_are_those_of_transformers_with_the_restored_weights(name: str, layout: str, tmp_path: Path) -> None:
    plain, target = tmp_path / "plain", tmp_path / "codes"
    reference = save_tiny_architecture(plain, name, SIZES[name])
    restored = write_codes(plain, target, layout)
    save_file(dict(restored), plain / "model.safetensors", metadata={"format": "pt"})
    reference = type(reference).from_pretrained(plain)
    checkpoint = Checkpoint(target)
    stored = ScaledFormats(checkpoint, is_held=True)
    config = parse_config(json.loads((target / "config.json").read_text()), target / "config.json")
    dense = TritonDense(torch.float32, DEVICE, is_invariant=True)
    model = Decoder(config, dense, stored=stored)
    model.load(checkpoint)

    prompt = list(range(3, 23))

    logits = PagedRun(model, TorchAttentionBackend()).prompt_logits(prompt, chunk_size=17)

    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-5


@each_row(
    ("layer", (NumberFormat.FP8, NumberFormat.FP8), False, True),
    ("qkv", (NumberFormat.INT4_G128, NumberFormat.INT4_G128), False, True),
    ("layer", (NumberFormat.FP8, NumberFormat.BFLOAT16), False, False),
    ("layer", (NumberFormat.NVFP4, NumberFormat.NVFP4), True, False),
    ("vocabulary", (NumberFormat.FP8, NumberFormat.FP8), False, False),
)
def test_which_codes_stay_codes(
    role: MatrixRole, stored: tuple[NumberFormat, NumberFormat], is_expert: bool, is_coded: bool
) -> None:
    dense = TritonDense(torch.bfloat16, DEVICE)
    matrix = dense.matrix(128, [8, 8], role=role, stored=stored, stack=MatrixStack(4) if is_expert else None)

    assert isinstance(matrix, CodedLinear) == is_coded
    assert isinstance(matrix.weights[0], RestoredPart) != is_coded
