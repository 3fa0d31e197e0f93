"""Errors in the shape of Anthropic's: {"type": "error", "error": {"type", "message"}, "request_id"}."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from http import HTTPStatus
from types import MappingProxyType

from aiohttp import web
from pydantic_core import to_json

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.anthropic.fields import THREAD
from scheduler_svc.front.api.request_limits import PromptTooLongError
from scheduler_svc.front.openai.call import Call
from scheduler_svc.front.openai.errors import ApiError, api_error

PATH = "/v1/messages"
VERSION_HEADER = "anthropic-version"

# The status of an overloaded server; no other API has it.
OVERLOADED = 529

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}

_NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema.schema": "output_config.format.schema",
}
_OF_TOOL = re.compile(r"(tools\[\d+\])\.function\.(\w+)")
_OF_MESSAGE = re.compile(r"messages\[(\d+)\](.*)")
_CHOICES = {'"required"': '"any"', "a function": '"tool"'}


@dataclass(eq=False)
class MessagesError(ApiError):
    """An error in the shape that Anthropic's clients read; `request_id` is that of the call."""

    request_id: str = ""

    @property
    def body(self) -> bytes:
        """The JSON body."""
        other = "api_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        error: dict[str, object] = {"type": _TYPES.get(self.status, other), "message": self.message}
        if self.param == THREAD:  # after this code Anthropic's clients send the whole conversation
            error["details"] = {"error_code": "thread_unsupported_request"}
        return to_json({"type": "error", "error": error, "request_id": self.request_id})


def speaks_anthropic(request: web.BaseRequest) -> bool:
    """Return whether a request comes from a client of Anthropic's API."""
    return request.path.startswith(PATH) or VERSION_HEADER in request.headers


def in_shape_of(call: Call, error: ApiError) -> ApiError:
    """Return an error in the shape that the caller reads."""
    if not speaks_anthropic(call.request):
        return error
    headers = {**error.headers, "request-id": call.request_id}
    values = {one.name: getattr(error, one.name) for one in fields(ApiError)} | {"headers": headers}
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        values["status"] = OVERLOADED
    return MessagesError(**values, request_id=call.request_id)


def messages_error(
    error: Exception, places: Sequence[str] = (), numbers: Mapping[str, float] = MappingProxyType({})
) -> ApiError:
    """Return an error of the service in the words of the Messages API.

    Args:
        error: See `api_error`.
        places: The path of each message of the chat in the request.
        numbers: Sampling parameters as they were sent.
    """
    if isinstance(error, PromptTooLongError):
        size, answer = error.size, api_error(error)
        if size.endswith(" tokens"):  # at these words clients shorten the conversation
            message = f"prompt is too long: {size} > {error.limits.max_prompt_tokens} maximum"
            return replace(answer, message=message)
        return answer
    if isinstance(error, InvalidFieldError):
        error = _renamed(error, places)
    return api_error(error, {"messages.tools_json": "tools"}, numbers)


def _renamed(error: InvalidFieldError, places: Sequence[str]) -> InvalidFieldError:
    """Return an error of a chat with the field and the value of the Messages API."""
    field, value = error.field.removeprefix("sampling_params."), error.value
    if field == "parallel_tool_calls":
        field, value = "tool_choice.disable_parallel_tool_use", "true"
    elif field == "tool_choice" and value in _CHOICES:
        field, value = "tool_choice.type", _CHOICES[value]
    elif field == "tool_choice.function.name":
        field = "tool_choice.name"
    elif found := _OF_TOOL.fullmatch(field):
        field = f"{found[1]}.{'input_schema' if found[2] == 'parameters' else found[2]}"
    elif (found := _OF_MESSAGE.fullmatch(field)) and int(found[1]) < len(places):
        field = places[int(found[1])] + found[2].replace("tool_calls_json", "tool_use")
    elif field in _NAMES:
        field = _NAMES[field]
    else:
        return error
    return InvalidFieldError(field, value, error.limit)
