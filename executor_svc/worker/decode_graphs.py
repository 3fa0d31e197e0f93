"""Steps that only decode, recorded once for a ladder of batch sizes and replayed: a CUDA graph for each.

A replay launches some hundred kernels at the price of one. The kernels read and write the same memory each time, so
a step is first copied into tensors that stay. A batch is padded to the next size of the ladder with rows that are
harmless because they are like any other: one token at position 0, in a block that no sequence has.

With several ranks a graph holds their collectives. All ranks capture the same sizes in the same order, and replay the
same ones: which one a step takes follows from its layout alone.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from executor_svc.attention.interface import DecodeBatch, DecodePlanner, LayerCache, first_caches, join_plans
from executor_svc.device.transfer import copy_to_device, to_device
from executor_svc.models.language_model import LanguageModel
from executor_svc.worker.graph_capture import Capture
from executor_svc.worker.last_tokens import LastTokens
from octavo_shared.step_wire.batch_table import BatchTable, StepLayout


class DecodeGraphs:
    """Runs decode steps; see the top of this file. Making it captures all graphs, the largest first.

    Args:
        model: With its weights; nothing keeps a graph from holding it.
        caches: One a layer, with one block more than sequences get: the last one.
        planner: Of the attention.
        last_tokens: The last sampled tokens.
        max_num_blocks: Longest block table of a sequence.
        capture: Records a function.
        sizes: Of the batches, ascending; see `ladder`.
    """

    def __init__(
        self,
        model: LanguageModel,
        caches: Sequence[LayerCache],
        planner: DecodePlanner,
        last_tokens: LastTokens,
        max_num_blocks: int,
        capture: Capture,
        sizes: Sequence[int],
    ) -> None:
        self._model, self._caches, self._planner, self._last_tokens = model, caches, planner, last_tokens
        device = model.device
        self._sizes = sizes
        largest = sizes[-1]
        self._first_caches = first_caches(caches)
        self._spare_block_ids = [len(cache.keys) - 1 for cache in self._first_caches]
        self._rows = torch.arange(largest, device=device)
        # Token id, its place in `LastTokens`, position, slot of the cache of each group; a padding row in each column.
        spare = [len(cache.keys) * cache.block_size - cache.block_size for cache in self._first_caches]
        padding = np.array([0, 0, 0, *spare], np.int64)
        self._padding = np.repeat(padding[:, None], largest, axis=1)
        self._inputs = to_device(self._padding.copy(), device)
        self._block_tables = [
            torch.full((largest, max_num_blocks), block_id, dtype=torch.int32, device=device)
            for block_id in self._spare_block_ids
        ]
        with torch.inference_mode():
            self._replays = {size: capture(partial(self._forward, size)) for size in reversed(self._sizes)}

    def can_run(self, layout: StepLayout) -> bool:
        """Return whether a step only decodes, and not more than the largest graph."""
        num_rows = len(layout.slots)
        return layout.num_decodes == num_rows == len(layout.sample_rows) and num_rows <= self._sizes[-1]

    def run(self, table: BatchTable, layout: StepLayout) -> torch.Tensor:
        """Compute a step that `can_run`; return what `LanguageModel.logits` takes, [num_rows, hidden_size].

        The result is valid until the next call.
        """
        num_rows = len(layout.slots)
        size = next(size for size in self._sizes if size >= num_rows)
        slots, positions = layout.slots, layout.starts
        inputs = self._padding.copy()
        places = self._last_tokens.places_of(slots, positions)
        inputs[:3, :num_rows] = table.token_ids[slots, positions], places, positions
        for row, group in enumerate(table.groups, 3):
            inputs[row, :num_rows] = group.places_of(slots, positions)
        copy_to_device(inputs, self._inputs)
        for group, spare_block_id, tables in zip(table.groups, self._spare_block_ids, self._block_tables, strict=True):
            num_blocks = int(positions.max()) // group.block_size + 1
            block_tables = np.full((size, num_blocks), spare_block_id, np.int32)
            block_tables[:num_rows] = group.block_ids[slots, :num_blocks]
            tables[:size, :num_blocks].copy_(to_device(block_tables, tables.device))
        return self._replays[size]()[:num_rows]

    def release(self) -> None:
        """Free the graphs; nothing is run any more."""
        self._replays.clear()

    def _forward(self, size: int) -> torch.Tensor:
        """Run the model on the first `size` rows of the tensors that stay; return [size, hidden_size]."""
        token_ids, places, positions, *slot_mappings = self._inputs[:, :size]
        num_visible = (positions + 1).int()
        groups = zip(self._block_tables, slot_mappings, self._first_caches, strict=True)
        plan = join_plans(
            [
                self._planner.decode_plan(DecodeBatch(num_visible, tables[:size], slot_mapping), cache)
                for tables, slot_mapping, cache in groups
            ]
        )
        known = self._last_tokens.choose(token_ids, places)
        return self._model.forward(known, positions, self._caches, plan, self._rows[:size])
