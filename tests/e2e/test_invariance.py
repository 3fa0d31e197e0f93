"""What a client gets does not depend on how it was scheduled: a real model behind the real core, bit for bit.

Each request runs alone first: whole prompt in one step, lock-step, nothing cached, one thread. Then all of them run
together by many schedules, in two waves of which the second finds the prompts of the first in the prefix cache. Every
token, log-probability, alternative and hypothesis has the bits of the one alone. The logits beneath:
`tests/numerics/test_same_bits.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from octavo_shared.step_wire.step import Adapter, SamplingRow
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.executors.serving_limits import PlannerSettings
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions
from tests.e2e.scenes import (
    ALL_AT_ONCE,
    ALONE,
    BLOCK_SIZE,
    BLOCK_SIZES,
    NUM_BLOCKS,
    SCHEDULE_NAMES,
    Scene,
    fewest_blocks,
    named_schedules,
    random_schedule,
)
from tests.numerics.architectures import VOCAB_SIZE, save_tiny_architecture
from tests.numerics.encoder_decoders import FAMILIES
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.numerics.native import SETTINGS
from tests.numerics.real_model import RealModel
from tests.support.adapters import save_adapter
from tests.support.schedules import GREEDY, Request, Schedule

pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = ("none", "int8")


def make_requests(prompts: Sequence[list[int]], num_output_tokens: int) -> list[Request]:
    """Return requests of every kind, one for each of five prompts; the last two prompts share a beginning."""
    conditions = StopConditions(num_output_tokens, ignore_eos=True)
    seeded = SamplingRow(temperature=1.0, seed=2024, num_logprobs=0, frequency_penalty=0.3)
    filtered = SamplingRow(temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, seed=7, num_logprobs=5)
    beams = BeamSearchParams(3, 3)
    first, second, third, fourth, fifth = prompts
    return [
        Request(first, conditions, GREEDY),
        Request(second, conditions, seeded, num_prompt_logprobs=3),
        Request(third, conditions, GREEDY, beam_search=beams),
        Request(fourth, conditions, seeded, num_sequences=3),
        Request(fifth, conditions, filtered),
    ]


def check_named(scene: Scene, name: str) -> None:
    schedule = named_schedules(fewest_blocks(scene.requests))[name]
    assert (scene.check(schedule).num_cached_tokens > 0) == schedule.settings.prefix_caching


def check_random(scene: Scene, seed: int) -> None:
    block_size, num_threads = BLOCK_SIZES[seed % 3], 1 + seed // 3 % 2
    schedule = random_schedule(seed, fewest_blocks(scene.requests, block_size))
    scene.check(schedule, block_size_tokens=block_size, num_threads=num_threads)


def check_loss(scene: Scene, *, uses_groups: bool = False) -> None:
    """Lose the executor in the middle: all go on, on another instance with an empty cache.

    Nothing is drafted: how much is depends on the time that steps take, and some requests might have ended.
    """
    workers = [scene.model.new_worker(max_draft_tokens=0, num_threads=number) for number in (2, 1)]
    schedule = Schedule(NUM_BLOCKS, num_steps_in_flight=2, loss_round=8, uses_groups=uses_groups)

    play = scene.play(schedule, scene.requests, lambda: workers.pop())

    assert play.fleet.num_recomputed_groups == len(scene.requests)


# Tiny models -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def make_scene(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Scene]:
    """Make, once, the scene of a tiny model of a family in a number format."""
    directory = tmp_path_factory.mktemp("invariance")
    ids = np.random.default_rng(3).integers(3, VOCAB_SIZE, 200).tolist()
    requests = make_requests([ids[:7], ids[10:43], ids[50:59], ids[100:116], ids[100:160]], 20)
    scenes: dict[tuple[str, str], Scene] = {}

    def make(family: str, number_format: str) -> Scene:
        if not (directory / family).exists():
            save_tiny_architecture(directory / family, family, FAMILY_ARCHITECTURES[family])
        if (family, number_format) not in scenes:
            model = RealModel(directory / family, BLOCK_SIZE, NUM_BLOCKS, **SETTINGS[number_format])
            scenes[family, number_format] = Scene.of(model, requests)
        return scenes[family, number_format]

    return make


class _WaitedFor(ThreadPoolExecutor):
    """Ends the load of an adapter with the step that began it, so that the time it takes decides nothing."""

    def submit(self, *args: Any, **kwargs: Any) -> "Future[Any]":
        future = super().submit(*args, **kwargs)
        future.done = lambda: bool(wait([future]).done)  # type: ignore[method-assign]
        return future


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Eight requests with an adapter each and two without one, all with one prompt, on an executor with eight slots."""
    directory = tmp_path_factory.mktemp("adapted")
    reference = save_tiny_architecture(
        directory / "model", "LlamaForCausalLM", FAMILY_ARCHITECTURES["LlamaForCausalLM"]
    )
    shapes = {
        name: module.weight.shape for name, module in reference.model.named_modules(prefix="model") if "_proj" in name
    }
    for number in range(8):
        save_adapter(directory / f"{number}", shapes, rank=2 + 5 * number, seed=number, size=0.2)
    prompt = np.random.default_rng(4).integers(3, VOCAB_SIZE, 43).tolist()
    adapters = [*(Adapter(f"{number}") for number in range(8)), None, None]
    requests = [Request(prompt, StopConditions(20, ignore_eos=True), GREEDY, adapter=adapter) for adapter in adapters]
    model = RealModel(directory / "model", BLOCK_SIZE, NUM_BLOCKS, lora_dir=(str(directory),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("executor_svc.worker.adapter_loads.ThreadPoolExecutor", _WaitedFor)
        scene = Scene.of(model, requests)
        assert len({tuple(outcome.outputs[0].token_ids) for outcome in scene.alone}) == 9, (
            "adapters change what is said"
        )
        yield scene


@pytest.mark.parametrize("num_slots", [8, 3])
@pytest.mark.parametrize("name", ["chunks of 7, 2 in flight", "recompute, 2 in flight", "swap, 4 in flight"])
def test_outputs_with_adapters_do_not_depend_on_scheduling(name: str, num_slots: int, adapted: Scene) -> None:
    num_blocks = fewest_blocks(adapted.requests) + 4  # two begin, and one of them must go
    adapted.check(named_schedules(num_blocks)[name], max_adapter_slots=num_slots)


def test_outputs_with_adapters_go_on_at_another_executor(adapted: Scene) -> None:
    check_loss(adapted)


@pytest.fixture(scope="module")
def make_encoding(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Scene]:
    """Make, once, the scene of a tiny model with an encoder, which reads one text for three of five requests."""
    directory = tmp_path_factory.mktemp("encoding")

    @cache
    def make(family: str) -> Scene:
        save_tiny_architecture(directory / family, family, FAMILIES[family])
        ids = np.random.default_rng(3).integers(3, 99, 200).tolist()
        requests = make_requests([ids[:7], ids[10:30], ids[50:53], ids[100:103], ids[100:117]], 20)
        texts = [ids[:9], ids[20:60], ids[20:60], ids[70:101], ids[20:60]]
        requests = [replace(each, encoder_prompt=text) for each, text in zip(requests, texts, strict=True)]
        return Scene.of(RealModel(directory / family, BLOCK_SIZE, NUM_BLOCKS), requests)

    return make


@pytest.mark.parametrize("family", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
@pytest.mark.parametrize("block_size", [8, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["chunks of 7, 2 in flight", "recompute, 2 in flight", "swap, 4 in flight"])
def test_outputs_with_an_encoder_do_not_depend_on_scheduling(
    name: str, block_size: int, family: str, make_encoding: Callable[[str], Scene]
) -> None:
    scene = make_encoding(family)
    schedule = replace(named_schedules(fewest_blocks(scene.requests, block_size))[name], uses_groups=True)
    play = scene.check(schedule, num_device_blocks=schedule.num_blocks, block_size_tokens=block_size)
    assert play.num_cached_tokens > 0 or schedule.num_blocks < NUM_BLOCKS


def test_outputs_with_an_encoder_go_on_at_another_executor(make_encoding: Callable[[str], Scene]) -> None:
    scene = make_encoding("T5ForConditionalGeneration")
    check_loss(scene, uses_groups=True)


@pytest.fixture
def tiny(make_scene: Callable[[str, str], Scene], request: pytest.FixtureRequest) -> Scene:
    return make_scene(*getattr(request, "param", ("LlamaForCausalLM", "none")))


@pytest.mark.parametrize(
    "name", ["chunks of 7, 2 in flight", "recompute, 2 in flight", "swap, 4 in flight", "neighbours leave"]
)
def test_outputs_of_a_tiny_model_are_those_alone(tiny: Scene, name: str) -> None:
    check_named(tiny, name)


@pytest.mark.parametrize(
    "tiny", [(family, "none") for family in ("Qwen3_5ForCausalLM", "Lfm2ForCausalLM")], indirect=True
)
@pytest.mark.parametrize("name", ["chunks of 7, 2 in flight", "recompute, 2 in flight", "swap, 4 in flight"])
def test_outputs_of_a_tiny_hybrid_are_those_alone(tiny: Scene, name: str) -> None:
    schedule = replace(named_schedules(fewest_blocks(tiny.requests))[name], uses_groups=True)
    play = tiny.check(schedule, num_device_blocks=schedule.num_blocks)
    assert play.num_cached_tokens > 0 or schedule.num_blocks < NUM_BLOCKS


def test_a_lost_executor_changes_no_output_of_a_tiny_model(tiny: Scene) -> None:
    check_loss(tiny)


def test_the_outcomes_that_are_compared_hold_all_that_a_client_can_get(tiny: Scene) -> None:
    outputs = [output for outcome in tiny.alone for output in outcome.outputs]
    assert len({tuple(output.token_ids) for output in outputs}) == 6
    assert [len(output.logprobs) for output in outputs] == [20] * 6
    assert sum(len(output.alternatives) for output in outputs) == 20
    assert len(tiny.alone[2].search) == 3
    assert [len(values) for values in tiny.alone[1].prompt_logprobs] == [32, 96, 96]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_prefix_may_be_found_up_to_any_block(block_size: int, make_scene: Callable[[str, str], Scene]) -> None:
    model = make_scene("LlamaForCausalLM", "none").model
    ids = np.random.default_rng(4).integers(3, VOCAB_SIZE, 3 * 32 + 5).tolist()
    ends = range(block_size, len(ids), block_size)
    conditions = StopConditions(3, ignore_eos=True)
    requests = [Request(ids, conditions, GREEDY)]
    requests += [Request([*ids[:end], 3 + number], conditions, GREEDY) for number, end in enumerate(ends)]
    schedule = replace(ALL_AT_ONCE, arrival_rounds=[0, *[10] * len(ends)])

    play = Scene.of(model, requests).play(schedule, requests, partial(model.worker, block_size_tokens=block_size))

    assert play.num_cached_tokens == sum(ends)


@pytest.fixture(scope="module")
def long_contexts(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Prompts of 2,000 tokens, one of which is another one's beginning, among short ones."""
    directory = tmp_path_factory.mktemp("long")
    save_tiny_architecture(directory, "LlamaForCausalLM", {"max_position_embeddings": 2100})
    ids = np.random.default_rng(6).integers(3, VOCAB_SIZE, 4100).tolist()
    prompts = [ids[:2010], ids[2050:4063], ids[40:47], ids[:33], ids[:2030]]
    return Scene.of(RealModel(directory, 32, NUM_BLOCKS), make_requests(prompts, 8))


@pytest.mark.parametrize(
    "schedule",
    [
        replace(
            ALL_AT_ONCE, settings=PlannerSettings(long_prefill_threshold=64, max_long_prefills=3), num_steps_in_flight=3
        ),
        pytest.param(
            Schedule(NUM_BLOCKS, settings=PlannerSettings(max_num_seqs=8, max_num_batched_tokens=17)),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Schedule(130, 130, PlannerSettings(preemption_mode=PreemptionMode.RECOMPUTE, watermark=0.0), 2),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Schedule(130, 130, PlannerSettings(preemption_mode=PreemptionMode.SWAP, watermark=0.0), 2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["chunks of 64", "a budget of 17", "recompute", "swap"],
)
def test_outputs_after_contexts_of_2000_tokens_are_those_alone(long_contexts: Scene, schedule: Schedule) -> None:
    long_contexts.check(schedule, num_threads=2)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tiny", [("LlamaForCausalLM", number_format) for number_format in SETTINGS], indirect=True)
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_outputs_of_a_tiny_model_are_those_alone_by_every_schedule(tiny: Scene, name: str) -> None:
    check_named(tiny, name)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "tiny", [(family, number_format) for family in FAMILY_ARCHITECTURES for number_format in SETTINGS], indirect=True
)
def test_outputs_of_every_family_are_those_alone_by_random_schedules(tiny: Scene, seed: int) -> None:
    check_random(tiny, seed)


# The demo model ----------------------------------------------------------------------------------


@dataclass
class Demo:
    """The demo model in a number format, or as its GGUF file has it, and tokens of a text."""

    model: RealModel
    ids: list[int]

    def prompt(self, number: int) -> list[int]:
        """Return one of 32 prompts, of 7 to 100 tokens."""
        return self.ids[70 * number :][: 7 + 3 * number]


@pytest.fixture(scope="module", params=[*FORMATS, "GGUF"])
def demo(demo_model: Path, float32_model: Path, request: pytest.FixtureRequest) -> Demo:
    ids = AutoTokenizer.from_pretrained(float32_model)((Path(__file__).parents[2] / "LICENSE").read_text()).input_ids
    if request.param == "GGUF":
        return Demo(RealModel(demo_model, BLOCK_SIZE, NUM_BLOCKS), ids)
    return Demo(RealModel(float32_model, BLOCK_SIZE, NUM_BLOCKS, quantization=request.param), ids)


@pytest.fixture(scope="module")
def demo_scene(demo: Demo) -> Scene:
    ids = demo.ids
    prompts = [ids[:7], ids[300:365], ids[700:716], ids[1000:1030], ids[1000:1050]]
    return Scene.of(demo.model, make_requests(prompts, 12))


@pytest.fixture(scope="module")
def demo_prompts(demo: Demo) -> Scene:
    """32 prompts, each a request of one of four kinds."""
    conditions = StopConditions(12, ignore_eos=True)
    kinds = [
        GREEDY,
        SamplingRow(temperature=1.0, seed=3, num_logprobs=2),
        SamplingRow(temperature=0.8, top_p=0.9, top_k=50, seed=4, num_logprobs=0),
        SamplingRow(repetition_penalty=1.2, num_logprobs=4),
    ]
    return Scene.of(demo.model, [Request(demo.prompt(n), conditions, kinds[n % len(kinds)]) for n in range(32)])


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("batch_size", [5, 24, 64])
def test_32_prompts_of_the_demo_model_get_in_batches_what_they_get_alone(demo_prompts: Scene, batch_size: int) -> None:
    for begin in range(0, max(32, batch_size), batch_size):
        numbers = [number % 32 for number in range(begin, begin + batch_size)]
        batch = demo_prompts.part(numbers)

        batch.play(replace(ALONE, num_blocks=NUM_BLOCKS), batch.requests, partial(batch.model.worker, num_threads=2))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_32_prompts_of_the_demo_model_get_as_prefix_hits_what_they_get_alone(demo_prompts: Scene) -> None:
    demo_prompts.check(replace(ALL_AT_ONCE, num_steps_in_flight=2), num_threads=2)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_outputs_of_the_demo_model_are_those_alone(demo_scene: Scene, name: str) -> None:
    check_named(demo_scene, name)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(100, 106))
def test_outputs_of_the_demo_model_are_those_alone_by_random_schedules(demo_scene: Scene, seed: int) -> None:
    check_random(demo_scene, seed)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_lost_executor_changes_no_output_of_the_demo_model(demo_scene: Scene) -> None:
    check_loss(demo_scene)
