"""The structs of the C library as ctypes has them; what a field means is said in C."""

import ctypes
from enum import IntEnum
from typing import Final

from executor_svc.native.binding import FLOAT, LONG, POINTER


class NumberFormat(IntEnum):
    """How weights are stored, and what their products take: `NumberFormat` of dense.h.

    FLOAT32 and BFLOAT16 multiply float32 activations, with the same sums in the same order; BFLOAT16_A16 rounds them to
    bfloat16. INT8 turns the activations of a row into int16 with one scale, the others into int8 with a scale for each
    group of 32. Codes and scales of Q5_1 and the K formats of llama.cpp come from a file; a row of a K format has a
    multiple of 256 inputs.
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


K_FORMATS: Final = (NumberFormat.Q2_K, NumberFormat.Q3_K, NumberFormat.Q4_K, NumberFormat.Q5_K, NumberFormat.Q6_K)
# Formats that weights have from a file only, never by a quantization; each is named after the type in the file.
FILE_FORMATS: Final = (NumberFormat.Q5_1, *K_FORMATS)


class MatrixStruct(ctypes.Structure):
    """`Matrix` of dense.h."""

    _fields_ = (
        ("format", LONG),
        ("num_outputs", LONG),
        ("num_inputs", LONG),
        ("panels", POINTER),
        ("scales", POINTER),
        ("bias", POINTER),
        ("rest", POINTER),
    )


class NormStruct(ctypes.Structure):
    """`Norm` of norm.h."""

    _fields_ = (
        ("weight", POINTER),
        ("bias", POINTER),
        ("is_layer_norm", LONG),
        ("epsilon", FLOAT),
    )


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

    _fields_ = (
        ("gate", MatrixStruct),
        ("up", MatrixStruct),
        ("down", MatrixStruct),
    )


class ExpertsStruct(ctypes.Structure):
    """`Experts` of mlp.h."""

    _fields_ = (
        ("router", MatrixStruct),
        ("mlps", POINTER),
        ("num_experts", LONG),
        ("num_chosen", LONG),
        ("is_normalized", LONG),
    )


class LayerEndStruct(ctypes.Structure):
    """`LayerEnd` of layers.h."""

    _fields_ = (
        ("attention_output", MatrixStruct),
        ("attention_output_norm", NormStruct),
        ("mlp_norm", NormStruct),
        ("mlp", MlpStruct),
        ("experts", ExpertsStruct),
        ("mlp_output_norm", NormStruct),
        ("activation", LONG),
    )


class HeadNormsStruct(ctypes.Structure):
    """`HeadNorms` of layers.h."""

    _fields_ = (
        ("query", NormStruct),
        ("key", NormStruct),
        ("num_heads", LONG),
        ("num_kv_heads", LONG),
        ("head_dim", LONG),
    )


class SegmentStruct(ctypes.Structure):
    """`Segment` of layers.h."""

    _fields_ = (
        ("end", LayerEndStruct),
        ("norm", NormStruct),
        ("projection", MatrixStruct),
        ("head_norms", HeadNormsStruct),
        ("hidden_size", LONG),
        ("has_layer_end", LONG),
        ("is_post_norm", LONG),
    )


class StepStruct(ctypes.Structure):
    """`Step` of step.h."""

    _fields_ = (
        ("num_heads", LONG),
        ("num_kv_heads", LONG),
        ("head_dim", LONG),
        ("block_size", LONG),
        ("block_stride", LONG),
        ("cache_format", LONG),
        ("num_tokens", LONG),
        ("table_width", LONG),
        ("window", LONG),
        ("scale", FLOAT),
        ("soft_cap", FLOAT),
        ("slopes", POINTER),
        ("cos", POINTER),
        ("sin", POINTER),
        ("slot_mapping", POINTER),
        ("block_tables", POINTER),
        ("tiles", POINTER),
        ("num_tiles", LONG),
        ("most_tokens", LONG),
        ("tasks", POINTER),
        ("num_tasks", LONG),
        ("num_partials", LONG),
        ("direct_heads", LONG),
        ("in_bfloat16", LONG),
        ("is_full", LONG),
    )


class LayerCacheStruct(ctypes.Structure):
    """`LayerCache` of step.h."""

    _fields_ = (("keys", POINTER), ("values", POINTER), ("key_scale", FLOAT), ("value_scale", FLOAT))


class RotationStruct(ctypes.Structure):
    """`Rotation` of forward.c."""

    _fields_ = (("frequencies", POINTER), ("cos", POINTER), ("sin", POINTER))


class AttentionKindStruct(ctypes.Structure):
    """`AttentionKind` of forward.c."""

    _fields_ = (("step", StepStruct), ("window", LONG), ("rotation", POINTER), ("group", LONG))


class LayerStruct(ctypes.Structure):
    """`Layer` of forward.c."""

    _fields_ = (("segment", POINTER), ("kind", POINTER), ("cache", LayerCacheStruct))


class ModelStruct(ctypes.Structure):
    """`Model` of forward.c."""

    _fields_ = (
        ("tokens", MatrixStruct),
        ("embedding", EmbeddingStruct),
        ("layers", POINTER),
        ("kinds", POINTER),
        ("rotations", POINTER),
        ("num_layers", LONG),
        ("num_kinds", LONG),
        ("num_rotations", LONG),
        ("last_segment", POINTER),
        ("head", POINTER),
        ("logit_soft_cap", FLOAT),
        ("last_step", StepStruct),
    )


class BlockTablesStruct(ctypes.Structure):
    """`BlockTables` of forward.c."""

    _fields_ = (("block_ids", POINTER), ("width", LONG), ("block_size", LONG))


class BatchStruct(ctypes.Structure):
    """`Batch` of forward.c."""

    _fields_ = (
        ("token_ids", POINTER),
        ("tables", POINTER),
        ("max_model_len", LONG),
        ("num_groups", LONG),
        ("num_rows", LONG),
        ("slots", POINTER),
        ("starts", POINTER),
        ("lengths", POINTER),
        ("wanted", POINTER),
        ("num_wanted", LONG),
        ("num_logit_rows", LONG),
        ("hidden", POINTER),
        ("logits", POINTER),
        ("likeliest", POINTER),
    )
