"""What the scheduler computes for a decode step does not grow with the sequences that run. Counted, not timed.

A step here is all that the driver does for one, but for giving tokens to requests: decision, log, message, result,
counts. Each feature that is added costs calls a step, never calls a sequence. To give a token to its request
costs a few calls; they are counted too.
"""

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.costs.core import limits_for
from octavo_shared.step_wire.step import SamplingRow, StepResult
from octavo_shared.step_wire.wire import decode_result, encode_result, encode_step
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.live_requests import LiveRequests
from scheduler_svc.executors.in_flight_limit import InFlightLimit
from scheduler_svc.front.output import AnswerOptions
from scheduler_svc.front.response import Response
from scheduler_svc.front.text.output_text import TextOptions
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.parameters import StopConditions
from scheduler_svc.telemetry.meter import Meter
from scheduler_svc.telemetry.recent_steps import RecentStep, RecentSteps
from tests.support.call_counts import num_calls, num_instructions
from tests.support.tokenizers import byte_level_backend, make_tokenizer

SIZES = (32, 256, 1024)
BLOCK_SIZE = 16
PROMPT_TOKENS = 20

# What was counted when this was written, and a little room. Whoever needs more of it says why in the commit.
MOST_CALLS_A_STEP = 424
MOST_CALLS_A_TOKEN = 34
MOST_CALLS_A_RANKED_TOKEN = 10

TOKENIZER = make_tokenizer(byte_level_backend())


class Stage:
    """A fleet of one core whose sequences all decode, and what the driver has beside it."""

    def __init__(self, num_sequences: int, sampling: SamplingRow, num_outputs: int = 1) -> None:
        self.fleet = Fleet(WaitingQueue(FcfsPolicy()), FcfsPolicy(), b"key")
        limits = limits_for(num_sequences, 8 * num_sequences, 8, budget=2**31 - 1)
        self.planner = self.fleet.join(limits, epoch=1)
        self.meter = Meter()
        self.requests = LiveRequests(self.fleet, lambda: None, self.meter)
        self.step_log = RecentSteps(observe=self.meter.step_processed)
        self.in_flight = InFlightLimit(None)
        self.in_flight.note_round_trip(0.001)
        self.sampling = sampling
        for number in range(num_sequences // num_outputs):
            self._add(number, num_outputs)
        self.updates = StepUpdates([], [], None, {})
        for _ in range(12):  # the prompts, then what is looked up once
            self.step()
            self.deliver()

    def _add(self, number: int, num_outputs: int) -> None:
        prompt = np.full(PROMPT_TOKENS + number % BLOCK_SIZE, 65, np.int32)
        conditions = StopConditions(100, ignore_eos=True)
        group = SequenceGroup(str(number), prompt, self.sampling, conditions, number, num_sequences=num_outputs)
        request = EngineRequest(group.request_id, prompt, self.sampling, conditions, num_sequences=num_outputs)
        response = Response(request, AnswerOptions(1, num_outputs, False, TextOptions()), TOKENIZER)
        self.requests.add(LiveRequest(group, response, 0.0))

    def step(self) -> None:
        """Decide and send a step, and take its result, as the driver does."""
        decision, _ = self.fleet.schedule(self.planner, 0.0)
        sent = decision.in_flight
        assert sent is not None
        logged = RecentStep(sent.step, sent.layout, decided_at_s=0.0)
        self.step_log.add(logged)
        self.in_flight.note_sent(0.0, is_alone=False)
        encode_step(sent.step)
        self.fleet.dispatch(0.0)
        num_samples = len(sent.layout.sample_slots)
        logprobs = np.full(num_samples, -1.0, np.float32) if self.sampling.num_logprobs >= 0 else None
        answer = encode_result(StepResult(1, sent.step.step_id, np.full(num_samples, 66, np.int32), logprobs))
        result = decode_result(answer)
        self.updates = self.fleet.process(self.planner, result)
        self.in_flight.note_answered(0.0, 0.01, num_samples, len(self.updates.finished), self.updates.num_void_rows)
        self.step_log.set_result(result, 0.0)

    def deliver(self) -> None:
        """Give the tokens of the last step to their requests."""
        self.requests.deliver(self.planner, self.updates)


def counts(count: Callable[[Callable[[], object]], int], sampling: SamplingRow) -> list[int]:
    """Return what a step costs at each of the sizes, the most of as many steps as fill a block."""
    found = []
    for num_sequences in SIZES:
        stage = Stage(num_sequences, sampling)
        assert np.count_nonzero(stage.planner.batch.is_decoding) == num_sequences
        found.append(max(count(stage.step) for _ in range(BLOCK_SIZE)))
    return found


@pytest.mark.parametrize("sampling", [SamplingRow(), SamplingRow(num_logprobs=0, temperature=1.0)])
def test_a_decode_step_costs_the_same_with_any_number_of_sequences(sampling: SamplingRow) -> None:
    calls, instructions = counts(num_calls, sampling), counts(num_instructions, sampling)

    assert len(set(calls)) == 1, calls
    assert len(set(instructions)) == 1, instructions
    assert calls[0] <= MOST_CALLS_A_STEP


@pytest.mark.parametrize(("num_outputs", "most"), [(1, MOST_CALLS_A_TOKEN), (16, MOST_CALLS_A_RANKED_TOKEN)])
def test_a_token_costs_its_request_a_few_calls(num_outputs: int, most: int) -> None:
    few, many = (
        Stage(num_sequences, SamplingRow(num_logprobs=0, temperature=1.0), num_outputs) for num_sequences in (32, 256)
    )
    for stage in (few, many):
        stage.step()
    added = num_calls(many.deliver) - num_calls(few.deliver)

    assert added / (256 - 32) <= most
