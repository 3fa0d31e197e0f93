"""What a client gets does not depend on how it was scheduled: a real model behind the real core.

Each request runs alone first: whole prompt in one step, lock-step, nothing cached. Then all of them run
together by many schedules, in two waves of which the second finds the prompts of the first in the prefix
cache. Every output is identical to the one alone, as `tests/numerics/identity.py` defines it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from executor_svc.worker.interface import Worker
from scheduler_svc.core.beams.beam_search import BeamSearchParams
from scheduler_svc.core.limits import PreemptionMode, PrefillMode
from scheduler_svc.core.stopping import StopConditions
from scheduler_svc.executors.served_model import CoreSettings
from shared.step import SamplingRow
from tests.numerics.identity import assert_identical, assert_same_search
from tests.numerics.real_model import RealModel
from tests.numerics.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.support.fleet import FoundHypothesis, Output
from tests.support.schedules import GREEDY, Play, Request, Schedule

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 4
NUM_BLOCKS = 400
SECOND_WAVE_ROUND = 30


def fewest_blocks(requests: Sequence[Request]) -> int:
    """Return a pool in which each request fits when it is alone, and few more."""
    return 1 + max(
        request.to_group(0).num_slots * -(-(len(request.prompt) + (request.conditions.max_tokens or 0)) // BLOCK_SIZE)
        for request in requests
    )


@dataclass
class Scene:
    """A model, the requests, and what each of them gets alone."""

    model: RealModel
    requests: list[Request]
    outputs: dict[tuple[int, int], Output]
    searches: dict[int, list[FoundHypothesis]]

    @classmethod
    def of(cls, model: RealModel, requests: list[Request]) -> "Scene":
        """Run each request alone."""
        scene = cls(model, requests, {}, {})
        schedule = Schedule(NUM_BLOCKS, settings=CoreSettings(prefix_caching=False))
        for arrival, request in enumerate(requests):
            play = Play(schedule, [request], model.worker).run()
            scene.outputs |= {(arrival, index): output for (_, index), output in play.outputs.items()}
            if request.beam_search is not None:
                scene.searches[arrival] = play.searches[0]
        return scene

    def check(self, schedule: Schedule) -> None:
        """Play both waves, and fail unless every output is identical and what the schedule forces came to pass."""
        num_requests = len(self.requests)
        schedule = replace(schedule, arrival_rounds=[0] * num_requests + [SECOND_WAVE_ROUND] * num_requests)

        play = self.play(schedule, [*self.requests, *self.requests], self.model.worker)

        mode = schedule.settings.preemption_mode
        in_the_middle = {preempted.mode for preempted in play.preemptions if preempted.num_output_tokens}
        assert mode is None or mode in in_the_middle, "nobody was preempted in the middle"
        assert (play.num_cached_tokens > 0) == schedule.settings.prefix_caching

    def play(self, schedule: Schedule, requests: Sequence[Request], make_worker: Callable[[], Worker]) -> Play:
        """Play waves of the requests, and fail unless every output is identical."""
        play = Play(schedule, requests, make_worker).run()
        assert len(play.outputs) == len(self.outputs) * len(requests) // len(self.requests)
        for (arrival, index), output in play.outputs.items():
            original = arrival % len(self.requests)
            request = requests[arrival]
            sampling = replace(request.sampling, output_index=index)
            assert_identical(output, self.outputs[original, index], request.prompt, sampling, self.model.logits)
        for arrival, found in play.searches.items():
            original = arrival % len(self.requests)
            alone = [(list(hypothesis.token_ids), hypothesis.score) for hypothesis in self.searches[original]]
            assert_same_search(found, alone, requests[arrival].prompt, 1.0, self.model.logits)
        return play


def make_requests(prompts: Sequence[list[int]], num_output_tokens: int) -> list[Request]:
    """Return requests of every kind, one for each of five prompts; the last two prompts share a beginning."""
    conditions = StopConditions(num_output_tokens, ignore_eos=True)
    seeded = SamplingRow(temperature=1.0, seed=2024, num_logprobs=0)
    filtered = SamplingRow(temperature=0.7, top_k=40, top_p=0.9, seed=7, num_logprobs=0)
    beams = BeamSearchParams(3, 3)
    first, second, third, fourth, fifth = prompts
    return [
        Request(first, conditions, GREEDY),
        Request(second, conditions, seeded),
        Request(third, conditions, GREEDY, beam_search=beams),
        Request(fourth, conditions, seeded, num_sequences=3),
        Request(fifth, conditions, filtered),
    ]


def named_schedules(num_blocks: int) -> dict[str, Schedule]:
    """Return schedules that differ in one thing each; `num_blocks` are too few for all."""
    chunked = {
        f"chunks of {budget}, {depth} in flight": Schedule(
            NUM_BLOCKS,
            settings=CoreSettings(max_num_seqs=min(budget, 16), max_num_batched_tokens=budget),
            num_steps_in_flight=depth,
        )
        for budget, depth in ((4, 1), (4, 2), (48, 1), (48, 2))
    }
    preempted = {
        f"{mode.value}, {depth} in flight": Schedule(
            num_blocks, NUM_BLOCKS, CoreSettings(preemption_mode=mode, watermark=0.0), depth
        )
        for mode in PreemptionMode
        for depth in (1, 2)
    }
    return {
        "all at once": Schedule(NUM_BLOCKS),
        "all at once, 2 in flight": Schedule(NUM_BLOCKS, num_steps_in_flight=2),
        "nothing cached": Schedule(NUM_BLOCKS, settings=CoreSettings(prefix_caching=False)),
        "prefill first": Schedule(NUM_BLOCKS, settings=CoreSettings(prefill_mode=PrefillMode.FIRST)),
        **chunked,
        **preempted,
    }


SCHEDULE_NAMES = list(named_schedules(1))
# The demo model takes a hundred times as long.
DEMO_SCHEDULE_NAMES = [
    "all at once, 2 in flight",
    "nothing cached",
    "chunks of 4, 2 in flight",
    "chunks of 48, 1 in flight",
    *(name for name in SCHEDULE_NAMES if name.startswith(("recompute", "swap"))),
]


def random_schedule(seed: int, num_blocks: int) -> Schedule:
    """Draw everything that can vary; the pool is tight, the preemption automatic."""
    random = np.random.default_rng(seed)
    max_num_seqs = int(random.integers(3, 16))
    settings = CoreSettings(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + int(random.choice([0, 3, 20, 100])),
        watermark=float(random.choice([0.0, 0.1])),
        prefill_mode=list(PrefillMode)[random.integers(2)],
        long_prefill_threshold=int(random.choice([0, 6])),
        num_lookahead_tokens=int(random.choice([0, 2])),
    )
    return Schedule(
        num_blocks + 3 + int(random.choice([0, 5, 20])),
        int(random.choice([0, 10, NUM_BLOCKS])),
        settings,
        num_steps_in_flight=int(random.integers(1, 4)),
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    directory = tmp_path_factory.mktemp("invariance") / "tiny"
    save_tiny_model(directory)
    ids = np.random.default_rng(3).integers(3, VOCAB_SIZE, 200).tolist()
    prompts = [ids[:7], ids[10:43], ids[50:59], ids[100:116], ids[100:160]]
    return Scene.of(RealModel(directory, BLOCK_SIZE, NUM_BLOCKS), make_requests(prompts, 20))


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> Scene:
    ids = AutoTokenizer.from_pretrained(demo_model)((Path(__file__).parents[2] / "LICENSE").read_text()).input_ids
    prompts = [ids[:7], ids[300:365], ids[700:716], ids[1000:1030], ids[1000:1050]]
    return Scene.of(RealModel(demo_model, BLOCK_SIZE, NUM_BLOCKS), make_requests(prompts, 12))


def check_named(scene: Scene, name: str) -> None:
    scene.check(named_schedules(fewest_blocks(scene.requests))[name])


def check_loss(scene: Scene) -> None:
    """Lose the executor in the middle: all go on, on another instance with an empty cache."""
    workers = [scene.model.new_worker(), scene.model.new_worker()]
    schedule = Schedule(NUM_BLOCKS, num_steps_in_flight=2, loss_round=8)

    play = scene.play(schedule, scene.requests, lambda: workers.pop())

    assert play.fleet.num_recomputed_groups == len(scene.requests)


@pytest.mark.parametrize("name", ["chunks of 4, 2 in flight", "recompute, 2 in flight", "swap, 1 in flight"])
def test_outputs_of_a_tiny_model_are_those_alone(tiny: Scene, name: str) -> None:
    check_named(tiny, name)


def test_a_lost_executor_changes_no_output_of_a_tiny_model(tiny: Scene) -> None:
    check_loss(tiny)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_outputs_of_a_tiny_model_are_those_alone_by_every_schedule(tiny: Scene, name: str) -> None:
    check_named(tiny, name)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(40))
def test_outputs_of_a_tiny_model_are_those_alone_by_random_schedules(tiny: Scene, seed: int) -> None:
    tiny.check(random_schedule(seed, fewest_blocks(tiny.requests)))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", DEMO_SCHEDULE_NAMES)
def test_outputs_of_the_demo_model_are_those_alone(demo: Scene, name: str) -> None:
    check_named(demo, name)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 106))
def test_outputs_of_the_demo_model_are_those_alone_by_random_schedules(demo: Scene, seed: int) -> None:
    demo.check(random_schedule(seed, fewest_blocks(demo.requests)))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lost_executor_changes_no_output_of_the_demo_model(demo: Scene) -> None:
    check_loss(demo)
