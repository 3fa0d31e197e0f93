"""The randomness of the sampler against plain facts; tests/numerics/test_processors.py compares its filters."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor_svc.sampler.filters import draw, filtered_scores
from executor_svc.sampler.interface import Alternatives
from executor_svc.sampler.sample_rows import SampleRows, uniforms
from executor_svc.sampler.sampler import Sampled, Sampler
from octavo_shared.step_wire.step import SAMPLING_ROW, Int32Array, SamplingRow
from octavo_shared.step_wire.token_rules import TokenRules
from tests.support.each_row import each_row
from tests.support.sample_rows import ROWS_OF_FILTERS, Row
from tests.support.sample_rows import sample_rows as rows_with_rules


def random_logits(num_rows: int, vocab_size: int = 500, seed: int = 0) -> torch.Tensor:
    return torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * 3


def rows_of(*rows: SamplingRow) -> npt.NDArray[np.void]:
    return np.array([row.as_tuple() for row in rows], SAMPLING_ROW)


def sample_rows(sampling: npt.NDArray[np.void]) -> SampleRows:
    """Return rows without rules, each behind a prompt of one token."""
    slots, ones = np.arange(len(sampling), dtype=np.int32), np.ones(len(sampling), np.int32)
    return SampleRows(sampling, [None] * len(slots), slots, ones, ones, np.zeros((len(slots), 1), np.int32))


def sample(logits: torch.Tensor, *rows: SamplingRow) -> tuple[Int32Array, npt.NDArray[np.float32] | None]:
    """Sample row i from logits row i."""
    sampled = Sampler().sample(logits, np.arange(len(rows), dtype=np.int32), sample_rows(rows_of(*rows)))
    return sampled.token_ids, sampled.logprobs


def sample_all_of_one(logits: torch.Tensor, sampling: npt.NDArray[np.void]) -> Sampled:
    """Sample all rows from logits row 0."""
    return Sampler().sample(logits, np.zeros(len(sampling), np.int32), sample_rows(sampling))


def test_top_k_keeps_ties_with_the_last_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])

    scores = filtered_scores(logits, rows_of(SamplingRow(temperature=1.0, top_k=2)))

    assert (scores[0] > -torch.inf).tolist() == [False, True, True, True, False]


def test_temperature_zero_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0]])

    token_ids, logprobs = sample(logits, SamplingRow(), SamplingRow())

    assert token_ids.tolist() == [1, 0]
    assert token_ids.dtype == np.int32
    assert logprobs is None


def test_a_temperature_near_zero_is_greedy_instead_of_nan() -> None:
    logits = random_logits(4) * 100

    token_ids, _ = sample(logits, *[SamplingRow(temperature=1e-40, seed=i, top_p=0.9) for i in range(4)])

    assert token_ids.tolist() == logits.argmax(-1).tolist()


def test_several_samples_may_share_a_logits_row() -> None:
    logits = random_logits(1)
    rows = [SamplingRow(temperature=2.0, seed=4, output_index=i, num_logprobs=0) for i in range(50)]

    sampled = sample_all_of_one(logits, rows_of(*rows))

    token_ids, logprobs = sampled.token_ids, sampled.logprobs
    assert len(set(token_ids.tolist())) > 10
    assert logprobs is not None
    np.testing.assert_allclose(logprobs, torch.log_softmax(logits[0], -1).numpy()[token_ids], atol=1e-5)


def test_column_major_logits_give_the_same_tokens() -> None:
    logits = random_logits(8)
    rows = [SamplingRow(temperature=float(i % 2), top_p=0.9, seed=i, num_logprobs=0) for i in range(8)]

    expected_ids, expected_logprobs = sample(logits, *rows)
    token_ids, logprobs = sample(logits.t().contiguous().t(), *rows)

    assert token_ids.tolist() == expected_ids.tolist()
    assert logprobs is not None
    assert expected_logprobs is not None
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-6)


@each_row(SamplingRow(temperature=1.0), SamplingRow(temperature=1.5, top_k=8, top_p=0.9))
def test_draws_follow_the_distribution(row: SamplingRow) -> None:
    """Chi-square of 20,000 draws with fixed seeds; the bound is 6 standard deviations."""
    num_draws = 20_000
    logits = random_logits(1, vocab_size=20) / 3
    rows = np.repeat(rows_of(row), num_draws)
    rows["seed"] = np.arange(num_draws)

    token_ids = sample_all_of_one(logits, rows).token_ids

    expected = torch.softmax(filtered_scores(logits.clone(), rows_of(row)), -1)[0].double().numpy() * num_draws
    counts = np.bincount(token_ids, minlength=20)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    degrees = possible.sum() - 1
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < degrees + 6 * np.sqrt(2 * degrees)


@each_row(0.0, 0.5, 1 - 2.0**-53)
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    scores = torch.tensor([[-torch.inf, 1.0, -torch.inf, 1.0, -torch.inf]])

    token_id = int(draw(scores, np.array([uniform]))[0])

    assert token_id == (1 if uniform < 0.5 else 3)


def candidates(logits: torch.Tensor, *num_candidates: int) -> list[tuple[list[int], list[float]]]:
    """Return the candidates of each row of logits."""
    rows = np.arange(len(num_candidates), dtype=np.int32)
    sampling = rows_of(*[SamplingRow()] * len(rows))
    found = Sampler().candidates(logits, rows, sample_rows(sampling), np.array(num_candidates, np.int32))
    ends = np.cumsum(num_candidates)[:-1]
    return [
        (ids.tolist(), values.tolist())
        for ids, values in zip(np.split(found.token_ids, ends), np.split(found.logprobs, ends), strict=True)
    ]


def test_equally_likely_candidates_come_by_token_id_also_where_the_cut_is() -> None:
    logits = torch.zeros(3, 200)
    logits[0, 150], logits[0, 7] = 2.0, 2.0
    logits[1] = torch.arange(200) // 2  # ties everywhere
    logits[2, [190, 30, 60, 120]] = 1.0

    result = candidates(logits, 5, 5, 3)

    assert [token_ids for token_ids, _ in result] == [[7, 150, 0, 1, 2], [198, 199, 196, 197, 194], [30, 60, 120]]


def test_fewer_candidates_are_a_prefix_of_more() -> None:
    logits = (random_logits(1) * 2).round()  # many ties

    everything, logprobs = candidates(logits, 500)[0]

    for width in (1, 2, 7, 32, 100):
        assert candidates(logits, width)[0] == (everything[:width], logprobs[:width])


def test_candidates_take_the_logits_row_that_is_theirs_and_leave_it_alone() -> None:
    logits = random_logits(3)
    before = logits.clone()

    rows = sample_rows(rows_of(SamplingRow(), SamplingRow()))
    token_ids = Sampler().candidates(logits, np.array([2, 0], np.int32), rows, np.array([2, 3], np.int32)).token_ids

    assert token_ids.tolist() == [*logits[2].topk(2).indices.tolist(), *logits[0].topk(3).indices.tolist()]
    assert token_ids.dtype == np.int32
    assert torch.equal(logits, before)


def test_uniforms_are_a_pure_function_of_seed_output_and_position() -> None:
    seeds = np.array([0, 1, 2**64 - 1, 1, 1], np.uint64)
    output_indices = np.array([0, 0, 0, 1, 0], np.int32)
    positions = np.array([0, 0, 0, 0, 1], np.int32)

    values = uniforms(seeds, output_indices, positions)

    assert len(set(values.tolist())) == 5
    assert np.array_equal(values, uniforms(seeds, output_indices, positions))
    assert uniforms(seeds[3:4], output_indices[3:4], positions[3:4])[0] == values[3]


def test_uniforms_are_pinned() -> None:
    """A changed hash would change what stored seeds mean."""
    values = uniforms(np.array([42, 42], np.uint64), np.array([0, 1], np.int32), np.array([7, 7], np.int32))

    assert values.tolist() == [0.6424233675512125, 0.10584086659863745]


def test_uniforms_fill_the_interval_evenly() -> None:
    num = 10_000
    zeros = np.zeros(num, np.int32)
    for values in (
        uniforms(np.arange(num, dtype=np.uint64), zeros, zeros),
        uniforms(np.zeros(num, np.uint64), zeros, np.arange(num, dtype=np.int32)),
    ):
        counts = np.histogram(values, bins=20, range=(0, 1))[0]
        chi_square = ((counts - num / 20) ** 2 / (num / 20)).sum()
        assert chi_square < 19 + 6 * np.sqrt(2 * 19)
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers how many values the largest tensor had that an operation made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            is_view = isinstance(tensor, torch.Tensor) and any(
                isinstance(arg, torch.Tensor) and arg.data_ptr() == tensor.data_ptr() for arg in args
            )
            if isinstance(tensor, torch.Tensor) and not is_view:
                self.num_values = max(self.num_values, tensor.numel())
        return result


def test_the_memory_of_sampling_has_a_bound_and_the_bound_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size = 10_000
    rules = TokenRules(biased_token_ids=np.array([3], np.int32), biases=np.array([1.5], np.float32))
    asking = SamplingRow(temperature=1.0, num_logprobs=5, repetition_penalty=1.2, seed=3)
    samplings = [asking, SamplingRow(), SamplingRow(num_logprobs=2), *ROWS_OF_FILTERS]
    rows = rows_with_rules(
        *(Row(sampling, (1, 2), (4,), rules if sampling is asking else None) for sampling in samplings)
    )
    logits = random_logits(len(samplings), vocab_size)
    logit_rows = np.arange(len(samplings), dtype=np.int32)[::-1].copy()
    num_candidates = np.arange(1, len(samplings) + 1, dtype=np.int32)

    def run() -> tuple[Sampled, Alternatives]:
        return Sampler().sample(logits, logit_rows, rows), Sampler().candidates(
            logits, logit_rows, rows, num_candidates
        )

    at_once, candidates_at_once = run()
    monkeypatch.setattr("executor_svc.sampler.torch_backend.VALUES_AT_ONCE", 3 * vocab_size + 1)
    with LargestTensor() as largest:
        sampled, candidates = run()

    assert largest.num_values <= 3 * vocab_size
    assert sampled.token_ids.tolist() == at_once.token_ids.tolist()
    np.testing.assert_array_equal(sampled.logprobs, at_once.logprobs)
    pairs = [(sampled.alternatives, at_once.alternatives), (candidates, candidates_at_once)]
    for ours, theirs in pairs:
        assert ours is not None
        assert theirs is not None
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
