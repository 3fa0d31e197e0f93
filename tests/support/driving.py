"""Drive a scheduler by hand in tests: make groups, and run steps on the toy executor."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.block_manager import AllocStatus
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.scheduler import Scheduler, StepUpdates
from scheduler_svc.core.sequence import SequenceGroup, StopConditions
from shared.step import SamplingRow, Step, StepResult
from tests.support.toy_executor import NextToken, ToyExecutor, count_up


def small_limits(
    max_num_seqs: int = 4,
    budget: int = 16,
    max_model_len: int = 24,
    block_size: int = 4,
    blocks: int = 8,
    eos_token_ids: tuple[int, ...] = (),
    watermark: float = 0.0,
) -> SchedulerLimits:
    """Return limits that are easy to follow by hand; without a watermark."""
    return SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        vocab_size=100_000,
        block_size=block_size,
        num_blocks=blocks,
        eos_token_ids=eos_token_ids,
        watermark=watermark,
    )


def group(arrival: int, num_prompt_tokens: int, conditions: StopConditions | None = None) -> SequenceGroup:
    """Return a request whose prompt is 100 * (arrival + 1), + 1, + 2 ..., named a, b, c ... by arrival."""
    first = 100 * (arrival + 1)
    prompt = np.arange(first, first + num_prompt_tokens, dtype=np.int32)
    return SequenceGroup(chr(ord("a") + arrival), prompt, SamplingRow(), conditions or StopConditions(), arrival)


@dataclass
class Bench:
    """A scheduler with a toy executor that counts up; results wait in `results` until `process`."""

    limits: SchedulerLimits
    next_token: NextToken = count_up
    epoch: int = 1
    results: deque[StepResult] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits, self.epoch)
        self.executor = ToyExecutor(self.limits, self.next_token)

    def add(self, arrival: int, num_prompt_tokens: int, conditions: StopConditions | None = None) -> SequenceGroup:
        """Queue a request that can be served."""
        added = group(arrival, num_prompt_tokens, conditions)
        assert self.scheduler.add(added) is AllocStatus.OK
        return added

    def schedule(self) -> Step:
        """Decide a step and run it; its result waits."""
        step = self.scheduler.schedule()
        assert step is not None, "the scheduler has nothing to do"
        self.results.append(self.executor.execute(step))
        self.scheduler.check_integrity()
        return step

    def process(self) -> StepUpdates:
        """Take the oldest result."""
        updates = self.scheduler.process(self.results.popleft())
        self.scheduler.check_integrity()
        return updates

    def step(self) -> StepUpdates:
        """Decide a step, run it, take its result."""
        self.schedule()
        return self.process()


def delivered(updates: StepUpdates) -> dict[str, int]:
    """Return the token of each request in `updates`."""
    names = [sequence.group.request_id for sequence in updates.sequences]
    assert len(set(names)) == len(names), "a request got two tokens in one step"
    return dict(zip(names, updates.token_ids, strict=True))
