"""The structs of a whole step of a model as ctypes has them; what a field means is said in C: step.h and forward.c."""

import ctypes

from executor_svc.native.binding import FLOAT, LONG, POINTER
from executor_svc.native.structs import EmbeddingStruct, MatrixStruct


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
