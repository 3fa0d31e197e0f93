"""The real scheduler's core and one worker in this process, without RPC: what is left is the model and the core."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from executor_svc.worker.interface import RunningStep, Worker
from octavo_shared.step_wire.step import Int32Array, SamplingRow
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_core import ExecutorCore
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.parameters import StopConditions

GREEDY = SamplingRow()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: `num_new_tokens` come, whatever they are."""

    token_ids: Int32Array
    num_new_tokens: int
    sampling: SamplingRow = GREEDY


@dataclass(slots=True)
class Run:
    """What came of some prompts, and what it took."""

    outputs: list[list[int]]  # in the order of the prompts
    wall_s: float = 0.0
    device_s: float = 0.0  # sum of the steps' times on the device
    num_steps: int = 0
    max_in_flight: int = 0
    num_preemptions: int = 0

    @property
    def num_output_tokens(self) -> int:
        """Of all prompts."""
        return sum(len(output) for output in self.outputs)

    @property
    def idle_share(self) -> float:
        """Share of the time in which no step was on the device."""
        return max(0.0, 1.0 - self.device_s / self.wall_s)


class InProcessEngine:
    """Runs prompts to their end, with steps in flight as the services have them.

    Args:
        worker: Empty.
        num_steps_in_flight: Steps that are launched before the oldest one is waited for.
    """

    def __init__(self, worker: Worker, *, num_steps_in_flight: int = 2) -> None:
        info = worker.info
        self._worker = worker
        self._num_steps_in_flight = num_steps_in_flight
        limits = CoreLimits(
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_model_len=min(info.max_model_len, info.num_device_blocks * info.block_size_tokens),
            vocab_size=info.vocab_size,
            block_size=info.block_size_tokens,
            num_blocks=info.num_device_blocks,
            num_host_blocks=info.num_host_blocks,
            sliding_window=info.sliding_window_tokens,
            prefix_caching=False,
        )
        policy = FcfsPolicy()
        self._queue = WaitingQueue(policy)
        self._core = ExecutorCore(limits, self._queue, policy, prefix_key=b"check")
        self._arrivals = count()

    def generate(self, prompts: Sequence[Prompt]) -> Run:
        """Run all prompts together, first come, first served."""
        groups = [self._group(prompt) for prompt in prompts]
        index_of = {group.arrival: index for index, group in enumerate(groups)}
        run = Run([[] for _ in prompts])
        begin_s = time.perf_counter()
        for group in groups:
            self._queue.add(group)
        running: deque[RunningStep] = deque()
        while True:
            while len(running) < self._num_steps_in_flight:
                step = self._core.schedule(time.perf_counter()).step
                if step is None:
                    break
                running.append(self._worker.launch(step))
            run.max_in_flight = max(run.max_in_flight, len(running))
            if not running:
                break
            result = running.popleft().finish()
            run.num_steps += 1
            run.device_s += result.execute_duration_us * 1e-6
            updates = self._core.process(result)
            for sequence, token_id in zip(updates.sequences, updates.token_ids, strict=True):
                run.outputs[index_of[sequence.group.arrival]].append(token_id)
        run.wall_s = time.perf_counter() - begin_s
        run.num_preemptions = sum(self._core.preemption.num_preemptions.values())
        assert not len(self._queue), "a prompt can never run: the cache is too small for it"
        return run

    def _group(self, prompt: Prompt) -> SequenceGroup:
        arrival = next(self._arrivals)
        return SequenceGroup(
            request_id=str(arrival),
            prompt_token_ids=np.asarray(prompt.token_ids, np.int32),
            sampling=prompt.sampling,
            stop_conditions=StopConditions(prompt.num_new_tokens, ignore_eos=True),
            arrival=arrival,
        )
