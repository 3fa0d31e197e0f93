"""Attention over the paged KV cache.

`interface.py` holds what the model and the backends agree on, `torch_backend.py` the reference; `step_reads.py` and
`explicit_attention.py` are parts of that.
"""

from executor_svc.attention.interface import (
    AttentionBackend,
    AttentionLayer,
    AttentionMetadata,
    AttentionPlan,
    DecodeBatch,
    DecodePlanner,
    LayerCache,
    Rotation,
)
from executor_svc.attention.torch_backend import TorchAttentionBackend

__all__ = [
    "AttentionBackend",
    "AttentionLayer",
    "AttentionMetadata",
    "AttentionPlan",
    "DecodeBatch",
    "DecodePlanner",
    "LayerCache",
    "Rotation",
    "TorchAttentionBackend",
]
