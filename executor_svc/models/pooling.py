"""From the hidden states of a text to its vector, or to its scores; text by text, so that no text touches another.

Sums are NumPy's over rows in their order, products are the C library's: the bits are the same alone and in a step
with others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from executor_svc.checkpoint.pooling_modules import PoolingModules
from octavo_shared.step_wire.step import Float32Array, PoolingInput, PoolingOutput, PoolingTask, RowFlag

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
