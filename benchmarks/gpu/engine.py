"""The real planner and one worker in this process, without RPC: what is left is the model and the planner."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from executor_svc.worker.interface import RunningStep, Worker
from octavo_shared.step_wire.step import NO_LOGPROBS, Int32Array, SamplingRow
from octavo_shared.step_wire.token_rules import TokenRules
from scheduler_svc.core.limits import CoreLimits, PreemptionMode
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions

GREEDY = SamplingRow()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: `num_new_tokens` come, whatever they are."""

    token_ids: Int32Array
    num_new_tokens: int
    sampling: SamplingRow = GREEDY
    num_outputs: int = 1
    beam_width: int = 0  # 0: tokens are sampled
    token_rules: TokenRules | None = None
    num_prompt_logprobs: int = NO_LOGPROBS


@dataclass(slots=True)
class Answer:
    """What one request got; lists by output, best hypothesis first."""

    outputs: list[list[int]]
    logprobs: list[list[float]]
    alternatives: list[list[int]]  # token ids, one place after the other
    prompt_logprobs: list[float] = field(default_factory=list)
    first_token_s: float = 0.0  # from the beginning of the run; the first of any output


@dataclass(slots=True)
class Run:
    """What came of some prompts, and what it took."""

    answers: list[Answer]  # in the order of the prompts
    wall_s: float = 0.0
    device_s: float = 0.0  # sum of the steps' times on the device
    step_s: list[float] = field(default_factory=list)  # of each step, on the device
    num_steps: int = 0
    max_in_flight: int = 0
    num_preemptions: int = 0
    num_copied_blocks: int = 0
    num_swapped_blocks: int = 0  # in and out

    @property
    def outputs(self) -> list[list[int]]:
        return [answer.outputs[0] for answer in self.answers]

    @property
    def num_output_tokens(self) -> int:
        return sum(len(output) for answer in self.answers for output in answer.outputs)

    @property
    def idle_share(self) -> float:
        """Share of the time in which no step was on the device."""
        return max(0.0, 1.0 - self.device_s / self.wall_s)


class InProcessEngine:
    """Runs prompts to their end, with steps in flight as the services have them.

    Args:
        worker: Empty.
        num_steps_in_flight: Steps that are launched before the oldest one is waited for.
        preemption_mode: What becomes of blocks for which there is no room.
        limits: The planner's; None: the worker's, without a prefix cache.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        num_steps_in_flight: int = 2,
        preemption_mode: PreemptionMode | None = None,
        limits: CoreLimits | None = None,
    ) -> None:
        info = worker.info
        self._worker = worker
        self._num_steps_in_flight = num_steps_in_flight
        limits = limits or CoreLimits(
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_model_len=min(info.max_model_len, info.num_device_blocks * info.block_size_tokens),
            vocab_size=info.vocab_size,
            block_size=info.block_size_tokens,
            num_blocks=info.num_device_blocks,
            num_host_blocks=info.num_host_blocks,
            sliding_window=info.sliding_window_tokens,
            prefix_caching=False,
            preemption_mode=preemption_mode,
        )
        worker.reset(uses_groups=bool(limits.more_groups))
        policy = FcfsPolicy()
        self._queue = WaitingQueue(policy)
        self._planner = ExecutorPlanner(limits, self._queue, policy, prefix_key=b"check")
        self._arrivals = count()

    def generate(self, prompts: Sequence[Prompt]) -> Run:
        """Run all prompts together, first come, first served."""
        groups = [self._group(prompt) for prompt in prompts]
        run = Run([_no_answer(prompt) for prompt in prompts])
        answer_of = {group.arrival: answer for group, answer in zip(groups, run.answers, strict=True)}
        begin_s = time.perf_counter()
        for group in groups:
            self._queue.add(group)
        running: deque[RunningStep] = deque()
        while True:
            while len(running) < self._num_steps_in_flight:
                step = self._planner.schedule(time.perf_counter()).step
                if step is None:
                    break
                running.append(self._worker.launch(step))
                run.num_copied_blocks += len(step.blocks_to_copy)
                run.num_swapped_blocks += len(step.blocks_to_swap_out) + len(step.blocks_to_swap_in)
            run.max_in_flight = max(run.max_in_flight, len(running))
            if not running:
                break
            result = running.popleft().finish()
            run.num_steps += 1
            run.step_s.append(result.execute_duration_us * 1e-6)
            run.device_s += run.step_s[-1]
            updates = self._planner.process(result)
            assert not updates.failures, updates.failures
            _keep(updates, answer_of, time.perf_counter() - begin_s)
        run.wall_s = time.perf_counter() - begin_s
        run.num_preemptions = sum(self._planner.preemption.num_preemptions.values())
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
            num_sequences=prompt.num_outputs if not prompt.beam_width else 1,
            beam_search=BeamSearchParams(prompt.beam_width, prompt.num_outputs) if prompt.beam_width else None,
            token_rules=prompt.token_rules,
            num_prompt_logprobs=prompt.num_prompt_logprobs,
        )


def _no_answer(prompt: Prompt) -> Answer:
    outputs = range(prompt.num_outputs)
    return Answer([[] for _ in outputs], [[] for _ in outputs], [[] for _ in outputs])


def _keep(updates: StepUpdates, answer_of: Mapping[int, Answer], now_s: float) -> None:
    """Add to the answers what a step brought."""
    for index, (row, token_id) in enumerate(zip(updates.row_of_each_token(), updates.token_ids, strict=False)):
        sequence = updates.sequences[row]
        answer = answer_of[sequence.group.arrival]
        answer.first_token_s = answer.first_token_s or now_s
        answer.outputs[sequence.index].append(token_id)
        if updates.logprobs is not None:
            answer.logprobs[sequence.index].append(updates.logprobs[index])
        if index in updates.alternatives:
            answer.alternatives[sequence.index] += updates.alternatives[index].token_ids
    for prompt_logprobs in updates.prompt_logprobs:
        answer_of[prompt_logprobs.group.arrival].prompt_logprobs += prompt_logprobs.logprobs
    for group in updates.finished_searches:
        assert group.beams is not None, "it is a search"
        best = group.beams.finished_hypotheses()
        answer_of[group.arrival].outputs = [hypothesis.token_ids.tolist() for hypothesis in best]
        answer_of[group.arrival].logprobs = [hypothesis.logprobs.tolist() for hypothesis in best]
