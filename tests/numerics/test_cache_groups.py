"""Layers with a window among layers without: in pools of their own they compute the same bits as in one pool."""

from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
import torch

from executor_svc.attention.interface import CachedLayer
from executor_svc.cache.block_count import BlockCounts
from executor_svc.cache.cache_engine import CacheShape
from executor_svc.cache.cache_groups import size_groups
from executor_svc.worker.torch_worker import TorchWorker
from octavo_shared.errors import DeviceLostError, InvalidStepError
from octavo_shared.step_wire.cache_group import CacheGroup, CacheKind, firsts_of, why_unusable
from octavo_shared.step_wire.step import Int32Array, SamplingRow, StepResult, TableDelta, pairs
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.executors.serving_limits import PlannerSettings
from scheduler_svc.request.parameters import StopConditions
from tests.numerics.driver import StepDriver
from tests.numerics.reference import random_prompt
from tests.numerics.test_native_forward import Load, load, mixed_steps
from tests.support.fleet import Outcome
from tests.support.schedules import Play, Request, Schedule

pytestmark = pytest.mark.usefixtures("one_thread")

__all__ = ["load"]


def in_groups(driver: StepDriver) -> StepDriver:
    """Return a driver of the same worker as after an Attach that agrees on CACHE_GROUPS."""
    driver.worker.reset(uses_groups=True)
    return StepDriver(driver.worker, seed=1)


def check_same(our: StepResult, their: StepResult) -> None:
    for field in fields(StepResult):
        if field.name != "execute_duration_us":
            np.testing.assert_array_equal(getattr(our, field.name), getattr(their, field.name), field.name)


def test_without_memory_for_another_layout_the_device_is_lost(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = load("Gemma3ForCausalLM", is_composed=False).worker

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(worker, "_lay_out", fail)
    with pytest.raises(DeviceLostError, match="laying out the KV cache anew failed: RuntimeError: no memory"):
        worker.reset(uses_groups=True)


def test_layers_with_other_heads_are_a_group_and_layers_that_share_a_cache_are_in_none(load: Load) -> None:
    worker = load("Gemma4ForCausalLM", is_composed=False).worker
    whole, windowed = worker.info.cache_groups

    assert (whole.kind, whole.layers, windowed.kind, windowed.layers) == (
        *(CacheKind.FULL, (1, 3)),
        *(CacheKind.WINDOW, (0, 2)),
    )
    heads_of_16, heads_of_10 = (2 * 2 * 2 * 4 * size * whole.block_size_tokens for size in (16, 10))
    assert (whole.bytes_per_block, windowed.bytes_per_block) == (heads_of_16, heads_of_10)


@pytest.mark.parametrize("kernels", ["native", "composed", "torch"])
@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM", "Qwen2ForCausalLM"])
def test_every_kind_of_step(name: str, kernels: str, load: Load) -> None:
    settings = {"cpu_kernels": "torch"} if kernels == "torch" else {}
    driver = load(name, is_composed=kernels != "native", **settings)
    in_one = mixed_steps(driver)

    grouped = in_groups(driver)
    assert [group.kind for group in driver.worker.info.cache_groups] == [CacheKind.FULL, CacheKind.WINDOW]
    assert len(driver.worker.table.groups) == 2
    for our, their in zip(mixed_steps(grouped), in_one, strict=True):
        check_same(our, their)

    driver.worker.reset()
    for our, their in zip(mixed_steps(StepDriver(driver.worker)), in_one, strict=True):
        check_same(our, their)


def test_moves_of_blocks_stay_in_their_group(load: Load) -> None:
    driver = load("Gemma3ForCausalLM", is_composed=False)
    expected = driver.generate([random_prompt(14)], 8)[0]
    grouped = in_groups(driver)
    admission = grouped.admission(0, random_prompt(14), 8)
    grouped.execute(TableDelta(admissions=(admission,), prefill_chunks=pairs((0, 14))))

    # All blocks leave, come back elsewhere, and are copied once more.
    used = admission.block_ids
    host = host_blocks_for(used, driver.worker)
    back, copies = grouped.take_blocks(22), grouped.take_blocks(22)
    tokens = grouped.worker.table.tokens_of(0)
    again = replace(admission, generation=2, token_ids=tokens, num_computed_tokens=14, block_ids=copies)
    grouped.execute(TableDelta(released_slots=np.array([0], np.int32)), blocks_to_swap_out=moves(used, host))
    grouped.execute(TableDelta(), blocks_to_swap_in=moves(host, back))
    grouped.execute(TableDelta(admissions=(again,), prefill_chunks=pairs((0, 1))), blocks_to_copy=moves(back, copies))
    while grouped.worker.table.num_tokens[0] < 22:
        grouped.execute(TableDelta())

    assert grouped.worker.table.tokens_of(0)[14:].tolist() == expected
    with pytest.raises(
        InvalidStepError, match=r"moves device block 0 to device block \d+, which is of another cache group"
    ):
        grouped.execute(TableDelta(), blocks_to_copy=pairs((0, int(copies[-1]))))


def test_a_hit_at_every_boundary_changes_no_bit(load: Load) -> None:
    """Prompts begin like one that was computed before, and leave it at each block."""
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 16, "num_host_blocks": 0}
    driver = load("Gemma3ForCausalLM", is_composed=False, **sizes)
    assert isinstance(driver.worker, TorchWorker)
    common, conditions = random_prompt(60), StopConditions(9, ignore_eos=True)
    sampled = SamplingRow(temperature=1.0, seed=3, num_logprobs=2)
    prompts = [common, *([*common[:end], *random_prompt(5, seed=end)] for end in range(4, 61, 4))]
    requests = [Request(prompt, conditions, sampled) for prompt in prompts]
    alone = Schedule(200, settings=PlannerSettings(prefix_caching=False))

    def emptied() -> TorchWorker:
        assert isinstance(driver.worker, TorchWorker)
        driver.worker.reset()
        return driver.worker

    expected = [Play(alone, [request], emptied).run().outcome_of(0) for request in requests]
    schedule = Schedule(0, num_steps_in_flight=2, arrival_rounds=[3 * n for n in range(len(prompts))], uses_groups=True)
    play = Play(schedule, requests, emptied).run()

    assert [play.outcome_of(n) for n in range(len(prompts))] == expected
    [member] = play.fleet.members
    assert [len(group.prefix_cache or ()) > 0 for group in member.planner.blocks.groups] == [True, True]
    cached = [play.fleet.groups[n].num_cached_tokens for n in range(len(prompts))]
    assert cached[1:] == [*range(4, 61, 4)], "nothing was evicted"


@pytest.mark.parametrize("kernels", ["native", "composed", "torch"])
def test_swaps_change_no_bit(kernels: str, load: Load) -> None:
    """More requests than the pools of both groups hold: all but the first leave for the host, and come back."""
    settings = {"cpu_kernels": "torch"} if kernels == "torch" else {}
    pools = {"num_device_blocks": 24, "num_host_blocks": 60, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    driver = load("Gemma3ForCausalLM", is_composed=kernels != "native", max_model_len=64, **settings, **pools)
    sampled, conditions = SamplingRow(temperature=1.0, seed=3, num_logprobs=2), StopConditions(24, ignore_eos=True)
    counts = [1, 1, 2, 1, 1]
    prompts = [random_prompt(30, seed=seed) for seed in range(len(counts))]
    requests = [Request(prompt, conditions, sampled, n) for prompt, n in zip(prompts, counts, strict=True)]

    def emptied() -> TorchWorker:
        assert isinstance(driver.worker, TorchWorker)
        driver.worker.reset()
        return driver.worker

    def run(schedule: Schedule, some: list[Request]) -> Play:
        return Play(schedule, some, emptied).run()

    alone = Schedule(24, settings=PlannerSettings(prefix_caching=False))
    expected = [run(alone, [request]).outcome_of(0) for request in requests]
    # The steps of the planner are the same whatever computes them.
    for depth, caches in product([1, 3], [False, True]) if kernels == "native" else [(3, True)]:
        ways = PlannerSettings(preemption_mode=PreemptionMode.SWAP, watermark=0.0, prefix_caching=caches)
        play = run(Schedule(0, settings=ways, num_steps_in_flight=depth, uses_groups=True), requests)

        for n, alone_outcome in enumerate(expected):
            check_outcome(play.outcome_of(n), alone_outcome, is_invariant=kernels != "torch")
        modes = [preempted.mode for preempted in play.preemptions]
        assert modes.count(PreemptionMode.SWAP) > 1


def check_outcome(found: Outcome, expected: Outcome, *, is_invariant: bool) -> None:
    """Assert that a client gets the same: bit for bit, or, of kernels that are not invariant, but for rounding."""
    if is_invariant:
        assert found == expected
        return
    for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert ours.token_ids == theirs.token_ids
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


def moves(sources: Int32Array, destinations: Int32Array) -> Int32Array:
    return np.stack((sources, destinations), axis=1).astype(np.int32)


def host_blocks_for(block_ids: Int32Array, worker: object) -> Int32Array:
    """Return as many host blocks of the same groups."""
    assert isinstance(worker, TorchWorker)
    firsts = firsts_of(worker.info.cache_groups, on_host=True)
    places = zip(firsts.tolist(), worker.table.places_by_group(block_ids), strict=False)
    return np.concatenate([first + np.arange(len(block_ids[own])) for first, own in places]).astype(np.int32)


def test_a_step_without_blocks_in_one_of_the_groups_is_refused(load: Load) -> None:
    grouped = in_groups(load("Gemma2ForCausalLM", is_composed=False))
    admission = grouped.admission(0, random_prompt(6), 2)
    full_only = replace(admission, block_ids=admission.block_ids[:2])

    with pytest.raises(InvalidStepError, match="slot 0 has no block for its next token"):
        grouped.execute(TableDelta(admissions=(full_only,), prefill_chunks=pairs((0, 6))))


SHAPE = CacheShape(num_layers=6, block_size=24, num_kv_heads=1, head_dim=8, dtype=torch.float32)


@pytest.mark.parametrize(
    ("windows", "num_blocks", "expected"),
    [
        ((None,) * 6, 1000, ()),
        ((64,) * 6, 1000, ()),
        # A model that generates nothing has no cache.
        ((64,) * 5 + (None,), 0, ()),
        # Two of (4 sequences x 4 blocks + 128 tokens / 24, rounded up); the share of the other five layers goes to the
        # one that sees all.
        ((64,) * 5 + (None,), 1000, ((1000 * 6 - 44 * 5, 0), (44, 64))),
        # A small pool: as many as one pool would have.
        ((64,) * 5 + (None,), 30, ((30, 0), (30, 64))),
    ],
)
def test_sizes(windows: tuple[int | None, ...], num_blocks: int, expected: tuple[tuple[int, int], ...]) -> None:
    caches = [CachedLayer(SHAPE.num_kv_heads, SHAPE.head_dim, window) for window in windows]
    groups = size_groups(SHAPE, caches, BlockCounts(num_blocks, 10), max_num_seqs=4, max_num_batched_tokens=128)

    assert tuple((group.num_device_blocks, group.window_tokens) for group in groups) == expected
    used = sum(group.num_device_blocks * group.bytes_per_block for group in groups)
    assert used <= num_blocks * SHAPE.bytes_per_block
    assert not groups or used > (num_blocks - 1) * SHAPE.bytes_per_block
    assert why_unusable(groups) == ""


FULL = CacheGroup(CacheKind.FULL, (0, 2), 16, 100)
WINDOW = CacheGroup(CacheKind.WINDOW, (1,), 16, 20, window_tokens=64)
STATE = CacheGroup(CacheKind.STATE, (1,), 16, 0)
ENCODER = CacheGroup(CacheKind.ENCODER, (1,), 16, 30)
BEHIND = "its cache groups of kinds ENCODER, one at most, and STATE do not stand behind all others, in this order"


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ((FULL, replace(WINDOW, layers=(1, 2))), "layer 2 is in two cache groups"),
        ((FULL, replace(WINDOW, layers=())), "layer 1 is in no cache group, of 2 groups"),
        (
            (FULL, replace(WINDOW, block_size_tokens=12)),
            "cache group 1 has blocks of 12 tokens, which do not divide 16",
        ),
        ((FULL, replace(WINDOW, num_device_blocks=0)), "cache group 1 has no blocks"),
        ((FULL, replace(WINDOW, window_tokens=0)), "cache group 1 is of kind WINDOW and has a window of 0 tokens"),
        ((STATE, FULL), BEHIND),
        ((replace(STATE, layers=(0, 1, 2)),), BEHIND),
        ((FULL, STATE, ENCODER), BEHIND),
        ((FULL, ENCODER, replace(ENCODER, layers=(9,))), BEHIND),
        ((FULL, replace(ENCODER, num_device_blocks=0)), "cache group 1 has no blocks"),
        ((FULL, replace(STATE, window_tokens=64)), "cache group 1 is of kind STATE and has a window of 64 tokens"),
    ],
)
def test_groups_that_cannot_be(groups: tuple[CacheGroup, ...], why: str) -> None:
    assert why_unusable(groups).startswith(why)


def test_a_group_of_states_needs_no_blocks() -> None:
    assert why_unusable((FULL, STATE)) == ""
    assert why_unusable((FULL, replace(ENCODER, layers=STATE.layers))) == ""
