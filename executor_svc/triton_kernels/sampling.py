"""One token of each row of logits, by one program a row: the filters of `executor_svc.sampler.filters`, then the draw.

A filter keeps the tokens whose *key* is at least a threshold: the score divided by the temperature (top-k, top-p,
min-p), or how close the information is to the entropy (typical-p). A threshold is found without sorting: float32
numbers order as their bits do, so an interval of bit patterns is narrowed until one is left. Each pass over the row
tries some pivots at once: how many tokens, or what mass, is at or above each.

Masses are whole numbers, exp(key - largest key) in units of 2**-42: their sums are exact, so that passes agree
with each other to the last bit, whatever the order of the additions. A token of less than a unit is never drawn.

The logits of a tile are read while the tile before is worked on: a program has a multiprocessor nearly for itself, so
that no other program fills the time that a load takes. Tiles are [1, TILE] as they are read: the threads that read a
token also try the pivots on it, and only the sums at the end of a pass go through shared memory.

Passes over the row: a greedy row 1. Another row 3 (largest key, total, draw), and for top-k up to 11 more, for top-p
and typical-p up to 12, for min-p none. What a row does not ask for is not run.
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
def _key(logits, temperature):
    keys = tl.math.div_rn(logits, temperature)
    keys = tl.where(keys == keys, keys, -BOUND)
    return tl.minimum(tl.maximum(keys, -BOUND), BOUND)


@triton.jit
def _read_tile(row, begin, TILE: tl.constexpr):
    """Return the logits of a tile of tokens, [1, TILE], -infinity beyond the last one: there nothing is read.

    Args:
        row: Pointer to the logits, their number, temperature.
        begin: First token.
        TILE: See `sample_rows`.
    """
    offsets = begin + tl.arange(0, TILE)[None, :]
    return tl.load(row[0] + offsets, mask=offsets < row[1], other=-float("inf"))


@triton.jit
def _weigh(row, left, tile):
    """Return the keys of a tile of tokens, their closeness, and their masses, 0 where a token is out; [1, TILE] each.

    Args:
        row: See `_read_tile`.
        left: The largest key, the least key that is left, the two numbers that say how close a key is to the entropy,
            the least closeness that is left.
        tile: Logits, [1, TILE].
    """
    top, least, log_total, entropy, farthest = left
    keys = _key(tile, row[2])
    closeness = -tl.abs(keys - log_total + entropy)
    is_left = (keys >= least) & (closeness >= farthest)
    return keys, closeness, tl.where(is_left, (tl.exp(keys - top) * UNITS).to(tl.int64), 0)


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
def _last_key(row, left, wanted, lowest, highest, SEARCH: tl.constexpr, TILE: tl.constexpr, NUM_PIVOTS: tl.constexpr):
    """Return the last key, from the largest one down, that it takes to reach `wanted`; `lowest` if all do not.

    It may be a number below that key that keeps the same tokens.

    Args:
        row: See `_read_tile`.
        left: See `_weigh`.
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
        next_tile = _read_tile(row, 0, TILE)
        for begin in range(0, size, TILE):
            tile = next_tile
            next_tile = _read_tile(row, begin + TILE, TILE)
            keys, closeness, masses = _weigh(row, left, tile)
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
def _total(lanes):
    """Return the sum of [1, TILE]."""
    return tl.sum(tl.sum(lanes, axis=1), axis=0)


@triton.jit
def _mass_left(row, left, TILE: tl.constexpr):
    """Return the mass of the tokens that are left, int64."""
    lanes = tl.zeros([1, TILE], tl.int64)
    next_tile = _read_tile(row, 0, TILE)
    for begin in range(0, row[1], TILE):
        tile = next_tile
        next_tile = _read_tile(row, begin + TILE, TILE)
        lanes += _weigh(row, left, tile)[2]
    return _total(lanes)


@triton.jit
def _mean_depth(row, left, mass, TILE: tl.constexpr):
    """Return the mean of key - top over what is left, float64."""
    lanes = tl.zeros([1, TILE], tl.float64)
    next_tile = _read_tile(row, 0, TILE)
    for begin in range(0, row[1], TILE):
        tile = next_tile
        next_tile = _read_tile(row, begin + TILE, TILE)
        keys, _closeness, masses = _weigh(row, left, tile)
        lanes += masses.to(tl.float64) * (keys - left[0]).to(tl.float64)
    return _total(lanes) / mass.to(tl.float64)


@triton.jit
def _share(share, mass):
    """Return the least mass that is a share of a mass, at least 1 unit."""
    return tl.maximum(tl.minimum(tl.ceil(share.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), mass), 1)


@triton.jit
def _first_largest(logits, size, TILE: tl.constexpr):
    """Return the largest logit and its index, of equal ones the first. NaN counts as infinity."""
    best = tl.full([TILE], -float("inf"), tl.float32)
    indices = tl.arange(0, TILE)
    for begin in range(0, size, TILE):
        offsets = begin + tl.arange(0, TILE)
        raw = tl.load(logits + offsets, mask=offsets < size, other=-float("inf"))
        raw = tl.where(raw == raw, raw, float("inf"))
        indices = tl.where(raw > best, offsets, indices)
        best = tl.maximum(raw, best)
    largest = tl.max(best, axis=0)
    return largest, tl.min(tl.where(best == largest, indices, size - 1), axis=0)


@triton.jit
def _drawn(row, left, draw, TILE: tl.constexpr):
    """Return the first token with a cumulative mass above the draw; 0 if none has a mass."""
    size = row[1]
    mass = _mass_left(row, left, TILE)
    target = tl.minimum((draw * mass.to(tl.float64)).to(tl.int64), mass - 1)
    begin = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int64)
    masses = _weigh(row, left, _read_tile(row, begin, TILE))[2]
    next_tile = _read_tile(row, begin + TILE, TILE)
    ahead = _total(masses)
    while (before + ahead <= target) & (begin < size):
        before += ahead
        begin += TILE
        masses = _weigh(row, left, next_tile)[2]
        next_tile = _read_tile(row, begin + TILE, TILE)
        ahead = _total(masses)
    offsets = begin + tl.arange(0, TILE)[None, :]
    exceeds = before + tl.cumsum(masses, axis=1) > target
    first = tl.min(tl.min(tl.where(exceeds, offsets, size - 1), axis=1), axis=0)
    return tl.minimum(first, size - 1)


@triton.jit
def _filtered_and_drawn(
    row, largest, top_k, top_p, log_min_p, typical_p, draw, TILE: tl.constexpr, NUM_PIVOTS: tl.constexpr
):
    """Return a token drawn from what the filters leave, applied in turn."""
    top = tl.maximum(_key(largest, row[2]), LOWEST)
    least = tl.full([], LOWEST, tl.float32)
    log_total = tl.zeros([], tl.float32)
    entropy = tl.zeros([], tl.float32)
    farthest = tl.full([], -float("inf"), tl.float32)
    if top_k > 0:
        left = (top, least, log_total, entropy, farthest)
        least = _last_key(row, left, top_k, least, top, NUMBER_BY_LIKELIHOOD, TILE, NUM_PIVOTS)
    if top_p < 1.0:
        left = (top, least, log_total, entropy, farthest)
        wanted = _share(top_p, _mass_left(row, left, TILE))
        deepest = tl.maximum(top - DEPTH, least)
        least = _last_key(row, left, wanted, deepest, top, MASS_BY_LIKELIHOOD, TILE, NUM_PIVOTS)
    least = tl.maximum(least, top + log_min_p)
    if typical_p < 1.0:
        left = (top, least, log_total, entropy, farthest)
        mass = tl.maximum(_mass_left(row, left, TILE), 1)
        log_mass = tl.log(mass.to(tl.float64) / UNITS)
        log_total = (log_mass + top).to(tl.float32)
        entropy = (log_mass - _mean_depth(row, left, mass, TILE)).to(tl.float32)
        left = (top, least, log_total, entropy, farthest)
        wanted = _share(typical_p, mass)
        farthest = _last_key(
            row,
            left,
            wanted,
            tl.full([], FARTHEST, tl.float32),
            tl.zeros([], tl.float32),
            MASS_BY_CLOSENESS,
            TILE,
            NUM_PIVOTS,
        )
    return _drawn(row, (top, least, log_total, entropy, farthest), draw, TILE)


@triton.jit
def sample_rows(
    logits,
    row_stride,
    size,
    numbers,
    num_numbers,
    limits,
    draws,
    sampled,
    TILE: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
):
    """Write the token of each sample row, and whether its logits are not finite; a program a row.

    Args:
        logits: [any, size] float32, contiguous rows that are `row_stride` apart.
        row_stride: In elements.
        size: Of the vocabulary, up to 2**20.
        numbers: [num_samples, num_numbers] float32: temperature (0: greedy), top_p, logarithm of min_p, typical_p;
            the order is that of octavo/values/sampling_params_table.py.
        num_numbers: Of a row.
        limits: [num_samples, 2] int32: the row of `logits`, top_k (0: off).
        draws: [num_samples] float64, from 0 to below 1.
        sampled: [2, num_samples] int64, written: the tokens, then 1 for each row that has NaN, infinity, or nothing but
            -infinity, where the token means nothing, and 0 for all others.
        TILE: Tokens that are read at once, a power of two.
        NUM_PIVOTS: Thresholds that a pass tries at once, a power of two.
    """
    index = tl.program_id(0)
    logits += tl.load(limits + 2 * index).to(tl.int64) * row_stride
    numbers += num_numbers * index
    temperature = tl.load(numbers)
    largest, token_id = _first_largest(logits, size, TILE)
    if temperature > 0.0:
        top_k = tl.load(limits + 2 * index + 1)
        top_p = tl.load(numbers + 1)
        log_min_p = tl.load(numbers + 2)
        typical_p = tl.load(numbers + 3)
        draw = tl.load(draws + index)
        row = (logits, size, temperature)
        token_id = _filtered_and_drawn(row, largest, top_k, top_p, log_min_p, typical_p, draw, TILE, NUM_PIVOTS)
    tl.store(sampled + index, token_id.to(tl.int64))
    is_finite = (largest > -float("inf")) & (largest < float("inf"))
    tl.store(sampled + tl.num_programs(0) + index, 1 - is_finite.to(tl.int64))
