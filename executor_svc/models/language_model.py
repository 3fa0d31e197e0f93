"""What the executor needs of a model, ours or transformers'."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from executor_svc.attention.interface import AttentionPlan, CachedLayer, LayerCache
from executor_svc.models.state_config import SlotState
from executor_svc.states.live_states import StepStates


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that the cache and the scheduler depend on."""

    vocab_size: int
    max_position_embeddings: int
    caches: tuple[CachedLayer, ...]  # of each layer with keys and values of its own
    states: Mapping[int, SlotState] = field(default_factory=dict)  # of this rank, by layer; the others attend
    # Whether a sequence, or the input of an encoder, cannot be longer; else it is what the model was trained on.
    has_position_limit: bool = True

    @property
    def num_layers(self) -> int:
        """Number of layers with keys and values of their own."""
        return len(self.caches)

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """Which of all layers these are: no other layer comes between them."""
        return tuple(layer for layer in range(self.num_layers + len(self.states)) if layer not in self.states)

    @property
    def state_bytes(self) -> int:
        """Size of the states of one sequence, of all layers."""
        return sum(state.state_bytes for state in self.states.values())

    @property
    def sliding_window_tokens(self) -> int:
        """Return the tokens after which no layer sees a token any more; 0: some layer sees all."""
        windows = [cache.window or 0 for cache in self.caches]
        return 0 if 0 in windows else max(windows)


class LanguageModel(Protocol):
    """A decoder on the paged KV cache."""

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    @property
    def hidden_size(self) -> int:
        """Numbers in a hidden state."""

    @property
    def why_not_capturable(self) -> str | None:
        """Why a CUDA graph cannot hold `forward`, in a few words; all ranks of a group say the same.

        None: it launches the same work for every batch of a size and waits for nothing.
        """

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        attention: AttentionPlan,
        wanted: torch.Tensor,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        """Run the decoder; keys and values of all tokens enter the caches, and all tokens the states.

        Args:
            token_ids: [num_tokens] int64 or int32.
            positions: [num_tokens], each token's position in its sequence.
            caches: One a layer with attention.
            attention: The plan of this step.
            wanted: The tokens whose hidden states are wanted, [num_rows] int64.
            states: Of the layers with a state, and the rows of the step; None: there are none.

        Returns:
            What `logits` takes, [num_rows, hidden_size].
        """

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what `forward` returns, [num_rows, hidden_size], as the head norms it."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Map hidden states [num_rows, hidden_size] to raw logits, [num_rows, vocab_size] float32.

        All ranks of a group call this together; only rank 0 gets the logits, the others None.
        """
