"""int8 by torchao, as a GPU computes it, is near the exact model; here on a CPU."""

import sys
from pathlib import Path

import pytest
import torch

from executor_svc.attention.torch_backend import TorchAttentionBackend
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.models.decoder import Decoder
from executor_svc.models.families import parse_config
from executor_svc.models.torch_dense import Linear, TorchaoLinear, TorchDense
from executor_svc.native.structs import NumberFormat
from octavo_shared.errors import ModelLoadError
from tests.numerics.architectures import PagedRun, save_tiny_architecture

PROMPT = list(range(3, 48))
CPU = torch.device("cpu")


class TorchaoDense(TorchDense):
    """As on a CUDA device."""

    def __init__(self) -> None:
        super().__init__(torch.float32, CPU, number_format=NumberFormat.INT8)
        self._uses_torchao = True


def test_parts_and_biases_are_those_of_a_plain_map() -> None:
    plain_map = Linear(64, [24, 8, 8], has_bias=True, dtype=torch.float32, device=CPU)
    quantized_map = TorchaoLinear(64, [24, 8, 8], has_bias=True, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(1)
    for index, size in enumerate((24, 8, 8)):
        weight, bias = torch.randn(size, 64, generator=generator), torch.randn(size, generator=generator)
        for each in (plain_map, quantized_map):
            each.weights[index].copy_(weight)
            each.biases[index].copy_(bias)
    x = torch.randn(5, 64, generator=generator)

    plain, quantized = plain_map(x), quantized_map(x)

    assert quantized.shape == plain.shape
    error = float((plain - quantized).norm() / plain.norm())
    assert 0 < error < 0.01


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MixtralForCausalLM", "BloomForCausalLM"])
def test_logits_are_near_those_of_the_exact_model(name: str, tmp_path: Path) -> None:
    reference = save_tiny_architecture(tmp_path, name, {})
    model = Decoder(parse_config(ModelDirectory(tmp_path).config(), tmp_path / "config.json"), TorchaoDense())
    model.load(Checkpoint(tmp_path))

    with torch.inference_mode():
        logits = PagedRun(model, TorchAttentionBackend()).prompt_logits(PROMPT, chunk_size=16)
        expected = reference(input_ids=torch.tensor([PROMPT])).logits[0]

    error = float((logits - expected).norm() / expected.norm())
    assert 1e-4 < error < 0.1


def test_without_torchao_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    monkeypatch.setitem(sys.modules, "torchao", None)

    with pytest.raises(ModelLoadError, match="requires torchao; install"):
        TorchaoDense().matrix(8, [8])
