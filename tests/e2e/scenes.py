"""Requests on a real model, what each gets alone, and schedules that must not change it.

`test_invariance.py` has few requests and many schedules; `test_drafts.py` has many requests, and drafts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from executor_svc.worker.interface import Worker
from scheduler_svc.core.limits import PreemptionMode, PrefillMode
from scheduler_svc.executors.serving_limits import PlannerSettings
from tests.numerics.architectures import VOCAB_SIZE
from tests.numerics.real_model import RealModel
from tests.support.fleet import Outcome, assert_same_outcomes
from tests.support.knowing import Knowing
from tests.support.schedules import Play, Request, Schedule

BLOCK_SIZES = (8, 16, 32)
BLOCK_SIZE = BLOCK_SIZES[0]
NUM_BLOCKS = 400
SECOND_WAVE_ROUND = 30
ALL_AT_ONCE = Schedule(NUM_BLOCKS)
ALONE = replace(ALL_AT_ONCE, settings=PlannerSettings(prefix_caching=False))


def fewest_blocks(requests: Sequence[Request], block_size: int = BLOCK_SIZE) -> int:
    """Return a pool in which each request fits when it is alone, and few more."""
    return 1 + max(
        request.to_group(0).num_slots * -(-(len(request.prompt) + (request.conditions.max_tokens or 0)) // block_size)
        for request in requests
    )


@dataclass
class Scene:
    """A model, the requests, and what each of them gets alone."""

    model: RealModel
    requests: list[Request]
    alone: list[Outcome]

    @classmethod
    def of(cls, model: RealModel, requests: list[Request]) -> "Scene":
        """Run each request alone, a token a step."""
        make_worker = partial(model.worker, num_threads=1, max_draft_tokens=0)
        alone = replace(ALONE, uses_groups=any(request.encoder_prompt is not None for request in requests))
        return cls(model, requests, [Play(alone, [request], make_worker).run().outcome_of(0) for request in requests])

    def part(self, numbers: Sequence[int]) -> "Scene":
        """Return the scene with some of its requests."""
        return replace(self, requests=[self.requests[n] for n in numbers], alone=[self.alone[n] for n in numbers])

    def check(self, schedule: Schedule, **settings: int) -> Play:
        """Play both waves, and fail unless every output is that alone and what the schedule forces came to pass.

        `settings` are those of the executor.
        """
        num_requests = len(self.requests)
        schedule = replace(schedule, arrival_rounds=[0] * num_requests + [SECOND_WAVE_ROUND] * num_requests)

        play = self.play(schedule, [*self.requests, *self.requests], partial(self.model.worker, **settings))

        mode = schedule.settings.preemption_mode
        in_the_middle = {preempted.mode for preempted in play.preemptions if preempted.num_output_tokens}
        assert mode is None or mode in in_the_middle, "nobody was preempted in the middle"
        return play

    def play(self, schedule: Schedule, requests: Sequence[Request], make_worker: Callable[[], Worker]) -> Play:
        """Play waves of the requests, and fail unless every output is that alone."""
        play = Play(schedule, requests, make_worker).run()
        stayed = [arrival for arrival in range(len(requests)) if arrival not in schedule.abort_rounds]
        found = [play.outcome_of(arrival) for arrival in stayed]
        assert_same_outcomes(found, [self.alone[arrival % len(self.requests)] for arrival in stayed], f"{stayed}")
        return play


def named_schedules(num_blocks: int) -> dict[str, Schedule]:
    """Return schedules that differ in one thing each; `num_blocks` are too few for all."""
    chunked = {
        f"chunks of {size}, {depth} in flight": Schedule(
            NUM_BLOCKS,
            settings=PlannerSettings(long_prefill_threshold=size, max_long_prefills=16),
            num_steps_in_flight=depth,
        )
        for size, depth in ((1, 1), (1, 3), (7, 2), (64, 1), (64, 3))
    }
    preempted = {
        f"{mode.value}, {depth} in flight": Schedule(
            num_blocks, NUM_BLOCKS, PlannerSettings(preemption_mode=mode, watermark=0.0), depth
        )
        for mode in PreemptionMode
        for depth in (1, 2, 4)
    }
    return {
        "all at once": ALL_AT_ONCE,
        "all at once, 4 in flight": replace(ALL_AT_ONCE, num_steps_in_flight=4),
        "nothing cached": ALONE,
        "prefill first": Schedule(NUM_BLOCKS, settings=PlannerSettings(prefill_mode=PrefillMode.FIRST)),
        "a budget of 8": Schedule(NUM_BLOCKS, settings=PlannerSettings(max_num_seqs=8, max_num_batched_tokens=8)),
        "neighbours leave": replace(ALL_AT_ONCE, abort_rounds={1: 3, 2: 6, 5: 33, 8: 34}, num_steps_in_flight=2),
        **chunked,
        **preempted,
    }


SCHEDULE_NAMES = list(named_schedules(1))


def random_schedule(seed: int, num_blocks: int) -> Schedule:
    """Draw everything that can vary; the pool is tight, the preemption automatic."""
    random = np.random.default_rng(seed)
    max_num_seqs = int(random.integers(3, 16))
    settings = PlannerSettings(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + int(random.choice([0, 3, 20, 100])),
        watermark=float(random.choice([0.0, 0.1])),
        prefill_mode=list(PrefillMode)[random.integers(2)],
        long_prefill_threshold=int(random.choice([0, 6])),
    )
    return Schedule(
        num_blocks + 3 + int(random.choice([0, 5, 20])),
        int(random.choice([0, 10, NUM_BLOCKS])),
        settings,
        num_steps_in_flight=int(random.integers(1, 5)),
    )


def knowing(scene: Scene) -> Knowing:
    """Return a proposer that knows the outputs of a scene."""
    texts = [
        [*request.prompt, *output.token_ids]
        for request, outcome in zip(scene.requests, scene.alone, strict=True)
        for output in outcome.outputs
    ]
    return Knowing(texts, lambda token_id: (token_id + 1) % VOCAB_SIZE)
