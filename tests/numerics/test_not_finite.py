"""A row whose logits are not finite is told, whatever is asked of it, and its neighbours keep their bits.

By the sampler in C, with either width of vectors, by the one in torch, and by whole models; the kernel: tests/kernels.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.config import ExecutorConfig
from executor_svc.sampler.sampler import Sampled, Sampler, flags_of_candidates
from executor_svc.worker.loading import load_worker
from octavo_shared.step_wire.step import RowFlag, SamplingRow, StepResult, TableDelta, pairs
from octavo_shared.step_wire.token_rules import TokenRules, pack_mask
from tests.numerics.driver import StepDriver
from tests.numerics.launch_ahead import draw_in_torch
from tests.numerics.native import LANES
from tests.numerics.reference import random_prompt
from tests.numerics.test_native_sampling import native_sampling
from tests.numerics.test_processors import logits_of
from tests.numerics.tiny_models import save_tiny_model
from tests.support.sample_rows import ROWS_OF_FILTERS, Row, sample_rows

NAN, INFINITY = float("nan"), float("inf")
VOCAB_SIZES = (1, 17, 150, 8195)
# Greedy rows, each filter, and a penalty.
ROWS = (SamplingRow(), *ROWS_OF_FILTERS, SamplingRow(presence_penalty=0.5), SamplingRow(temperature=0.7, seed=3))
NEIGHBOURS = (SamplingRow(num_logprobs=1), SamplingRow(temperature=1.0, top_p=0.9, num_logprobs=0))


@pytest.fixture(params=[*LANES, "torch"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return Sampler(None if request.param == "torch" else native_sampling(request.param))


def with_value(vocab_size: int, place: int, value: float) -> torch.Tensor:
    """Return a row with a value in one place."""
    row = logits_of(1, seed=place, vocab_size=vocab_size)
    row[0, place] = value
    return row


def sample(sampler: Sampler, row: torch.Tensor, how: Row, neighbours: torch.Tensor) -> Sampled:
    """Sample a row between two neighbours."""
    logits = torch.cat((neighbours[:1], row, neighbours[1:]))
    rows = sample_rows(Row(NEIGHBOURS[0]), how, Row(NEIGHBOURS[1]))
    return sampler.sample(logits, np.arange(3, dtype=np.int32), rows)


def flags(sampled: Sampled) -> list[int]:
    return [0] * len(sampled.token_ids) if sampled.row_flags is None else sampled.row_flags.tolist()


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("how", ROWS, ids=repr)
def test_a_row_is_told_and_its_neighbours_notice_nothing(sampler: Sampler, how: SamplingRow, vocab_size: int) -> None:
    places = sorted({0, vocab_size // 2, vocab_size - 1})
    broken = [with_value(vocab_size, place, value) for place in places for value in (NAN, -NAN, INFINITY)]
    broken += [torch.full((1, vocab_size), value) for value in (NAN, INFINITY, -INFINITY)]
    neighbours = logits_of(2, seed=7, vocab_size=vocab_size)
    neighbours[:, 1::2] = -INFINITY  # as is legal
    alone = sample(sampler, logits_of(1, seed=8, vocab_size=vocab_size), Row(how), neighbours)
    assert flags(alone) == [0, 0, 0]
    assert alone.logprobs is not None

    for row in broken:
        sampled = sample(sampler, row, Row(how), neighbours)

        assert flags(sampled) == [0, RowFlag.NOT_FINITE, 0]
        assert 0 <= sampled.token_ids[1] < vocab_size, "the next step computes with it"
        assert sampled.token_ids[[0, 2]].tolist() == alone.token_ids[[0, 2]].tolist()
        assert sampled.logprobs is not None
        assert sampled.logprobs[[0, 2]].tobytes() == alone.logprobs[[0, 2]].tobytes()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_neither_hide_it_nor_leave_a_row_without_a_token(sampler: Sampler, temperature: float) -> None:
    how = SamplingRow(temperature=temperature)
    bans_5 = TokenRules(banned_token_ids=np.array([5], np.int32))
    only_5 = TokenRules(allowed_mask=pack_mask(np.array([5], np.int32), 150))
    biases_5 = TokenRules(biased_token_ids=np.array([5], np.int32), biases=np.array([3e38], np.float32))
    neighbours = logits_of(2, seed=7, vocab_size=150)
    cases = (
        (NAN, bans_5, True),
        (INFINITY, bans_5, True),
        (-INFINITY, bans_5, False),
        (-INFINITY, only_5, True),
        (0.0, only_5, False),
        (3e38, biases_5, True),  # their sum is infinite
    )
    for value, rules, is_told in cases:
        sampled = sample(sampler, with_value(150, 5, value), Row(how, rules=rules), neighbours)
        assert flags(sampled) == [0, RowFlag.NOT_FINITE * is_told, 0], (value, rules)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_candidates_of_beams_and_log_probabilities_of_prompts_tell_it_too(sampler: Sampler, vocab_size: int) -> None:
    neighbours = logits_of(2, seed=7, vocab_size=vocab_size)
    index, counts = np.arange(3, dtype=np.int32), np.array([1, min(2, vocab_size), 1], np.int32)
    rows = sample_rows(Row(), Row(), Row())
    for value in (NAN, INFINITY):
        logits = torch.cat((neighbours[:1], with_value(vocab_size, vocab_size // 2, value), neighbours[1:]))

        found = sampler.candidates(logits, index, rows, counts)
        of_prompt, _ = sampler.prompt_logprobs(torch.empty(3, 1), lambda _: logits, np.zeros(3, np.int32), counts)  # noqa: B023

        assert flags_of_candidates(found, counts).tolist() == [0, RowFlag.NOT_FINITE, 0]
        assert np.isnan(of_prompt).tolist() == [False, True, False]
        assert ((found.token_ids >= 0) & (found.token_ids < vocab_size)).all()


NAN_TOKEN = 50


def save_model_with_nan(directory: Path) -> None:
    """Save a random model whose embedding of NAN_TOKEN is NaN."""
    save_tiny_model(directory, tie_word_embeddings=False)
    file = directory / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][NAN_TOKEN] = NAN
    save_file(weights, file, metadata={"format": "pt"})


@pytest.fixture(params=["one call", "torch", "as on a GPU"])
def driver(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepDriver:
    """A model that is one call of C, one of torch's parts, and one whose steps are launched ahead."""
    if request.param == "as on a GPU":
        monkeypatch.setattr("executor_svc.worker.assembly.device_sampling", lambda _: draw_in_torch)
    save_model_with_nan(tmp_path)
    kernels = "auto" if request.param == "one call" else "torch"
    config = ExecutorConfig(
        model=str(tmp_path), block_size_tokens=4, num_device_blocks=60, max_num_seqs=4, cpu_kernels=kernels
    )
    return StepDriver(load_worker(config))


@pytest.mark.parametrize("how", [SamplingRow(), SamplingRow(num_logprobs=0), SamplingRow(temperature=0.8, seed=1)])
def test_a_model_with_a_broken_embedding_breaks_the_rows_behind_it_alone(driver: StepDriver, how: SamplingRow) -> None:
    """In prefill and decode, and for whoever has its blocks afterwards."""
    prompts = [random_prompt(9, seed=1), [*random_prompt(6, seed=2), NAN_TOKEN, 7], random_prompt(5, seed=3)]
    assert NAN_TOKEN not in prompts[0] + prompts[2]
    blocks = driver.free_block_ids.copy()

    def run(slots: list[int], *, releases: list[int]) -> list[StepResult]:
        admissions = tuple(driver.admission(slot, prompts[slot], 8, how) for slot in slots)
        chunks = pairs(*[(slot, len(prompts[slot])) for slot in slots])
        first = TableDelta(np.array(releases, np.int32), admissions=admissions, prefill_chunks=chunks)
        return [driver.execute(delta) for delta in (first, TableDelta(), TableDelta(), TableDelta())]

    together = run([0, 1, 2], releases=[])
    driver.free_block_ids = blocks[::-1]  # in another order: those of the broken row are used too
    alone = run([0, 2], releases=[0, 1, 2])

    assert [flags_of(result) for result in together] == [[0, RowFlag.NOT_FINITE, 0]] * 4
    assert [flags_of(result) for result in alone] == [[0, 0]] * 4
    for shared, expected in zip(together, alone, strict=True):
        assert shared.sampled_token_ids[[0, 2]].tolist() == expected.sampled_token_ids.tolist()
        if shared.logprobs is not None:
            assert expected.logprobs is not None
            np.testing.assert_allclose(shared.logprobs[[0, 2]], expected.logprobs, atol=1e-5)


def flags_of(result: StepResult) -> list[int]:
    return [0] * len(result.sampled_token_ids) if result.row_flags is None else result.row_flags.tolist()
