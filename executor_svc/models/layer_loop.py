"""The layers of a model in turn: a segment of dense work, the attention of a layer, the next segment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from executor_svc.attention.interface import AttentionLayer, AttentionPlan, LayerCache, Rotation
from executor_svc.models.dense import Norm, Segment


class LayerLoop(Protocol):
    """Runs all layers of a step, but for the end of the last one."""

    def __call__(
        self,
        residual: torch.Tensor,
        rotations: Sequence[Rotation | None],
        caches: Sequence[LayerCache],
        attention: AttentionPlan,
    ) -> torch.Tensor:
        """Run the layers; keys and values of all tokens enter the caches.

        Args:
            residual: The embedded tokens, [num_tokens, hidden_size]; updated in place.
            rotations: One a layer; None: the layer does not rotate.
            caches: One a layer.
            attention: The plan of this step.

        Returns:
            What the last layer attended, [num_tokens, num_heads * head_dim].
        """


# Makes a loop of the segments and attentions of a model, one of each a layer.
MakeLayerLoop = Callable[[Sequence[Segment], Sequence[AttentionLayer]], LayerLoop]


@dataclass(frozen=True, slots=True)
class LayerByLayer:
    """The loop in Python, of any segments and attentions; the reference. See `LayerLoop`."""

    segments: Sequence[Segment]
    attention_layers: Sequence[AttentionLayer]
    query_norms: Sequence[Norm]  # one a layer, over each head; empty: there are none
    key_norms: Sequence[Norm]

    def __call__(
        self,
        residual: torch.Tensor,
        rotations: Sequence[Rotation | None],
        caches: Sequence[LayerCache],
        attention: AttentionPlan,
    ) -> torch.Tensor:
        """Run the layers."""
        attended: torch.Tensor | None = None
        for index, (segment, layer) in enumerate(zip(self.segments, self.attention_layers, strict=True)):
            head_dim = caches[index].keys.shape[3]
            qkv = segment(attended, residual).contiguous().view(residual.shape[0], -1, head_dim)
            if self.query_norms:
                self._norm_queries_and_keys(qkv, index, caches[index].keys.shape[2])
            attended = attention.attend(qkv, rotations[index], caches[index], layer)
        assert attended is not None, "a model has layers"
        return attended

    def _norm_queries_and_keys(self, qkv: torch.Tensor, index: int, num_kv_heads: int) -> None:
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        queries, keys = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads]
        queries.copy_(self.query_norms[index](queries))
        keys.copy_(self.key_norms[index](keys))
