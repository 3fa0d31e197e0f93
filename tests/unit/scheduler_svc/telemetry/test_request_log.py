"""The line that the log has for a request: what is in it, and what never is."""

import json
import logging
from dataclasses import replace

import pytest

from octavo_shared.errors import UnavailableError
from octavo_shared.process.events import JsonFormatter
from scheduler_svc.request.life import EndedRequest
from scheduler_svc.telemetry.request_log import log_end
from tests.support.live_requests import ended_request

LOGGER = "scheduler_svc.telemetry.request_log"


def logged(ended: EndedRequest, caplog: pytest.LogCaptureFixture) -> dict[str, object]:
    """Return the fields of the one line."""
    with caplog.at_level(logging.INFO, LOGGER):
        log_end(ended)
    [record] = caplog.records
    fields: dict[str, object] = json.loads(JsonFormatter().format(record))
    assert (fields.pop("level"), fields.pop("logger"), fields.pop("event")) == ("info", LOGGER, "request_ended")
    del fields["time"]
    return fields


def test_a_finished_request(caplog: pytest.LogCaptureFixture) -> None:
    ended = ended_request(num_tokens=6)
    ended.times.first_scheduled_at_s, ended.times.first_token_at_s = 0.25, 0.50000049
    fields = logged(ended, caplog)
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
    failed = ended_request(num_tokens=0, error=UnavailableError("the executor is gone"))
    fields = logged(replace(failed, tenant="ml"), caplog)
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
        log_end(ended_request())
    assert not caplog.records
