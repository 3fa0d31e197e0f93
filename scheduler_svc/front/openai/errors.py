"""Errors in the shape of OpenAI's: a status, and {"error": {"message", "type", "param", "code"}}."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from types import MappingProxyType

import grpc
from pydantic_core import to_json

from octavo_shared.errors import (
    CacheTooSmallError,
    GrammarNotFollowedError,
    InvalidFieldError,
    NotFiniteError,
    OctavoServiceError,
    QueueFullError,
    RequestAbortedError,
    RequestExistsError,
    TokenizerFailedError,
    TokenQuotaError,
)
from octavo_shared.grpc.grpc_status import status_code
from scheduler_svc.front.api.request_limits import PromptTooLongError
from scheduler_svc.front.api_meter import INTERNAL, refusal_reason
from scheduler_svc.front.text.text_model import UnknownModelError

_INVALID = "invalid_request_error"
_SERVER = "server_error"

# OpenAI's clients retry by themselves after 408, 409, 429 and 5xx, unless this header says no.
_NO_RETRY = MappingProxyType({"x-should-retry": "false"})

# Errors that a retry would meet again.
_NOT_TO_BE_SENT_AGAIN = (
    RequestAbortedError,
    RequestExistsError,
    NotFiniteError,
    GrammarNotFollowedError,
    TokenizerFailedError,
)

# For an answer after which the connection cannot be used.
CLOSE = MappingProxyType({"Connection": "close"})

_RETRY_AFTER_S = 1.0

_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.CONFLICT,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.ABORTED: HTTPStatus.CONFLICT,
}

# Reasons, in the metrics, of requests that HTTP itself refuses; all others are invalid.
_REFUSALS = {
    HTTPStatus.FORBIDDEN: "permission_denied",
    HTTPStatus.NOT_FOUND: "not_found",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "too_long",
    HTTPStatus.TOO_MANY_REQUESTS: "queue_full",
}

# Advice of the native API, and its wording here.
_ADVICE = (
    ("send text or token_ids", "send a prompt to /v1/completions"),
    ("send token_ids", "send token ids to /v1/completions"),
)
_NAMED_IN_LIMIT = re.compile(r"\((\w+)\)")

# The native API's names of the prompt.
PROMPT_FIELDS = ("text", "token_ids", "prompt")


@dataclass(eq=False)
class ApiError(OctavoServiceError):
    """An error that a request is answered with.

    Attributes:
        status: Of the HTTP response.
        message: One sentence.
        kind: OpenAI's `type`.
        param: OpenAI's name of the wrong field; None: the error is about no field.
        code: OpenAI's code of the error; None: it has none.
        headers: Of the response, beside those of every response.
    """

    status: int
    message: str
    kind: str = _INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> bytes:
        """The JSON that OpenAI's clients read."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return to_json({"error": error})


def api_error(
    error: Exception,
    names: Mapping[str, str] = MappingProxyType({}),
    numbers: Mapping[str, float] = MappingProxyType({}),
) -> ApiError:
    """Return an error of the service in OpenAI's shape.

    Args:
        error: If it is not of our tree, only its class is told: its words may be internals.
        names: OpenAI's names of fields that the native API calls otherwise.
        numbers: Sampling parameters as they were sent: the native API may have got the nearest that it can hold.
    """
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, OctavoServiceError):
        message = f"the server failed with {type(error).__name__}; see its log"
        return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, _SERVER, headers=_NO_RETRY)
    status = _STATUSES.get(status_code(error), HTTPStatus.INTERNAL_SERVER_ERROR)
    answer = ApiError(status, str(error), _INVALID if status < HTTPStatus.INTERNAL_SERVER_ERROR else _SERVER)
    if isinstance(error, UnknownModelError):
        return replace(answer, status=HTTPStatus.NOT_FOUND, param="model", code="model_not_found")
    if isinstance(error, InvalidFieldError):
        param = openai_name(error.field, names)
        if isinstance(error, PromptTooLongError):
            return replace(answer, param=param, code="context_length_exceeded")
        sent = numbers.get(error.field.removeprefix("sampling_params."), error.value)
        value, limit = _in_json(sent), _in_openai_words(error.limit, names)
        if param == "logit_bias":  # a list in the native API
            value, limit = value.replace("a list", "an object"), limit.replace("a list", "an object")
        return replace(answer, message=str(InvalidFieldError(param, value, limit)), param=param)
    if isinstance(error, QueueFullError | TokenQuotaError):
        headers = _NO_RETRY if error.retry_after_s is None else {"Retry-After": str(math.ceil(error.retry_after_s))}
        return replace(answer, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)
    if isinstance(error, CacheTooSmallError):  # a retry cannot succeed
        return replace(answer, status=HTTPStatus.BAD_REQUEST, code="context_length_exceeded")
    if isinstance(error, _NOT_TO_BE_SENT_AGAIN):
        return replace(answer, param="request_id" if isinstance(error, RequestExistsError) else None, headers=_NO_RETRY)
    if status == HTTPStatus.UNAUTHORIZED:
        return replace(answer, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return replace(answer, headers={"Retry-After": str(math.ceil(_RETRY_AFTER_S))})
    return answer


def refusal_of(error: Exception) -> str:
    """Return the reason of a refusal, in the words of the metrics, given the exception."""
    if not isinstance(error, ApiError):
        return refusal_reason(error)
    if isinstance(error.__cause__, OctavoServiceError) and error.__cause__ is not error:
        return refusal_of(error.__cause__)
    otherwise = "invalid" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else INTERNAL
    return _REFUSALS.get(HTTPStatus(error.status), otherwise)


def _in_json(value: object) -> str:
    """Return a number or a truth value as it stands in JSON, and another value as the native API shows it."""
    if isinstance(value, float):
        return (
            repr(value).removesuffix(".0")
            if math.isfinite(value)
            else to_json(value, inf_nan_mode="constants").decode()
        )
    return str(value).lower() if str(value) in ("True", "False") else str(value)


def _in_openai_words(limit: str, names: Mapping[str, str]) -> str:
    """Return a rule of the native API with the fields and endpoints of this one."""
    for native, advice in _ADVICE:
        limit = limit.replace(native, advice)
    return _NAMED_IN_LIMIT.sub(lambda match: f"({openai_name(match[1], names)})", limit)


def openai_name(native_field: str, names: Mapping[str, str]) -> str:
    """Return OpenAI's name of a field of the native API."""
    name = native_field.removeprefix("sampling_params.")
    if name.startswith("messages["):  # a field of one message
        return name.removesuffix("_json")
    name, bracket, index = name.partition("[")
    return names.get(name, "prompt" if name in PROMPT_FIELDS else name) + bracket + index
