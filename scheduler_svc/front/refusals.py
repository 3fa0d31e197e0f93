"""Why requests are refused, in the words of the metrics: a closed list, from the tree of errors."""

from octavo_shared.errors import (
    CacheTooSmallError,
    CallerError,
    DeadlineTooShortError,
    DrainingError,
    NoExecutorError,
    OctavoServiceError,
    PermissionDeniedError,
    QueueFullError,
    RequestAbortedError,
    RequestExistsError,
    TokenQuotaError,
    UnauthenticatedError,
    UnavailableError,
    UnknownNameError,
    WorldError,
)
from scheduler_svc.front.api.request_limits import PromptTooLongError
from scheduler_svc.front.text.text_model import UnknownModelError

# An error has the reason of its nearest class.
_REASONS: dict[type[BaseException], str] = {
    CallerError: "invalid",
    PromptTooLongError: "too_long",
    RequestExistsError: "duplicate_id",
    UnknownModelError: "not_found",
    UnknownNameError: "not_found",
    UnauthenticatedError: "unauthenticated",
    PermissionDeniedError: "permission_denied",
    QueueFullError: "queue_full",
    TokenQuotaError: "quota",
    DeadlineTooShortError: "deadline",
    CacheTooSmallError: "too_long",
    NoExecutorError: "no_executor",
    DrainingError: "draining",
    WorldError: "unavailable",
    RequestAbortedError: "aborted",
}

# For errors of no class above: bugs, and texts at which the tokenizer fails.
INTERNAL = "internal"

REASONS = (*dict.fromkeys(_REASONS.values()), INTERNAL)

# Reasons that are not the caller's fault; alerts use them.
SERVICE_REASONS = ("queue_full", "deadline", "no_executor", "draining", "unavailable", INTERNAL)


def refusal_reason(error: BaseException) -> str:
    """Return why a request was refused, given the error that its caller gets."""
    cause = error.__cause__
    if type(error) is UnavailableError and isinstance(cause, OctavoServiceError):  # the caller is not told the cause
        return refusal_reason(cause)
    return next((_REASONS[kind] for kind in type(error).__mro__ if kind in _REASONS), INTERNAL)
