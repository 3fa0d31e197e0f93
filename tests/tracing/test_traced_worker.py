"""One span for each stay of a request in the batch table, whatever becomes of its sequences there."""

from dataclasses import replace

import numpy as np
import pytest

from executor_svc.fake.worker import FakeWorker
from executor_svc.service.traced_worker import TracedWorker
from executor_svc.worker.interface import execute
from octavo_shared.errors import InvalidStepError
from octavo_shared.step_wire.step import Admission, Fork, SamplingRow, Step, TableDelta, pairs
from tests.tracing.conftest import Recorder
from tests.tracing.spans import CALLER_SPAN_ID, NOT_SAMPLED, SAMPLED

OTHER = f"00-{'12' * 16}-{'34' * 8}-01"


class ManualClock:
    """Nanoseconds since 1970; 10 more at each look."""

    now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 10
        return self.now_ns


class Driver:
    """Sends numbered steps to a traced worker."""

    def __init__(self, recorder: Recorder) -> None:
        self.worker = TracedWorker(FakeWorker(), recorder.tracing.tracer, ManualClock())
        self.num_steps = 0

    def step(self, delta: TableDelta) -> None:
        self.num_steps += 1
        execute(self.worker, Step(1, self.num_steps, delta))


@pytest.fixture
def driver(recorder: Recorder) -> Driver:
    return Driver(recorder)


def admitted(slot: int, num_tokens: int, traceparent: str | None = SAMPLED, generation: int = 1) -> Admission:
    """Return an admission with a history of its own, and room for 32 tokens."""
    return Admission(
        slot,
        generation,
        np.arange(33 + 5 * slot, 33 + 5 * slot + num_tokens, dtype=np.int32),
        num_tokens,
        0,
        np.array([2 * slot, 2 * slot + 1], np.int32),
        SamplingRow(),
        traceparent=traceparent,
    )


def entering(*admissions: Admission) -> TableDelta:
    """Return the delta that admits sequences and computes all their tokens."""
    return TableDelta(admissions=admissions, prefill_chunks=pairs(*((a.slot, len(a.token_ids)) for a in admissions)))


def leaving(*slots: int) -> TableDelta:
    return TableDelta(released_slots=np.array(slots, np.int32))


def test_a_stay_begins_with_the_admission_and_ends_with_the_release(recorder: Recorder, driver: Driver) -> None:
    driver.step(entering(admitted(0, 10)))
    driver.step(TableDelta())
    driver.step(TableDelta())
    assert not recorder.spans
    driver.step(leaving(0))

    [span] = recorder.spans
    assert (span.name, span.parent_id, span.begin_ns, span.end_ns) == ("execute", CALLER_SPAN_ID, 10, 20)
    assert span.attributes == {
        "octavo.instance_id": driver.worker.info.instance_id,
        "octavo.num_known_tokens": 10,
        "octavo.num_cached_tokens": 0,
        "octavo.num_steps": 3,
        "octavo.num_computed_tokens": 12,
    }


@pytest.mark.parametrize("traceparent", [None, NOT_SAMPLED])
def test_what_is_not_traced_leaves_no_span(recorder: Recorder, driver: Driver, traceparent: str | None) -> None:
    driver.step(entering(admitted(0, 10, traceparent)))
    driver.step(leaving(0))

    assert not recorder.spans


def test_forks_belong_to_the_stay_of_their_parent_and_its_prompt_is_counted_once(
    recorder: Recorder, driver: Driver
) -> None:
    forks = (Fork(0, 1, 1, SamplingRow(temperature=1.0, output_index=1)),)
    driver.step(replace(entering(admitted(0, 16)), forks=forks))
    driver.step(TableDelta(replaced_blocks=pairs((1, 1, 9))))
    driver.step(leaving(0))
    assert not recorder.spans
    driver.step(leaving(1))

    [span] = recorder.spans
    assert span.attributes["octavo.num_computed_tokens"] == 16 + 1 + 2
    assert span.attributes["octavo.num_steps"] == 3


def test_beams_belong_to_the_stay_of_their_parent(recorder: Recorder, driver: Driver) -> None:
    beam = SamplingRow(num_candidates=2)
    driver.step(entering(replace(admitted(0, 16), sampling=beam)))
    driver.step(
        TableDelta(
            beam_forks=(Fork(0, 1, 1, beam),),
            appended_tokens=pairs((0, 40), (1, 41)),
            replaced_blocks=pairs((1, 1, 9)),
            activated_slots=np.array([0, 1], np.int32),
        )
    )
    driver.step(leaving(0, 1))

    [span] = recorder.spans
    assert span.attributes["octavo.num_computed_tokens"] == 16 + 2


def test_sequences_of_one_request_share_a_stay_and_other_requests_have_their_own(
    recorder: Recorder, driver: Driver
) -> None:
    driver.step(entering(admitted(0, 4), admitted(1, 5), admitted(2, 6, OTHER)))
    driver.step(leaving(0))
    driver.step(leaving(2))
    driver.step(leaving(1))

    other, own = recorder.spans
    assert (other.trace_id, own.parent_id) == ("12" * 16, CALLER_SPAN_ID)
    assert other.attributes["octavo.num_computed_tokens"] == 6 + 1
    assert own.attributes["octavo.num_computed_tokens"] == 4 + 5 + 2


def test_a_slot_that_is_given_out_again_in_the_step_of_its_release_begins_a_new_stay(
    recorder: Recorder, driver: Driver
) -> None:
    driver.step(entering(admitted(0, 4)))
    driver.step(replace(entering(admitted(0, 7, OTHER, generation=2)), released_slots=np.array([0], np.int32)))
    driver.step(leaving(0))

    first, second = recorder.spans
    assert (first.trace_id, first.attributes["octavo.num_computed_tokens"]) == (SAMPLED[3:35], 4)
    assert (second.trace_id, second.attributes["octavo.num_computed_tokens"]) == ("12" * 16, 7)


def test_a_new_scheduler_ends_the_spans_of_what_the_last_one_left(recorder: Recorder, driver: Driver) -> None:
    driver.step(entering(admitted(0, 4)))
    driver.worker.reset()

    [span] = recorder.spans
    assert (span.is_error, span.description) == (True, "a scheduler attached anew")
    driver.num_steps = 0
    driver.step(entering(admitted(0, 4)))
    driver.step(leaving(0))
    assert len(recorder.spans) == 2


def test_a_refused_step_changes_no_span(recorder: Recorder, driver: Driver) -> None:
    driver.step(entering(admitted(0, 4)))
    wrong = replace(entering(admitted(9000, 4)), released_slots=np.array([0], np.int32))

    with pytest.raises(InvalidStepError):
        driver.step(wrong)

    assert not recorder.spans
    driver.step(leaving(0))
    assert [span.is_error for span in recorder.spans] == [False]
