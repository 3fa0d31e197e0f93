"""A decoder whose layers also attend to the input of an encoder: keys and values of that lie in caches of their own.

The encoder runs over whole inputs, each token of which sees all of its input, and what it returns becomes keys and
values of every layer of the decoder with `attends_to_encoder`, in the blocks that the input has. From there on a step
needs the decoder alone. Each of its tokens is a row for these layers, at the last position of the input: so the causal
rule of every attention lets it see all of the input, and no sum depends on the other tokens of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from executor_svc.adapters.slots import AdapterSlots
from executor_svc.attention.interface import AttentionBackend, AttentionMetadata, AttentionPlan, LayerCache
from executor_svc.attention.key_value_write import write_in_torch
from executor_svc.attention.native_backend import NativeAttentionBackend
from executor_svc.attention.torch_backend import TorchAttentionBackend
from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder import Decoder
from executor_svc.models.decoder_weights import StoredFormats
from executor_svc.models.dense import DenseKernels
from executor_svc.models.pooling import ScratchCache, positions_of, text_rows
from executor_svc.parallel.group import SINGLE_RANK, TensorParallelGroup
from executor_svc.states.interface import StateBackend
from octavo_shared.step_wire.step import Int32Array

# A multiple of the lanes of every processor: keys are read in place.
_BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class EncodedInputs:
    """Where the inputs of an encoder lie in the caches of its keys and values, one a row.

    What lies in a table beyond the blocks of an input is garbage.
    """

    lengths: Int32Array  # [num_rows] tokens of each, 1 or more
    block_tables: Int32Array  # [num_rows, max_num_blocks]
    block_size: int

    def slots_of(self, rows: Int32Array, positions: Int32Array) -> Int32Array:
        """Return the slots of tokens of inputs, [num_tokens]; both arguments are."""
        blocks = self.block_tables[rows, positions // self.block_size].astype(np.int64)
        slots: Int32Array = blocks * self.block_size + positions % self.block_size
        return slots

    def seen_by(self, num_tokens: Int32Array, device: torch.device) -> AttentionMetadata:
        """Return how so many tokens of each row see its input, each as a row of its own; [num_rows], 0 or more."""
        rows = np.repeat(np.arange(len(num_tokens), dtype=np.int32), num_tokens)
        last = self.lengths[rows] - 1
        return AttentionMetadata(
            starts=last,
            lengths=np.ones(len(rows), np.int32),
            block_tables=self.block_tables[rows],
            slot_mapping=torch.from_numpy(self.slots_of(rows, last)).to(device),
        )


class EncoderDecoder(Decoder):
    """A decoder and its encoder, with uninitialised weights; `load` fills them. See `Decoder`."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: DenseKernels[Any],
        group: TensorParallelGroup = SINGLE_RANK,
        stored: StoredFormats | None = None,
        states: StateBackend | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        super().__init__(config, kernels, group, stored, states, adapters=adapters)
        assert config.encoder is not None, "it has one"
        self.encoder = Decoder(config.encoder, kernels, group, stored, encodes_for=self)
        first = self.encoder.shape.caches[0]
        self._scratch = ScratchCache(
            _BLOCK_SIZE, first.num_kv_heads, first.head_dim, dtype=self.dtype, device=self.device
        )

    @property
    def max_encoder_tokens(self) -> int:
        """Tokens of the longest input of the encoder, if the model has such a limit."""
        return self.encoder.config.max_position_embeddings

    @torch.inference_mode()
    def encode(
        self,
        texts: Sequence[Int32Array],
        places: EncodedInputs,
        caches: Sequence[LayerCache],
        backend: AttentionBackend,
    ) -> None:
        """Run the encoder, and write keys and values of what it returns.

        Args:
            texts: Token ids of each input, [num_tokens].
            places: Of the inputs, whose lengths are those of `texts`.
            caches: As of `forward`; those of layers that attend to the encoder are written.
            backend: Of both attentions.
        """
        hidden = self._states_of(texts, backend)
        rows = np.repeat(np.arange(len(texts), dtype=np.int32), places.lengths)
        slots = torch.from_numpy(places.slots_of(rows, positions_of(places.lengths))).to(self.device)
        cache_of = self.caches_of(caches)
        for index, to_keys_and_values in self.weights.encoder_maps.items():
            mapped = to_keys_and_values(None, hidden).contiguous()
            mapped = mapped.view(len(hidden), -1, self.config.layers[index].head_dim)
            write_in_torch(mapped, None, slots, cache_of[index])

    def _states_of(self, texts: Sequence[Int32Array], backend: AttentionBackend) -> torch.Tensor:
        """Return what the encoder makes of some texts, one behind the other, [num_tokens, hidden_size]."""
        rows = text_rows([len(text) for text in texts], _BLOCK_SIZE, self.device)
        cache = self._scratch.of_size(rows)
        positions = positions_of(rows.lengths).astype(np.int64)
        hidden = self.encoder.forward(
            torch.from_numpy(np.concatenate(texts).astype(np.int64)).to(self.device),
            torch.from_numpy(positions).to(self.device),
            [cache] * self.encoder.config.num_hidden_layers,
            self._full_plan(backend, rows, cache),
            torch.arange(len(positions), device=self.device),
        )
        return self.encoder.final_norm(hidden)

    def _full_plan(self, backend: AttentionBackend, rows: AttentionMetadata, cache: LayerCache) -> AttentionPlan:
        """Return how each token of some texts sees all of its text."""
        if isinstance(backend, NativeAttentionBackend):
            return backend.full_plan(rows)
        if any(layer.distance_buckets is not None for layer in self.encoder.config.layers):
            return (backend if isinstance(backend, TorchAttentionBackend) else TorchAttentionBackend()).full_plan(rows)
        places = EncodedInputs(rows.lengths, rows.block_tables, cache.block_size)
        tokens = places.seen_by(rows.lengths, rows.slot_mapping.device)
        return backend.plan(replace(tokens, slot_mapping=rows.slot_mapping), cache)

    def _is_redundant(self, name: str) -> bool:
        """Whether a checkpoint may hold the tensor `name` although the model computes or shares it."""
        stacks = ("encoder.", "decoder.")
        is_computed = self.config.has_sinusoidal_positions and name.endswith(".embed_positions.weight")
        is_shared = name.endswith(".embed_tokens.weight")
        # T5's attention to its encoder has one in old checkpoints, and does not use it.
        is_unused = name.endswith(".EncDecAttention.relative_attention_bias.weight")
        is_of_stack = name.removeprefix("model.").startswith(stacks)
        return (is_of_stack and (is_computed or is_shared or is_unused)) or super()._is_redundant(name)
