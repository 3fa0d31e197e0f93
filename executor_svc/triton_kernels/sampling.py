"""One token of each row of logits: the filters of `executor_svc.sampler.filters`, then the draw.

Most rows are decided by few tokens, the *candidates*: those that a bound does not rule out (`_least_key`). Three
kernels, in a launch each, read a row at most three times:

1. `scan_parts`: the largest logit of each part of the row, and of each block. A greedy row is decided by it.
2. `weigh_parts`: the mass of each part, for rows whose bound or draw follows from it.
3. `choose_tokens`: the blocks that reach the bound are read again, and their tokens that reach it are put aside; all
   passes of the searches (`sampling_search.py`) go over these. Without a filter it is the part with the drawn token
   that is read again. Rows with more candidates than there is room for, of nearly equal scores or with a huge top-k,
   make all passes over the whole row: for top-k up to 11, for top-p and typical-p up to 12.

Parts and blocks follow the vocabulary alone: a row's token depends on no other row.
"""

import triton
import triton.language as tl

from executor_svc.triton_kernels.sampling_search import (
    DEPTH,
    FARTHEST,
    LOWEST,
    MASS_BY_CLOSENESS,
    MASS_BY_LIKELIHOOD,
    NUMBER_BY_LIKELIHOOD,
    UNITS,
    all_left,
    drawn,
    first_above,
    key,
    last_key,
    mass_left,
    mean_depth,
    read_tile,
    share,
    total,
    weigh,
)

# Bounds of probabilities are so much lower than they need be, so that rounding is safe.
MARGIN = tl.constexpr(0.5)
# Below every key.
NO_BOUND = tl.constexpr(-(2.0**101))


@triton.jit
def _largest_of_parts(part_largest, part_indices, index, num_parts, PARTS_PADDED: tl.constexpr):
    """Return the largest logit of a row and its index, of equal ones the first. NaN counts as infinity."""
    parts = tl.arange(0, PARTS_PADDED)
    is_part = parts < num_parts
    largest_of = tl.load(part_largest + index * num_parts + parts, mask=is_part, other=-float("inf"))
    indices = tl.load(part_indices + index * num_parts + parts, mask=is_part, other=2**31 - 1)
    largest = tl.max(largest_of, axis=0)
    return largest, tl.min(tl.where(largest_of == largest, indices, 2**31 - 1), axis=0)


@triton.jit
def _limits_and_numbers(limits, numbers, num_numbers, index):
    """Return top_k, top_p, the logarithm of min_p, typical_p, and whether the mass of the whole row is asked for."""
    top_k = tl.load(limits + 2 * index + 1)
    top_p = tl.load(numbers + num_numbers * index + 1)
    log_min_p = tl.load(numbers + num_numbers * index + 2)
    typical_p = tl.load(numbers + num_numbers * index + 3)
    is_weighed = (top_k == 0) & ((top_p < 1.0) | (log_min_p == -float("inf")))
    return top_k, top_p, log_min_p, typical_p, is_weighed


@triton.jit
def scan_parts(
    logits,
    row_stride,
    size,
    limits,
    part_largest,
    part_indices,
    block_maxima,
    num_blocks,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the largest logit of a part of a row, its index, and the largest of each block; the grid is (rows, parts).

    Args:
        logits: See `choose_tokens`; so are the next three.
        row_stride: See there.
        size: See there.
        limits: See there.
        part_largest: [num_samples, num_parts] float32, written; NaN counts as infinity.
        part_indices: [num_samples, num_parts] int32, written: of equal logits the first.
        block_maxima: [num_samples, num_blocks] float32, written.
        num_blocks: Of a row.
        PART: Tokens of a part, a power of two.
        BLOCK: Tokens of a block, a power of two that divides it.
    """
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits + tl.load(limits + 2 * index).to(tl.int64) * row_stride
    offsets = part * PART + tl.arange(0, PART)
    x = tl.load(row + offsets, mask=offsets < size, other=-float("inf"))
    x = tl.where(x == x, x, float("inf"))
    maxima = tl.max(tl.reshape(x, [PART // BLOCK, BLOCK]), axis=1)
    blocks = part * (PART // BLOCK) + tl.arange(0, PART // BLOCK)
    tl.store(block_maxima + index * num_blocks + blocks, maxima, mask=blocks < num_blocks)
    largest = tl.max(maxima, axis=0)
    place = index * tl.num_programs(1) + part
    tl.store(part_largest + place, largest)
    tl.store(part_indices + place, tl.min(tl.where(x == largest, offsets, 2**31 - 1), axis=0))


@triton.jit
def weigh_parts(
    logits,
    row_stride,
    size,
    numbers,
    num_numbers,
    limits,
    part_largest,
    part_indices,
    part_masses,
    part_moments,
    PART: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
):
    """Write the mass of a part of a row, and the sum of mass * (key - largest key); the grid is (rows, parts).

    Args:
        logits: See `choose_tokens`; so are the next five.
        row_stride: See there.
        size: See there.
        numbers: See there.
        num_numbers: See there.
        limits: See there.
        part_largest: Of `scan_parts`; so is the next.
        part_indices: See there.
        part_masses: [num_samples, num_parts] int64, written where a row asks for it.
        part_moments: [num_samples, num_parts] float64, the same.
        PART: See `scan_parts`.
        PARTS_PADDED: The next power of two of the number of parts.
    """
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(numbers + num_numbers * index)
    is_weighed = _limits_and_numbers(limits, numbers, num_numbers, index)[4]
    if (temperature > 0.0) & is_weighed:
        num_parts = tl.num_programs(1)
        largest, _ = _largest_of_parts(part_largest, part_indices, index, num_parts, PARTS_PADDED)
        top = tl.maximum(key(largest, temperature), LOWEST)
        row = (logits + tl.load(limits + 2 * index).to(tl.int64) * row_stride, size, temperature)
        left = all_left(top)
        keys, _, masses = weigh(row, left, read_tile(row, part * PART, PART))
        place = index * num_parts + part
        tl.store(part_masses + place, total(masses))
        tl.store(part_moments + place, total(masses.to(tl.float64) * (keys - top).to(tl.float64)))


@triton.jit
def _least_key(
    maxima,
    num_blocks,
    size,
    temperature,
    top,
    mass,
    moment,
    top_k,
    top_p,
    log_min_p,
    typical_p,
    TILE: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
):
    """Return a key below which no token survives the filters; `NO_BOUND`: there is none.

    As `least_key` of executor_svc/native/csrc/sampling.c, where the reasons stand.
    """
    if top_k > 0:
        least = tl.full([], NO_BOUND, tl.float32)
        if top_k <= num_blocks:  # so many blocks with the largest maxima have so many tokens that reach the least one
            row = (maxima, num_blocks, temperature)
            lowest = tl.full([], LOWEST, tl.float32)
            least = last_key(row, all_left(top), top_k, lowest, top, NUMBER_BY_LIKELIHOOD, TILE, NUM_PIVOTS)
    elif (top_p >= 1.0) & (log_min_p > -float("inf")):
        least = top + log_min_p
    else:
        log_mass = tl.log(tl.maximum(mass, 1).to(tl.float64) / UNITS)
        p = tl.where(top_p < 1.0, top_p, typical_p).to(tl.float64)
        depth = tl.log(size.to(tl.float64) / tl.maximum(1.0 - p, 2.0**-60))
        if top_p >= 1.0:
            depth = tl.maximum(depth, 2.0 * (log_mass - moment / tl.maximum(mass, 1).to(tl.float64)))
        least = (top.to(tl.float64) + log_mass - depth + tl.log(tl.full([], MARGIN, tl.float64))).to(tl.float32)
        least = tl.maximum(least, top - DEPTH)
    return least


@triton.jit
def _put_candidates_aside(
    row,
    least,
    maxima,
    num_blocks,
    block_ids,
    candidate_logits,
    candidate_ids,
    room,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the tokens of a row with a key of at least `least`, in their order; return how many there are.

    Of more than `room` only the first are written.
    """
    num_found = tl.zeros([], tl.int32)
    for begin in range(0, num_blocks, TILE):
        blocks = begin + tl.arange(0, TILE)
        keys = key(tl.load(maxima + blocks, mask=blocks < num_blocks, other=-float("inf")), row[2])
        is_found = ((keys >= least) & (blocks < num_blocks)).to(tl.int32)
        tl.store(block_ids + num_found + tl.cumsum(is_found, axis=0) - 1, blocks, mask=is_found != 0)
        num_found += tl.sum(is_found, axis=0)
    tl.debug_barrier()  # threads read what others have written
    count = tl.zeros([], tl.int32)
    for begin in range(0, num_found * BLOCK, TILE):
        places = begin + tl.arange(0, TILE)
        is_read = places < num_found * BLOCK
        offsets = tl.load(block_ids + places // BLOCK, mask=is_read, other=0) * BLOCK + places % BLOCK
        is_read = is_read & (offsets < row[1])
        x = tl.load(row[0] + offsets, mask=is_read, other=-float("inf"))
        is_candidate = (is_read & (key(x, row[2]) >= least)).to(tl.int32)
        targets = count + tl.cumsum(is_candidate, axis=0) - 1
        is_kept = (is_candidate != 0) & (targets < room)
        tl.store(candidate_logits + targets, x, mask=is_kept)
        tl.store(candidate_ids + targets, offsets, mask=is_kept)
        count += tl.sum(is_candidate, axis=0)
    tl.debug_barrier()
    return count


@triton.jit
def _drawn_from_parts(row, left, draw, masses, PART: tl.constexpr, PARTS_PADDED: tl.constexpr, TILE: tl.constexpr):
    """Return what `_drawn` does of a whole row whose parts have some masses, [PARTS_PADDED]; it reads one part."""
    mass = tl.sum(masses, axis=0)
    target = tl.minimum((draw * mass.to(tl.float64)).to(tl.int64), mass - 1)
    ends = tl.cumsum(masses, axis=0)
    part = tl.minimum(tl.sum((ends <= target).to(tl.int32), axis=0), PARTS_PADDED - 1)
    before = tl.sum(tl.where(tl.arange(0, PARTS_PADDED) < part, masses, 0), axis=0)
    return first_above(row, left, target, before, part * PART, TILE)


@triton.jit
def _filtered_and_drawn(
    row,
    top,
    top_k,
    top_p,
    log_min_p,
    typical_p,
    draw,
    is_weighed,
    mass,
    moment,
    TILE: tl.constexpr,
    NUM_PIVOTS: tl.constexpr,
):
    """Return the place of a token drawn from what the filters leave, applied in turn.

    Args:
        row: See `read_tile`: all that may survive, in the order of the tokens.
        top: The largest key.
        top_k: As in `choose_tokens`; so are the other filters and the draw.
        top_p: See there.
        log_min_p: See there.
        typical_p: See there.
        draw: See there.
        is_weighed: Whether the mass of all tokens is known.
        mass: That mass.
        moment: Of all tokens, of `weigh_parts`.
        TILE: See `choose_tokens`.
        NUM_PIVOTS: See there.
    """
    least = tl.full([], LOWEST, tl.float32)
    log_total = tl.zeros([], tl.float32)
    entropy = tl.zeros([], tl.float32)
    farthest = tl.full([], -float("inf"), tl.float32)
    if top_k > 0:
        left = (top, least, log_total, entropy, farthest)
        least = last_key(row, left, top_k, least, top, NUMBER_BY_LIKELIHOOD, TILE, NUM_PIVOTS)
    if top_p < 1.0:
        left = (top, least, log_total, entropy, farthest)
        if not is_weighed:
            mass = mass_left(row, left, TILE)
        deepest = tl.maximum(top - DEPTH, least)
        least = last_key(row, left, share(top_p, mass), deepest, top, MASS_BY_LIKELIHOOD, TILE, NUM_PIVOTS)
    least = tl.maximum(least, top + log_min_p)
    if typical_p < 1.0:
        left = (top, least, log_total, entropy, farthest)
        if (not is_weighed) | (top_p < 1.0):
            mass = tl.maximum(mass_left(row, left, TILE), 1)
            depth = mean_depth(row, left, mass, TILE)
        else:
            mass = tl.maximum(mass, 1)
            depth = moment / mass.to(tl.float64)
        log_mass = tl.log(mass.to(tl.float64) / UNITS)
        log_total = (log_mass + top).to(tl.float32)
        entropy = (log_mass - depth).to(tl.float32)
        left = (top, least, log_total, entropy, farthest)
        farthest = last_key(
            row,
            left,
            share(typical_p, mass),
            tl.full([], FARTHEST, tl.float32),
            tl.zeros([], tl.float32),
            MASS_BY_CLOSENESS,
            TILE,
            NUM_PIVOTS,
        )
    return drawn(row, (top, least, log_total, entropy, farthest), draw, TILE)


@triton.jit
def choose_tokens(
    logits,
    row_stride,
    size,
    numbers,
    num_numbers,
    limits,
    draws,
    part_largest,
    part_indices,
    part_masses,
    part_moments,
    block_maxima,
    num_blocks,
    block_ids,
    candidate_logits,
    candidate_ids,
    room,
    num_parts,
    sampled,
    PART: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
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
        part_largest: Of `scan_parts`; so is the next.
        part_indices: See there.
        part_masses: Of `weigh_parts`; so is the next.
        part_moments: See there.
        block_maxima: Of `scan_parts`.
        num_blocks: Of a row.
        block_ids: [num_samples, num_blocks] int32, overwritten.
        candidate_logits: [num_samples, room] float32, overwritten.
        candidate_ids: [num_samples, room] int32, overwritten.
        room: For candidates of a row.
        num_parts: Of a row.
        sampled: [2, num_samples] int64, written: the tokens, then 1 for each row that has NaN, infinity, or nothing but
            -infinity, where the token means nothing, and 0 for all others.
        PART: See `scan_parts`; so is `BLOCK`.
        PARTS_PADDED: See `weigh_parts`.
        BLOCK: See there.
        TILE: Tokens that are read at once, a power of two.
        NUM_PIVOTS: Thresholds that a pass tries at once, a power of two.
    """
    index = tl.program_id(0).to(tl.int64)
    temperature = tl.load(numbers + num_numbers * index)
    largest, token_id = _largest_of_parts(part_largest, part_indices, index, num_parts, PARTS_PADDED)
    token_id = tl.minimum(token_id, size - 1)
    if temperature > 0.0:
        top_k, top_p, log_min_p, typical_p, is_weighed = _limits_and_numbers(limits, numbers, num_numbers, index)
        draw = tl.load(draws + index)
        top = tl.maximum(key(largest, temperature), LOWEST)
        row = (logits + tl.load(limits + 2 * index).to(tl.int64) * row_stride, size, temperature)
        parts = tl.arange(0, PARTS_PADDED)
        masses = tl.zeros([PARTS_PADDED], tl.int64)
        moments = tl.zeros([PARTS_PADDED], tl.float64)
        if is_weighed:
            places = index * num_parts + parts
            masses = tl.load(part_masses + places, mask=parts < num_parts, other=0)
            moments = tl.load(part_moments + places, mask=parts < num_parts, other=0.0)
        mass, moment = tl.sum(masses, axis=0), tl.sum(moments, axis=0)
        if is_weighed & (top_p >= 1.0) & (typical_p >= 1.0):
            token_id = _drawn_from_parts(row, all_left(top), draw, masses, PART, PARTS_PADDED, TILE)
        else:
            maxima = block_maxima + index * num_blocks
            least = _least_key(
                maxima,
                num_blocks,
                size,
                temperature,
                top,
                mass,
                moment,
                top_k,
                top_p,
                log_min_p,
                typical_p,
                TILE,
                NUM_PIVOTS,
            )
            own_logits, own_ids = candidate_logits + index * room, candidate_ids + index * room
            own_blocks = block_ids + index * num_blocks
            count = _put_candidates_aside(
                row, least, maxima, num_blocks, own_blocks, own_logits, own_ids, room, BLOCK, TILE
            )
            has_room = count <= room
            tokens = (tl.where(has_room, own_logits, row[0]), tl.where(has_room, count, size), temperature)
            place = _filtered_and_drawn(
                tokens, top, top_k, top_p, log_min_p, typical_p, draw, is_weighed, mass, moment, TILE, NUM_PIVOTS
            )
            token_id = place
            if has_room:
                token_id = tl.load(own_ids + tl.minimum(place, tl.maximum(count, 1) - 1))
            token_id = tl.minimum(tl.maximum(token_id, 0), size - 1)
    tl.store(sampled + index, token_id.to(tl.int64))
    is_finite = (largest > -float("inf")) & (largest < float("inf"))
    tl.store(sampled + tl.num_programs(0) + index, 1 - is_finite.to(tl.int64))
