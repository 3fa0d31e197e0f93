"""Whole workers with a cache of each format: the same outputs alone and in company, and scales of a checkpoint."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.attention.cache_format import CACHE_DTYPES, FORMAT_NAMES, choose_cache_dtype
from executor_svc.config import ExecutorConfig
from executor_svc.worker.interface import Worker
from executor_svc.worker.loading import load_worker
from octavo_shared.errors import ModelLoadError
from octavo_shared.step_wire.step import SamplingRow
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.executors.serving_limits import PlannerSettings
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping, StopConditions
from tests.numerics.conftest import TinyModel
from tests.numerics.driver import PoisonedCacheEngine
from tests.numerics.reference import random_prompt
from tests.numerics.threaded_group import ThreadedRanks
from tests.numerics.tiny_models import save_tiny_model
from tests.support.fleet import Outcome, assert_same_outcomes
from tests.support.schedules import Play, Request, Schedule

FORMATS = [name for name in CACHE_DTYPES if name != "float32"]
END = StopConditions(20, ignore_eos=True)
SAMPLED = SamplingRow(temperature=1.0, top_p=0.9, seed=3, num_logprobs=2)
REQUESTS = [
    *(Request(random_prompt(length, seed=length), END) for length in (1, 15, 17, 60)),
    Request(random_prompt(11), END, SAMPLED, num_sequences=3),
    Request(random_prompt(9), END, beam_search=BeamSearchParams(3, 3, 1.0, EarlyStopping.NEVER)),
    Request(random_prompt(30, seed=5), END, num_prompt_logprobs=2),
]
CHUNKED = PlannerSettings(long_prefill_threshold=7, max_long_prefills=4)
SCHEDULES = [
    Schedule(100),
    Schedule(100, settings=CHUNKED),
    *(Schedule(30, 60, replace(CHUNKED, preemption_mode=mode), 2) for mode in PreemptionMode),
]


def config_of(directory: Path, kv_cache_dtype: str, **settings: object) -> ExecutorConfig:
    values = {"model": str(directory), "kv_cache_dtype": kv_cache_dtype, "block_size_tokens": 4}
    sizes = {"num_device_blocks": 100, "num_host_blocks": 64, "max_num_seqs": 16}
    return ExecutorConfig.model_validate({**values, **sizes, **settings})


def check_outputs(emptied: Callable[[], Worker]) -> list[Outcome]:
    """Fail unless every request gets what it gets alone; return that."""
    lone = Schedule(100, settings=PlannerSettings(prefix_caching=False))
    alone = [Play(lone, [request], emptied).run().outcome_of(0) for request in REQUESTS]
    modes = set()
    for schedule in SCHEDULES:
        play = Play(schedule, REQUESTS, emptied).run()
        assert_same_outcomes(map(play.outcome_of, range(len(REQUESTS))), alone, f"{schedule}")
        modes |= {preempted.mode for preempted in play.preemptions}
    assert modes == set(PreemptionMode)
    return alone


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
def test_outputs_do_not_depend_on_the_schedule(
    kv_cache_dtype: str, tiny_models: dict[str, TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, several sampled ones, beams and scores of prompts; in chunks, swapped, recomputed and from a prefix."""
    monkeypatch.setattr("executor_svc.worker.assembly.CacheEngine", PoisonedCacheEngine)
    worker = load_worker(config_of(tiny_models["wide_heads"].directory, kv_cache_dtype))

    def emptied() -> Worker:
        worker.reset()
        return worker

    alone = check_outputs(emptied)
    assert worker.info.kv_cache_dtype == kv_cache_dtype
    exact = load_worker(config_of(tiny_models["wide_heads"].directory, "float32"))
    lone = Schedule(100, settings=PlannerSettings(prefix_caching=False))
    assert Play(lone, [REQUESTS[-1]], lambda: exact).run().outcome_of(0) != alone[-1]  # the format is in use


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
def test_ranks_have_the_scales_of_their_heads(
    kv_cache_dtype: str, tiny_models: dict[str, TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor_svc.worker.assembly.CacheEngine", PoisonedCacheEngine)
    directory = tiny_models["gqa"].directory
    ranks = ThreadedRanks(config_of(directory, kv_cache_dtype), 2)
    try:

        def emptied() -> Worker:
            ranks.reset()
            return ranks

        of_ranks = check_outputs(emptied)
    finally:
        ranks.close()
    lone = Schedule(100, settings=PlannerSettings(prefix_caching=False))
    worker = load_worker(config_of(directory, kv_cache_dtype))
    for request, outcome in zip(REQUESTS[:4], of_ranks, strict=False):
        worker.reset()
        alone = Play(lone, [request], lambda: worker).run().outcome_of(0)
        assert [output.token_ids for output in alone.outputs] == [output.token_ids for output in outcome.outputs]


def with_scales(directory: Path, scales: dict[str, object]) -> Path:
    """Save a tiny model with further tensors; return its directory."""
    save_tiny_model(directory, head_dim=24)
    file = directory / "model.safetensors"
    tensors = load_file(file) | {name: torch.tensor(scale) for name, scale in scales.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def first_logprobs(directory: Path, kv_cache_dtype: str, cpu_kernels: str) -> Outcome:
    worker = load_worker(config_of(directory, kv_cache_dtype, cpu_kernels=cpu_kernels))
    return Play(Schedule(100), [REQUESTS[-1]], lambda: worker).run().outcome_of(0)


ATTENTION = "model.layers.{}.self_attn."


@pytest.mark.parametrize("prefix", ["", "attn."])
def test_fp8_uses_the_scales_of_the_checkpoint_and_other_formats_do_not(prefix: str, tmp_path: Path) -> None:
    names = [f"{ATTENTION.format(layer)}{prefix}{which}_scale" for layer in range(2) for which in "kv"]
    plain = with_scales(tmp_path / f"plain{prefix}", {})
    scaled = with_scales(tmp_path / f"scaled{prefix}", dict.fromkeys(names, 0.011))
    as_one = with_scales(tmp_path / f"one{prefix}", {name: [1.0] for name in names})

    for kernels in ("native", "torch"):
        of_plain, of_scaled, of_one = (first_logprobs(path, "fp8_e4m3", kernels) for path in (plain, scaled, as_one))
        assert of_plain == of_one != of_scaled
        assert first_logprobs(plain, "int8", kernels) == first_logprobs(scaled, "int8", kernels)


UNUSABLE = [
    ({"k_scale": 0.0}, r"self_attn\.k_scale is 0, but the scale of an FP8 cache is above 0 and finite; set --kv-cache"),
    ({"v_scale": -2.0}, r"self_attn\.v_scale is -2, but"),
    ({"v_scale": float("inf")}, r"self_attn\.v_scale is inf, but"),
    ({"attn.k_scale": float("nan")}, r"self_attn\.attn\.k_scale is nan, but"),
    ({"k_scale": [1.0, 2.0]}, r"self_attn\.k_scale has 2 values, but an FP8 cache has one scale a layer; set"),
]


@pytest.mark.parametrize(("scales", "message"), UNUSABLE)
def test_scales_that_no_cache_can_have_are_refused(scales: dict[str, object], message: str, tmp_path: Path) -> None:
    named = {ATTENTION.format(1) + name: scale for name, scale in scales.items()}
    directory = with_scales(tmp_path, named)
    with pytest.raises(ModelLoadError, match=message):
        load_worker(config_of(directory, "fp8_e4m3"))
    load_worker(config_of(directory, "int8"))


def test_auto_is_the_number_format_of_activations_or_that_of_attention() -> None:
    assert choose_cache_dtype("auto", torch.float32, in_bfloat16=True) == torch.bfloat16
    assert choose_cache_dtype("float32", torch.float32, in_bfloat16=True) == torch.float32
    for dtype in (torch.float32, torch.bfloat16):
        assert choose_cache_dtype("auto", dtype) == dtype
        assert choose_cache_dtype("fp8_e5m2", dtype) == torch.float8_e5m2
    assert [FORMAT_NAMES[dtype] for dtype in CACHE_DTYPES.values()] == list(CACHE_DTYPES)
