"""The line that the log has for a request: what is in it, and what never is."""

import json
import logging

import pytest

from scheduler_svc.core.stop_conditions import FinishReason
from scheduler_svc.front.request import Request
from scheduler_svc.telemetry.request_log import log_end
from shared.errors import UnavailableError
from shared.events import JsonFormatter
from tests.unit.scheduler_svc.front.test_request import push_text, sampled_request

LOGGER = "scheduler_svc.telemetry.request_log"


def logged(request: Request, caplog: pytest.LogCaptureFixture) -> dict[str, object]:
    """Return the fields of the one line."""
    with caplog.at_level(logging.INFO, LOGGER):
        log_end(request)
    [record] = caplog.records
    fields: dict[str, object] = json.loads(JsonFormatter().format(record))
    assert (fields.pop("level"), fields.pop("logger"), fields.pop("event")) == ("info", LOGGER, "request_ended")
    del fields["time"]
    return fields


def test_a_finished_request(caplog: pytest.LogCaptureFixture) -> None:
    request = sampled_request()
    push_text(request, 0, "secret")
    request.finish_output(0, FinishReason.LENGTH)
    times = request.times
    times.first_scheduled_at_s, times.first_token_at_s, times.ended_at_s = 0.25, 0.50000049, 2.0
    fields = logged(request, caplog)
    assert fields == {
        "request_id": "a",
        "finish_reason": "length",
        "num_prompt_tokens": 3,
        "num_output_tokens": 6,
        "num_cached_tokens": 0,
        "queue_s": 0.25,
        "ttft_s": 0.5,
        "duration_s": 2.0,
    }


def test_a_request_that_failed_before_it_ran_has_its_code_and_no_times_that_never_came(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = sampled_request()
    request.group.tenant = "ml"
    request.fail(UnavailableError("the executor is gone"))
    request.times.ended_at_s = 2.0
    fields = logged(request, caplog)
    assert fields == {
        "request_id": "a",
        "tenant": "ml",
        "error": "UNAVAILABLE",
        "num_prompt_tokens": 3,
        "num_output_tokens": 0,
        "num_cached_tokens": 0,
        "duration_s": 2.0,
    }


def test_nothing_is_made_for_a_level_that_nobody_reads(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.telemetry.request_log.Event", None)
    with caplog.at_level(logging.WARNING, LOGGER):
        log_end(sampled_request())
    assert not caplog.records
