"""The small models of the probe: together they have everything that a model of a family can have.

Sizes are odd on purpose: no multiple of a panel, a lane or a group of int8, so that every tail of a kernel is run.
Weights are counted, not drawn by a library, and each is a float32 to the last bit: no release of anything changes them.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from executor_svc.attention.interface import AttentionLayer
from executor_svc.checkpoint.weight_map import TensorTarget
from executor_svc.models.config import (
    ExpertsConfig,
    LayerConfig,
    LinearScaling,
    Llama3Scaling,
    MlpConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
    WeightNames,
)
from executor_svc.sampler.sample_rows import mix

MAX_POSITION_EMBEDDINGS = 1024

_PLAIN = RopeConfig(10_000.0)
_LLAMA3 = RopeConfig(500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 128))
_LINEAR = RopeConfig(10_000.0, LinearScaling(4.0))

# Names of tensors that only some models have.
_NAMES = WeightNames(
    embedding_norm="model.embedding_norm",
    position_embedding="model.positions",
    attention_output_norm="model.layers.{layer}.attention_output_norm",
    router="model.layers.{layer}.router",
    mlp_output_norm="model.layers.{layer}.mlp_output_norm",
)
_OF_EXPERTS = ("model.layers.{layer}.{expert}.gate", "model.layers.{layer}.{expert}.up")


def probe_models() -> Mapping[str, ModelConfig]:
    """Return the models by name."""
    plain = _model(heads=(4, 2), head_dim=12, layers=(_layer(12, _PLAIN), _layer(12, _PLAIN)))
    qkv, gate_up = ("model.layers.{layer}.qkv",), ("model.layers.{layer}.gate_up",)
    merged = replace(_NAMES, qkv=qkv, qkv_layout="merged", gate_up=gate_up)
    interleaved = replace(_NAMES, qkv=qkv, qkv_layout="interleaved")
    layer_norm = NormConfig(1e-5, is_layer_norm=True, has_bias=True)
    slopes = (0.5, 0.25, 0.125)
    return {
        "grouped_heads": plain,
        "one_kv_head": replace(
            _model(heads=(5, 1), head_dim=64, layers=(_layer(64, _LLAMA3),)), qkv_bias=True, tie_word_embeddings=True
        ),
        "wide_heads_window": _model(heads=(2, 2), head_dim=80, layers=(_layer(80, _LINEAR, window_tokens=33),)),
        "widest_heads": _model(heads=(1, 1), head_dim=128, layers=(_layer(128, _PLAIN),)),
        "caps_and_more_norms": replace(
            _model(
                heads=(4, 2),
                head_dim=20,
                layers=(_layer(20, _PLAIN, window_tokens=19, soft_cap=5.0), _layer(20, _LINEAR, soft_cap=5.0)),
            ),
            names=merged,
            norm=NormConfig(1e-6, weight_offset=1.0),
            mlp=MlpConfig(51, "gelu_tanh"),
            has_query_key_norm=True,
            has_output_norms=True,
            embedding_scale=6.25,
            logit_soft_cap=3.0,
        ),
        "alibi": replace(
            _model(heads=(3, 3), head_dim=16, layers=(_layer(16, None, alibi_slopes=slopes),)),
            names=interleaved,
            norm=layer_norm,
            mlp=MlpConfig(51, "gelu_tanh", is_gated=False, has_bias=True),
            qkv_bias=True,
            attention_output_bias=True,
            has_embedding_norm=True,
        ),
        "learned_positions": replace(
            _model(heads=(3, 3), head_dim=16, layers=(_layer(16, None),)),
            norm=layer_norm,
            mlp=MlpConfig(51, "relu", is_gated=False, has_bias=True),
            position_offset=2,
        ),
        "exact_gelu": replace(plain, norm=NormConfig(1e-5, is_layer_norm=True), mlp=MlpConfig(51, "gelu")),
        "experts": replace(
            plain,
            names=replace(_NAMES, gate_up=_OF_EXPERTS, down="model.layers.{layer}.{expert}.down"),
            experts=ExpertsConfig(num_experts=5, num_chosen=2, is_normalized=True),
        ),
        "experts_as_they_are": replace(
            plain,
            names=replace(_NAMES, gate_up=_OF_EXPERTS, down="model.layers.{layer}.{expert}.down"),
            experts=ExpertsConfig(num_experts=5, num_chosen=3, is_normalized=False),
        ),
    }


def _model(heads: tuple[int, int], head_dim: int, layers: tuple[LayerConfig, ...]) -> ModelConfig:
    return ModelConfig(
        source=Path("the probe"),
        architecture="probe",
        vocab_size=331,
        hidden_size=45,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        layers=layers,
        norm=NormConfig(1e-5),
        mlp=MlpConfig(51),
        names=_NAMES,
    )


def _layer(
    head_dim: int,
    rope: RopeConfig | None,
    window_tokens: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: tuple[float, ...] | None = None,
) -> LayerConfig:
    return LayerConfig(AttentionLayer(head_dim**-0.5, window_tokens, soft_cap, alibi_slopes), rope)


class CountedWeights:
    """Takes the place of a checkpoint: each tensor is made of its name and its shape."""

    def load_into(
        self, targets: Mapping[str, TensorTarget], is_redundant: Callable[[str], bool], optional_prefix: str = ""
    ) -> None:
        """Fill the targets; see `Checkpoint.load_into`."""
        for name, target in targets.items():
            target.fill(torch.from_numpy(counted_values(name, target.shape)))


def counted_values(name: str, shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return values of a name, spread evenly around 0, or around 1 for norms; sums over rows stay near 1."""
    seed = np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
    bits = mix(np.arange(np.prod(shape), dtype=np.uint64) ^ seed) >> np.uint64(44)
    values = bits.astype(np.float32) * np.float32(2.0**-19) - np.float32(1.0)  # [-1, 1), 20 bits each
    if len(shape) == 1:
        values = values * np.float32(0.25) + np.float32("norm" in name)
    else:
        values *= np.float32(4.0 * 2.0 ** -(shape[1].bit_length() // 2))
    return values.reshape(shape)
