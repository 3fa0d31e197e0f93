"""A step in one call of the C library gives bit for bit what its segments and attentions give one by one."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.worker.loading import load_worker
from executor_svc.worker.native_runner import NativeRunner
from executor_svc.worker.torch_worker import TorchWorker
from octavo_shared.step_wire.step import SamplingRow, StepResult, TableDelta, pairs
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.driver import PoisonedCacheEngine, StepDriver, fork_of
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.numerics.native import LANES, library_path
from tests.numerics.reference import random_prompt

GREEDY = SamplingRow()
SAMPLINGS = (
    GREEDY,
    SamplingRow(temperature=0.9, top_k=20, seed=4, num_logprobs=3),
    SamplingRow(repetition_penalty=1.4),
    SamplingRow(num_candidates=5),
)
# Longer than what is planned as one part of a sequence's keys; than what one thread looks at of a row of logits.
LONG_PROMPT, LARGE_VOCABULARY = 900, 20_000

Load = Callable[..., StepDriver]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a tiny model with a cache full of NaN: its steps in one call each, or composed of many."""
    monkeypatch.setattr("executor_svc.worker.assembly.CacheEngine", PoisonedCacheEngine)

    def loaded(name: str, *, is_composed: bool, changes: dict[str, Any] | None = None, **settings: Any) -> StepDriver:
        if not (tmp_path / "config.json").exists():
            save_tiny_architecture(tmp_path, name, {**FAMILY_ARCHITECTURES[name], **(changes or {})})
        config = {"cpu_kernels": "native", "num_device_blocks": 200, "block_size_tokens": 4, "max_num_seqs": 40}
        with monkeypatch.context() as patch:
            if is_composed:
                patch.setattr("executor_svc.worker.assembly.native_forward", lambda *_: None)
            worker = load_worker(ExecutorConfig(model=str(tmp_path), **{**config, **settings}))
        assert isinstance(worker, TorchWorker)
        assert isinstance(worker._runner, NativeRunner) is not is_composed
        worker.reset()  # one table for all layers
        return StepDriver(worker)

    return loaded


def mixed_steps(driver: StepDriver) -> list[StepResult]:
    """Run chunks, decodes, forks, beams, penalties and log-probabilities of prompts, beside each other."""
    rows = [driver.admission(slot, random_prompt(11 + slot, seed=slot), 9, row) for slot, row in enumerate(SAMPLINGS)]
    rows[1] = replace(rows[1], num_prompt_logprobs=2)
    late = replace(driver.admission(7, random_prompt(23, seed=7), 9, GREEDY), num_prompt_logprobs=0)
    deltas = [
        TableDelta(admissions=tuple(rows), prefill_chunks=pairs(*((row.slot, 6) for row in rows))),
        TableDelta(
            prefill_chunks=pairs(*((row.slot, len(row.token_ids) - 6) for row in rows)), forks=(fork_of(0, 5, GREEDY),)
        ),
        TableDelta(admissions=(late,), prefill_chunks=pairs((7, 10))),
        TableDelta(prefill_chunks=pairs((7, 12))),
        TableDelta(prefill_chunks=pairs((7, 1))),
        TableDelta(),
        *one_after_the_other_rests(0, 1),
    ]
    blocks = driver.take_blocks(8).tolist()
    deltas[2].appended_blocks = pairs(*((5, block) for block in blocks))
    return [driver.execute(delta) for delta in deltas]


def one_after_the_other_rests(first: int, second: int) -> list[TableDelta]:
    """Return decodes of as many sequences each, but of others."""
    slots = np.array([first], np.int32), np.array([second], np.int32)
    swapped = TableDelta(activated_slots=slots[0], deactivated_slots=slots[1])
    return [TableDelta(deactivated_slots=slots[0]), swapped, TableDelta()]


def greedy_steps(driver: StepDriver, prompts: Sequence[Sequence[int]]) -> list[StepResult]:
    """Run prompts and decodes that take the likeliest token alone; one sequence ends before the others."""
    admissions = tuple(driver.admission(slot, prompt, 9) for slot, prompt in enumerate(prompts))
    chunks = pairs(*((slot, len(prompt)) for slot, prompt in enumerate(prompts)))
    deltas = [
        TableDelta(admissions=admissions, prefill_chunks=chunks),
        *[TableDelta()] * 3,
        *one_after_the_other_rests(0, 1),
        TableDelta(released_slots=np.array([1], np.int32)),
    ]
    return [driver.execute(delta) for delta in deltas]


def check_same(ours: StepDriver, theirs: StepDriver, run: Callable[[StepDriver], list[StepResult]]) -> None:
    """Compare all that steps answer, and what they leave in table and cache."""
    for our, their in zip(run(ours), run(theirs), strict=True):
        for field in fields(StepResult):
            if field.name != "execute_duration_us":
                np.testing.assert_array_equal(getattr(our, field.name), getattr(their, field.name), field.name)
    assert isinstance(ours.worker, TorchWorker)
    assert isinstance(theirs.worker, TorchWorker)
    assert ours.worker.table.token_ids.tolist() == theirs.worker.table.token_ids.tolist()
    for our_layer, their_layer in zip(
        ours.worker._cache_engine.layers, theirs.worker._cache_engine.layers, strict=True
    ):
        for our_pool, their_pool in ((our_layer.keys, their_layer.keys), (our_layer.values, their_layer.values)):
            assert torch.equal(our_pool.view(torch.int32), their_pool.view(torch.int32))


# Every family, and every number format with experts; a family in int8 is more of both.
@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        *((name, "none") for name in FAMILY_ARCHITECTURES),
        *(("Qwen3MoeForCausalLM", quantization) for quantization in ("bfloat16", "int8", "int8-a8", "int4")),
        *(
            pytest.param(name, "int8", marks=pytest.mark.slow)
            for name in FAMILY_ARCHITECTURES
            if name != "Qwen3MoeForCausalLM"
        ),
    ],
)
def test_every_family_and_every_kind_of_step(name: str, quantization: str, load: Load) -> None:
    ours, theirs = (load(name, is_composed=composed, quantization=quantization) for composed in (False, True))

    check_same(ours, theirs, mixed_steps)
    for driver in (ours, theirs):
        driver.worker.reset()
    check_same(ours, theirs, lambda driver: greedy_steps(driver, [random_prompt(9), random_prompt(3), [5]]))


@pytest.mark.parametrize("lanes", LANES)
def test_long_contexts_and_large_vocabularies(lanes: str, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_svc.native.library.find_library", lambda: library_path(lanes))
    changes = {"max_position_embeddings": 1_000, "vocab_size": LARGE_VOCABULARY}
    settings = {"num_device_blocks": 500, "changes": changes}
    ours, theirs = (load("Gemma2ForCausalLM", is_composed=composed, **settings) for composed in (False, True))
    prompts = [
        np.random.default_rng(size).integers(3, LARGE_VOCABULARY, size).tolist() for size in (LONG_PROMPT, 5, 40)
    ]

    check_same(ours, theirs, lambda driver: greedy_steps(driver, prompts))


def test_the_first_of_equal_logits_is_the_likeliest_in_every_part_of_a_row(load: Load) -> None:
    changes = {"vocab_size": LARGE_VOCABULARY, "tie_word_embeddings": False}
    driver = load("LlamaForCausalLM", is_composed=False, changes=changes)
    assert isinstance(driver.worker, TorchWorker)
    head = driver.worker._runner.model.weights.head._weights[1].weights[0]  # type: ignore[attr-defined]
    direction = torch.randn(32, generator=torch.Generator().manual_seed(1))

    for first, second in ((0, 8_191), (0, 19_999), (8_190, 8_192), (9_000, 17_000), (16_384, 16_390)):
        weight = torch.zeros(LARGE_VOCABULARY, 32)
        weight[[first, second]], weight[[first + 1, second - 1]] = direction, -direction  # one of them is above 0
        head.copy_(weight)
        driver.worker.reset()
        for result in greedy_steps(driver, [[5, 6], [7]]):
            assert set(result.sampled_token_ids.tolist()) <= {first, first + 1}


def test_sequences_that_take_turns_are_sampled_each_as_it_asks(load: Load) -> None:
    driver = load("LlamaForCausalLM", is_composed=False)
    asking = SamplingRow(num_logprobs=0)
    rows = tuple(driver.admission(slot, [5, 6], 9, row) for slot, row in enumerate((GREEDY, asking)))
    driver.execute(TableDelta(admissions=rows, prefill_chunks=pairs((0, 2), (1, 2))))

    results = [driver.execute(delta) for delta in one_after_the_other_rests(0, 1)]

    assert [result.logprobs is not None for result in results] == [True, False, False]


def test_the_last_layer_attends_for_wanted_tokens_alone(load: Load) -> None:
    driver = load("LlamaForCausalLM", is_composed=False, changes={"max_position_embeddings": 1_000})
    assert isinstance(driver.worker, TorchWorker)
    assert isinstance(driver.worker._runner, NativeRunner)
    model = driver.worker._runner._forward._model
    driver.execute(TableDelta(admissions=(driver.admission(0, random_prompt(700), 9),), prefill_chunks=pairs((0, 300))))
    tasks_before_the_end = model.last_step.num_tasks
    driver.execute(TableDelta(prefill_chunks=pairs((0, 400))))
    tile = ctypes.cast(model.last_step.tasks, ctypes.POINTER(ctypes.c_int32))[0]

    assert tasks_before_the_end == 0
    assert tile == model.last_step.num_tiles - 1 > 0
