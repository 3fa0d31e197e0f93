"""Steps for the fake worker, made by hand. Blocks have 4 slots of tokens."""

from dataclasses import replace
from typing import Any

import numpy as np

from executor_svc.fake.worker import FakeWorker
from octavo_shared.step_wire.step import Admission, SamplingRow, Step, StepResult, TableDelta, pairs

Moves = dict[str, Any]


class Run:
    """Numbers the steps of one worker."""

    def __init__(self, worker: FakeWorker | None = None) -> None:
        self.worker = worker or small_worker()
        self.step_id = 0

    def step(self, delta: TableDelta, moves: Moves | None = None) -> StepResult:
        self.step_id += 1
        step = Step(1, self.step_id, delta)
        return self.worker.execute(replace(step, **moves) if moves else step)

    def prefill(self, admission: Admission, *, num_tokens: int = 0, moves: Moves | None = None) -> list[int]:
        missing = len(admission.token_ids) - admission.num_computed_tokens
        chunk = pairs((admission.slot, num_tokens or missing))
        result = self.step(TableDelta(admissions=(admission,), prefill_chunks=chunk), moves)
        return list(result.sampled_token_ids)

    def decode(self, *appended_blocks: tuple[int, int]) -> list[int]:
        return list(self.step(TableDelta(appended_blocks=pairs(*appended_blocks))).sampled_token_ids)

    def release(self, slot: int, moves: Moves | None = None) -> None:
        self.step(TableDelta(released_slots=np.array([slot], np.int32)), moves)


def small_worker(**options: float) -> FakeWorker:
    numbers = {"block_size_tokens": 4, "num_device_blocks": 16, "max_model_len": 32, "max_num_seqs": 4}
    return FakeWorker(**{**numbers, **options})  # type: ignore[arg-type]


def admission(
    tokens: str,
    blocks: tuple[int, ...],
    *,
    slot: int = 0,
    generation: int = 1,
    computed: int = 0,
    salt: int = 0,
    sampling: SamplingRow | None = None,
) -> Admission:
    return Admission(
        slot=slot,
        generation=generation,
        token_ids=np.frombuffer(tokens.encode(), np.uint8).astype(np.int32),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=computed,
        block_ids=np.array(blocks, np.int32),
        sampling=sampling or SamplingRow(),
        cache_salt=salt,
    )


def continuation(
    prompt: str, num_tokens: int, *, sampling: SamplingRow | None = None, salt: int = 0, **options: float
) -> list[int]:
    run = Run(small_worker(max_model_len=len(prompt) + num_tokens, **options))
    num_blocks = -(-(len(prompt) + num_tokens) // 4)
    blocks = tuple(range(num_blocks))
    tokens = run.prefill(admission(prompt, blocks, sampling=sampling, salt=salt))
    for _ in range(num_tokens - 1):
        tokens += run.decode()
    return tokens
