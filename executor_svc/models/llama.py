"""The Llama family: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

One flat forward pass over the tokens of all sequences of a step. Which sequence a token belongs to
is known to the attention plan alone. Weights are plain tensors, allocated here and filled in place
by `executor_svc/weights.py`; the projections that read the same input are merged, and
`named_weights` shows the loader their parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 -- the name that everybody knows

from executor_svc.attention import AttentionPlan, LayerCache
from executor_svc.models.config import ModelConfig
from executor_svc.models.layers import Linear
from executor_svc.models.rotary import inverse_frequencies, rotate, rotations


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor  # [hidden_size]
    qkv: Linear  # to [(num_heads + 2 * num_kv_heads) * head_dim]
    attention_output: Linear  # from [num_heads * head_dim]
    post_attention_norm: torch.Tensor  # [hidden_size]
    gate_up: Linear  # to [2 * intermediate_size]
    down: Linear


class LlamaForCausalLM:
    """A decoder with uninitialised weights; fill all of `named_weights` before use."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._embedding = self._empty(config.vocab_size, config.hidden_size)
        self._layers = [self._make_layer() for _ in range(config.num_hidden_layers)]
        self._norm = self._empty(config.hidden_size)
        head = self._embedding if config.tie_word_embeddings else self._empty(config.vocab_size, config.hidden_size)
        self._head = Linear(head, None)
        self._frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        attention: AttentionPlan,
    ) -> torch.Tensor:
        """Run the decoder; keys and values of all tokens enter the caches.

        Args:
            token_ids: [num_tokens] int64 or int32.
            positions: [num_tokens], each token's position in its sequence.
            caches: One a layer.
            attention: The plan of this step.

        Returns:
            Hidden states before the final norm, [num_tokens, hidden_size].
        """
        hidden = F.embedding(token_ids, self._embedding)  # [num_tokens, hidden_size]
        cos, sin = rotations(positions, self._frequencies, self.dtype)
        for layer, cache in zip(self._layers, caches, strict=True):
            normed = self._rms_norm(hidden, layer.input_norm)
            hidden += self._attend(layer, normed, cos, sin, cache, attention)
            normed = self._rms_norm(hidden, layer.post_attention_norm)
            gate, up = layer.gate_up(normed).chunk(2, -1)  # each [num_tokens, intermediate_size]
            hidden += layer.down(F.silu(gate, inplace=True).mul_(up))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states [num_rows, hidden_size] to raw logits [num_rows, vocab_size], float32."""
        return self._head(self._rms_norm(hidden, self._norm)).float()

    def named_weights(self) -> dict[str, torch.Tensor]:
        """Return every tensor of a checkpoint by its name there, as a view of where it belongs."""
        config = self.config
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        weights = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm}
        if not config.tie_word_embeddings:
            weights["lm_head.weight"] = self._head.weight
        for index, layer in enumerate(self._layers):
            prefix = f"model.layers.{index}"
            weights[f"{prefix}.input_layernorm.weight"] = layer.input_norm
            weights[f"{prefix}.post_attention_layernorm.weight"] = layer.post_attention_norm
            for names, linear, sizes in (
                (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), layer.qkv, [q_size, kv_size, kv_size]),
                (("self_attn.o_proj",), layer.attention_output, [config.hidden_size]),
                (("mlp.gate_proj", "mlp.up_proj"), layer.gate_up, [config.intermediate_size] * 2),
                (("mlp.down_proj",), layer.down, [config.hidden_size]),
            ):
                for kind, merged in (("weight", linear.weight), ("bias", linear.bias)):
                    if merged is not None:
                        parts = torch.split(merged, sizes)
                        weights |= {f"{prefix}.{name}.{kind}": part for name, part in zip(names, parts, strict=True)}
        return weights

    def is_redundant(self, name: str) -> bool:
        """Whether a checkpoint may hold the tensor `name` although the model computes or shares it."""
        if name == "lm_head.weight":
            return self.config.tie_word_embeddings
        return name.endswith(".rotary_emb.inv_freq")

    def _attend(
        self,
        layer: _Layer,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: LayerCache,
        attention: AttentionPlan,
    ) -> torch.Tensor:
        num_heads, num_kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        heads = layer.qkv(normed).contiguous().view(len(normed), num_heads + 2 * num_kv_heads, self.config.head_dim)
        rotated = rotate(heads[:, : num_heads + num_kv_heads], cos, sin)
        query, key = rotated[:, :num_heads], rotated[:, num_heads:]
        value = heads[:, num_heads + num_kv_heads :]
        return layer.attention_output(attention.attend(query, key, value, cache))

    def _rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)

    def _make_layer(self) -> _Layer:
        config = self.config
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        return _Layer(
            input_norm=self._empty(config.hidden_size),
            qkv=self._linear(config.hidden_size, q_size + 2 * kv_size, config.attention_bias),
            attention_output=self._linear(q_size, config.hidden_size, config.attention_bias),
            post_attention_norm=self._empty(config.hidden_size),
            gate_up=self._linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias),
            down=self._linear(config.intermediate_size, config.hidden_size, config.mlp_bias),
        )

    def _linear(self, in_features: int, out_features: int, has_bias: bool) -> Linear:
        return Linear(self._empty(out_features, in_features), self._empty(out_features) if has_bias else None)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)
