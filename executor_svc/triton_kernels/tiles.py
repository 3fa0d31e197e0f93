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
from types import MappingProxyType
from typing import Final, TypeVar

from executor_svc.attention.interface import LayerCache

Tile = TypeVar("Tile")

# Of a layer that sees everything. No difference with a position leaves int32.
WIDEST_WINDOW: Final = 2**31 - 1
# Of the keys of a row; see `reduce_room`.
MAX_SPLITS: Final = 64
# Of `resident_programs`.
MAX_RESIDENT_PROGRAMS: Final = 3
# Of the invariant attention: positions that are added up together, by any program. A split is enough work to be worth a
# program: 256 KiB of keys and values in 16 bits and 128 dimensions.
SPLIT_KEYS: Final = 512
# Query heads that a program takes on a latent cache.
MAX_LATENT_GROUP: Final = 16
# What the tensor cores take.
MIN_MATRIX_ROWS: Final = 16


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """How a program of `decode_kernel` works."""

    num_keys: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class QueryTile:
    """How a program of `prefill_kernel` works, or of `attend_kernel`: on chunks and decodes alike, on every device."""

    num_queries: int  # tokens times heads of a group
    num_keys: int  # of `attend_kernel` a divisor of SPLIT_KEYS
    num_warps: int
    num_stages: int


def _by_value_dim(small: Tile, of_128: Tile, of_256: Tile, of_512: Tile) -> Mapping[int, Tile]:
    """Return tiles by padded size of a value; the small ones are alike, and those of 512 are of latent caches."""
    return MappingProxyType({16: small, 32: small, 64: small, 128: of_128, 256: of_256, 512: of_512})


_DECODE_16_BITS: Final = _by_value_dim(
    DecodeTile(128, 4, 5), DecodeTile(64, 4, 5), DecodeTile(32, 8, 5), DecodeTile(32, 8, 5)
)
# A cache of 8 bits: what is widened fills registers, so that with as many keys two programs would run, not three.
_DECODE_8_BITS: Final = _by_value_dim(
    DecodeTile(64, 4, 5), DecodeTile(32, 4, 5), DecodeTile(16, 4, 5), DecodeTile(32, 8, 5)
)
_DECODE_FLOAT32: Final = _by_value_dim(
    DecodeTile(32, 4, 5), DecodeTile(16, 4, 5), DecodeTile(16, 8, 5), DecodeTile(16, 8, 3)
)
# Any device: less than the 99 KiB that a program may have on 8.6, 8.9 and 12.0.
_PREFILL_16_BITS: Final = _by_value_dim(
    QueryTile(128, 64, 8, 5), QueryTile(128, 32, 8, 5), QueryTile(64, 16, 8, 5), QueryTile(32, 16, 8, 5)
)
# Hopper and the data-centre Blackwell: 227 KiB, and products that want many keys.
_PREFILL_16_BITS_LARGE: Final = _by_value_dim(
    QueryTile(128, 64, 8, 5), QueryTile(128, 64, 8, 5), QueryTile(64, 32, 8, 5), QueryTile(64, 16, 8, 5)
)
# 64 queries are the least that the products of Hopper take. A decode fills a few of them, and reads no more for the
# rest.
_INVARIANT_16_BITS: Final = _by_value_dim(
    QueryTile(64, 64, 4, 5), QueryTile(64, 32, 4, 5), QueryTile(64, 16, 8, 5), QueryTile(32, 16, 8, 5)
)
# Of chunks, and of the invariant attention.
_QUERIES_FLOAT32: Final = _by_value_dim(
    QueryTile(16, 32, 4, 5), QueryTile(16, 16, 4, 5), QueryTile(16, 16, 8, 5), QueryTile(16, 16, 8, 3)
)


def pad(number: int) -> int:
    """Return the least power of two that is not less, and at least 16."""
    return max(MIN_MATRIX_ROWS, 1 << (number - 1).bit_length())


def groups_of(num_heads: int, cache: LayerCache) -> tuple[int, int]:
    """Return into how many groups programs part the query heads, and the heads of one.

    Those of a KV head are a group. A latent cache has one KV head for all, whose results would not fit into registers:
    its groups have up to `MAX_LATENT_GROUP` heads.
    """
    num_groups = cache.keys.shape[2]
    if cache.value_begin:
        assert num_groups == 1, "a token has one latent vector"
        least = -(-num_heads // MAX_LATENT_GROUP)
        num_groups = next(number for number in range(least, num_heads + 1) if num_heads % number == 0)
    return num_groups, num_heads // num_groups


def decode_tile(value_dim: int, group: int, itemsize: int, cache_itemsize: int) -> DecodeTile:
    """Return the tile for a group of so many heads, values of so many numbers, and their bytes in queries and cache."""
    table = _DECODE_8_BITS if cache_itemsize == 1 else _DECODE_16_BITS
    tile = (_DECODE_FLOAT32 if max(itemsize, cache_itemsize) == 4 else table)[pad(value_dim)]
    if pad(group) <= 32:
        return tile
    # The results of many heads fill the registers.
    return DecodeTile(min(32, tile.num_keys), 8, tile.num_stages)


def _has_large_shared_memory(capability: tuple[int, int]) -> bool:
    """Return whether multiprocessors have 228 KiB: Hopper and the data-centre Blackwell."""
    return capability[0] in (9, 10)


def resident_programs(value_dim: int, cache_itemsize: int, capability: tuple[int, int]) -> int:
    """Return how many programs of `decode_kernel` a multiprocessor is given work for at once, 2 or 3.

    Three programs need 216 KiB with what each has beside its tiles, and each of their 128 threads may have up to 168 of
    the 65,536 registers. The tiles of 16 and 8 bits keep to that for heads of up to 128 numbers in groups of up to 16;
    wider heads take 256 threads. With float32, wider heads or less memory it is 2; of a latent cache one fills it.
    """
    if pad(value_dim) > 256:
        return 1
    is_small = cache_itemsize <= 2 and pad(value_dim) <= 128
    return MAX_RESIDENT_PROGRAMS if is_small and _has_large_shared_memory(capability) else 2


def prefill_tile(
    value_dim: int, group: int, itemsize: int, cache_itemsize: int, capability: tuple[int, int]
) -> QueryTile:
    """Return the tile for a group of so many heads, values of so many numbers, and their bytes in queries and cache.

    What is widened of a latent cache of 8 bits leaves no registers for large tiles.
    """
    is_large = _has_large_shared_memory(capability) and (cache_itemsize > 1 or pad(value_dim) <= 256)
    itemsize = max(itemsize, cache_itemsize)
    of_16_bits = _PREFILL_16_BITS_LARGE if is_large else _PREFILL_16_BITS
    return _with_room_for(group, (of_16_bits if itemsize == 2 else _QUERIES_FLOAT32)[pad(value_dim)], itemsize)


def invariant_tile(value_dim: int, group: int, itemsize: int) -> QueryTile:
    """Return the tile for a group of so many heads, with values of so many numbers of `itemsize` bytes, anywhere."""
    return _with_room_for(group, (_QUERIES_FLOAT32 if itemsize == 4 else _INVARIANT_16_BITS)[pad(value_dim)], itemsize)


def _with_room_for(group: int, tile: QueryTile, itemsize: int) -> QueryTile:
    """Return a tile that has room for at least one token."""
    if pad(group) <= tile.num_queries:
        return tile
    return QueryTile(pad(group), min(16, tile.num_keys) if itemsize == 4 else tile.num_keys, 8, tile.num_stages)


def reduce_room(num_splits: int) -> int:
    """Return for how many splits `reduce_kernel` is compiled: `MAX_SPLITS` or half of them."""
    return MAX_SPLITS // 2 if num_splits <= MAX_SPLITS // 2 else MAX_SPLITS


def reduce_warps(value_dim: int, room: int) -> int:
    """Return the warps of a program of `reduce_kernel`: each thread has 32 numbers, or 64 of a latent cache."""
    return min(16, max(1, room * pad(value_dim) // 1024))
