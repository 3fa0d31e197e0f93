"""What the sampling kernels draw is what the torch form of the sampler draws; the tolerance is that of rounding."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from executor_svc.sampler import device_sampling
from executor_svc.sampler.device_sampling import sample_on_device
from executor_svc.sampler.filters import draw, filtered_scores
from executor_svc.sampler.interface import NOT_FINITE
from executor_svc.sampler.likeliest import largest_index
from octavo_shared.step_wire.step import SamplingRow
from tests.kernels.device import DEVICE, RANDOM_CASES, SLOW_IF_INTERPRETED
from tests.support.sample_rows import KEPT_OF_TIES, ROWS_OF_FILTERS, TYPICAL_TOKENS, sampling_of

# Tokens of a part, and that a program reads at once, so few that small vocabularies take several tiles.
TILE = 128
# In the interpreter passes are slow: many pivots are few of them, and a larger tile of a small vocabulary is one. On a
# GPU a pass costs nothing, and each pair of numbers takes seconds to compile.
IS_COMPILED = DEVICE.type == "cuda"
NUM_PIVOTS = device_sampling.NUM_PIVOTS if IS_COMPILED else 128
TILE_OF_MANY_ROWS = TILE if IS_COMPILED else 256
LAST_DRAW = 1 - 2.0**-53
EDGE = 1e-6

# One filter each, and all together.
ROWS_OF_EACH = [ROWS_OF_FILTERS[index] for index in (0, 2, 4, 7, 9, 14)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make small vocabularies take several tiles."""
    monkeypatch.setattr(device_sampling, "PART", TILE)
    monkeypatch.setattr(device_sampling, "TILE", TILE)
    monkeypatch.setattr(device_sampling, "NUM_PIVOTS", NUM_PIVOTS)


def random_logits(num_rows: int, vocab_size: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(num_rows, vocab_size, generator=generator)).to(DEVICE)


@contextmanager
def without_waiting() -> Iterator[None]:
    """Fail on a GPU if the host waits for it."""
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def sample(
    logits: torch.Tensor, rows: Sequence[SamplingRow], draws: Sequence[float], logit_rows: Sequence[int] | None = None
) -> list[int]:
    index = np.arange(len(rows)) if logit_rows is None else np.array(logit_rows)
    sampling, before = sampling_of(*rows), logits.clone()
    with without_waiting():
        sampled = sample_on_device(logits, index.astype(np.int32), sampling, np.array(draws, np.float64))
    assert sampled.dtype == torch.int64
    assert sampled.device.type == DEVICE.type
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert bool(((sampled[0] >= 0) & (sampled[0] < logits.shape[1])).all()), "each row has a valid token"
    result: list[int] = torch.where(sampled[1] == 1, NOT_FINITE, sampled[0]).tolist()
    return result


def is_near(token_id: int, kept: torch.Tensor, drawn: float) -> bool:
    """Return whether the draw falls into the part of the distribution that the token has, up to rounding."""
    cumulative = kept.double().softmax(-1).cumsum(-1)
    begin = float(cumulative[token_id - 1]) if token_id else 0.0
    return bool(kept[token_id] > -torch.inf) and begin - EDGE <= drawn <= float(cumulative[token_id]) + EDGE


def check(logits: torch.Tensor, rows: Sequence[SamplingRow], draws: npt.NDArray[np.float64]) -> None:
    """Fail unless each row gets the token of the torch form.

    Another one may come only if the draw is at its edge, with what is left at the wanted mass or within rounding of it.
    """
    token_ids = sample(logits, rows, draws.tolist())
    expected = draw(filtered_scores(logits, sampling_of(*rows)), draws).tolist()
    others = [row for row, (ours, theirs) in enumerate(zip(token_ids, expected, strict=True)) if ours != theirs]
    for row in others:
        shares = [
            replace(rows[row], top_p=rows[row].top_p * factor, typical_p=rows[row].typical_p * factor)
            for factor in (1 - EDGE, 1.0, 1 + EDGE)
        ]
        likely = filtered_scores(logits[[row] * len(shares)], sampling_of(*shares))
        assert any(is_near(token_ids[row], kept, float(draws[row])) for kept in likely), rows[row]
    assert len(others) <= max(1, len(rows) // 50)


def random_rows(count: int, seed: int) -> list[SamplingRow]:
    generator = np.random.default_rng(seed)

    def pick(*values: float) -> float:
        return float(generator.choice(values))

    return [
        SamplingRow(
            temperature=pick(0.3, 1.0, 4.0),
            top_k=int(pick(0, 0, 1, 3, 40, 10_000)),
            top_p=pick(1.0, 1.0, 0.9, 0.4, 1e-6),
            min_p=pick(0.0, 0.0, 0.05, 1.0),
            typical_p=pick(1.0, 1.0, 0.95, 0.2),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("kind", ["distinct", "ties", "forbidden"])
def test_combinations_of_filters(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_sampling, "TILE", TILE_OF_MANY_ROWS)
    rows = random_rows(RANDOM_CASES // 3, seed=len(kind))
    logits = random_logits(len(rows), vocab_size=250, seed=len(kind))
    if kind == "ties":
        logits.round_()
    if kind == "forbidden":
        logits[:, ::3] = -torch.inf
        logits[:, 150:240] = -torch.inf

    check(logits, rows, np.random.default_rng(0).random(len(rows)))


@pytest.mark.parametrize("vocab_size", [1, TILE, TILE + 1, pytest.param(3 * TILE - 5, marks=SLOW_IF_INTERPRETED)])
def test_vocabularies_of_any_size(vocab_size: int) -> None:
    rows = [row for row in ROWS_OF_EACH for _ in range(3)]
    logits = random_logits(len(rows), vocab_size, seed=vocab_size)

    check(logits, rows, np.tile([0.0, LAST_DRAW, 0.4], len(ROWS_OF_EACH)))


def test_the_tiles_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert (device_sampling.PART, device_sampling.TILE, device_sampling.NUM_PIVOTS) == (2048, 2048, 8)
    logits = random_logits(len(ROWS_OF_EACH), vocab_size=5003, seed=1)

    check(logits, ROWS_OF_EACH, np.linspace(0.05, 0.95, len(ROWS_OF_EACH)))


@pytest.mark.parametrize(
    ("vocab_size", "spread"),
    [
        (300, 1.0),
        *(pytest.param(*case, marks=SLOW_IF_INTERPRETED) for case in ((3, 1.0), (129, 0.0), (701, 0.1), (701, 30.0))),
    ],
)
def test_candidates_give_the_tokens_of_the_whole_row(
    vocab_size: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*random_rows(8, seed=vocab_size), *ROWS_OF_FILTERS[4:]]
    logits = random_logits(len(rows), vocab_size, seed=vocab_size, spread=spread)
    logits[::3].round_()
    logits[1::4, ::2] = -torch.inf
    draws = np.random.default_rng(1).random(len(rows)).tolist()
    results = []
    # With room for one candidate the filters look at all tokens; with room for 40, at those of some rows.
    for part, parts_of_program, capacity in ((TILE, 4, 10_000), (64, 2, 40), (256, 1, 1)):
        monkeypatch.setattr(device_sampling, "PART", part)
        monkeypatch.setattr(device_sampling, "PARTS_OF_PROGRAM", parts_of_program)
        monkeypatch.setattr(device_sampling, "CAPACITY", capacity)
        results.append(sample(logits, rows, draws))

    assert results == [results[0]] * len(results)


def test_rows_that_have_no_use_for_a_kernel_do_not_launch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(2, 300, seed=8)
    monkeypatch.setattr(device_sampling, "gather_parts", None)
    sample(logits, [SamplingRow(), SamplingRow(temperature=1.0, top_k=300)], [0.1, 0.2])
    monkeypatch.setattr(device_sampling, "weigh_parts", None)
    sample(logits, [SamplingRow(), SamplingRow(top_k=5, top_p=0.5)], [0.1, 0.2])


@pytest.mark.skipif(IS_COMPILED, reason="the interpreter's loads are counted")
def test_a_row_is_read_three_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(1, 10 * TILE, seed=9)
    begin, num_read = logits.data_ptr(), 0
    load = InterpreterBuilder.create_masked_load

    def count(builder: InterpreterBuilder, pointers: TensorHandle, mask: TensorHandle, *others: object) -> TensorHandle:
        nonlocal num_read
        offsets = pointers.data[mask.data].astype(np.int64) - begin
        num_read += int(((offsets >= 0) & (offsets < logits.nbytes)).sum())
        return load(builder, pointers, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", count)
    passes = []
    for row in (SamplingRow(), *ROWS_OF_FILTERS):
        num_read = 0
        sample_on_device(logits, np.zeros(1, np.int32), sampling_of(row), np.array([0.5]))
        passes.append(num_read / logits.numel())

    assert passes[0] == 1.0  # greedy
    assert passes[1] == 2.1  # no filter: then the part that the draw falls into
    assert all(2.0 < of_row <= 3.0 for of_row in passes[2:])
    assert passes[2] < 3.0  # the likeliest token alone: parts without candidates are not read


def test_tokens_of_nearly_equal_scores() -> None:
    logits = random_logits(len(ROWS_OF_FILTERS), 300, seed=2, spread=0.01)

    token_ids = sample(logits, ROWS_OF_FILTERS, [0.37] * len(ROWS_OF_FILTERS))

    kept = filtered_scores(logits, sampling_of(*ROWS_OF_FILTERS))
    for token_id, of_row in zip(token_ids, kept, strict=True):
        # Of hundreds of such tokens, two at the edge of a filter may be in or out.
        cumulative = of_row.double().softmax(-1).cumsum(-1)
        num_kept = int((of_row > -torch.inf).sum())
        edge = 2 / num_kept if num_kept > 100 else EDGE
        assert float(cumulative[token_id]) + edge >= 0.37
        assert float(cumulative[token_id - 1] if token_id else 0) - edge <= 0.37


def tokens_left(probabilities: list[float], row: SamplingRow) -> set[int]:
    """Return which tokens the torch form leaves; the kernel must give each for the draw in the middle of its part."""
    scores = torch.tensor([probabilities], device=DEVICE).log()
    left = filtered_scores(scores, sampling_of(row))[0].double().softmax(-1)
    kept = torch.nonzero(left)[:, 0].tolist()
    middles = (left.cumsum(-1) - left / 2)[kept].tolist()
    assert sample(scores, [row] * len(kept), middles, [0] * len(kept)) == kept
    return set(kept)


TIED = [math.exp(score) for score in (0.0, 3.0, 2.0, 2.0, -1.0, -2.0, -9.0)]


@pytest.mark.parametrize(
    ("row", "kept"),
    [*KEPT_OF_TIES, (SamplingRow(temperature=1.0), {0, 1, 2, 3, 4, 5, 6})],
)
def test_ties_stay_together(row: SamplingRow, kept: set[int]) -> None:
    assert tokens_left(TIED, row) == kept


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (SamplingRow(temperature=1.0, top_k=2, top_p=0.5), {0}),
        (SamplingRow(temperature=1.0, top_k=4, top_p=0.5, min_p=0.8), {0, 1}),
    ],
)
def test_top_p_is_a_share_of_what_top_k_leaves(row: SamplingRow, kept: set[int]) -> None:
    scores = torch.tensor([[0.3, 0.25, 0.2, 0.15, 0.1]], device=DEVICE).log()
    # A draw in the middle would not tell whether too much is left.
    assert sample(scores, [row] * 2, [0.0, LAST_DRAW], [0, 0]) == [min(kept), max(kept)]


@pytest.mark.parametrize(("probabilities", "typical_p", "kept"), TYPICAL_TOKENS)
def test_typical_tokens(probabilities: list[float], typical_p: float, kept: set[int]) -> None:
    assert tokens_left(probabilities, SamplingRow(temperature=1.0, typical_p=typical_p)) == kept


def test_greedy_rows_get_the_first_of_the_likeliest() -> None:
    logits = random_logits(6, 300, seed=3)
    logits[1, [290, 140, 141]] = 50.0
    logits[2, [130, 5]] = torch.inf
    logits[3] = -torch.inf
    logits[4, 200] = torch.nan
    logits[5] = torch.nan

    token_ids = sample(logits, [SamplingRow()] * 6, [0.5] * 6)

    assert token_ids == largest_index(logits).tolist()
    assert token_ids[1:] == [140, *[NOT_FINITE] * 4]


def test_greedy_rows_of_one_token() -> None:
    assert sample(random_logits(3, 1, seed=4), [SamplingRow()] * 3, [0.0, 0.5, LAST_DRAW]) == [0, 0, 0]


def test_a_temperature_near_zero_is_greedy() -> None:
    logits = random_logits(4, 150, seed=3, spread=100.0)
    rows = [SamplingRow(temperature=1e-40), SamplingRow(temperature=1e-40, top_p=0.9)] * 2

    assert sample(logits, rows, [0.0, 0.0, LAST_DRAW, LAST_DRAW]) == logits.argmax(-1).tolist()


def test_rows_share_logits_of_any_stride() -> None:
    wide = random_logits(3, 200, seed=5)
    logits, logit_rows = wide[:, :150], [2, 0, 2, 2, 1, 0]
    rows = [SamplingRow(), *ROWS_OF_EACH[:5]]
    draws = [0.3] * 6

    token_ids = sample(logits, rows, draws, logit_rows)

    assert token_ids == sample(logits[logit_rows].clone(), rows, draws)
    assert token_ids == [sample(logits[[i]], [row], [0.3])[0] for i, row in zip(logit_rows, rows, strict=True)]


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_a_row_that_is_not_finite_is_told(value: float) -> None:
    alone = torch.full((1, 200), value, device=DEVICE)
    mixed = random_logits(1, 200, seed=6)
    mixed[0, ::3] = value
    rows = [row for row in ROWS_OF_EACH for _ in range(2)]

    token_ids = sample(torch.cat((alone, mixed)), rows, [0.9] * len(rows), [0, 1] * len(ROWS_OF_EACH))

    mixed_is_finite = value == -math.inf
    assert [token_id == NOT_FINITE for token_id in token_ids] == [True, not mixed_is_finite] * len(ROWS_OF_EACH)


def test_no_rows_are_no_error() -> None:
    assert sample(random_logits(2, 10, seed=7), [], []) == []


def test_other_layouts_are_refused() -> None:
    for logits in (torch.zeros(4, 3, device=DEVICE).t(), torch.zeros(3, 4, device=DEVICE, dtype=torch.float64)):
        with pytest.raises(AssertionError):
            sample(logits, [SamplingRow()], [0.0])
