"""The structs of the C library as ctypes has them; what a field means is said in C."""

import ctypes
from enum import IntEnum
from typing import Final

from executor_svc.native.binding import FLOAT, LONG, POINTER


class NumberFormat(IntEnum):
    """How weights are stored, and what their products take: `NumberFormat` of dense.h.

    FLOAT32, BFLOAT16, FP8 and INT8_A32 multiply float32 activations, with the same sums in the same order; BFLOAT16_A16
    rounds them to bfloat16. INT8 turns the activations of a row into int16 with one scale, the others into int8 with a
    scale for each group of 32. Codes and scales of Q5_1, FP8, INT8_A32, MXFP4, NVFP4, INT4_G32, INT4_G128 and the K
    formats of llama.cpp come from a file; a row of MXFP4 has a multiple of 32 inputs, of a K format one of 256.
    """

    FLOAT32 = 0
    BFLOAT16 = 1
    BFLOAT16_A16 = 2
    INT8 = 3
    INT8_A8 = 4
    INT4 = 5
    Q5_1 = 6
    Q2_K = 7
    Q3_K = 8
    Q4_K = 9
    Q5_K = 10
    Q6_K = 11
    FP8 = 12
    MXFP4 = 13
    INT8_A32 = 14
    INT4_G32 = 15
    INT4_G128 = 16
    NVFP4 = 17


K_FORMATS: Final = (NumberFormat.Q2_K, NumberFormat.Q3_K, NumberFormat.Q4_K, NumberFormat.Q5_K, NumberFormat.Q6_K)
# Formats whose products take floats; the others take codes of their inputs.
FLOAT_INPUTS: Final = (NumberFormat.FLOAT32, NumberFormat.BFLOAT16, NumberFormat.FP8, NumberFormat.INT8_A32)
# Formats that weights have from a file only, never by a quantization; each is named after the type in the file.
FILE_FORMATS: Final = (
    NumberFormat.Q5_1,
    *K_FORMATS,
    NumberFormat.FP8,
    NumberFormat.MXFP4,
    NumberFormat.INT8_A32,
    NumberFormat.INT4_G32,
    NumberFormat.INT4_G128,
    NumberFormat.NVFP4,
)


def _of(kind: type, *names: str) -> list[tuple[str, type]]:
    """Return fields of one type that follow each other."""
    return [(name, kind) for name in names]


class MatrixStruct(ctypes.Structure):
    """`Matrix` of dense.h."""

    _fields_ = (
        *_of(LONG, "format", "num_outputs", "num_inputs"),
        *_of(POINTER, "panels", "scales", "bias", "rest", "adapted"),
    )


class AdapterRowsStruct(ctypes.Structure):
    """`AdapterRows` of adapters.h."""

    _fields_ = (("num_runs", LONG), *_of(POINTER, "runs", "order", "shrunk"), ("stride", LONG))


class LowRankStruct(ctypes.Structure):
    """`LowRank` of adapters.h."""

    _fields_ = (("shrink", POINTER), ("num_shrunk", LONG), ("expand", MatrixStruct), ("ranges", POINTER))


class AdaptedStruct(ctypes.Structure):
    """`Adapted` of adapters.h."""

    _fields_ = (*_of(POINTER, "slots", "rows"),)


class NormStruct(ctypes.Structure):
    """`Norm` of norm.h."""

    _fields_ = (*_of(POINTER, "weight", "bias"), ("is_layer_norm", LONG), ("epsilon", FLOAT))


class EmbeddingStruct(ctypes.Structure):
    """`Embedding` of embedding.c."""

    _fields_ = (
        ("scale", FLOAT),
        ("positions", POINTER),
        ("position_offset", LONG),
        ("norm", NormStruct),
        ("hidden_size", LONG),
    )


class MlpStruct(ctypes.Structure):
    """`Mlp` of mlp.h."""

    _fields_ = (*_of(MatrixStruct, "gate", "up", "down"),)


class ExpertsStruct(ctypes.Structure):
    """`Experts` of mlp.h."""

    _fields_ = (
        ("router", MatrixStruct),
        ("mlps", POINTER),
        *_of(LONG, "num_experts", "num_chosen", "is_normalized", "is_sigmoid"),
        ("correction_bias", POINTER),
        *_of(FLOAT, "sum_epsilon", "scale"),
        *_of(LONG, "num_groups", "num_chosen_groups"),
        ("expert_scales", POINTER),
        *_of(NormStruct, "router_norm", "input_norm", "output_norm", "shared_output_norm"),
        ("shared", MlpStruct),
        ("shared_gate", MatrixStruct),
    )


class LayerInputsStruct(ctypes.Structure):
    """`LayerInputs` of layers.h."""

    _fields_ = (("values", POINTER), ("stride", LONG))


class PerLayerStruct(ctypes.Structure):
    """`PerLayer` of layers.h."""

    _fields_ = (
        *_of(MatrixStruct, "gate", "projection"),
        ("norm", NormStruct),
        ("inputs", POINTER),
        ("begin", LONG),
    )


class LayerEndStruct(ctypes.Structure):
    """`LayerEnd` of layers.h."""

    _fields_ = (
        ("attention_output", MatrixStruct),
        *_of(NormStruct, "attention_output_norm", "mlp_norm"),
        ("mlp", MlpStruct),
        ("experts", ExpertsStruct),
        ("mlp_output_norm", NormStruct),
        ("activation", LONG),
        ("residual_scale", FLOAT),
        ("per_layer", PerLayerStruct),
        ("layer_scale", POINTER),
    )


class HeadNormsStruct(ctypes.Structure):
    """`HeadNorms` of layers.h."""

    _fields_ = (*_of(NormStruct, "query", "key", "value"), *_of(LONG, "num_heads", "num_kv_heads", "head_dim"))


class SegmentStruct(ctypes.Structure):
    """`Segment` of layers.h."""

    _fields_ = (
        ("end", LayerEndStruct),
        ("norm", NormStruct),
        ("projection", MatrixStruct),
        ("head_norms", HeadNormsStruct),
        *_of(LONG, "hidden_size", "has_layer_end", "is_post_norm"),
    )


class StepStruct(ctypes.Structure):
    """`Step` of step.h."""

    _fields_ = (
        *_of(
            LONG,
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "block_size",
            "value_begin",
            "rotary_dim",
            "qkv_stride",
            "block_stride",
            "cache_format",
            "num_tokens",
            "table_width",
            "window",
            "first",
        ),
        *_of(FLOAT, "scale", "soft_cap"),
        *_of(POINTER, "slopes", "distance_biases"),
        ("num_distances", LONG),
        *_of(POINTER, "cos", "sin", "slot_mapping", "block_tables", "tiles"),
        *_of(LONG, "num_tiles", "most_tokens"),
        ("tasks", POINTER),
        *_of(LONG, "num_tasks", "num_partials", "direct_heads", "in_bfloat16", "reads_only", "is_full"),
    )


class StepRowsStruct(ctypes.Structure):
    """`StepRows` of plan.h."""

    _fields_ = (("num_rows", LONG), *_of(POINTER, "tables", "starts", "lengths", "commits"))


class DeltaNetStruct(ctypes.Structure):
    """`DeltaNet` of delta_net.h."""

    _fields_ = (
        *_of(LONG, "num_key_heads", "num_value_heads", "key_dim", "value_dim", "conv_size", "is_tiled"),
        *_of(POINTER, "conv_weight", "a_log", "dt_bias"),
        ("norm", NormStruct),
    )


class ShortConvStruct(ctypes.Structure):
    """`ShortConv` of short_conv.h."""

    _fields_ = (*_of(LONG, "size", "conv_size"), *_of(POINTER, "conv_weight", "bias"))


class Mamba2Struct(ctypes.Structure):
    """`Mamba2` of mamba2.h."""

    _fields_ = (
        *_of(LONG, "num_heads", "num_groups", "head_dim", "state_size", "conv_size"),
        *_of(POINTER, "conv_weight", "conv_bias", "a_log", "dt_bias", "d"),
        ("norm", NormStruct),
    )


class LatentStruct(ctypes.Structure):
    """`Latent` of latent.h."""

    _fields_ = (
        *_of(LONG, "num_heads", "rank", "rotary_dim", "key_dim", "value_dim", "query_rank"),
        *_of(NormStruct, "norm", "query_norm"),
        ("queries", MatrixStruct),
        *_of(POINTER, "keys", "values"),
    )


class LayerCacheStruct(ctypes.Structure):
    """`LayerCache` of step.h."""

    _fields_ = (("keys", POINTER), ("values", POINTER), ("key_scale", FLOAT), ("value_scale", FLOAT))


class RotationStruct(ctypes.Structure):
    """`Rotation` of forward.c."""

    _fields_ = (
        ("frequencies", POINTER),
        ("rotary_dim", LONG),
        ("factor", FLOAT),
        ("query_factors", POINTER),
        ("query_interval", LONG),
        *_of(POINTER, "cos", "sin"),
    )


class AttentionKindStruct(ctypes.Structure):
    """`AttentionKind` of forward.c."""

    _fields_ = (
        ("step", StepStruct),
        ("window", LONG),
        ("rotation", POINTER),
        *_of(LONG, "group", "has_output_gate", "attends_to_encoder"),
    )


class LayerStruct(ctypes.Structure):
    """`Layer` of forward.c."""

    _fields_ = (
        *_of(POINTER, "segment", "kind"),
        ("cache", LayerCacheStruct),
        *_of(POINTER, "sinks", "latent", "delta_net", "short_conv", "mamba2", "conv_states", "states"),
    )


class TokenInputsStruct(ctypes.Structure):
    """`TokenInputs` of forward.c."""

    _fields_ = (
        ("tokens", MatrixStruct),
        ("projection", POINTER),
        *_of(FLOAT, "token_scale", "scale"),
        *_of(POINTER, "inputs", "wanted_inputs"),
    )


class ModelStruct(ctypes.Structure):
    """`Model` of forward.c."""

    _fields_ = (
        ("tokens", MatrixStruct),
        ("embedding", EmbeddingStruct),
        *_of(POINTER, "layers", "kinds", "rotations"),
        *_of(LONG, "num_layers", "num_kinds", "num_rotations"),
        *_of(POINTER, "last_segment", "head", "join_embedding", "join_hidden", "token_inputs"),
        *_of(FLOAT, "logit_scale", "logit_soft_cap"),
        ("last_step", StepStruct),
    )


class BlockTablesStruct(ctypes.Structure):
    """`BlockTables` of forward.c."""

    _fields_ = (("block_ids", POINTER), ("width", LONG), ("block_size", LONG))


class BatchStruct(ctypes.Structure):
    """`Batch` of forward.c."""

    _fields_ = (
        *_of(POINTER, "token_ids", "tables"),
        *_of(LONG, "max_model_len", "num_groups", "num_rows"),
        *_of(POINTER, "slots", "starts", "lengths", "commits", "wanted"),
        *_of(LONG, "num_wanted", "num_logit_rows"),
        *_of(POINTER, "previous", "hidden", "normed", "logits", "likeliest", "draft_inputs"),
        ("encoded", StepRowsStruct),
    )


class AcceptedDraftsStruct(ctypes.Structure):
    """`AcceptedDrafts` of forward.c."""

    _fields_ = (
        ("rows", StepRowsStruct),
        ("first_drafts", POINTER),
        ("num_drafts", LONG),
        ("inputs", POINTER),
    )
