"""A scheduler of a few lines: makes steps by hand and drives a worker with them.

Blocks are handed out in a scrambled order, so block tables are never contiguous.
"""

from collections.abc import Sequence

import numpy as np
import torch

from executor_svc.cache.cache_engine import CacheEngine, CacheShape
from executor_svc.native.sampling import NativeSampling
from executor_svc.sampler.sample_rows import SampleRows
from executor_svc.sampler.sampler import Sampled, Sampler
from executor_svc.worker.interface import Worker, execute
from octavo_shared.step_wire.step import (
    Admission,
    Fork,
    Int32Array,
    SamplingRow,
    Step,
    StepResult,
    TableDelta,
    no_pairs,
    no_slots,
    pairs,
)

GREEDY = SamplingRow()
NO_MOVES = no_pairs()


class StepDriver:
    def __init__(self, worker: Worker, seed: int = 0) -> None:
        self.worker = worker
        self.last_step_id = 0
        groups, draw = worker.table.groups, np.random.default_rng(seed)
        self._free = [(group.first_id + draw.permutation(group.num_device_blocks)).tolist() for group in groups]
        self.free_block_ids = self._free[0]

    def take_blocks(self, num_tokens: int) -> Int32Array:
        """Take blocks for so many tokens in every cache group."""
        groups = zip(self._free, self.worker.table.groups, strict=True)
        return np.array(
            [free.pop() for free, group in groups for _ in range(-(-num_tokens // group.block_size))], np.int32
        )

    def admission(
        self,
        slot: int,
        token_ids: Sequence[int],
        num_new_tokens: int,
        sampling: SamplingRow = GREEDY,
        num_prompt_tokens: int | None = None,
    ) -> Admission:
        """Admit tokens, all of them the prompt by default, with blocks for all that they will become."""
        block_ids = self.take_blocks(len(token_ids) + num_new_tokens)
        generation = int(self.worker.table.generation[slot]) + 1
        num_prompt_tokens = num_prompt_tokens or len(token_ids)
        return Admission(slot, generation, np.array(token_ids, np.int32), num_prompt_tokens, 0, block_ids, sampling)

    def execute(
        self,
        delta: TableDelta,
        drafts: Sequence[Sequence[int]] | None = None,
        /,
        *,
        blocks_to_copy: Int32Array = NO_MOVES,
        blocks_to_swap_out: Int32Array = NO_MOVES,
        blocks_to_swap_in: Int32Array = NO_MOVES,
        states_to_save: Sequence[tuple[int, int, int]] = (),
    ) -> StepResult:
        """Run a step; `drafts` are those of each sample row."""
        self.last_step_id += 1
        flat = [token_id for of_row in drafts or () for token_id in of_row]
        step = Step(
            epoch=1,
            step_id=self.last_step_id,
            delta=delta,
            blocks_to_swap_out=blocks_to_swap_out,
            blocks_to_swap_in=blocks_to_swap_in,
            blocks_to_copy=blocks_to_copy,
            states_to_save=np.array(states_to_save, np.int32).reshape(-1, 3),
            draft_counts=None if drafts is None else np.array([len(of_row) for of_row in drafts], np.uint8),
            draft_token_ids=None if drafts is None else np.array(flat, np.int32),
        )
        return execute(self.worker, step)

    def prefill(self, prompts: Sequence[Sequence[int]], num_new_tokens: int = 1) -> StepResult:
        """Run all prompts in one step, in slots 0, 1, 2, ..."""
        admissions = tuple(self.admission(slot, prompt, num_new_tokens) for slot, prompt in enumerate(prompts))
        chunks = pairs(*[(slot, len(prompt)) for slot, prompt in enumerate(prompts)])
        return self.execute(TableDelta(admissions=admissions, prefill_chunks=chunks))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_new_tokens: int,
        chunk_size: int = 1_000,
        sampling: SamplingRow = GREEDY,
    ) -> list[list[int]]:
        """Run all prompts together, chunked; short ones decode while long ones still prefill."""
        admissions = tuple(self.admission(s, prompt, num_new_tokens, sampling) for s, prompt in enumerate(prompts))
        left = {slot: len(prompt) for slot, prompt in enumerate(prompts)}
        stops = np.array([len(prompt) + num_new_tokens for prompt in prompts])
        deactivated = no_slots()
        live = set(range(len(prompts)))
        while live:
            chunks = pairs(*[(slot, min(chunk_size, num)) for slot, num in left.items()])
            left = {slot: num - chunk_size for slot, num in left.items() if num > chunk_size}
            self.execute(TableDelta(admissions=admissions, deactivated_slots=deactivated, prefill_chunks=chunks))
            admissions = ()
            done = {slot for slot in live if self.worker.table.num_tokens[slot] == stops[slot]}
            deactivated = np.array(sorted(done), np.int32)
            live -= done
        table = self.worker.table
        return [table.token_ids[slot, len(prompt) : stops[slot]].tolist() for slot, prompt in enumerate(prompts)]


MOST_HOST_BLOCKS = 130


class RecordingSampler(Sampler):
    """Keeps the logits of the last step, [num_samples, vocab_size]."""

    def __init__(self, native: NativeSampling | None = None) -> None:
        super().__init__(native)
        self.logits = torch.empty(0)
        self.num_logit_rows = 0

    def sample(
        self, logits: torch.Tensor, logit_rows: Int32Array, rows: SampleRows, likeliest: Int32Array | None = None
    ) -> Sampled:
        self.logits = logits[torch.from_numpy(logit_rows)].clone()
        self.num_logit_rows = len(logits)
        return super().sample(logits, logit_rows, rows, likeliest)


class PoisonedCacheEngine(CacheEngine):
    """Starts with NaN in every slot of every block: whatever attention reads too much shows.

    The host pool is not larger than tests use it: by default it would be 1 GiB, which takes a second to fill.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_blocks: int,
        num_host_blocks: int,
        device: torch.device,
        scales: Sequence[tuple[float, float]] = (),
    ) -> None:
        super().__init__(shape, num_blocks, min(num_host_blocks, MOST_HOST_BLOCKS), device, scales)
        for pool in (self.host_blocks, *self._pools):
            pool.fill_(0xFF if pool.dtype == torch.uint8 else torch.nan)


def fork_of(parent_slot: int, slot: int, sampling: SamplingRow = GREEDY, generation: int = 1) -> Fork:
    return Fork(parent_slot, slot, generation, sampling)
