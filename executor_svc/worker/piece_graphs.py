"""Steps with prompts as CUDA graphs in pieces: each graph is what lies between two reads of the cache.

How the cache is read follows the lengths of the rows, so no graph holds that. All else depends on the number of tokens
alone: it is recorded once for a ladder of numbers, and a layer is one graph and one read. A step is padded with tokens
that belong to no row: they are computed, and their keys and values go to a block that no sequence has.

Only small models gain: of others the device takes longer for a layer than the host for launching it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from executor_svc.attention.interface import (
    AttentionLayer,
    AttentionMetadata,
    CacheReader,
    LayerCache,
    ReadPlan,
    Rotation,
    first_caches,
)
from executor_svc.device.transfer import to_device
from executor_svc.models.language_model import LanguageModel
from executor_svc.worker.graph_capture import Cut, Launch, PieceCapture
from executor_svc.worker.last_tokens import LastTokens
from executor_svc.worker.step_tokens import StepTokens
from octavo_shared.step_wire.batch_table import BatchTable, StepLayout


@dataclass(frozen=True, slots=True)
class _Read:
    """A read of the cache between two pieces, with tensors that stay."""

    query: torch.Tensor  # [size, num_heads, head_dim]
    cache: LayerCache
    layer: AttentionLayer
    output: torch.Tensor  # [size, num_heads * value_dim]

    def launch(self, plans: Sequence[ReadPlan], num_tokens: int) -> None:
        plan = plans[self.cache.group]
        plan.read(self.query[:num_tokens], self.cache, self.layer, self.output[:num_tokens])


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A forward pass: a piece, a read, a piece, and so on, and a last piece."""

    pieces: Sequence[Launch]
    reads: Sequence[_Read]
    hidden: torch.Tensor  # [size, hidden_size]


class PieceGraphs:
    """Runs steps; see the top of this file. Making it captures all pieces, the largest first.

    Args:
        model: With its weights; nothing keeps a graph from holding it.
        caches: One a layer, with one block more than sequences get: the last one.
        backend: Of the attention.
        last_tokens: The last sampled tokens.
        capture: Records a function.
        sizes: Numbers of tokens, ascending.
    """

    def __init__(
        self,
        model: LanguageModel,
        caches: Sequence[LayerCache],
        backend: CacheReader,
        last_tokens: LastTokens,
        capture: PieceCapture,
        sizes: Sequence[int],
    ) -> None:
        self._model, self._caches, self._backend, self._last_tokens = model, caches, backend, last_tokens
        self._sizes = sizes
        self._first_caches = first_caches(caches)
        # Token id, its place in `LastTokens`, position, slot of the cache of each group; padding in each column.
        spare = [len(cache.keys) * cache.block_size - cache.block_size for cache in self._first_caches]
        self._padding = np.repeat(np.array([0, 0, 0, *spare], np.int64)[:, None], sizes[-1], axis=1)
        self._inputs = to_device(self._padding.copy(), model.device)
        self._rows = torch.arange(sizes[-1], device=model.device)
        self._kept: dict[str, torch.Tensor] = {}  # what pieces and reads leave to each other; all layers share it
        with torch.inference_mode():
            self._recorded = {size: self._record(size, capture) for size in reversed(sizes)}

    def can_run(self, layout: StepLayout) -> bool:
        """Return whether a step has no more tokens than the largest pieces."""
        return layout.num_tokens <= self._sizes[-1]

    def run(self, table: BatchTable, layout: StepLayout) -> torch.Tensor:
        """Compute a step that `can_run`; return what `LanguageModel.logits` takes, of all tokens, in row order.

        The result, [num_tokens, hidden_size], is valid until the next call.
        """
        tokens, num_tokens = StepTokens.of(layout), layout.num_tokens
        slots, positions = tokens.slots, tokens.positions
        size = next(size for size in self._sizes if size >= num_tokens)
        inputs = self._padding[:, :size].copy()
        places = self._last_tokens.places_of(slots, positions)
        inputs[:3, :num_tokens] = table.token_ids[slots, positions], places, positions
        for row, group in enumerate(table.groups, 3):
            inputs[row, :num_tokens] = group.places_of(slots, positions)
        self._inputs[:, :size].copy_(to_device(inputs, self._inputs.device))
        plans = []
        for row, (group, cache) in enumerate(zip(table.groups, self._first_caches, strict=True), 3):
            block_tables = group.block_ids[layout.slots, : -(-tokens.longest // group.block_size)]
            slot_mapping = self._inputs[row, :num_tokens]
            metadata = AttentionMetadata(layout.starts, layout.lengths, block_tables, slot_mapping)
            plans.append(self._backend.plan(metadata, cache))
        recorded = self._recorded[size]
        for piece, read in zip(recorded.pieces, recorded.reads, strict=False):
            piece()
            read.launch(plans, num_tokens)
        recorded.pieces[-1]()
        return recorded.hidden[:num_tokens]

    def release(self) -> None:
        """Free the graphs; nothing is run any more."""
        self._recorded.clear()

    def _record(self, size: int, capture: PieceCapture) -> _Recorded:
        reads: list[_Read] = []
        pieces, hidden = capture.in_pieces(partial(self._forward, size, reads))
        return _Recorded(pieces, reads, hidden)

    def _forward(self, size: int, reads: list[_Read], cut: Cut) -> torch.Tensor:
        """Run the model on the first `size` tokens of the tensors that stay, but for reads; return hidden states."""
        reads.clear()
        token_ids, places, positions, *slot_mappings = self._inputs[:, :size]
        known = self._last_tokens.choose(token_ids, places)
        plan = _CuttingPlan(self._backend, slot_mappings, self._keep, reads, cut)
        return self._model.forward(known, positions, self._caches, plan, self._rows[:size])

    def _keep(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory that stays, of a shape that begins with a size; the largest size asks first."""
        count = int(np.prod(shape))
        kept = self._kept.get(name)
        if kept is None or len(kept) < count:  # a wider layer; what was kept is held by those who have it
            kept = self._kept[name] = torch.empty(count, dtype=dtype, device=self._model.device)
        return kept[:count].view(shape)


@dataclass(frozen=True, slots=True)
class _CuttingPlan:
    """An `AttentionPlan` that writes keys and values in a piece, leaves the read to be launched later, and cuts."""

    backend: CacheReader
    slot_mappings: Sequence[torch.Tensor]  # of each cache group
    keep: Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
    reads: list[_Read]
    cut: Cut

    def attend(
        self, qkv: torch.Tensor, rotation: Rotation | None, cache: LayerCache, layer: AttentionLayer
    ) -> torch.Tensor:
        query = self.backend.write(qkv, rotation, self.slot_mappings[cache.group], cache)
        num_tokens, num_heads, _ = query.shape
        kept = self.keep("query", tuple(query.shape), query.dtype).copy_(query)
        output = self.keep("output", (num_tokens, num_heads * cache.value_dim), query.dtype)
        self.reads.append(_Read(kept, cache, layer, output))
        self.cut()
        return output
