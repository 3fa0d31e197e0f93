"""The probe: a fixed computation through all kernels, from token ids through all filters to ids and log-probabilities.

It finds what no list of versions does: another function of the C library's maths, a processor that rounds differently,
a change of code that was meant to change nothing. Some models of a few thousand weights compute prompts in
chunks and single tokens behind them; the sampler draws from rows of counted scores, by each filter alone and by all,
with penalties and rules, and lists candidates. All bits that come out are hashed. It takes about 0.05 s.

The models have together everything that a model of a family can have. Sizes are odd on purpose: no multiple of a panel,
a lane or a group of int8, so that every tail of a kernel is run. Weights are counted, not drawn by a library, and each
is a float32 to the last bit: no release of anything changes them.

Nothing of it depends on the weights of a model, on the number of threads, on the size of blocks or on what ran before.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType

from executor_svc.attention.interface import AttentionLayer, AttentionMetadata
from executor_svc.cache.cache_engine import CacheEngine, CacheShape
from executor_svc.checkpoint.gguf.rounding import block_size
from executor_svc.checkpoint.scaled_codes import E4M3, INT8, NVFP4, UINT4_G32, UINT4_G128
from executor_svc.checkpoint.weight_map import TensorTarget
from executor_svc.models.config import (
    DistanceBuckets,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    LinearScaling,
    Llama3Scaling,
    MlpConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
    WeightNames,
)
from executor_svc.models.kernels import ChosenModel
from executor_svc.models.state_config import DeltaNetConfig, Mamba2Config, ShortConvConfig
from executor_svc.native.binding import WeightMemory
from executor_svc.native.library import NativeLibrary
from executor_svc.native.matrix import PackedMatrix
from executor_svc.native.structs import NumberFormat
from executor_svc.sampler.interface import Alternatives
from executor_svc.sampler.sample_rows import SampleRows, mix
from executor_svc.sampler.sampler import Sampler
from executor_svc.states.interface import StateRows
from executor_svc.states.live_states import LiveStates, StepStates
from octavo_shared.step_wire.step import NO_LOGPROBS, SAMPLING_ROW, Int32Array, SamplingRow
from octavo_shared.step_wire.token_rules import TokenRules, pack_mask, pad_words

_BLOCK_SIZE = 16
MAX_POSITION_EMBEDDINGS = 1024
_NUM_BLOCKS = MAX_POSITION_EMBEDDINGS // _BLOCK_SIZE
# Tokens of two sequences in each step, (first, second): a prompt in chunks beside a short one that decodes. Long
# prompts pass two of the places where attention cuts the keys of a query.
_STEPS = ((61, 5), (50, 1), (1, 1))
_LONG_STEPS = ((101, 5), (700, 1), (1, 1))
_LONG = ("grouped_heads", "wide_heads_window", "alibi")
_NUM_WANTED = 9  # logits of the last tokens of a step; they attend to the others

_VOCAB_SIZE = 1_531
_NUM_DRAWS = 24  # of each way to sample
_SAMPLINGS = (
    SamplingRow(temperature=0.7),
    SamplingRow(temperature=1.3, top_k=40),
    SamplingRow(temperature=0.9, top_p=0.8),
    SamplingRow(temperature=1.0, min_p=0.05),
    SamplingRow(temperature=1.0, typical_p=0.6),
    # Two filters that give other tokens in another order.
    SamplingRow(temperature=1.0, top_k=60, top_p=0.7),
    SamplingRow(temperature=1.0, top_p=0.7, min_p=0.4),
    SamplingRow(temperature=1.0, min_p=0.2, typical_p=0.5),
    SamplingRow(temperature=1.1, top_k=300, top_p=0.7, min_p=0.01, typical_p=0.7),
    SamplingRow(repetition_penalty=1.3),
    SamplingRow(temperature=1.0, presence_penalty=0.4, frequency_penalty=0.3, min_tokens=9),
    SamplingRow(),
)
_HISTORY_TOKENS, _PROMPT_TOKENS = 23, 17


def probe_bits(
    make: Callable[[ModelConfig], ChosenModel],
    sampler: Sampler,
    cache_dtype: torch.dtype = torch.float32,
    models: Mapping[str, ModelConfig] | None = None,
) -> str:
    """Run the probe; return the SHA-256 of all bits that came out, 64 hexadecimal digits.

    Args:
        make: Makes a model as the served one is made. A model that is not invariant is left out: its bits mean nothing.
        sampler: Of the executor.
        cache_dtype: Format of the KV cache.
        models: By name; None: those of `probe_models`.
    """
    hasher = hashlib.sha256()
    with torch.inference_mode():
        for name, config in (probe_models() if models is None else models).items():
            made = make(config)
            if made.why_not_invariant is None:
                made.load(CountedWeights())
                hasher.update(name.encode())
                for logits in _run(made, config, _LONG_STEPS if name in _LONG else _STEPS, cache_dtype):
                    hasher.update(logits.numpy().tobytes())
                    _add(hasher, sampler.prompt_logprobs(logits, lambda rows: rows, *_of_each(logits)))
        _add(hasher, *_sample(sampler))
    return hasher.hexdigest()


def _run(
    made: ChosenModel, config: ModelConfig, steps: Sequence[tuple[int, int]], cache_dtype: torch.dtype
) -> Sequence[torch.Tensor]:
    """Return the logits of the last tokens of each step, [num_wanted, vocab_size]."""
    model = made.model
    first = config.layers[0]
    sizes = model.shape.num_layers, _BLOCK_SIZE, first.num_kv_heads, first.head_dim, cache_dtype
    shape = CacheShape(*sizes, value_begin=first.value_begin)
    states = LiveStates(model.shape.states.values(), 2, torch.device("cpu")).layers
    caches = CacheEngine(shape, 2 * _NUM_BLOCKS, 0, torch.device("cpu")).layers
    tables = np.arange(2 * _NUM_BLOCKS, dtype=np.int32).reshape(_NUM_BLOCKS, 2).T.copy()  # blocks by turns
    starts = np.zeros(2, np.int32)
    found = []
    for step, lengths in enumerate(np.array(steps, np.int32)):
        row_of = np.repeat([0, 1], lengths)
        positions = np.concatenate([np.arange(length) for length in lengths]) + starts[row_of]
        slots = tables[row_of, positions // _BLOCK_SIZE].astype(np.int64) * _BLOCK_SIZE + positions % _BLOCK_SIZE
        metadata = AttentionMetadata(starts.copy(), lengths, tables, torch.from_numpy(slots))
        token_ids = torch.from_numpy((positions * 37 + row_of * 11 + step) % config.vocab_size)
        plan = made.attention.plan(metadata, caches[0])
        wanted = torch.arange(max(0, len(positions) - _NUM_WANTED), len(positions))
        rows = StateRows(np.arange(2, dtype=np.int32), starts.copy(), lengths)
        step_states = StepStates(rows, states) if states else None
        hidden = model.forward(token_ids, torch.from_numpy(positions), caches, plan, wanted, step_states)
        logits = model.logits(hidden)
        assert logits is not None, "one rank has them all"
        found.append(logits)
        starts += lengths
    return found


def _of_each(logits: torch.Tensor) -> tuple[Int32Array, Int32Array]:
    """Return a token for each row, and how many alternatives it gets."""
    rows = np.arange(len(logits), dtype=np.int32)
    return rows % logits.shape[1], rows % 3


def _sample(sampler: Sampler) -> Sequence[object]:
    logits = torch.from_numpy(counted_values("logits", (4, _VOCAB_SIZE)) * np.float32(64.0))
    sampling = np.array([row.as_tuple() for row in _SAMPLINGS], SAMPLING_ROW).repeat(_NUM_DRAWS)
    number = np.arange(len(sampling), dtype=np.int32)
    sampling["seed"], sampling["output_index"] = number, number % 3
    sampling["num_logprobs"] = np.where(number % 2, NO_LOGPROBS, number % 5)
    rules = [None, _rules()]
    rows = SampleRows(
        sampling=sampling,
        rules=[rules[index] for index in (number % 4 == 3).tolist()],
        slots=number % 2,
        num_tokens=np.full(len(number), _HISTORY_TOKENS, np.int32),
        num_prompt_tokens=np.full(len(number), _PROMPT_TOKENS, np.int32),
        token_ids=(np.arange(2 * _HISTORY_TOKENS, dtype=np.int32) * 131 % _VOCAB_SIZE).reshape(2, -1),
    )
    sampled = sampler.sample(logits, number % 4, rows)
    candidates = sampler.candidates(logits, number % 4, rows, 1 + number % 7)
    return sampled.token_ids, sampled.logprobs, sampled.alternatives, candidates


def _rules() -> TokenRules:
    allowed = np.arange(0, _VOCAB_SIZE, 2, dtype=np.int32)
    return TokenRules(
        biased_token_ids=np.array([2, 700], np.int32),
        biases=np.array([1.5, -2.25], np.float32),
        stop_token_ids=np.array([4], np.int32),
        banned_token_ids=np.array([6, 8], np.int32),
        banned_words=pad_words([[(_HISTORY_TOKENS - 1) * 131 % _VOCAB_SIZE, 10]]),
        allowed_mask=pack_mask(allowed, _VOCAB_SIZE),
    )


def _add(hasher: "hashlib._Hash", *results: object) -> None:
    """Hash arrays, values that hold them, and that there is none."""
    for result in results:
        if isinstance(result, np.ndarray):
            hasher.update(result.tobytes())
        elif isinstance(result, Alternatives):
            _add(hasher, result.token_ids, result.logprobs)
        elif isinstance(result, tuple):
            _add(hasher, *result)
        else:
            assert result is None, f"{type(result)} has no bits"
            hasher.update(b"none")


_MLP = MlpConfig(51)
_PLAIN = RopeConfig(10_000.0)
_LLAMA3 = RopeConfig(500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 128))
_LINEAR = RopeConfig(10_000.0, LinearScaling(4.0))

# Names of tensors that only some models have.
_NAMES = WeightNames(
    embedding_norm="model.embedding_norm",
    position_embedding="model.positions",
    attention_output_norm="model.layers.{layer}.attention_output_norm",
    router="model.layers.{layer}.router",
    correction_bias="model.layers.{layer}.correction_bias",
    expert_gate_up=("model.layers.{layer}.{expert}.gate", "model.layers.{layer}.{expert}.up"),
    expert_down="model.layers.{layer}.{expert}.down",
    mlp_output_norm="model.layers.{layer}.mlp_output_norm",
)


def probe_models() -> Mapping[str, ModelConfig]:
    """Return the models by name."""
    plain = _model(_layer((4, 2), 12, _PLAIN), _layer((4, 2), 12, _PLAIN))
    qkv, gate_up = ("model.layers.{layer}.qkv",), ("model.layers.{layer}.gate_up",)
    merged = replace(_NAMES, qkv=qkv, qkv_layout="merged", gate_up=gate_up)
    interleaved = replace(_NAMES, qkv=qkv, qkv_layout="interleaved")
    layer_norm = NormConfig(1e-5, is_layer_norm=True, has_bias=True)
    capped = MlpConfig(51, "gelu_tanh")
    plain_mlp: Any = {"is_gated": False, "has_bias": True}
    return {
        "grouped_heads": plain,
        "one_kv_head": replace(_model(_layer((5, 1), 64, _LLAMA3)), qkv_bias=True, tie_word_embeddings=True),
        "wide_heads_window": _model(_layer((2, 2), 80, _LINEAR, window_tokens=33)),
        "widest_heads": _model(_layer((1, 1), 128, _PLAIN)),
        "caps_and_more_norms": replace(
            _model(
                _layer((4, 2), 20, _PLAIN, capped, window_tokens=19, soft_cap=5.0),
                _layer((4, 2), 20, _LINEAR, capped, soft_cap=5.0),
            ),
            names=merged,
            norm=NormConfig(1e-6, weight_offset=1.0),
            has_query_key_norm=True,
            has_output_norms=True,
            embedding_scale=6.25,
            logit_soft_cap=3.0,
        ),
        "alibi": replace(
            _model(_layer((3, 3), 16, None, MlpConfig(51, "gelu_tanh", **plain_mlp), alibi_slopes=(0.5, 0.25, 0.125))),
            names=interleaved,
            norm=layer_norm,
            qkv_bias=True,
            attention_output_bias=True,
            has_embedding_norm=True,
        ),
        "learned_positions": replace(
            _model(_layer((3, 3), 16, None, MlpConfig(51, "relu", **plain_mlp))),
            norm=layer_norm,
            position_offset=2,
        ),
        "exact_gelu": replace(plain.with_layers(mlp=MlpConfig(51, "gelu")), norm=NormConfig(1e-5, is_layer_norm=True)),
        "experts": plain.with_layers(mlp=ExpertsConfig(num_experts=5, num_chosen=2, is_normalized=True, mlp=_MLP)),
        "experts_as_they_are": plain.with_layers(
            mlp=ExpertsConfig(num_experts=5, num_chosen=3, is_normalized=False, mlp=_MLP)
        ),
    }


def probe_models_of(config: ModelConfig) -> Mapping[str, ModelConfig]:
    """Return further models by name, for what few families have, and this model."""
    models: dict[str, ModelConfig] = {}
    if any(layer.has_sinks for layer in config.layers):
        models["sinks_and_bounded_experts"] = _with_sinks()
    if any(layer.distance_buckets is not None for layer in config.layers):
        models["distance_biases"] = _with_distance_biases()
    if any(isinstance(layer.state, ShortConvConfig) for layer in config.layers):
        models["short_convolutions"] = _with_short_convolutions()
    if any(isinstance(layer.state, DeltaNetConfig) for layer in config.layers):
        models["delta_nets_and_shared_experts"] = _with_delta_nets()
    if any(isinstance(layer.mlp, ExpertsConfig) and layer.mlp.scoring == "sigmoid" for layer in config.layers):
        models["corrected_experts"] = _with_corrected_experts()
    if any(isinstance(layer.mlp, ExpertsConfig) and layer.mlp.has_norms for layer in config.layers):
        models["experts_with_norms"] = _with_expert_norms()
    if any(isinstance(layer.state, Mamba2Config) for layer in config.layers):
        models["mamba2_and_scales"] = _with_mamba2()
    if any(layer.latent is not None for layer in config.layers):
        models["latents_and_groups_of_experts"] = _with_latents()
    return models


def _with_corrected_experts() -> ModelConfig:
    routing: Any = {"scoring": "sigmoid", "has_correction_bias": True, "sum_epsilon": 1e-6, "scale": 1.5}
    experts = ExpertsConfig(num_experts=5, num_chosen=2, is_normalized=True, mlp=_MLP, **routing)
    return _model(_layer((4, 2), 12, _PLAIN, experts))


def _with_expert_norms() -> ModelConfig:
    beside: Any = {"shared": MlpConfig(37), "has_shared_gate": False, "has_expert_scales": True, "has_norms": True}
    experts = ExpertsConfig(num_experts=5, num_chosen=2, is_normalized=True, mlp=_MLP, **beside)
    return replace(_model(_layer((4, 2), 12, _PLAIN, experts)), has_output_norms=True)


def _with_sinks() -> ModelConfig:
    bounded = MlpConfig(51, "swiglu_oai", has_bias=True)
    experts = ExpertsConfig(num_experts=5, num_chosen=2, is_normalized=True, mlp=bounded, has_router_bias=True)
    layers = (_layer((4, 2), 12, _PLAIN, window_tokens=19), _layer((4, 2), 12, _PLAIN))
    return _model(*layers).with_layers(has_sinks=True, mlp=experts)


def _with_distance_biases() -> ModelConfig:
    buckets = DistanceBuckets(num_buckets=8, max_distance=20, sees_later_tokens=False)
    model = _model(_layer((3, 3), 16, None)).with_layers(distance_buckets=buckets)
    return replace(model, names=replace(_NAMES, distance_biases="model.distance_biases"))


def _with_short_convolutions() -> ModelConfig:
    attends, conv = _layer((4, 2), 12, _PLAIN), ShortConvConfig(size=45, conv_size=3, has_bias=True)
    return _model(replace(attends, rope=None, state=conv), attends)


def _with_delta_nets() -> ModelConfig:
    experts = ExpertsConfig(num_experts=5, num_chosen=2, is_normalized=True, mlp=_MLP, shared=MlpConfig(37))
    net = DeltaNetConfig(num_key_heads=2, num_value_heads=6, key_dim=20, value_dim=11, conv_size=4)
    attends = replace(_layer((4, 2), 12, replace(_PLAIN, rotary_dim=6), experts), has_output_gate=True)
    return replace(
        _model(replace(attends, rope=None, state=net, has_output_gate=False), attends),
        norm=NormConfig(1e-6, weight_offset=1.0),
        has_query_key_norm=True,
    )


def _with_mamba2() -> ModelConfig:
    experts = ExpertsConfig(5, 2, is_normalized=True, mlp=_MLP, shared=MlpConfig(37), has_shared_gate=False)
    mamba = Mamba2Config(6, 2, head_dim=20, state_size=11, conv_size=4, has_conv_bias=True, has_bias=False)
    attends = _layer((4, 2), 12, None, experts)
    return replace(_model(replace(attends, state=mamba), attends), residual_scale=0.7, logit_scale=0.3)


def _with_latents() -> ModelConfig:
    routing: Any = {"scoring": "sigmoid", "num_groups": 3, "num_chosen_groups": 2}
    experts = ExpertsConfig(num_experts=6, num_chosen=2, is_normalized=False, mlp=_MLP, **routing)
    latent = LatentConfig(rank=37, rotary_dim=6, key_dim=11, value_dim=13)
    layer = _layer((9, 1), latent.vector_dim, replace(_PLAIN, rotary_dim=6), experts)
    return _model(replace(layer, latent=latent), replace(layer, latent=replace(latent, query_rank=21)))


def _model(*layers: LayerConfig) -> ModelConfig:
    return ModelConfig(
        source=Path("the probe"),
        architecture="probe",
        vocab_size=331,
        hidden_size=45,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        layers=layers,
        norm=NormConfig(1e-5),
        names=_NAMES,
    )


def _layer(
    heads: tuple[int, int],
    head_dim: int,
    rope: RopeConfig | None,
    mlp: MlpConfig | ExpertsConfig = _MLP,
    **attention: Any,
) -> LayerConfig:
    return LayerConfig(*heads, head_dim, AttentionLayer(head_dim**-0.5, **attention), rope, mlp)


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


# Of the probe of formats that weights have from files alone.
_NUM_OUTPUTS, _BLOCKS_OF_ROW = 100, 3
_NUM_ROWS = (1, 6, 70)  # from a token alone to so many that codes are unpacked for them


def probe_file_format(library: NativeLibrary, number_format: NumberFormat) -> str:
    """Return the SHA-256 of counted rows and products of a format, 64 hexadecimal digits."""
    scaled = {
        NumberFormat.FP8: E4M3,
        NumberFormat.INT8_A32: INT8,
        NumberFormat.INT4_G32: UINT4_G32,
        NumberFormat.INT4_G128: UINT4_G128,
        NumberFormat.NVFP4: NVFP4,
    }
    kind = scaled.get(number_format)
    block_type = int(GGMLQuantizationType[number_format.name]) if kind is None else kind.block_type
    block_inputs, block_bytes = block_size(block_type)
    counted = counted_values("blocks", (_NUM_OUTPUTS, _BLOCKS_OF_ROW * block_bytes))
    # Without the second highest bit no float16 or float32 among the bytes is beyond 2: they are everywhere in a block.
    blocks = torch.from_numpy((counted * 2**20).astype("int64") & 0xBF).to(torch.uint8)
    num_inputs = _BLOCKS_OF_ROW * block_inputs
    matrix = PackedMatrix(library, num_inputs, [(number_format, [_NUM_OUTPUTS])], has_bias=False, memory=WeightMemory())
    is_exact = matrix.weights[0].copy_blocks(blocks, block_type, None)
    assert is_exact, "all scales of the blocks are numbers"
    hasher = hashlib.sha256(matrix.rows(torch.arange(_NUM_OUTPUTS)).numpy().tobytes())
    for num_rows in _NUM_ROWS:
        x = torch.from_numpy(counted_values(f"{num_rows} inputs", (num_rows, num_inputs)))
        hasher.update(matrix(x).numpy().tobytes())
    return hasher.hexdigest()
