"""What the flash-attn libraries take and return: their signatures, their demands, and the result in plain torch.

Signatures and demands are those of flash-attn 2.8.3 (`flash_attn/flash_attn_interface.py`,
`csrc/flash_attn/flash_api.cpp`) and of its version 3 (`hopper/flash_attn_interface.py`, `hopper/flash_api.cpp`).
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

# Keys that a kernel reads at once: it begins at a multiple, also where a window begins later.
TILE_KEYS = 128
# What the stand-ins compute with; they have no meaning for the other arguments.
UNDERSTOOD = {
    *("q", "k", "v", "k_cache", "v_cache", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    *("cache_seqlens", "block_table", "page_table", "num_splits"),
    *("softmax_scale", "causal", "window_size", "softcap", "alibi_slopes"),
}

Call = tuple[str, dict[str, object]]  # the function, and the arguments that it was given


@contextmanager
def flash_attn_2() -> Iterator[list[Call]]:
    """Put the stand-in of version 2 in place; yields the calls that it gets."""
    with _library("flash_attn", flash_attn_varlen_func_2, flash_attn_with_kvcache_2) as calls:
        yield calls


@contextmanager
def flash_attn_3() -> Iterator[list[Call]]:
    """Put the stand-in of version 3 in place; yields the calls that it gets."""
    with _library("flash_attn_interface", flash_attn_with_kvcache_3) as calls:
        yield calls


def flash_attn_varlen_func_2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """Version 2, rows of any length."""
    assert block_table is not None
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    key_ends = _checked_ends(cu_seqlens_k, len(block_table))
    assert key_ends.diff().max() <= max_seqlen_k
    scores = _Scores(softmax_scale, causal, window_size, softcap, alibi_slopes)
    query_ends = _checked_ends(cu_seqlens_q, len(block_table), len(q), max_seqlen_q)
    return _attend(q, k, v, query_ends, key_ends.diff(), block_table, scores)


def flash_attn_with_kvcache_2(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    """Version 2, rows of the same length."""
    assert k is v is None, "what is new is in the cache already"
    assert cache_seqlens is not None
    assert block_table is not None
    assert k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert num_splits <= 128, "num_splits > 128 not supported"
    batch_size, seqlen_q = q.shape[:2]
    scores = _Scores(softmax_scale, causal, window_size, softcap, alibi_slopes)
    query_ends = torch.arange(batch_size + 1) * seqlen_q
    return _attend(q.flatten(0, 1), k_cache, v_cache, query_ends, cache_seqlens, block_table, scores).view(q.shape)


def flash_attn_with_kvcache_3(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    """Version 3, rows of any length."""
    assert k is v is None, "what is new is in the cache already"
    assert cache_seqlens is not None
    assert page_table is not None
    assert cu_seqlens_q is not None
    assert num_splits <= 256, "num_splits > 256 not supported"
    assert max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided"
    scores = _Scores(softmax_scale, causal, window_size, softcap, None)
    query_ends = _checked_ends(cu_seqlens_q, len(page_table), len(q), max_seqlen_q)
    return _attend(q, k_cache, v_cache, query_ends, cache_seqlens, page_table, scores)


@contextmanager
def _library(name: str, *functions: Callable[..., torch.Tensor]) -> Iterator[list[Call]]:
    calls: list[Call] = []
    module: Any = ModuleType(name)
    for function in functions:
        public_name = function.__name__.removesuffix("_2").removesuffix("_3")
        setattr(module, public_name, _recorded(function, public_name, calls))
    with patch.dict(sys.modules, {name: module}):
        yield calls


def _recorded(function: Callable[..., torch.Tensor], name: str, calls: list[Call]) -> Callable[..., torch.Tensor]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(*args, **kwargs).arguments  # TypeError: there is no such argument
        assert given.keys() <= UNDERSTOOD
        calls.append((name, dict(given)))
        return function(*args, **kwargs)

    return recorded


@dataclass(frozen=True, slots=True)
class _Scores:
    scale: float | None
    causal: bool
    window: tuple[int, int]
    softcap: float
    alibi_slopes: torch.Tensor | None

    def check(self, num_heads: int) -> None:
        assert self.scale is not None
        assert self.causal, "without it a query sees the tokens after it"
        assert self.window[0] >= -1
        assert self.window == (-1, -1) or self.window[1] == 0
        assert self.softcap >= 0
        if self.alibi_slopes is not None:
            assert self.alibi_slopes.dtype == torch.float32
            assert self.alibi_slopes.shape == (num_heads,)
            assert self.alibi_slopes.stride(-1) == 1

    def weights(self, products: torch.Tensor, query_positions: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return softmax weights from products [num_heads, num_queries, num_keys]; nothing is seen past a query."""
        assert self.scale is not None
        distances = positions - query_positions[:, None]
        scores = products * self.scale
        if self.softcap > 0:
            scores = self.softcap * (scores / self.softcap).tanh()
        if self.alibi_slopes is not None:
            scores = scores - self.alibi_slopes.double()[:, None, None] * distances.abs()
        hidden = distances > 0
        if self.window[0] >= 0:
            hidden = hidden | (distances < -self.window[0])
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_ends: torch.Tensor,
    num_keys: torch.Tensor,
    table: torch.Tensor,
    scores: _Scores,
) -> torch.Tensor:
    """Attend in float64, with what the kernels read: whole tiles from a window's first key on, nothing past the end.

    Weights of 0 do not help against NaN.
    """
    _check_tensors(q, k_cache, v_cache, num_keys, table)
    scores.check(q.shape[1])
    page_size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    output = torch.empty(q.shape, dtype=q.dtype)
    for row, end in enumerate(num_keys.tolist()):
        tokens = slice(int(query_ends[row]), int(query_ends[row + 1]))
        query = q[tokens].double().movedim(1, 0)  # [num_heads, num_queries, head_dim]
        assert end >= query.shape[1], "a query would see nothing"
        query_positions = torch.arange(end - query.shape[1], end)
        first = 0 if scores.window[0] < 0 else max(0, int(query_positions[0]) - scores.window[0])
        positions = torch.arange(first // TILE_KEYS * TILE_KEYS, end)
        pages = table[row, positions // page_size].long()
        keys, values = (
            pool[pages, positions % page_size].double().movedim(1, 0).repeat_interleave(group, 0)
            for pool in (k_cache, v_cache)
        )
        weights = scores.weights(query @ keys.transpose(1, 2), query_positions, positions)
        output[tokens] = (weights @ values).movedim(0, 1).to(q.dtype)
    return output


def _check_tensors(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, num_keys: torch.Tensor, table: torch.Tensor
) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type"
    assert q.dtype == k_cache.dtype == v_cache.dtype, "query and key must have the same dtype"
    for tensor in (q, k_cache, v_cache):
        assert tensor.stride(-1) == 1, "Input tensor must have contiguous last dimension"
    num_pages, page_size, num_kv_heads, head_dim = k_cache.shape
    assert v_cache.shape == k_cache.shape
    assert q.shape[1] % num_kv_heads == 0, "Number of heads in key/value must divide number of heads in query"
    assert q.shape[2] == head_dim
    assert head_dim <= 256, "FlashAttention forward only supports head dimension at most 256"
    assert head_dim % 8 == 0, "head_size must be a multiple of 8; the wrapper would pad, and copy the cache"
    assert table.dtype == torch.int32, "block_table must have dtype torch.int32"
    assert table.stride(-1) == 1, "block_table must have contiguous last dimension"
    assert num_keys.dtype == torch.int32, "seqlens_k must have dtype int32"
    assert num_keys.shape == (len(table),)
    assert num_keys.is_contiguous()
    assert num_keys.max() <= table.shape[1] * page_size, "a sequence does not fit its row of the table"
    assert table.min() >= 0, "an id is none of the pool"
    assert table.max() < num_pages, "an id is none of the pool"


def _checked_ends(
    ends: torch.Tensor, num_rows: int, num_tokens: int | None = None, longest: int | None = None
) -> torch.Tensor:
    assert ends.dtype == torch.int32, "cu_seqlens must have dtype int32"
    assert ends.is_contiguous(), "cu_seqlens must be contiguous"
    assert ends.shape == (num_rows + 1,)
    assert ends[0] == 0
    assert ends.diff().min() >= 1
    assert num_tokens is None or ends[-1] == num_tokens
    assert longest is None or ends.diff().max() <= longest
    return ends
