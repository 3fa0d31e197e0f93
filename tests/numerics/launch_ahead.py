"""A driver that launches steps before it finishes earlier ones, and what stands for the sampling kernel of a GPU."""

from collections.abc import Sequence

import numpy as np
import torch

from executor_svc.sampler.filters import Draws, SamplingRows, draw, filtered_scores
from executor_svc.sampler.likeliest import are_finite, largest_index
from executor_svc.worker.interface import RunningStep
from octavo_shared.step_wire.step import Int32Array, SamplingRow, Step, StepResult, TableDelta, pairs
from tests.numerics.driver import StepDriver

NUM_NEW_TOKENS = 12


def draw_in_torch(logits: torch.Tensor, logit_rows: Int32Array, sampling: SamplingRows, draws: Draws) -> torch.Tensor:
    """Stand for the kernel of a GPU."""
    scores = logits[torch.from_numpy(logit_rows).long()]
    token_ids = largest_index(scores)
    drawing = np.flatnonzero(sampling["temperature"] > 0)
    if len(drawing):
        filtered = filtered_scores(scores[torch.from_numpy(drawing)], sampling[drawing])
        token_ids[torch.from_numpy(drawing)] = draw(filtered, draws[drawing])
    is_not_finite = ~are_finite(scores)
    return torch.stack((token_ids.masked_fill(is_not_finite, 0), is_not_finite.long()))


class Ahead:
    """Launches steps and keeps them, unfinished, until it is told."""

    def __init__(self, driver: StepDriver) -> None:
        self.driver = driver
        self.running: list[RunningStep] = []

    def launch(self, delta: TableDelta) -> None:
        self.driver.last_step_id += 1
        self.running.append(self.driver.worker.launch(Step(1, self.driver.last_step_id, delta)))

    def finish(self) -> list[StepResult]:
        results = [step.finish() for step in self.running]
        self.running.clear()
        return results


def admit(
    driver: StepDriver, prompts: Sequence[Sequence[int]], sampling: SamplingRow, first_slot: int = 0
) -> TableDelta:
    slots = range(first_slot, first_slot + len(prompts))
    admissions = tuple(
        driver.admission(slot, prompt, 2 * NUM_NEW_TOKENS, sampling)
        for slot, prompt in zip(slots, prompts, strict=True)
    )
    chunks = pairs(*[(slot, len(prompt)) for slot, prompt in zip(slots, prompts, strict=True)])
    return TableDelta(admissions=admissions, prefill_chunks=chunks)


def one_at_a_time(driver: StepDriver, deltas: Sequence[TableDelta]) -> list[StepResult]:
    return [driver.execute(delta) for delta in deltas]


def assert_same(results: Sequence[StepResult], expected: Sequence[StepResult]) -> None:
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.sampled_token_ids.tolist() == theirs.sampled_token_ids.tolist()
        if theirs.logprobs is not None:
            assert ours.logprobs is not None
            assert ours.logprobs.tolist() == theirs.logprobs.tolist()
