"""Which tokens of a row the filters have to look at: found by programs that each read one part of a row, a tile.

A row is read once for its largest logit, once for its masses, and once for its candidates: the tokens that can be left,
mostly some thousand. What is at or above which key is known from the numbers of keys by their depth below the largest,
in bins of a quarter: a bin's mass is known up to a factor of exp(1/4), which is enough to leave out what surely goes.
The filters themselves are in `executor_svc.triton_kernels.sampling`.

Masses are whole numbers, exp(key - largest key) in units of 2**-42: their sums are exact, so that parts and passes
agree with each other to the last bit, whatever the order of the additions. A token of less than a unit is never drawn.
Numbers of keys are added up atomically, as integers. Nothing else is, so that a row always gets the same bits.
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
# Bins of depth, and how many make 1. From `MASSLESS_BIN` on no token has a mass; the last bin has all that are deeper.
NUM_BINS = tl.constexpr(128)
BINS_PER_DEPTH = tl.constexpr(4)
MASSLESS_BIN = tl.constexpr(120)
# Of the mass of a bin: the exponential of a device is not exact.
MARGIN = tl.constexpr(1.0 + 2.0**-10)

# Columns of `choices`, before the numbers.
NUM_LIMITS = tl.constexpr(4)
# Columns of `parts`: the largest logit, its index, the mass, and the sum of mass times (key - largest key).
PART_NUMBERS = tl.constexpr(4)


@triton.jit
def key_of(logits, temperature):
    """Return logits divided by a temperature, bounded."""
    keys = tl.math.div_rn(logits, temperature)
    keys = tl.where(keys == keys, keys, -BOUND)
    return tl.minimum(tl.maximum(keys, -BOUND), BOUND)


@triton.jit
def mass_of(keys, top):
    """Return the masses of keys, int64; `top` is the largest key."""
    return tl.where(keys >= LOWEST, (tl.exp(keys - top) * UNITS).to(tl.int64), 0)


@triton.jit
def share_of(share, mass):
    """Return the least mass that is a share of a mass, at least 1 unit."""
    return tl.maximum(tl.minimum(tl.ceil(share.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), mass), 1)


@triton.jit
def read_logits(logits, begin, size, TILE: tl.constexpr):
    """Return the logits of a tile of tokens, [TILE], -infinity beyond the last one: there nothing is read."""
    offsets = begin + tl.arange(0, TILE)
    return tl.load(logits + offsets, mask=offsets < size, other=-float("inf"))


@triton.jit
def read_parts(parts, index, num_parts, COLUMN: tl.constexpr, OTHER: tl.constexpr, PARTS_PADDED: tl.constexpr):
    """Return a number of each part of a row, [PARTS_PADDED] float64, `OTHER` where there is no part."""
    each = tl.arange(0, PARTS_PADDED)
    numbers = parts + (index.to(tl.int64) * num_parts + each) * PART_NUMBERS + COLUMN
    return tl.load(numbers, mask=each < num_parts, other=OTHER)


@triton.jit
def top_of(parts, index, num_parts, temperature, PARTS_PADDED: tl.constexpr):
    """Return the largest key of a row."""
    largest = tl.max(read_parts(parts, index, num_parts, 0, -float("inf"), PARTS_PADDED), axis=0).to(tl.float32)
    return tl.maximum(key_of(largest, temperature), LOWEST)


@triton.jit
def totals_of(parts, index, num_parts, PARTS_PADDED: tl.constexpr):
    """Return the mass of a row, int64, and the mean of key - top, float64."""
    mass = tl.sum(read_parts(parts, index, num_parts, 2, 0.0, PARTS_PADDED).to(tl.int64), axis=0)
    moment = tl.sum(read_parts(parts, index, num_parts, 3, 0.0, PARTS_PADDED), axis=0)
    return mass, moment / tl.maximum(mass, 1).to(tl.float64)


@triton.jit
def _bin_of(keys, top):
    return tl.minimum((tl.minimum(top - keys, DEPTH + 2.0) * BINS_PER_DEPTH).to(tl.int32), NUM_BINS - 1)


@triton.jit
def _bins_of_mass(counts, share, mass):
    """Return the bin that a key surely reaches when all keys from the largest to it have a share of the mass.

    Args:
        counts: Number of keys by bin, [NUM_BINS].
        share: Of the mass.
        mass: Of the row.
    """
    bins = tl.arange(0, NUM_BINS)
    most = tl.exp(bins.to(tl.float32) * (-1.0 / BINS_PER_DEPTH)).to(tl.float64) * (UNITS * MARGIN)
    most = tl.where(bins < MASSLESS_BIN, counts.to(tl.float64) * most, 0.0)
    # What is in deeper bins, at most. Sums of few numbers of float64: their rounding is far less than the margin.
    deeper = tl.cumsum(most, axis=0, reverse=True) - most
    return tl.sum((deeper > (mass - share_of(share, mass)).to(tl.float64)).to(tl.int32), axis=0)


@triton.jit
def _candidates_of(choice, top, mass, mean, counts):
    """Return up to which bin tokens may be left of a row, and how many they are.

    Args:
        choice: Pointer to the numbers of the row, from top_k on.
        top: The largest key.
        mass: Of the row.
        mean: Mean of key - top.
        counts: Pointer to the numbers of keys by bin.
    """
    top_k = tl.load(choice).to(tl.int32)
    top_p = tl.load(choice + 3).to(tl.float32)
    log_min_p = tl.load(choice + 4).to(tl.float32)
    typical_p = tl.load(choice + 5).to(tl.float32)
    bins = tl.arange(0, NUM_BINS)
    numbers = tl.load(counts + bins)
    last = MASSLESS_BIN + tl.zeros([], tl.int32)
    if top_k > 0:
        last = tl.minimum(last, tl.sum((tl.cumsum(numbers, axis=0) < top_k).to(tl.int32), axis=0))
    elif top_p < 1.0:
        last = tl.minimum(last, _bins_of_mass(numbers, top_p, mass))
    elif (typical_p < 1.0) & (log_min_p == -float("inf")):
        # Typical tokens lie in a band around the mean. When it reaches up to the largest key, it holds all down to the
        # key as far on the other side: from there on it grows as a nucleus does.
        mirrored = (tl.minimum(-2.0 * mean, DEPTH) * BINS_PER_DEPTH).to(tl.int32) + 1
        last = tl.minimum(last, tl.maximum(mirrored, _bins_of_mass(numbers, typical_p, mass)))
    if (top_k == 0) | (top_p >= 1.0):  # a top-p behind a top-k needs the mass of all that this one leaves
        last = tl.minimum(last, _bin_of(top + log_min_p, top))
    return last, tl.sum(tl.where(bins <= last, numbers, 0), axis=0)


@triton.jit
def measure_parts(logits, row_stride, size, choices, num_columns, parts, counts, TILE: tl.constexpr):
    """Write the largest logit of each part and its index, of equal ones the first; NaN counts as infinity.

    The grid is [num_samples, num_parts].

    Args:
        logits: See `sample_rows`; the same for all others.
        row_stride: In elements.
        size: Of the vocabulary.
        choices: [num_samples, num_columns] float64.
        num_columns: Of a row.
        parts: [num_samples, num_parts, PART_NUMBERS] float64.
        counts: [num_samples, 1 + num_parts, NUM_BINS] int32; the first of a row, of all its parts, becomes 0.
        TILE: Tokens of a part, a power of two.
    """
    index, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    logits += tl.load(choices + index * num_columns).to(tl.int64) * row_stride
    tile = read_logits(logits, part * TILE, size, TILE)
    tile = tl.where(tile == tile, tile, float("inf"))
    largest = tl.max(tile, axis=0)
    first = tl.min(tl.where(tile == largest, tl.arange(0, TILE), TILE - 1), axis=0)
    numbers = parts + (index.to(tl.int64) * num_parts + part) * PART_NUMBERS
    tl.store(numbers, largest.to(tl.float64))
    tl.store(numbers + 1, (part * TILE + first).to(tl.float64))
    if part == 0:
        row_counts = counts + index.to(tl.int64) * (1 + num_parts) * NUM_BINS
        tl.store(row_counts + tl.arange(0, NUM_BINS), tl.zeros([NUM_BINS], tl.int32))


@triton.jit
def weigh_parts(
    logits, row_stride, size, choices, num_columns, parts, counts, TILE: tl.constexpr, PARTS_PADDED: tl.constexpr
):
    """Write the mass and the moment of each part of a row that is drawn; of one with filters, its keys by bin too.

    Args: See `measure_parts`, but: `counts` of a part are of all keys up to a bin, those of a row of each bin;
        PARTS_PADDED is the number of parts, up to a power of two.
    """
    index, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    choice = choices + index * num_columns
    temperature = tl.load(choice + NUM_LIMITS).to(tl.float32)
    if temperature > 0.0:
        logits += tl.load(choice).to(tl.int64) * row_stride
        keys = key_of(read_logits(logits, part * TILE, size, TILE), temperature)
        top = top_of(parts, index, num_parts, temperature, PARTS_PADDED)
        masses = mass_of(keys, top)
        numbers = parts + (index.to(tl.int64) * num_parts + part) * PART_NUMBERS
        tl.store(numbers + 2, tl.sum(masses, axis=0).to(tl.float64))  # exact: up to 2**11 tokens of 2**42
        if tl.load(choice + NUM_LIMITS + 3) < 1.0:  # typical-p alone asks for it
            tl.store(numbers + 3, tl.sum(masses.to(tl.float64) * (keys - top).to(tl.float64), axis=0))
        if tl.load(choice + 1) > 0:
            bins = tl.arange(0, NUM_BINS)
            of_part = tl.histogram(_bin_of(keys, top), NUM_BINS)
            row_counts = counts + index.to(tl.int64) * (1 + num_parts) * NUM_BINS
            tl.atomic_add(row_counts + bins, of_part, mask=(of_part > 0) & (bins < NUM_BINS - 1), sem="relaxed")
            tl.store(row_counts + (1 + part) * NUM_BINS + bins, tl.cumsum(of_part, axis=0))


@triton.jit
def gather_parts(
    logits,
    row_stride,
    size,
    choices,
    num_columns,
    parts,
    counts,
    candidates,
    token_ids,
    capacity,
    num_parts,
    TILE: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    PARTS_OF_PROGRAM: tl.constexpr,
):
    """Write the candidates of the rows with filters, in the order of tokens; none of a row that has too many.

    The grid is [num_samples, programs of a row].

    Args: See `weigh_parts`, and:
        candidates: [num_samples, capacity] float32, written: logits.
        token_ids: [num_samples, 1 + capacity] int32, written: how many there are, also if too many; then the tokens.
        capacity: The most of a row.
        num_parts: Of a row.
        PARTS_OF_PROGRAM: Parts that a program reads one after the other: the bin is found once for all of them.
    """
    index, first_part = tl.program_id(0), tl.program_id(1) * PARTS_OF_PROGRAM
    choice = choices + index * num_columns
    temperature = tl.load(choice + NUM_LIMITS).to(tl.float32)
    if (temperature > 0.0) & (tl.load(choice + 1) > 0):
        top = top_of(parts, index, num_parts, temperature, PARTS_PADDED)
        mass, mean = totals_of(parts, index, num_parts, PARTS_PADDED)
        counts += index.to(tl.int64) * (1 + num_parts) * NUM_BINS
        last, number = _candidates_of(choice + 2, top, mass, mean, counts)
        of_parts = counts + NUM_BINS + last
        token_ids += index.to(tl.int64) * (1 + capacity)
        candidates += index.to(tl.int64) * capacity
        logits += tl.load(choice).to(tl.int64) * row_stride
        if first_part == 0:
            tl.store(token_ids, number)
        if number <= capacity:
            each = tl.arange(0, PARTS_PADDED)
            before = tl.sum(tl.load(of_parts + each * NUM_BINS, mask=each < first_part, other=0), axis=0)
            for part in range(first_part, tl.minimum(first_part + PARTS_OF_PROGRAM, num_parts)):
                in_part = tl.load(of_parts + part * NUM_BINS)
                if in_part > 0:
                    tile = read_logits(logits, part * TILE, size, TILE)
                    is_candidate = _bin_of(key_of(tile, temperature), top) <= last
                    places = before + tl.cumsum(is_candidate.to(tl.int32), axis=0)  # from 1 on
                    tl.store(candidates + places - 1, tile, mask=is_candidate)
                    tl.store(token_ids + places, part * TILE + tl.arange(0, TILE), mask=is_candidate)
                before += in_part
