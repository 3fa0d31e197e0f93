"""The Llama family: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

One flat forward pass over the tokens of all sequences of a step. Which sequence a token belongs to is known to
the attention plan alone. The model is a loop: a segment of dense work (`executor_svc/models/dense.py`), the
attention of a layer, the next segment. Weights are made by the kernels and filled in place by
`executor_svc/weights.py`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from executor_svc.attention import AttentionLayer, AttentionPlan, LayerCache
from executor_svc.models.config import ModelConfig
from executor_svc.models.dense import DenseKernels, LastSegment, LayerEnd, MatrixT, Segment, WeightTarget
from executor_svc.models.rotary import inverse_frequencies, rotations


class LlamaForCausalLM:
    """A decoder with uninitialised weights; fill all of `named_weights` before use."""

    # Any: mypy does not solve for the matrices of the kernels here, as it does in `_build`.
    def __init__(self, config: ModelConfig, kernels: DenseKernels[Any]) -> None:
        self.config = config
        self.dtype = kernels.dtype
        self.device = kernels.device
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(kernels.device)
        self._attention_layer = AttentionLayer(config.head_dim**-0.5)
        self._weights: dict[str, WeightTarget] = {}
        self._segments: list[Segment] = []
        self._last_segment: LastSegment
        self._head: Segment
        self._embed: Callable[[torch.Tensor], torch.Tensor]
        self._build(kernels)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        attention: AttentionPlan,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """Run the decoder; keys and values of all tokens enter the caches.

        Args:
            token_ids: [num_tokens] int64 or int32.
            positions: [num_tokens], each token's position in its sequence.
            caches: One a layer.
            attention: The plan of this step.
            wanted: The tokens whose hidden states are wanted, [num_rows] int64; the last layer ends for them only.

        Returns:
            Hidden states before the final norm, [num_rows, hidden_size].
        """
        config = self.config
        qkv_shape = (token_ids.shape[0], config.num_attention_heads + 2 * config.num_key_value_heads, config.head_dim)
        rotation = rotations(positions, self._frequencies, self.dtype)
        residual = self._embed(token_ids)  # [num_tokens, hidden_size]
        attended: torch.Tensor | None = None
        for segment, cache in zip(self._segments, caches, strict=True):
            qkv = segment(attended, residual).contiguous().view(qkv_shape)
            attended = attention.attend(qkv, rotation, cache, self._attention_layer)
        assert attended is not None, "a model has layers"
        residual = residual[wanted]
        self._last_segment(attended[wanted], residual)
        return residual

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states [num_rows, hidden_size] to raw logits [num_rows, vocab_size], float32."""
        return self._head(None, hidden).float()

    def named_weights(self) -> dict[str, WeightTarget]:
        """Return where every tensor of a checkpoint belongs, by its name there."""
        return dict(self._weights)

    def is_redundant(self, name: str) -> bool:
        """Whether a checkpoint may hold the tensor `name` although the model computes or shares it."""
        if name == "lm_head.weight":
            return self.config.tie_word_embeddings
        return name.endswith(".rotary_emb.inv_freq")

    def _build(self, kernels: DenseKernels[MatrixT]) -> None:
        config = self.config
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        hidden_size, intermediate_size = config.hidden_size, config.intermediate_size
        embedding = self._matrix(kernels, ["model.embed_tokens"], hidden_size, [config.vocab_size])
        layer_end: LayerEnd[MatrixT] | None = None
        for index in range(config.num_hidden_layers):
            prefix = f"model.layers.{index}"
            attention = f"{prefix}.self_attn"
            norm = self._vector(kernels, f"{prefix}.input_layernorm", hidden_size)
            names = [f"{attention}.{kind}_proj" for kind in "qkv"]
            qkv = self._matrix(kernels, names, hidden_size, [q_size, kv_size, kv_size], config.attention_bias)
            self._segments.append(kernels.segment(layer_end, norm, qkv, config.rms_norm_eps))
            layer_end = LayerEnd(
                self._matrix(kernels, [f"{attention}.o_proj"], q_size, [hidden_size], config.attention_bias),
                self._vector(kernels, f"{prefix}.post_attention_layernorm", hidden_size),
                self._matrix(kernels, [f"{prefix}.mlp.gate_proj"], hidden_size, [intermediate_size], config.mlp_bias),
                self._matrix(kernels, [f"{prefix}.mlp.up_proj"], hidden_size, [intermediate_size], config.mlp_bias),
                self._matrix(kernels, [f"{prefix}.mlp.down_proj"], intermediate_size, [hidden_size], config.mlp_bias),
            )
        assert layer_end is not None, "a model has layers"
        self._last_segment = kernels.last_segment(layer_end, config.rms_norm_eps)
        norm = self._vector(kernels, "model.norm", hidden_size)
        head = embedding
        if not config.tie_word_embeddings:
            head = self._matrix(kernels, ["lm_head"], hidden_size, [config.vocab_size])
        self._head = kernels.segment(None, norm, head, config.rms_norm_eps)
        self._embed = partial(kernels.embed, embedding)

    def _matrix(
        self,
        kernels: DenseKernels[MatrixT],
        names: Sequence[str],
        num_inputs: int,
        sizes: Sequence[int],
        has_bias: bool = False,
    ) -> MatrixT:
        """Make a matrix whose parts a checkpoint holds under `names`."""
        matrix = kernels.matrix(num_inputs, sizes, has_bias=has_bias)
        self._weights |= {f"{name}.weight": part for name, part in zip(names, matrix.weights, strict=True)}
        if has_bias:
            self._weights |= {f"{name}.bias": part for name, part in zip(names, matrix.biases, strict=True)}
        return matrix

    def _vector(self, kernels: DenseKernels[MatrixT], name: str, size: int) -> torch.Tensor:
        vector = kernels.vector(size)
        self._weights[f"{name}.weight"] = vector
        return vector
