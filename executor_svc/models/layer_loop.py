"""The layers of a model in turn: a segment of dense work, the attention of a layer, the next segment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from executor_svc.attention.interface import AttentionLayer, AttentionPlan, LayerCache, Rotation
from executor_svc.models.dense import Segment


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
            attended = attention.attend(qkv, rotations[index], caches[index], layer)
        assert attended is not None, "a model has layers"
        return attended
