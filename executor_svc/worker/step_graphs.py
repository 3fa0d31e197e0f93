"""Which CUDA graphs a worker has, what they take, and making them."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from executor_svc.attention.interface import AttentionBackend, CacheReader, DecodePlanner, LayerCache
from executor_svc.device.memory import GpuMemory
from executor_svc.models.decoder import Decoder
from executor_svc.models.language_model import LanguageModel
from executor_svc.parallel.group import TensorParallelGroup
from executor_svc.worker.decode_graphs import DecodeGraphs
from executor_svc.worker.graph_capture import Capture, PieceCapture, ladder, measure_graph_bytes
from executor_svc.worker.last_tokens import LastTokens
from executor_svc.worker.piece_graphs import PieceGraphs
from octavo_shared.process.events import Event

# Larger batches keep a GPU busy without a graph.
MAX_BATCH_SIZE = 512
# So do steps of more tokens, or of larger models: 3 B parameters in 16 bits.
MAX_PIECE_TOKENS = 1024
MAX_PIECE_WEIGHT_BYTES = 6 * 10**9

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """The graphs of a worker; None: it has none of a kind."""

    decodes: DecodeGraphs | None = None
    pieces: PieceGraphs | None = None

    def release(self) -> None:
        """Free the graphs; nothing is run any more."""
        for graphs in (self.decodes, self.pieces):
            if graphs is not None:
                graphs.release()


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """What is recorded of a model.

    Args:
        model: With its weights.
        backend: Of the attention.
        max_num_blocks: Longest block table of a sequence.
        decode_sizes: Batches that only decode, ascending; empty: none is recorded.
        piece_sizes: Numbers of tokens of other steps; the same.
    """

    model: LanguageModel
    backend: AttentionBackend
    max_num_blocks: int
    decode_sizes: Sequence[int]
    piece_sizes: Sequence[int]

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        backend: AttentionBackend,
        capture: Capture,
        group: TensorParallelGroup,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_blocks: int,
    ) -> "GraphPlan | None":
        """Return what `capture` can record; None, with a line in the log: nothing."""
        reason = model.why_not_capturable
        if reason is None and not isinstance(backend, DecodePlanner):
            reason = "the attention backend plans its steps on the host"
        if reason is not None:
            _logger.info(Event("cuda_graphs", sizes=0, reason=reason))
            return None
        pieces: Sequence[int] = ()
        gains = isinstance(capture, PieceCapture) and _gains_by_pieces(model, backend)
        if group.least(int(gains)):  # all ranks record and replay the same
            pieces = ladder(min(max_num_batched_tokens, MAX_PIECE_TOKENS), 8)
        return cls(model, backend, max_num_blocks, ladder(min(max_num_seqs, MAX_BATCH_SIZE)), pieces)

    def measure_bytes(
        self, memory: GpuMemory, capture: Capture, caches: Sequence[LayerCache], last_tokens: LastTokens
    ) -> int:
        """Return what all graphs will take of the device; caches of any size will do."""
        decodes = partial(self._make_decodes, caches, last_tokens, self.decode_sizes[-2:])
        num_bytes = measure_graph_bytes(memory, capture, len(self.decode_sizes), decodes)
        if self.piece_sizes:
            pieces = partial(self._make_pieces, caches, last_tokens, self.piece_sizes[-2:])
            num_bytes += measure_graph_bytes(memory, capture, len(self.piece_sizes), pieces)
        return num_bytes

    def make(
        self, capture: Capture, caches: Sequence[LayerCache], last_tokens: LastTokens, group: TensorParallelGroup
    ) -> StepGraphs:
        """Capture all graphs; see `DecodeGraphs` and `PieceGraphs`."""
        begin_s = time.perf_counter()
        graphs = StepGraphs(
            self._make_decodes(caches, last_tokens, self.decode_sizes, capture),
            self._make_pieces(caches, last_tokens, self.piece_sizes, capture) if self.piece_sizes else None,
        )
        group.release_at_end(graphs)
        sizes = {"sizes": len(self.decode_sizes), "piece_sizes": len(self.piece_sizes)}
        _logger.info(Event("cuda_graphs", **sizes, seconds=round(time.perf_counter() - begin_s, 1)))
        return graphs

    def _make_decodes(
        self, caches: Sequence[LayerCache], last_tokens: LastTokens, sizes: Sequence[int], capture: Capture
    ) -> DecodeGraphs:
        assert isinstance(self.backend, DecodePlanner), "else there is no plan"
        return DecodeGraphs(self.model, caches, self.backend, last_tokens, self.max_num_blocks, capture, sizes)

    def _make_pieces(
        self, caches: Sequence[LayerCache], last_tokens: LastTokens, sizes: Sequence[int], capture: Capture
    ) -> PieceGraphs:
        assert isinstance(self.backend, CacheReader), "else there are no sizes"
        assert isinstance(capture, PieceCapture), "else there are no sizes"
        return PieceGraphs(self.model, caches, self.backend, last_tokens, capture, sizes)


def _gains_by_pieces(model: LanguageModel, backend: AttentionBackend) -> bool:
    """Return whether a model that graphs can hold is so small that the host is behind, and its cache is read apart."""
    if not isinstance(model, Decoder) or not isinstance(backend, CacheReader):
        return False
    return model.mtp is None and model.weights.map.num_bytes <= MAX_PIECE_WEIGHT_BYTES
