"""A driver that launches steps before it finishes earlier ones, and what stands for the sampling kernel of a GPU."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar

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
    scores = logits.as_subclass(torch.Tensor)[torch.from_numpy(logit_rows).long()]
    token_ids = largest_index(scores)
    drawing = np.flatnonzero(sampling["temperature"] > 0)
    if len(drawing):
        filtered = filtered_scores(scores[torch.from_numpy(drawing)], sampling[drawing])
        token_ids[torch.from_numpy(drawing)] = draw(filtered, draws[drawing])
    is_not_finite = ~are_finite(scores)
    sampled = torch.stack((token_ids.masked_fill(is_not_finite, 0), is_not_finite.long()))
    return sampled.as_subclass(type(logits))


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


def assert_same(results: Sequence[StepResult], expected: Sequence[StepResult], tolerance: float = 0.0) -> None:
    """Compare all that was asked for; rows that did not ask hold NaN on both sides."""
    for ours, theirs in zip(results, expected, strict=True):
        for name in (field.name for field in fields(StepResult)):
            mine, other = getattr(ours, name), getattr(theirs, name)
            if isinstance(other, np.ndarray) or isinstance(mine, np.ndarray):
                message = f"{name} of step {theirs.step_id}"
                np.testing.assert_allclose(mine, other, rtol=0, atol=tolerance, err_msg=message)


class OnDevice(torch.Tensor):
    """Stands for memory of a GPU: notes what would make the host wait for it. What is made of it is on it too."""

    WAITING = frozenset(
        {
            *("cpu", "numpy", "item", "tolist", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"),
            *("repeat_interleave", "equal", "allclose", "__bool__", "__int__", "__float__", "__index__", "__array__"),
        }
    )
    waits: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        goes_to_host = name == "to" and "cpu" in args
        is_masked = name in ("__getitem__", "__setitem__") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], tuple) else args[1:2])
        )
        if name in cls.WAITING or is_masked or (goes_to_host and not kwargs.get("non_blocking")):
            cls.waits.append(name)
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return result.as_subclass(torch.Tensor) if goes_to_host else result
