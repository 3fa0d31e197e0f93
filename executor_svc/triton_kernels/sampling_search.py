"""Searching and drawing among the tokens of a row, by one program: what the sampling kernels are made of.

A filter keeps the tokens whose *key* is at least a threshold: the score divided by the temperature (top-k, top-p,
min-p), or how close the information is to the entropy (typical-p). A threshold is found without sorting: float32
numbers order as their bits do, so an interval of bit patterns is narrowed until one is left. Each pass over the tokens
tries some pivots at once: how many tokens, or what mass, is at or above each.

Masses are whole numbers, exp(key - largest key) in units of 2**-42: their sums are exact, so that passes agree
with each other to the last bit, whatever the order of the additions. A token of less than a unit is never drawn.

The logits of a tile are read while the tile before is worked on: a program has a multiprocessor nearly for itself, so
that no other program fills the time that a load takes. Tiles are [1, TILE] as they are read: the threads that read a
token also try the pivots on it, and only the sums at the end of a pass go through shared memory.
"""

import triton
import triton.language as tl

# Keys beyond are as if infinite: a difference of two does not overflow. NaN is the lowest key.
BOUND = tl.constexpr(2.0**100)
# Below this a token is out.
LOWEST = tl.constexpr(-(2.0**99))
# Units of mass in 1, the mass of the likeliest token; 2**20 tokens do not overflow.
UNITS = tl.constexpr(2.0**42)
# Keys so far below the largest have no mass: exp(-30) is less than a unit.
DEPTH = tl.constexpr(30.0)
# All tokens with a mass are closer to the entropy than this: DEPTH, and twice the logarithm of 2**20 tokens.
FARTHEST = tl.constexpr(-64.0)

# What a search sums up, and over which keys.
NUMBER_BY_LIKELIHOOD = tl.constexpr(0)
MASS_BY_LIKELIHOOD = tl.constexpr(1)
MASS_BY_CLOSENESS = tl.constexpr(2)


@triton.jit
def key(logits, temperature):
    """Return the keys of logits."""
    keys = tl.math.div_rn(logits, temperature)
    keys = tl.where(keys == keys, keys, -BOUND)
    return tl.minimum(tl.maximum(keys, -BOUND), BOUND)


@triton.jit
def read_tile(row, begin, TILE: tl.constexpr):
    """Return the logits of a tile of tokens, [1, TILE], -infinity beyond the last one: there nothing is read.

    Args:
        row: Pointer to the logits, their number, temperature.
        begin: First token.
        TILE: See `sample_rows`.
    """
    offsets = begin + tl.arange(0, TILE)[None, :]
    return tl.load(row[0] + offsets, mask=offsets < row[1], other=-float("inf"))


@triton.jit
def weigh(row, left, tile):
    """Return the keys of a tile of tokens, their closeness, and their masses, 0 where a token is out; [1, TILE] each.

    Args:
        row: See `read_tile`.
        left: The largest key, the least key that is left, the two numbers that say how close a key is to the entropy,
            the least closeness that is left.
        tile: Logits, [1, TILE].
    """
    top, least, log_total, entropy, farthest = left
    keys = key(tile, row[2])
    closeness = -tl.abs(keys - log_total + entropy)
    is_left = (keys >= least) & (closeness >= farthest)
    return keys, closeness, tl.where(is_left, (tl.exp(keys - top) * UNITS).to(tl.int64), 0)


@triton.jit
def all_left(top):
    """Return what `weigh` takes where no filter was applied."""
    none = tl.zeros([], tl.float32)
    return top, tl.full([], LOWEST, tl.float32), none, none, tl.full([], -float("inf"), tl.float32)


@triton.jit
def _in_order(x):
    """Return a number that orders as `x` does, int64."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _from_order(order):
    bits = order.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def last_key(row, left, wanted, lowest, highest, SEARCH: tl.constexpr, TILE: tl.constexpr, NUM_PIVOTS: tl.constexpr):
    """Return the last key, from the largest one down, that it takes to reach `wanted`; `lowest` if all do not.

    It may be a number below that key that keeps the same tokens.

    Args:
        row: See `read_tile`.
        left: See `weigh`.
        wanted: Number of tokens or mass.
        lowest: At or below the key, unless all do not reach `wanted`.
        highest: At or above all keys.
        SEARCH: What is summed up over which keys.
        TILE: See `sample_rows`.
        NUM_PIVOTS: The same.
    """
    size = row[1]
    low = _in_order(lowest)  # reaches it
    high = _in_order(highest) + 1  # does not
    pivots = tl.arange(0, NUM_PIVOTS).to(tl.int64) + 1
    while high - low > 1:
        span = high - low
        thresholds = _from_order(low + span * pivots // (NUM_PIVOTS + 1))[:, None]
        lanes = tl.zeros([NUM_PIVOTS, TILE], tl.int32 if SEARCH == NUMBER_BY_LIKELIHOOD else tl.int64)
        next_tile = read_tile(row, 0, TILE)
        for begin in range(0, size, TILE):
            tile = next_tile
            next_tile = read_tile(row, begin + TILE, TILE)
            keys, closeness, masses = weigh(row, left, tile)
            if SEARCH == NUMBER_BY_LIKELIHOOD:
                lanes += (keys >= thresholds).to(tl.int32)
            elif SEARCH == MASS_BY_LIKELIHOOD:
                lanes += tl.where(keys >= thresholds, masses, 0)
            else:
                lanes += tl.where(closeness >= thresholds, masses, 0)
        sums = tl.sum(lanes, axis=1)
        num_reached = tl.sum((sums >= wanted).to(tl.int64), axis=0)
        is_exact = tl.sum((sums == wanted).to(tl.int64), axis=0) > 0  # then nothing between is left to decide
        high = low + span * (num_reached + 1) // (NUM_PIVOTS + 1)
        low = low + span * num_reached // (NUM_PIVOTS + 1)
        high = tl.where(is_exact, low + 1, high)
    return _from_order(low)


@triton.jit
def total(lanes):
    """Return the sum of [1, TILE]."""
    return tl.sum(tl.sum(lanes, axis=1), axis=0)


@triton.jit
def mass_left(row, left, TILE: tl.constexpr):
    """Return the mass of the tokens that are left, int64."""
    lanes = tl.zeros([1, TILE], tl.int64)
    next_tile = read_tile(row, 0, TILE)
    for begin in range(0, row[1], TILE):
        tile = next_tile
        next_tile = read_tile(row, begin + TILE, TILE)
        lanes += weigh(row, left, tile)[2]
    return total(lanes)


@triton.jit
def mean_depth(row, left, mass, TILE: tl.constexpr):
    """Return the mean of key - top over what is left, float64."""
    lanes = tl.zeros([1, TILE], tl.float64)
    next_tile = read_tile(row, 0, TILE)
    for begin in range(0, row[1], TILE):
        tile = next_tile
        next_tile = read_tile(row, begin + TILE, TILE)
        keys, _closeness, masses = weigh(row, left, tile)
        lanes += masses.to(tl.float64) * (keys - left[0]).to(tl.float64)
    return total(lanes) / mass.to(tl.float64)


@triton.jit
def share(share, mass):
    """Return the least mass that is a share of a mass, at least 1 unit."""
    return tl.maximum(tl.minimum(tl.ceil(share.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), mass), 1)


@triton.jit
def first_above(row, left, target, before, begin, TILE: tl.constexpr):
    """Return the first token with a cumulative mass above a target; those before `begin` have the mass `before`."""
    size = row[1]
    masses = weigh(row, left, read_tile(row, begin, TILE))[2]
    next_tile = read_tile(row, begin + TILE, TILE)
    ahead = total(masses)
    while (before + ahead <= target) & (begin < size):
        before += ahead
        begin += TILE
        masses = weigh(row, left, next_tile)[2]
        next_tile = read_tile(row, begin + TILE, TILE)
        ahead = total(masses)
    offsets = begin + tl.arange(0, TILE)[None, :]
    exceeds = before + tl.cumsum(masses, axis=1) > target
    first = tl.min(tl.min(tl.where(exceeds, offsets, size - 1), axis=1), axis=0)
    return tl.minimum(first, size - 1)


@triton.jit
def drawn(row, left, draw, TILE: tl.constexpr):
    """Return the first token with a cumulative mass above the draw; 0 if none has a mass."""
    mass = mass_left(row, left, TILE)
    target = tl.minimum((draw * mass.to(tl.float64)).to(tl.int64), mass - 1)
    return first_above(row, left, target, tl.zeros([], tl.int64), tl.zeros([], tl.int32), TILE)
