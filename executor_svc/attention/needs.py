"""What a model, its settings and its device ask of an attention backend."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from executor_svc.attention.interface import AttentionLayer


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """All that may keep a backend from running a model, apart from the block size."""

    dtype: torch.dtype
    num_heads: int  # of this rank
    num_kv_heads: int  # of this rank
    head_dim: int
    layers: Sequence[AttentionLayer]
    compute_capability: tuple[int, int] | None  # of the CUDA device, such as (9, 0); None: the device is a CPU

    @property
    def has_window(self) -> bool:
        """Whether some layer has a sliding window."""
        return any(layer.window_tokens is not None for layer in self.layers)

    @property
    def has_soft_cap(self) -> bool:
        """Whether some layer caps its scores."""
        return any(layer.soft_cap is not None for layer in self.layers)

    @property
    def has_alibi(self) -> bool:
        """Whether some layer has ALiBi."""
        return any(layer.alibi_slopes is not None for layer in self.layers)


class BackendRules(Protocol):
    """What a backend can do, without making it. One module a backend; none imports the backend's library."""

    @property
    def name(self) -> str:
        """As in `--attention-backend`."""

    @property
    def preferred_block_size(self) -> int:
        """The block size to use where none was asked for, in tokens."""

    def why_not_block_size(self, block_size: int) -> str | None:
        """Return what is wrong with a block size and which ones work, as the end of a sentence; None: nothing."""

    def why_not(self, needs: AttentionNeeds) -> str | None:
        """Return what the backend lacks for these needs, as the end of a sentence; None: nothing."""
