"""The fake executor gives the same tokens, log-probabilities and alternatives however many of them a step brings."""

from collections import defaultdict, deque
from dataclasses import replace

import numpy as np

from executor_svc.fake.worker import FakeWorker
from executor_svc.worker.interface import execute
from octavo_shared.step_wire.step import SamplingRow, StepResult
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.executors.serving_limits import PlannerSettings, serving_limits
from scheduler_svc.request.parameters import StopConditions
from tests.support.each_row import each_row

NAN_TOKEN = 7


class Run:
    """All that groups are answered by one worker, with so many steps in flight."""

    def __init__(self, max_allowance: int, num_steps_in_flight: int, window: int = 0, num_blocks: int = 60) -> None:
        worker = FakeWorker(
            block_size_tokens=4,
            num_device_blocks=num_blocks,
            num_host_blocks=30,
            max_model_len=100,
            max_num_seqs=8,
            max_num_batched_tokens=40,
            eos_probability=0.02,
            sliding_window_tokens=window,
            nan_token_id=NAN_TOKEN,
            max_allowance=max_allowance,
        )
        queue = WaitingQueue(FcfsPolicy())
        limits = replace(serving_limits(worker.info, PlannerSettings()), flags_rows=True)
        self.planner = ExecutorPlanner(limits, queue, FcfsPolicy(), 1, prefix_key=b"key")
        self.outputs = defaultdict[tuple[str, int], list[object]](list)
        self.num_spans = 0
        for arrival in range(10):
            queue.add(_group(arrival))
        results: deque[StepResult] = deque()
        while True:
            step = self.planner.schedule(0.0).step
            check_integrity(self.planner)
            if step is not None:
                results.append(execute(worker, step))
            elif not results:
                return
            while results and (step is None or len(results) >= num_steps_in_flight):
                self._process(results.popleft())

    def _process(self, result: StepResult) -> None:
        updates = self.planner.process(result)
        check_integrity(self.planner)
        self.num_spans += sum(count > 1 for count in updates.counts or ())
        for failure in updates.failures:
            self.outputs[failure.group.request_id, -1].append(failure.message)
        logprobs = updates.logprobs or [np.nan] * len(updates.token_ids)
        tokens = zip(updates.row_of_each_token(), updates.token_ids, logprobs, strict=False)
        for place, (row, token_id, logprob) in enumerate(tokens):
            sequence, alternatives = updates.sequences[row], updates.alternatives.get(place)
            known = str(logprob) if sequence.group.sampling.num_logprobs >= 0 else ""
            found = [] if alternatives is None else alternatives.logprobs
            self.outputs[sequence.group.request_id, sequence.index].append((token_id, known, found))


def _group(arrival: int) -> SequenceGroup:
    sampling = SamplingRow(
        temperature=1.0,
        seed=arrival,
        num_logprobs=2 if arrival % 2 else -1,
        repetition_penalty=1.2 if arrival % 3 == 0 else 1.0,
    )
    prompt = np.array([10 + arrival, 20 + arrival, 30], np.int32)
    conditions = StopConditions(max_tokens=30)
    return SequenceGroup(f"r{arrival}", prompt, sampling, conditions, arrival, num_sequences=1 + (arrival % 4 == 3))


@each_row((1, 2, 0, 60), (2, 4, 0, 60), (4, 8, 0, 40), (3, 4, 8, 40))
def test_tokens_are_those_of_one_a_step(num_steps_in_flight: int, max_allowance: int, window: int, blocks: int) -> None:
    alone, drafted = Run(1, 1, window, blocks), Run(max_allowance, num_steps_in_flight, window, blocks)

    assert drafted.outputs == alone.outputs
    assert not alone.num_spans
    assert drafted.num_spans > 20
