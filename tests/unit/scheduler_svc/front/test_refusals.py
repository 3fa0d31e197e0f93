"""Why a request was refused, in the words of the metrics."""

import re
from contextvars import copy_context
from http import HTTPStatus

import pytest

from octavo_shared.errors import (
    CacheTooSmallError,
    DeadlineTooShortError,
    DrainingError,
    InvalidFieldError,
    LostTooOftenError,
    MalformedMessageError,
    NoExecutorError,
    OctavoServiceError,
    PermissionDeniedError,
    QueueFullError,
    RequestAbortedError,
    RequestExistsError,
    TokenizerFailedError,
    TokenQuotaError,
    UnauthenticatedError,
    UnavailableError,
    UnknownNameError,
)
from scheduler_svc.front.access.identity import Identity, private_deployment, set_identity
from scheduler_svc.front.api_meter import REASONS, SERVICE_REASONS, refusal_reason
from scheduler_svc.front.openai.errors import ApiError, api_error, refusal_of
from scheduler_svc.link.messages import decode_failure, encode_failure
from tests.monitoring.expressions import rules_with
from tests.support.each_row import each_row

ROWS: list[tuple[OctavoServiceError, str]] = [
    (InvalidFieldError("top_p", 7, "at most 1"), "invalid"),
    (MalformedMessageError(), "invalid"),
    (RequestExistsError("a"), "duplicate_id"),
    (UnknownNameError("no such model"), "not_found"),
    (UnauthenticatedError("no token"), "unauthenticated"),
    (PermissionDeniedError("another tenant"), "permission_denied"),
    (QueueFullError(3, 1.0), "queue_full"),
    (TokenQuotaError("ml", 20, 10, 0, None), "quota"),
    (DeadlineTooShortError("take", 3.0, 1.0), "deadline"),
    (CacheTooSmallError("it needs 9 blocks"), "too_long"),
    (NoExecutorError("no executor is attached", "at a:1"), "no_executor"),
    (DrainingError("it drains"), "draining"),
    (UnavailableError("the engine does not answer"), "unavailable"),
    (LostTooOftenError(4), "unavailable"),
    (RequestAbortedError("it was aborted"), "aborted"),
    (TokenizerFailedError("it panics"), "internal"),
]


@each_row(*ROWS)
def test_an_error_has_one_reason_also_behind_the_link_and_over_http(error: OctavoServiceError, reason: str) -> None:
    assert reason in REASONS
    assert refusal_reason(error) == refusal_reason(decode_failure(encode_failure(error))) == reason
    with pytest.raises(ApiError) as raised:
        raise api_error(error) from error
    assert refusal_of(raised.value) == reason


def test_what_a_tenant_is_not_told_counts_as_what_it_is() -> None:
    def refuse_a_tenant() -> None:
        set_identity(Identity("ml"))
        with private_deployment():
            raise NoExecutorError("no executor is attached", "at a:1")

    with pytest.raises(UnavailableError) as raised:
        copy_context().run(refuse_a_tenant)
    assert refusal_reason(raised.value) == refusal_of(raised.value) == "no_executor"


def test_a_bug_is_internal() -> None:
    assert refusal_reason(AssertionError()) == refusal_of(ValueError()) == "internal"


@each_row(
    (HTTPStatus.BAD_REQUEST, "invalid"),
    (HTTPStatus.FORBIDDEN, "permission_denied"),
    (HTTPStatus.NOT_FOUND, "not_found"),
    (HTTPStatus.METHOD_NOT_ALLOWED, "invalid"),
    (HTTPStatus.REQUEST_TIMEOUT, "invalid"),
    (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too_long"),
    (HTTPStatus.TOO_MANY_REQUESTS, "queue_full"),
    (HTTPStatus.INTERNAL_SERVER_ERROR, "internal"),
)
def test_what_gets_no_further_than_http_has_a_reason_by_its_status(status: HTTPStatus, reason: str) -> None:
    error = ApiError(status, "no")
    with pytest.raises(ApiError):
        raise error from error  # as `in_openai_words` does with one that is in OpenAI's words already
    assert refusal_of(error) == reason
    assert reason in REASONS


def test_the_alert_asks_for_every_reason_that_is_not_the_callers_doing() -> None:
    expression = rules_with("alert")["OctavoRequestsRefused"]["expr"]
    [asked] = re.findall(r'reason=~"([^"]*)"', expression)
    assert tuple(asked.split("|")) == SERVICE_REASONS
