"""All layers of a step in one call of the C library, from the embedding to the last attention.

Between the calls of a step of one token Python takes as long as some layers do, and the threads are woken for each.
"""

from collections.abc import Sequence
from ctypes import addressof

import torch

from executor_svc.attention.interface import AttentionLayer, AttentionPlan, LayerCache, Rotation
from executor_svc.attention.native_backend import NativeAttentionPlan
from executor_svc.models.dense import Segment
from executor_svc.models.native_segments import NativeSegment
from executor_svc.native.library import LayerStruct, NativeLibrary, StepStruct


class NativeLayers:
    """The loop of a model whose segments and attention are those of the library; see `LayerLoop`.

    Args:
        library: That of the segments.
        segments: One a layer, made by `NativeDense`.
        attention_layers: One a layer.
    """

    def __init__(
        self, library: NativeLibrary, segments: Sequence[Segment], attention_layers: Sequence[AttentionLayer]
    ) -> None:
        self._library = library
        self._segments = segments  # the structs have pointers into them
        distinct = {layer: layer for layer in attention_layers}
        self._attention_layers = [distinct[layer] for layer in attention_layers]
        self._structs = (LayerStruct * len(segments))()
        for struct, segment in zip(self._structs, segments, strict=True):
            assert isinstance(segment, NativeSegment), "the library runs its own segments"
            struct.segment = addressof(segment.struct)
            self._num_outputs = segment.num_outputs

    def __call__(
        self,
        residual: torch.Tensor,
        rotations: Sequence[Rotation | None],
        caches: Sequence[LayerCache],
        attention: AttentionPlan,
    ) -> torch.Tensor:
        """Run the layers."""
        assert isinstance(attention, NativeAttentionPlan), "the library runs its own attention"
        num_tokens, (num_kv_heads, head_dim) = residual.shape[0], caches[0].keys.shape[2:]
        num_heads = self._num_outputs // head_dim - 2 * num_kv_heads
        steps: dict[tuple[int, int], StepStruct] = {}  # by layer and rotation; most models have one or two
        for struct, layer, rotation, cache in zip(
            self._structs, self._attention_layers, rotations, caches, strict=True
        ):
            key = (id(layer), id(rotation))
            step = steps.get(key)
            if step is None:
                step = steps[key] = attention.step_struct(num_tokens, num_heads, rotation, cache, layer)
            struct.step = addressof(step)
            struct.keys = cache.keys.data_ptr()
            struct.values = cache.values.data_ptr()
        qkv = torch.empty(num_tokens, self._num_outputs)
        attended = torch.empty(num_tokens, num_heads * head_dim)
        self._library.layers(self._structs, residual, qkv, attended)
        return attended
