"""Steps that only decode, recorded once for a ladder of batch sizes and replayed: a CUDA graph for each.

A replay launches some hundred kernels at the price of one. The kernels read and write the same memory each time, so
a step is first copied into tensors that stay. A batch is padded to the next size of the ladder with rows that are
harmless because they are like any other: one token at position 0, in a block that no sequence has.

With several ranks a graph holds their collectives. All ranks capture the same sizes in the same order, and replay the
same ones: which one a step takes follows from its layout alone.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from executor_svc.attention.interface import (
    AttentionBackend,
    DecodeBatch,
    DecodePlanner,
    LayerCache,
    first_caches,
    join_plans,
)
from executor_svc.device.memory import GpuMemory
from executor_svc.device.transfer import to_device
from executor_svc.models.language_model import LanguageModel
from executor_svc.worker.last_tokens import LastTokens
from octavo_shared.process.events import Event
from octavo_shared.step_wire.batch_table import BatchTable, StepLayout

# Larger batches keep a GPU busy without a graph.
MAX_BATCH_SIZE = 512

_logger = logging.getLogger(__name__)

Replay = Callable[[], torch.Tensor]
# Runs a function once, recording what it launches; the result launches it again and returns the same tensor.
Capture = Callable[[Callable[[], torch.Tensor]], Replay]


class GraphCapture(PieceCapture, Protocol):
    """Records functions whole, as `Capture` does, or in pieces."""

    def __call__(self, run: Callable[[], torch.Tensor]) -> Replay:
        """See `Capture`."""


class CudaCapture:
    """Captures CUDA graphs with their memory in one pool: they run in turn. See `Capture`."""

    def __init__(self) -> None:
        # One for all: a library keeps work space for each stream that it has seen.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], torch.Tensor]) -> Replay:
        """Capture `run`."""
        self._warm_up(run)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile: that of NCCL asks whether collectives before this one have ended.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay

    def in_pieces(self, run: Callable[[Cut], torch.Tensor]) -> tuple[list[Launch], torch.Tensor]:
        """Capture `run` in pieces; see `PieceCapture`. A piece may reuse what the piece before it has freed."""
        self._warm_up(lambda: run(lambda: None))
        torch.cuda.synchronize()
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        with torch.cuda.stream(self._stream):
            begin()
            try:
                output = run(cut)
            finally:
                graphs[-1].capture_end()
        return [graph.replay for graph in graphs], output

    def _warm_up(self, run: Callable[[], object]) -> None:
        """Run a function: libraries choose their kernels and take their work space when they are first called."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)


def graph_capture(device: torch.device) -> CudaCapture | None:
    """Return what captures graphs on a device, if anything does."""
    return CudaCapture() if device.type == "cuda" else None


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the ladder up to `max_num_seqs`: padding is at most 7 rows, or a fifth of the batch."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < MAX_BATCH_SIZE:
        sizes.append(sizes[-1] + max(8, 2 ** (sizes[-1].bit_length() - 3)))
    limit = min(max_num_seqs, MAX_BATCH_SIZE)
    return [size for size in sizes if size < limit] + [limit]


def measure_graph_bytes(
    memory: GpuMemory, capture: Capture, num_graphs: int, make_graphs: Callable[[Capture], object]
) -> int:
    """Return what so many graphs will take of the device: of torch's memory, and of the driver's.

    They share their memory, so the largest takes most of it. What one more takes is measured with the next to largest,
    and taken for all others.

    Args:
        memory: Of the device.
        capture: Records a function.
        num_graphs: How many there will be.
        make_graphs: Captures the largest, then the next, with what it is given; they are not kept.
    """
    memory.release()
    free = [memory.free()]

    def capture_and_measure(run: Callable[[], torch.Tensor]) -> Replay:
        replay = capture(run)
        memory.release()
        free.append(memory.free())
        return replay

    make_graphs(capture_and_measure)
    taken = [max(0, before - after) for before, after in pairwise(free)]
    memory.release()
    remains = max(0, free[0] - memory.free())  # work space of libraries, for the stream of the capture
    return remains + sum(taken[:1]) + sum(taken[1:2]) * (num_graphs - 1)


def sizes_to_capture(model: LanguageModel, backend: AttentionBackend, max_num_seqs: int) -> list[int]:
    """Return the ladder; empty, with a line in the log, if the model or its attention cannot have graphs."""
    reason = model.why_not_capturable
    if reason is None and not isinstance(backend, DecodePlanner):
        reason = "the attention backend plans its steps on the host"
    if reason is None:
        return batch_sizes(max_num_seqs)
    _logger.info(Event("cuda_graphs", sizes=0, reason=reason))
    return []


class DecodeGraphs:
    """Runs decode steps; see the top of this file. Making it captures all graphs, the largest first.

    Args:
        model: With its weights; nothing keeps a graph from holding it.
        caches: One a layer, with one block more than sequences get: the last one.
        planner: Of the attention.
        last_tokens: The last sampled tokens.
        max_num_blocks: Longest block table of a sequence.
        capture: Records a function.
        sizes: Of the batches, ascending; see `batch_sizes`.
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
        self._inputs.copy_(to_device(inputs, self._inputs.device))
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
