"""From the hidden states of a text to its vector, or to its scores; text by text, so that no text touches another.

Sums are NumPy's over rows in their order, products are the C library's: the bits are the same alone and in a step
with others. Decoders and encoders of ours take whole texts as rows of an attention: each has blocks of its own in a
scratch cache that all layers share, as no layer reads what another has written.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np
import torch

from executor_svc.attention.interface import AttentionBackend, AttentionMetadata, LayerCache
from executor_svc.checkpoint.pooling_modules import PoolingModules
from executor_svc.models.language_model import LanguageModel
from executor_svc.states.interface import StateRows
from executor_svc.states.live_states import LiveStates, StepStates
from octavo_shared.step_wire.step import Float32Array, Int32Array, PoolingInput, PoolingOutput, PoolingTask, RowFlag

ScoreFunction = Literal["sigmoid", "identity"]

# sentence-transformers divides by no less.
_LEAST_LENGTH = 1e-12


class TextModel(Protocol):
    """Computes the hidden states of whole texts."""

    def encode(self, texts: Sequence[PoolingInput]) -> Float32Array:
        """Return them, one text after the other, [num_tokens, hidden_size]."""


class Head(Protocol):
    """Makes the answer of a task of the hidden states of one text."""

    @property
    def size(self) -> int:
        """Numbers in an answer."""

    def __call__(self, hidden: Float32Array) -> Float32Array:
        """Return the answer, [size], of hidden states, [num_tokens, hidden_size]."""


@dataclass(frozen=True, slots=True)
class EmbeddingHead:
    """The vector of a text."""

    modules: PoolingModules
    size: int

    def __str__(self) -> str:
        return f"{self.modules.mode}{', normalized' if self.modules.is_normalized else ''}"

    def __call__(self, hidden: Float32Array) -> Float32Array:
        """Pool, and normalize if the model does."""
        vector: Float32Array
        match self.modules.mode:
            case "mean":
                vector = np.add.reduce(hidden, axis=0) / np.float32(len(hidden))
            case "cls":
                vector = hidden[0].copy()
            case "last":
                vector = hidden[-1].copy()
        if not self.modules.is_normalized:
            return vector
        length = np.sqrt(np.add.reduce(np.square(vector, dtype=np.float64)))
        normalized: Float32Array = (vector / max(length, _LEAST_LENGTH)).astype(np.float32)
        return normalized


@dataclass(frozen=True, slots=True)
class ScoringHead:
    """The scores of a text, of its first token: a layer under tanh, then a layer of scores."""

    layer: Callable[[torch.Tensor], torch.Tensor]
    scores: Callable[[torch.Tensor], torch.Tensor]
    size: int
    function: ScoreFunction

    def __str__(self) -> str:
        return self.function

    @torch.inference_mode()
    def __call__(self, hidden: Float32Array) -> Float32Array:
        """Score the first token."""
        first = np.tanh(self.layer(torch.from_numpy(hidden[:1].copy())).numpy())
        return apply(self.function, self.scores(torch.from_numpy(first)).numpy()[0])


def apply(function: ScoreFunction, scores: Float32Array) -> Float32Array:
    """Return what a model makes of its raw scores."""
    if function == "identity":
        return scores
    with np.errstate(over="ignore"):
        limited: Float32Array = (1 / (1 + np.exp(-scores.astype(np.float64)))).astype(np.float32)
    return limited


@dataclass(frozen=True, slots=True)
class Pooler:
    """Answers the texts of a step.

    Attributes:
        model: Computes their hidden states.
        heads: By task.
    """

    model: TextModel
    heads: Mapping[PoolingTask, Head]

    def pool(self, texts: Sequence[PoolingInput]) -> tuple[PoolingOutput, ...]:
        """Return the answers to some texts, one or more, in their order."""
        hidden = self.model.encode(texts)
        outputs, begin = [], 0
        for text in texts:
            end = begin + len(text.token_ids)
            values = self.heads[text.task](hidden[begin:end])
            flag = 0 if np.isfinite(values).all() else RowFlag.NOT_FINITE
            outputs.append(PoolingOutput(text.number, values, flag))
            begin = end
        return tuple(outputs)

    def size_of(self, task: PoolingTask) -> int:
        """Return how many numbers an answer has; 0: the task is not offered."""
        return self.heads[task].size if task in self.heads else 0


class DecoderTexts:
    """Hidden states of whole texts before the last norm; see `executor_svc.models.pooling.TextModel`."""

    def __init__(self, model: LanguageModel, backend: AttentionBackend, block_size: int, dtype: torch.dtype) -> None:
        self._model = model
        self._backend = backend
        sizes = [(each.num_kv_heads, each.head_dim, each.value_begin) for each in model.shape.caches]
        scratch = partial(ScratchCache, block_size, dtype=dtype, device=model.device)
        # One for all layers that are alike: each writes what it reads. Others may read what an earlier one wrote.
        self._caches = [scratch(*each) for each in sizes] if len({*sizes}) > 1 else [scratch(*sizes[0])] * len(sizes)

    @torch.inference_mode()
    def encode(self, texts: Sequence[PoolingInput]) -> Float32Array:
        """Return the hidden states of the tokens of some texts, one text after the other, [num_tokens, hidden_size]."""
        device = self._model.device
        rows = text_rows([len(text.token_ids) for text in texts], self._caches[0].block_size, device)
        caches = [cache.of_size(rows) for cache in self._caches]
        token_ids = np.concatenate([text.token_ids for text in texts]).astype(np.int64)
        positions = positions_of(rows.lengths).astype(np.int64)
        hidden = self._model.forward(
            torch.from_numpy(token_ids).to(device),
            torch.from_numpy(positions).to(device),
            caches,
            self._backend.plan(rows, caches[0]),
            torch.arange(len(token_ids), device=device),
            self._states_of(rows),
        )
        states: Float32Array = hidden.float().cpu().numpy()
        return states

    def _states_of(self, rows: AttentionMetadata) -> StepStates | None:
        """Return states for the layers that have one, which begin with the texts; None: there are none."""
        configs, num_rows = self._model.shape.states.values(), len(rows.lengths)
        if not configs:
            return None
        slots = np.arange(num_rows, dtype=np.int32)
        layers = LiveStates(configs, num_rows, self._model.device).layers
        return StepStates(StateRows(slots, rows.starts, rows.lengths), layers)


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


def text_rows(lengths: Sequence[int], block_size: int, device: torch.device) -> AttentionMetadata:
    """Return where the tokens of some texts are: one text after the other, none padded."""
    sizes = np.array(lengths, np.int32)
    num_blocks = -(-sizes // block_size)
    first_blocks = np.cumsum(num_blocks) - num_blocks
    tables = (first_blocks[:, None] + np.arange(num_blocks.max())[None]).astype(np.int32)
    slots = np.repeat(first_blocks * block_size, sizes) + positions_of(sizes)
    return AttentionMetadata(
        starts=np.zeros(len(sizes), np.int32),
        lengths=sizes,
        block_tables=tables,
        slot_mapping=torch.from_numpy(slots.astype(np.int64)).to(device),
    )


def positions_of(lengths: Int32Array) -> Int32Array:
    """Return the position of each token in its text, [num_tokens]."""
    begins = np.cumsum(lengths) - lengths
    positions: Int32Array = (np.arange(lengths.sum()) - np.repeat(begins, lengths)).astype(np.int32)
    return positions


class ScratchCache:
    """The keys and values of one layer of some texts; its memory is kept."""

    def __init__(
        self,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        value_begin: int = 0,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self._value_begin = value_begin
        self._shape = (block_size, num_kv_heads, head_dim)
        self._dtype, self._device = dtype, device
        self._cache = self._make(0)

    def of_size(self, rows: AttentionMetadata) -> LayerCache:
        """Return a cache with the blocks of some texts; what it holds is left over."""
        num_blocks = int((-(-rows.lengths // self.block_size)).sum())
        if len(self._cache.keys) < num_blocks:
            self._cache = self._make(num_blocks)
        return self._cache

    def _make(self, num_blocks: int) -> LayerCache:
        keys = torch.empty(num_blocks, *self._shape, dtype=self._dtype, device=self._device)
        return LayerCache(keys, keys if self._value_begin else torch.empty_like(keys), value_begin=self._value_begin)
