"""A decoder as an embedder: texts are prefilled whole on a scratch cache, and their hidden states are pooled."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from executor_svc.attention.interface import AttentionBackend
from executor_svc.models.language_model import LanguageModel
from executor_svc.models.pooling import EmbeddingHead
from executor_svc.models.text_rows import ScratchCache, positions_of, text_rows
from octavo_shared.step_wire.step import Float32Array, PoolingInput


class DecoderTexts:
    """Hidden states of whole texts before the last norm; see `executor_svc.models.pooling.TextModel`.

    Args:
        model: With its weights, on one rank.
        backend: Its attention.
        block_size: Tokens in a block of a cache, as the attention wants it.
        dtype: Number format of a cache.
    """

    def __init__(self, model: LanguageModel, backend: AttentionBackend, block_size: int, dtype: torch.dtype) -> None:
        shape = model.shape
        self._model = model
        self._backend = backend
        # One for all layers: each writes what it reads.
        self._cache = ScratchCache(block_size, shape.num_kv_heads, shape.head_dim, dtype, model.device)

    @torch.inference_mode()
    def encode(self, texts: Sequence[PoolingInput]) -> Float32Array:
        """Return the hidden states of the tokens of some texts, one text after the other, [num_tokens, hidden_size]."""
        device = self._model.device
        rows = text_rows([len(text.token_ids) for text in texts], self._cache.block_size, device)
        cache = self._cache.of_size(rows)
        token_ids = np.concatenate([text.token_ids for text in texts]).astype(np.int64)
        positions = positions_of(rows.lengths).astype(np.int64)
        hidden = self._model.forward(
            torch.from_numpy(token_ids).to(device),
            torch.from_numpy(positions).to(device),
            [cache] * self._model.shape.num_layers,
            self._backend.plan(rows, cache),
            torch.arange(len(token_ids), device=device),
        )
        states: Float32Array = hidden.float().cpu().numpy()
        return states


@dataclass(frozen=True, slots=True)
class NormedHead:
    """The head of a decoder's texts: the last norm, of the tokens that are pooled alone."""

    model: LanguageModel
    head: EmbeddingHead

    @property
    def size(self) -> int:
        """Numbers in a vector."""
        return self.head.size

    @torch.inference_mode()
    def __call__(self, hidden: Float32Array) -> Float32Array:
        """Return the vector of a text."""
        pooled = {"mean": hidden, "cls": hidden[:1], "last": hidden[-1:]}[self.head.modules.mode]
        normed = self.model.final_norm(torch.from_numpy(pooled.copy()).to(self.model.device))
        return self.head(normed.float().cpu().numpy())
