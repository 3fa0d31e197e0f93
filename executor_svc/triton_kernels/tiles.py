"""The sizes of tiles, warps and pipelines of the attention kernels, by number format and head size.

Launchers and the compile tests read the same tables. In 16 bits the keys and values of a tile are up to 32 KiB. The
compiler splits five stages into block ids, keys and values, and work, and keeps two tiles of keys and values in shared
memory: a program has about 72 KiB of it, so that two run on a multiprocessor of compute capability 8.0 (164 KiB), three
on one of 9.0 (228 KiB): see `resident_programs`. Float32 has no tensor cores without rounding; its tiles only keep
clear of register spills.

Decodes and chunks have tiles of their own, which are fastest, and so sums in orders of their own. Where bits must not
depend on the schedule (`--numerics invariant`) both have `invariant_tile`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

# Of a layer that sees everything. No difference with a position leaves int32.
WIDEST_WINDOW: Final = 2**31 - 1
# Of the keys of a row; the reduction is compiled for this many, whatever their number.
MAX_SPLITS: Final = 32
# Of `resident_programs`.
MAX_RESIDENT_PROGRAMS: Final = 3
# Of the invariant attention: positions that are added up together, by any program. A split is enough work to be worth a
# program: 256 KiB of keys and values in 16 bits and 128 dimensions.
SPLIT_KEYS: Final = 512
# What the tensor cores take.
MIN_MATRIX_ROWS: Final = 16


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """How a program of `decode_kernel` works."""

    num_keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """How a program of `prefill_kernel` works."""

    num_queries: int  # tokens times heads of a group
    num_keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class InvariantTile:
    """How a program of `attend_kernel` works: on chunks and decodes alike, on every device."""

    num_queries: int  # tokens times heads of a group
    num_keys: int  # a divisor of SPLIT_KEYS
    num_warps: int
    num_stages: int


# By padded head size.
_DECODE_16_BITS: Final = {
    16: DecodeTile(128, 4, 5),
    32: DecodeTile(128, 4, 5),
    64: DecodeTile(128, 4, 5),
    128: DecodeTile(64, 4, 5),
    256: DecodeTile(32, 8, 5),
}
# A cache of 8 bits: what is widened fills registers, so that with as many keys two programs would run, not three.
_DECODE_8_BITS: Final = {
    16: DecodeTile(64, 4, 5),
    32: DecodeTile(64, 4, 5),
    64: DecodeTile(64, 4, 5),
    128: DecodeTile(32, 4, 5),
    256: DecodeTile(16, 4, 5),
}
_DECODE_FLOAT32: Final = {
    16: DecodeTile(32, 4, 5),
    32: DecodeTile(32, 4, 5),
    64: DecodeTile(32, 4, 5),
    128: DecodeTile(16, 4, 5),
    256: DecodeTile(16, 8, 5),
}
# Any device: less than the 99 KiB that a program may have on 8.6, 8.9 and 12.0.
_PREFILL_16_BITS: Final = {
    16: PrefillTile(128, 64, 8, 5),
    32: PrefillTile(128, 64, 8, 5),
    64: PrefillTile(128, 64, 8, 5),
    128: PrefillTile(128, 32, 8, 5),
    256: PrefillTile(64, 16, 8, 5),
}
# Hopper and the data-centre Blackwell: 227 KiB, and products that want many keys.
_PREFILL_16_BITS_LARGE: Final = {
    **_PREFILL_16_BITS,
    128: PrefillTile(128, 64, 8, 5),
    256: PrefillTile(64, 32, 8, 5),
}
_PREFILL_FLOAT32: Final = {
    16: PrefillTile(16, 32, 4, 5),
    32: PrefillTile(16, 32, 4, 5),
    64: PrefillTile(16, 32, 4, 5),
    128: PrefillTile(16, 16, 4, 5),
    256: PrefillTile(16, 16, 8, 5),
}
# 64 queries are the least that the products of Hopper take. A decode fills a few of them, and reads no more for the
# rest.
_INVARIANT_16_BITS: Final = {
    16: InvariantTile(64, 64, 4, 5),
    32: InvariantTile(64, 64, 4, 5),
    64: InvariantTile(64, 64, 4, 5),
    128: InvariantTile(64, 32, 4, 5),
    256: InvariantTile(64, 16, 8, 5),
}
_INVARIANT_FLOAT32: Final = {
    16: InvariantTile(16, 32, 4, 5),
    32: InvariantTile(16, 32, 4, 5),
    64: InvariantTile(16, 32, 4, 5),
    128: InvariantTile(16, 16, 4, 5),
    256: InvariantTile(16, 16, 8, 5),
}


def pad(number: int) -> int:
    """Return the least power of two that is not less, and at least 16."""
    return max(MIN_MATRIX_ROWS, 1 << (number - 1).bit_length())


def decode_tile(head_dim: int, group: int, itemsize: int, cache_itemsize: int) -> DecodeTile:
    """Return the tile for a group of so many heads of `head_dim` numbers, and the bytes of one in queries and cache."""
    table = _DECODE_8_BITS if cache_itemsize == 1 else _DECODE_16_BITS
    tile = (_DECODE_FLOAT32 if max(itemsize, cache_itemsize) == 4 else table)[pad(head_dim)]
    if pad(group) <= 32:
        return tile
    # The results of many heads fill the registers.
    return DecodeTile(min(32, tile.num_keys), 8, tile.num_stages)


def _has_large_shared_memory(capability: tuple[int, int]) -> bool:
    """Return whether multiprocessors have 228 KiB: Hopper and the data-centre Blackwell."""
    return capability[0] in (9, 10)


def resident_programs(head_dim: int, cache_itemsize: int, capability: tuple[int, int]) -> int:
    """Return how many programs of `decode_kernel` a multiprocessor is given work for at once, 2 or 3.

    Three programs need 216 KiB with what each has beside its tiles, and each of their 128 threads may have up to 168 of
    the 65,536 registers. The tiles of 16 and 8 bits keep to that for heads of up to 128 numbers in groups of up to 16;
    wider heads take 256 threads. With float32, wider heads or less memory it is 2.
    """
    is_small = cache_itemsize <= 2 and pad(head_dim) <= 128
    return MAX_RESIDENT_PROGRAMS if is_small and _has_large_shared_memory(capability) else 2


def prefill_tile(head_dim: int, group: int, itemsize: int, capability: tuple[int, int]) -> PrefillTile:
    """Return the tile for a group of so many heads of `head_dim` numbers of up to `itemsize` bytes on a device."""
    table: Mapping[int, PrefillTile] = _PREFILL_FLOAT32
    if itemsize == 2:
        table = _PREFILL_16_BITS_LARGE if _has_large_shared_memory(capability) else _PREFILL_16_BITS
    tile = table[pad(head_dim)]
    if pad(group) <= tile.num_queries:
        return tile
    # At least one token.
    return PrefillTile(pad(group), min(16, tile.num_keys) if itemsize == 4 else tile.num_keys, 8, tile.num_stages)


def reduce_warps(head_dim: int) -> int:
    """Return the warps of a program of `reduce_kernel`: each thread has up to 32 numbers."""
    return max(1, MAX_SPLITS * pad(head_dim) // 1024)


def invariant_tile(head_dim: int, group: int, itemsize: int) -> InvariantTile:
    """Return the tile for a group of so many heads of `head_dim` numbers of up to `itemsize` bytes, on any device."""
    tile = (_INVARIANT_FLOAT32 if itemsize == 4 else _INVARIANT_16_BITS)[pad(head_dim)]
    if pad(group) <= tile.num_queries:
        return tile
    # At least one token.
    return InvariantTile(pad(group), min(16, tile.num_keys) if itemsize == 4 else tile.num_keys, 8, tile.num_stages)
