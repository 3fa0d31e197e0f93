"""One token of each row of logits: the filters of `executor_svc.sampler.filters`, then the draw.

A filter keeps the tokens whose *key* is at least a threshold: the score divided by the temperature (top-k, top-p,
min-p), or how close the information is to the entropy (typical-p). A threshold is found without sorting: float32
numbers order as their bits do, so an interval of bit patterns is narrowed until one is left. Each pass tries some
pivots at once: how many tokens, or what mass, is at or above each.

What is passed over are the candidates of `executor_svc.triton_kernels.sampling_candidates`, by one program a row. The
row itself is read 3 times before, by many programs: for the largest logit, the masses, the candidates. A greedy row is
read once. A row without filters is read twice, and once more where the draw falls. Of a row with more candidates than
there is room for, the row is passed over instead: up to 10 times for a top-k, 11 for each of top-p and typical-p.

The tokens of a tile are read while the tile before is worked on: a program has a multiprocessor nearly for itself, so
that no other program fills the time that a load takes. Tiles are [1, TILE] as they are read: the threads that read a
token also try the pivots on it, and only the sums at the end of a pass go through shared memory.
"""

import triton
import triton.language as tl

from executor_svc.triton_kernels.sampling_candidates import (
    DEPTH,
    LOWEST,
    NUM_LIMITS,
    UNITS,
    key_of,
    mass_of,
    read_logits,
    read_parts,
    share_of,
    top_of,
    totals_of,
)

# All tokens with a mass are closer to the entropy than this: DEPTH, and twice the logarithm of 2**20 tokens.
FARTHEST = tl.constexpr(-64.0)

# What a search sums up, and over which keys.
NUMBER_BY_LIKELIHOOD = tl.constexpr(0)
MASS_BY_LIKELIHOOD = tl.constexpr(1)
MASS_BY_CLOSENESS = tl.constexpr(2)


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
    keys = key_of(tile, row[2])
    closeness = -tl.abs(keys - log_total + entropy)
    is_left = (keys >= least) & (closeness >= farthest)
    return keys, closeness, tl.where(is_left, mass_of(keys, top), 0)


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
    return _total(lanes) / tl.maximum(mass, 1).to(tl.float64)


@triton.jit
def _first_above(masses, begin, before, target, size):
    """Return the first token of a tile, [1, TILE], with a cumulative mass above a target.

    Args:
        masses: Of the tile.
        begin: First token of the tile.
        before: Mass of the tokens before.
        target: Mass; -1 if none has any.
        size: Number of tokens.
    """
    offsets = begin + tl.arange(0, masses.shape[1])[None, :]
    exceeds = before + tl.cumsum(masses, axis=1) > target
    first = tl.min(tl.min(tl.where(exceeds, offsets, size - 1), axis=1), axis=0)
    return tl.maximum(tl.minimum(first, size - 1), 0)


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
    return _first_above(masses, begin, before, target, size)


@triton.jit
def _drawn_of_all(row, top, parts, index, num_parts, draw, PART: tl.constexpr, PARTS_PADDED: tl.constexpr):
    """Return the first token of a row without filters that is above the draw: first its part, then the token in it."""
    masses = read_parts(parts, index, num_parts, 2, 0.0, PARTS_PADDED).to(tl.int64)
    mass = tl.sum(masses, axis=0)
    target = tl.minimum((draw * mass.to(tl.float64)).to(tl.int64), mass - 1)
    is_before = tl.cumsum(masses, axis=0) <= target
    begin = tl.sum(is_before.to(tl.int32), axis=0) * PART
    before = tl.sum(tl.where(is_before, masses, 0), axis=0)
    in_part = mass_of(key_of(read_logits(row[0], begin, row[1], PART), row[2]), top)
    return _first_above(in_part[None, :], begin, before, target, row[1])


@triton.jit
def _filtered_and_drawn(row, top, mass, mean, choice, TILE: tl.constexpr, NUM_PIVOTS: tl.constexpr):
    """Return a token drawn from what the filters leave, applied in turn: its place in the tokens that are read.

    Args:
        row: See `_read_tile`; the candidates or all.
        top: The largest key.
        mass: Of all tokens.
        mean: Of key - top, over all tokens.
        choice: Pointer to the row of `choices`; a number is read where it is used, and fills no register before.
        TILE: See `sample_rows`.
        NUM_PIVOTS: The same.
    """
    numbers = choice + NUM_LIMITS
    least = tl.full([], LOWEST, tl.float32)
    log_total = tl.zeros([], tl.float32)
    entropy = tl.zeros([], tl.float32)
    farthest = tl.full([], -float("inf"), tl.float32)
    top_k = tl.load(choice + 2).to(tl.int32)
    if top_k > 0:
        left = (top, least, log_total, entropy, farthest)
        least = _last_key(row, left, top_k, least, top, NUMBER_BY_LIKELIHOOD, TILE, NUM_PIVOTS)
    top_p = tl.load(numbers + 1).to(tl.float32)
    if top_p < 1.0:
        left = (top, least, log_total, entropy, farthest)
        if top_k > 0:
            mass = _mass_left(row, left, TILE)
        deepest = tl.maximum(top - DEPTH, least)
        least = _last_key(row, left, share_of(top_p, mass), deepest, top, MASS_BY_LIKELIHOOD, TILE, NUM_PIVOTS)
    least = tl.maximum(least, top + tl.load(numbers + 2).to(tl.float32))
    typical_p = tl.load(numbers + 3).to(tl.float32)
    if typical_p < 1.0:
        left = (top, least, log_total, entropy, farthest)
        if least > LOWEST:
            mass = _mass_left(row, left, TILE)
            mean = _mean_depth(row, left, mass, TILE)
        log_mass = tl.log(tl.maximum(mass, 1).to(tl.float64) / UNITS)
        log_total = (log_mass + top).to(tl.float32)
        entropy = (log_mass - mean).to(tl.float32)
        left = (top, least, log_total, entropy, farthest)
        farthest = _last_key(
            row,
            left,
            share_of(typical_p, mass),
            tl.full([], FARTHEST, tl.float32),
            tl.zeros([], tl.float32),
            MASS_BY_CLOSENESS,
            TILE,
            NUM_PIVOTS,
        )
    return _drawn(row, (top, least, log_total, entropy, farthest), tl.load(choice + 3), TILE)


@triton.jit
def sample_rows(
    logits,
    row_stride,
    size,
    choices,
    num_columns,
    parts,
    num_parts,
    candidates,
    token_ids,
    capacity,
    sampled,
    PART: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
):
    """Write the token of each sample row, and whether its logits are not finite; a program a row.

    Args:
        logits: [any, size] float32, contiguous rows that are `row_stride` apart.
        row_stride: In elements.
        size: Of the vocabulary, up to 2**20.
        choices: [num_samples, num_columns] float64: the row of `logits`, whether a filter is on, top_k (0: off), the
            draw (from 0 to below 1), and float32 numbers: temperature (0: greedy), top_p, logarithm of min_p,
            typical_p; their order is that of octavo/values/sampling_params_table.py.
        num_columns: Of a row.
        parts: [num_samples, num_parts, PART_NUMBERS] float64, of `measure_parts` and `weigh_parts`.
        num_parts: Of a row.
        candidates: [num_samples, capacity] float32, of `gather_parts`.
        token_ids: [num_samples, 1 + capacity] int32, the same.
        capacity: The most candidates of a row.
        sampled: [2, num_samples] int64, written: the tokens, then 1 for each row that has NaN, infinity, or nothing but
            -infinity, where the token means nothing, and 0 for all others.
        PART: Tokens of a part, a power of two.
        PARTS_PADDED: The number of parts, up to a power of two.
        TILE: Tokens that are read at once, a power of two.
        NUM_PIVOTS: Thresholds that a pass tries at once, a power of two.
    """
    index = tl.program_id(0)
    choice = choices + index * num_columns
    temperature = tl.load(choice + NUM_LIMITS).to(tl.float32)
    of_parts = read_parts(parts, index, num_parts, 0, -float("inf"), PARTS_PADDED)
    largest = tl.max(of_parts, axis=0)
    is_finite = (largest > -float("inf")) & (largest < float("inf"))
    tl.store(sampled + tl.num_programs(0) + index, 1 - is_finite.to(tl.int64))
    firsts = read_parts(parts, index, num_parts, 1, 0.0, PARTS_PADDED)
    token_id = tl.min(tl.where(of_parts == largest, firsts, float("inf")), axis=0).to(tl.int32)
    if temperature > 0.0:
        logits += tl.load(choice).to(tl.int64) * row_stride
        top = top_of(parts, index, num_parts, temperature, PARTS_PADDED)
        if tl.load(choice + 1) > 0:
            mass, mean = totals_of(parts, index, num_parts, PARTS_PADDED)
            token_ids += index.to(tl.int64) * (1 + capacity)
            number = tl.load(token_ids)
            has_candidates = number <= capacity
            if has_candidates:
                logits = candidates + index.to(tl.int64) * capacity
            row = (logits, tl.where(has_candidates, number, size), temperature)
            token_id = _filtered_and_drawn(row, top, mass, mean, choice, TILE, NUM_PIVOTS)
            if has_candidates:
                token_id = tl.load(token_ids + 1 + token_id, mask=number > 0, other=0)
        else:
            row = (logits, size, temperature)
            token_id = _drawn_of_all(row, top, parts, index, num_parts, tl.load(choice + 3), PART, PARTS_PADDED)
    tl.store(sampled + index, token_id.to(tl.int64))
