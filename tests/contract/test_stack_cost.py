"""The bare loop of `benchmarks.costs stack` does the work that the whole stack does."""

from pathlib import Path

import pytest

from benchmarks.end_to_end.adapters.octavo import bare_loop, generate, generate_alone, target_of
from benchmarks.end_to_end.workloads import Request, Shape, Workload
from executor_svc.config import ExecutorConfig
from executor_svc.worker.loading import load_worker
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.engine.tenants import Tenants
from scheduler_svc.processes.service import engine_settings
from tests.numerics.tiny_models import save_tiny_model
from tests.support.stack import running_stack

VOCAB_SIZE = 256  # prompts have ids from 100

# More requests than slots, prompts of several chunks, a pool that is too small for all: they wait, and are preempted.
SHAPES = (Shape(40, 9, 16), Shape(3, 30), Shape(17, 1), Shape(16, 25), Shape(33, 12, 16), Shape(1, 40))
EXECUTOR = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "block_size_tokens": 8, "num_device_blocks": 10}


def requests(seed: int) -> list[Request]:
    return Workload("tiny", "", SHAPES).requests(seed, VOCAB_SIZE)


@pytest.mark.usefixtures("one_thread")
async def test_the_bare_loop_gives_the_tokens_of_the_whole_stack(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, vocab_size=VOCAB_SIZE, eos_token_id=182)
    worker = load_worker(ExecutorConfig.model_validate({"model": str(tmp_path), "num_threads": 1, **EXECUTOR}))
    async with running_stack(worker) as stack, target_of(stack.address) as target:
        through_stack = [await generate(target, requests(seed)) for seed in (1, 2)]

    bare = bare_loop(worker, engine_settings(SchedulerConfig.model_validate({"executor": ("127.0.0.1:1",)}), Tenants()))
    alone = [generate_alone(bare, requests(seed)) for seed in (1, 2)]

    for stacked, done in zip(through_stack, alone, strict=True):
        assert done.token_ids == stacked.token_ids
        assert done.output_tokens == stacked.output_tokens == [shape.output_tokens for shape in SHAPES]
        assert len(done.first_token_s) == len(SHAPES)
        assert 0 < min(done.first_token_s) <= max(done.first_token_s) <= done.seconds
