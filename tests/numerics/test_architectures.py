"""Every architecture equals plain transformers on the paged cache, with code of our own or without."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.attention.interface import CachedLayer
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.config import ExecutorConfig
from executor_svc.models.decoder import Decoder
from executor_svc.models.families import FAMILIES
from executor_svc.models.selection import read_model_config
from executor_svc.models.transformers_model import TransformersModel, load_transformers_model
from octavo_shared.errors import ModelLoadError
from tests.numerics.architectures import (
    ALL_WINDOWS,
    ARCHITECTURES,
    DYNAMIC_ROPE,
    LINEAR_ROPE,
    ONE_WINDOW,
    PARTIAL_ROPE,
    VOCAB_SIZE,
    YARN,
    compare_with_transformers,
    load_architecture,
    save_tiny_architecture,
)
from tests.numerics.family_architectures import DELTA_NETS, MAMBA2, SHORT_CONVS, WITH_STATES
from tests.numerics.ties import TIE


def load(directory: Path, dtype: torch.dtype = torch.float32) -> TransformersModel:
    return load_transformers_model(directory, dtype, torch.device("cpu"))


# Of those without code of our own: learned positions, windows, scaled residuals, experts, soft caps, and a class
# without `_supports_attention_backend`.
SAMPLE = (
    "BioGptForCausalLM",
    "Cohere2ForCausalLM",
    "GPT2LMHeadModel",
    "GraniteMoeForCausalLM",
    "Olmo3ForCausalLM",
    "VaultGemmaForCausalLM",
)


def slow_unless(is_quick: bool, value: str) -> Any:
    return value if is_quick else pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [slow_unless(n in SAMPLE or n in FAMILIES, n) for n in ARCHITECTURES])
def test_logits_and_greedy_tokens_equal_plain_transformers(name: str, tmp_path: Path) -> None:
    reference = save_tiny_architecture(tmp_path, name, ARCHITECTURES[name])
    model, backend = load_architecture(tmp_path)

    comparison = compare_with_transformers(model, backend, reference)

    assert isinstance(model, Decoder) == (name in FAMILIES)
    # transformers computes a delta net in blocks of tokens, which rounds otherwise. Vectors of AVX-512 round otherwise
    # than those of AVX2: Gemma 4 differs by 1.1e-5 there.
    assert comparison.logit_difference < (1e-4 if name in WITH_STATES else 2e-5)
    assert comparison.greedy_distance < TIE


def test_the_shape_of_a_model_is_what_its_layers_were_seen_to_do(tmp_path: Path) -> None:
    save_tiny_architecture(tmp_path, "Olmo3ForCausalLM", ALL_WINDOWS)

    model = load(tmp_path)

    shape = model.shape
    assert (shape.caches, shape.vocab_size) == ((CachedLayer(2, 8, window=9),) * 2, VOCAB_SIZE)
    assert (shape.max_position_embeddings, shape.sliding_window_tokens) == (128, 9)
    assert (model.dtype, model.device.type) == (torch.float32, "cpu")


def test_a_layer_without_a_window_keeps_all_blocks(tmp_path: Path) -> None:
    save_tiny_architecture(tmp_path, "Olmo3ForCausalLM", ONE_WINDOW)

    assert load(tmp_path).shape.sliding_window_tokens == 0


# Of config.json, as published, and as transformers saves it.
FURTHER = ("num_nextn_predict_layers", "num_mtp_layers")


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """As published checkpoints of GLM-4.5 have them, behind the last layer; without a word of them they are refused."""
    reference = save_tiny_architecture(tmp_path, "Glm4MoeForCausalLM", ARCHITECTURES["Glm4MoeForCausalLM"])
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    save_file(load_file(weights) | {"model.layers.2.eh_proj.weight": torch.zeros(32, 64)}, weights)
    values = {name: value for name, value in json.loads(config.read_text()).items() if name not in FURTHER}
    config.write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match=r"model\.layers\.2\.eh_proj\.weight"):
        load_architecture(tmp_path)

    config.write_text(json.dumps(values | {FURTHER[0]: 1}))

    assert compare_with_transformers(*load_architecture(tmp_path), reference).logit_difference < 1e-5


def test_two_models_do_not_share_a_step(tmp_path: Path) -> None:
    """The second one is loaded, and runs, between the loading and the run of the first."""
    references = [
        save_tiny_architecture(tmp_path / name, name, ARCHITECTURES[name])
        for name in ("OlmoForCausalLM", "GraniteMoeForCausalLM")
    ]
    loaded = [load_architecture(tmp_path / type(reference).__name__) for reference in references]

    for (model, backend), reference in reversed(list(zip(loaded, references, strict=True))):
        assert compare_with_transformers(model, backend, reference).logit_difference < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_loaded_in_the_number_format_that_is_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    save_tiny_architecture(tmp_path, "OlmoeForCausalLM", {})

    model = load(tmp_path, dtype)

    assert model.dtype == dtype
    with torch.inference_mode():
        assert model.logits(torch.ones(3, 32, dtype=dtype)).dtype == torch.float32


def test_weights_are_in_memory_of_their_own(tmp_path: Path) -> None:
    save_tiny_architecture(tmp_path, "OlmoForCausalLM", {})
    model = load(tmp_path)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    before = model.logits(hidden)

    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))

    assert torch.equal(model.logits(hidden), before)


def test_loading_is_reported_in_one_line_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    reference = save_tiny_architecture(tmp_path, "OlmoForCausalLM", {})
    capfd.readouterr()

    with caplog.at_level(logging.INFO):
        load(tmp_path)

    num_bytes = 4 * reference.num_parameters()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"event=weights_loaded directory={tmp_path} bytes={num_bytes} duration_s=")
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Qwen3ForCausalLM", {"rope_parameters": PARTIAL_ROPE}),  # it rotates whole heads nevertheless
        ("LlamaForCausalLM", {"hidden_act": "mish"}),
    ],
)
def test_settings_that_our_own_code_does_not_have_run_through_transformers(
    name: str, settings: dict[str, object], tmp_path: Path
) -> None:
    reference = save_tiny_architecture(tmp_path, name, settings)
    model, backend = load_architecture(tmp_path)

    assert isinstance(model, TransformersModel)
    assert compare_with_transformers(model, backend, reference).logit_difference < 1e-5


# Of 6 in 8 dimensions, for sequences up to 64 tokens.
LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
LONGROPE |= {"short_factor": [1.0, 1.5, 2], "long_factor": [4.0, 8.0, 16.0]}
# Gemma 3 in which only layers without a window are stretched.
TWO_ROPES = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 7}

# Of families with code of our own, beside what `FAMILY_ARCHITECTURES` has of each.
FAMILY_SETTINGS: dict[str, tuple[str, dict[str, object]]] = {
    "Mamba-2 in groups with biases, without experts": (
        "GraniteMoeHybridForCausalLM",
        {**MAMBA2, "mamba_n_groups": 2, "mamba_proj_bias": True, "mamba_conv_bias": False, "num_local_experts": 0}
        | {"attention_bias": True, "position_embedding_type": "rope"},
    ),
    "no Mamba-2 layer": ("GraniteMoeHybridForCausalLM", {**MAMBA2, "layer_types": ["attention"] * 3}),
    "linear rotary scaling": ("LlamaForCausalLM", {"rope_parameters": LINEAR_ROPE}),
    "dynamic rotary scaling": ("LlamaForCausalLM", {"rope_parameters": {**DYNAMIC_ROPE, "factor": 0.7}}),
    "yarn": ("Qwen3ForCausalLM", {"rope_parameters": {**YARN, "rope_theta": 100.0}}),
    "yarn with an attention factor": ("Qwen2ForCausalLM", {"rope_parameters": {**YARN, "attention_factor": 1.7}}),
    "yarn with all else": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                **YARN,
                "beta_fast": 3,
                "beta_slow": 0.4,
                "mscale": 2.0,
                "mscale_all_dim": 0.7,
                "truncate": False,
            }
        },
    ),
    "yarn between the same pairs": (
        "MistralForCausalLM",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 4}},
    ),
    "yarn beside a window": (
        "Gemma3ForCausalLM",
        {"rope_parameters": TWO_ROPES, "num_hidden_layers": 7, "sliding_window": 9},
    ),
    "part of the head": ("Phi3ForCausalLM", {"rope_parameters": PARTIAL_ROPE}),
    "longrope of part of the head": (
        "Phi3ForCausalLM",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64, "sliding_window": 11},
    ),
    "a window in all layers": ("Qwen2ForCausalLM", {**QWEN_WINDOW, "max_window_layers": 0}),
    "a window in no layer": ("Qwen2ForCausalLM", {**QWEN_WINDOW, "max_window_layers": 2}),
    "Mistral without a window": ("MistralForCausalLM", {"sliding_window": None}),
    "experts in some layers": (
        "Qwen3MoeForCausalLM",
        {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "every second layer attends, with biases": (
        "Qwen3_5ForCausalLM",
        {**DELTA_NETS, "layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
        | {"attention_bias": True, "linear_conv_kernel_dim": 2, "rope_parameters": PARTIAL_ROPE},
    ),
    "experts beside states, weighed as they are": (
        "Qwen3NextForCausalLM",
        {**DELTA_NETS, "decoder_sparse_step": 2, "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "four taps with biases, other sizes": (
        "Lfm2ForCausalLM",
        {**SHORT_CONVS, "conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False}
        | {"block_multiple_of": 12, "block_ffn_dim_multiplier": 1.3},
    ),
    "all layers attend, sizes as they are": ("Lfm2ForCausalLM", {"block_auto_adjust_ff_dim": False}),
    "a window beside experts": ("Qwen3MoeForCausalLM", {**QWEN_WINDOW, "norm_topk_prob": True}),
}


@pytest.mark.parametrize("case", FAMILY_SETTINGS)
def test_settings_that_our_own_code_has_equal_plain_transformers(case: str, tmp_path: Path) -> None:
    name, settings = FAMILY_SETTINGS[case]
    reference = save_tiny_architecture(tmp_path, name, settings)
    for kernels in ("native", "torch"):
        model, backend = load_architecture(tmp_path, cpu_kernels=kernels, max_model_len=64)

        assert isinstance(model, Decoder)
        assert compare_with_transformers(model, backend, reference).logit_difference < (
            1e-4 if name in WITH_STATES else 1e-5
        )


def test_longrope_is_refused_for_lengths_at_which_all_tokens_would_change(tmp_path: Path) -> None:
    save_tiny_architecture(
        tmp_path, "Phi3ForCausalLM", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}
    )
    for settings in ({}, {"max_model_len": 65}):
        with pytest.raises(ModelLoadError, match=r"longer than 64 tokens; set max_model_len to 64 or less$"):
            load_architecture(tmp_path, **settings)


@pytest.mark.parametrize(("settings", "setting"), [({"tp": 2}, "tp is 2"), ({"quantization": "int8"}, "quantization")])
def test_what_needs_our_own_code_is_refused_without_it(
    settings: dict[str, object], setting: str, tmp_path: Path
) -> None:
    save_tiny_architecture(tmp_path, "OlmoForCausalLM", {})
    config = ExecutorConfig.model_validate({"model": str(tmp_path), **settings})

    with pytest.raises(ModelLoadError, match=f"{setting}.*needs Octavo's own decoder; but .*OlmoForCausalLM"):
        read_model_config(ModelDirectory(tmp_path), config)
