import pytest

from executor_svc.service.kept_responses import NUM_KEPT_RESPONSES, KeptResponses
from octavo.execution.v1 import step_pb2
from octavo_shared.errors import StepGapError
from tests.support.each_row import each_row


def log_of(num_steps: int) -> KeptResponses:
    log = KeptResponses()
    for step_id in range(1, num_steps + 1):
        log.append(step_pb2.ExecuteModelResponse(step_id=step_id))
    return log


def test_the_next_step_has_no_response_yet() -> None:
    assert log_of(0).find(1) is None
    assert log_of(3).find(4) is None


def test_an_executed_step_has_its_stored_response() -> None:
    response = log_of(3).find(2)
    assert response is not None
    assert response.step_id == 2


@each_row(5, 100)
def test_a_skipped_step_is_a_gap(step_id: int) -> None:
    with pytest.raises(StepGapError, match="4 is missing"):
        log_of(3).find(step_id)


def test_step_ids_begin_at_1() -> None:
    with pytest.raises(StepGapError):
        log_of(3).find(0)


def test_responses_since_a_step_are_in_order() -> None:
    log = log_of(5)
    assert [response.step_id for response in log.since(3)] == [4, 5]
    assert log.since(5) == []
    assert [response.step_id for response in log.since(0)] == [1, 2, 3, 4, 5]


def test_only_the_last_responses_are_kept() -> None:
    log = log_of(NUM_KEPT_RESPONSES + 1)
    assert len(log.since(1)) == NUM_KEPT_RESPONSES
    with pytest.raises(StepGapError, match="the response of step 1 is no longer kept; the first kept is 2"):
        log.since(0)


def test_a_caller_cannot_have_received_what_was_not_executed() -> None:
    with pytest.raises(StepGapError, match="step 4 was not executed"):
        log_of(3).since(4)
