"""What the rows of a step read of the cache under one window, on any device; see `torch_backend.py`.

Rows of one token (decodes) are put into buckets of similar length, longer rows (prefill chunks) stand
alone. Blocks that lie wholly before the window of a row are not named: other sequences may have them.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from executor_svc.attention.interface import AttentionMetadata, LayerCache
from octavo_shared.step_wire.step import Int32Array

# Rows that see up to this many tokens share a bucket: splitting them saves less than a launch costs.
MIN_BUCKET_TOKENS = 128


@dataclass(frozen=True)
class DecodeBucket:
    """Decode rows that see about as many tokens, padded to whole blocks and to the longest."""

    rows: torch.Tensor | None  # [n] int64 token indices; None: all tokens of the step, in order
    block_ids: torch.Tensor  # [n * num_blocks]; padded with block 0
    padding: torch.Tensor  # [num_padded] indices into the gathered slots [n * num_keys] that the row does not see
    key_distances: npt.NDArray[np.int64]  # [n, num_keys] key position - query position
    is_padding: npt.NDArray[np.bool_]  # [n, num_keys]
    dtype: torch.dtype  # of the queries

    @cached_property
    def distances(self) -> torch.Tensor:
        """Key position - query position, [n, 1, num_keys] in the number format of scores."""
        return torch.from_numpy(self.key_distances[:, None]).to(self.block_ids.device, score_dtype(self.dtype))

    @cached_property
    def hidden(self) -> torch.Tensor:
        """Whether the query does not see the key, [n, 1, num_keys] bool."""
        return torch.from_numpy(self.is_padding[:, None]).to(self.block_ids.device)

    @cached_property
    def mask(self) -> torch.Tensor:
        """0 where the query sees the key, else -inf, [n, 1, 1, num_keys]."""
        mask = np.where(self.is_padding, -np.inf, 0.0)[:, None, None]
        return torch.from_numpy(mask).to(self.block_ids.device, self.dtype)


@dataclass(frozen=True)
class PrefillChunk:
    """A row of several tokens. `block_ids` is None when it sees keys of this step only."""

    tokens: slice
    start: int  # position of the first token
    end: int  # behind the last token
    first_key: int  # position of the first key that one of the tokens sees
    window: int | None  # None: all tokens see the keys from the first one on
    block_ids: torch.Tensor | None  # [num_blocks]
    first_slot: int  # of `first_key` among the gathered slots
    device: torch.device
    dtype: torch.dtype  # of the queries

    @property
    def num_keys(self) -> int:
        """Positions from `first_key` to the last token."""
        return self.end - self.first_key

    @cached_property
    def distances(self) -> torch.Tensor:
        """Key position - query position, [1, length, num_keys] in the number format of scores."""
        keys = torch.arange(self.num_keys, dtype=score_dtype(self.dtype), device=self.device)
        return keys - keys[self.start - self.first_key :, None].unsqueeze(0)

    @cached_property
    def hidden(self) -> torch.Tensor:
        """Whether the query does not see the key, [1, length, num_keys] bool."""
        hidden = self.distances > 0
        return hidden if self.window is None else hidden.logical_or_(self.distances <= -self.window)

    @cached_property
    def mask(self) -> torch.Tensor | None:
        """0 where the query sees the key, else -inf, [length, num_keys]; None: the square causal mask."""
        if self.first_key == self.start and self.window is None:
            return None
        mask = torch.zeros(self.hidden.shape[1:], dtype=self.dtype, device=self.device)
        return mask.masked_fill_(self.hidden[0], -torch.inf)


@dataclass(frozen=True, slots=True)
class StepReads:
    """The rows of a step under one window."""

    buckets: list[DecodeBucket]
    chunks: list[PrefillChunk]

    @property
    def max_num_blocks(self) -> int:
        """Blocks of the largest gather."""
        gathered = [bucket.block_ids for bucket in self.buckets]
        gathered += [chunk.block_ids for chunk in self.chunks if chunk.block_ids is not None]
        return max((len(block_ids) for block_ids in gathered), default=0)


def plan_reads(metadata: AttentionMetadata, window: int | None, cache: LayerCache, dtype: torch.dtype) -> StepReads:
    """Return what the rows of a step read in layers that see the last `window` positions (None: all).

    `dtype` is the format of the queries.
    """
    num_decodes = _num_leading_decodes(metadata.lengths)
    firsts = np.zeros_like(metadata.starts) if window is None else np.maximum(metadata.starts + 1 - window, 0)
    lengths = (metadata.starts + 1 - firsts)[:num_decodes]
    token_ends = np.cumsum(metadata.lengths)
    return StepReads(
        [_plan_bucket(metadata, rows, firsts[rows], num_decodes, cache, dtype) for rows in _bucket_by_length(lengths)],
        [
            _plan_chunk(metadata, row, int(token_ends[row]), int(firsts[row]), window, cache, dtype)
            for row in range(num_decodes, len(token_ends))
        ],
    )


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the number format of scores: float32, or the queries' own if that is wider."""
    return torch.promote_types(dtype, torch.float32)


def _num_leading_decodes(lengths: Int32Array) -> int:
    """Count the rows of one token before the first longer one; they are their own token indices."""
    longer = np.flatnonzero(lengths > 1)
    return int(longer[0]) if len(longer) else len(lengths)


def _bucket_by_length(lengths: Int32Array) -> list[Int32Array]:
    """Split rows so that none is padded to more than twice its length, short ones apart."""
    order = np.argsort(lengths, kind="stable").astype(np.int32)
    ascending = lengths[order]
    buckets: list[Int32Array] = []
    end = len(order)
    while end:
        longest = ascending[end - 1]
        begin = int(np.searchsorted(ascending, longest // 2)) if longest > MIN_BUCKET_TOKENS else 0
        buckets.append(np.sort(order[begin:end]))
        end = begin
    return buckets


def _plan_bucket(
    metadata: AttentionMetadata,
    rows: Int32Array,
    firsts: Int32Array,
    num_decodes: int,
    cache: LayerCache,
    dtype: torch.dtype,
) -> DecodeBucket:
    """Plan decode rows that see the positions from `firsts`, [n], on."""
    device, block_size = cache.keys.device, cache.block_size
    positions = metadata.starts[rows]
    first_blocks, last_blocks = firsts // block_size, positions // block_size
    block_indices = first_blocks[:, None] + np.arange((last_blocks - first_blocks).max() + 1)
    is_used = block_indices <= last_blocks[:, None]
    block_ids = np.where(is_used, metadata.block_tables[rows[:, None], np.where(is_used, block_indices, 0)], 0)
    key_positions = first_blocks[:, None] * block_size + np.arange(block_indices.shape[1] * block_size)
    is_padding = (key_positions > positions[:, None]) | (key_positions < firsts[:, None])
    covers_step = num_decodes == len(rows) == len(metadata.lengths)
    return DecodeBucket(
        rows=None if covers_step else torch.from_numpy(rows.astype(np.int64)).to(device),
        block_ids=torch.from_numpy(block_ids.ravel()).to(device),
        padding=torch.from_numpy(np.flatnonzero(is_padding)).to(device),
        key_distances=key_positions - positions[:, None],
        is_padding=is_padding,
        dtype=dtype,
    )


def _plan_chunk(
    metadata: AttentionMetadata,
    row: int,
    token_end: int,
    first_key: int,
    window: int | None,
    cache: LayerCache,
    dtype: torch.dtype,
) -> PrefillChunk:
    """Plan a row that sees the positions from `first_key` on with its first token."""
    start, length = int(metadata.starts[row]), int(metadata.lengths[row])
    device, block_size = cache.keys.device, cache.block_size
    first_block, end_block = first_key // block_size, -(-(start + length) // block_size)
    block_ids: torch.Tensor | None = None
    if first_key < start:
        block_ids = torch.from_numpy(metadata.block_tables[row, first_block:end_block].copy()).to(device)
    return PrefillChunk(
        tokens=slice(token_end - length, token_end),
        start=start,
        end=start + length,
        first_key=first_key,
        window=None if window is None or start + length <= window else window,
        block_ids=block_ids,
        first_slot=first_key - first_block * block_size,
        device=device,
        dtype=dtype,
    )
