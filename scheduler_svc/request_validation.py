"""Check a `GenerateRequest` and turn it into the service's own values.

Everything that is wrong raises `InvalidFieldError` with field, value and limit. What this release
does not support is refused as well, never ignored: fields that are reserved for later, and fields
that this release does not know at all.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf import unknown_fields
from google.protobuf.message import Message

from octavo.generation.v1 import generation_pb2, generation_service_pb2
from scheduler_svc.core.sequence import StopConditions
from scheduler_svc.output_text import TextOptions
from shared.errors import InvalidFieldError
from shared.step import NO_LOGPROBS, Int32Array, SamplingRow

MAX_REQUEST_ID_LENGTH = 256
MAX_TEMPERATURE = 100.0
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 64
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What bounds a prompt; all in tokens. `max_cached_tokens` is the size of the whole block pool."""

    max_model_len: int
    max_cached_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that may be queued."""

    request_id: str
    prompt_token_ids: Int32Array
    sampling: SamplingRow
    stop_conditions: StopConditions
    text_options: TextOptions


def validate_request(
    request: generation_service_pb2.GenerateRequest, prompt_token_ids: Sequence[int], limits: PromptLimits
) -> ValidRequest:
    """Return the checked request: the second half of the checks, those behind tokenizing.

    Args:
        request: A request that has passed `check_request_fields`, which is not called again.
        prompt_token_ids: Its prompt after tokenizing.
        limits: What bounds the prompt.

    Raises: InvalidFieldError: the first wrong field.
    """
    params = request.sampling_params
    prompt = check_prompt(prompt_token_ids, request.WhichOneof("prompt") or "prompt", limits)
    return ValidRequest(
        request_id=request.request_id or f"request-{secrets.token_hex(8)}",
        prompt_token_ids=prompt,
        sampling=sampling_row(params),
        stop_conditions=stop_conditions(params, limits.vocab_size),
        text_options=text_options(params),
    )


def check_request_fields(request: generation_service_pb2.GenerateRequest) -> None:
    """Check what can be checked before the prompt is tokenized; `validate_request` checks the rest."""
    refuse_unknown_fields(request, "GenerateRequest")
    _require(
        len(request.request_id) <= MAX_REQUEST_ID_LENGTH,
        "request_id",
        f"{len(request.request_id)} characters long",
        f"at most {MAX_REQUEST_ID_LENGTH} characters long",
    )
    if request.WhichOneof("prompt") is None:
        raise InvalidFieldError("prompt", "absent", "one of text, token_ids and messages")
    for field, is_neutral in _RESERVED_REQUEST_FIELDS.items():
        _require(is_neutral(request), field, getattr(request, field), "unset: this release does not support it")
    for field, is_neutral_param in _RESERVED_SAMPLING_FIELDS.items():
        if not is_neutral_param(request.sampling_params):
            value = getattr(request.sampling_params, field)
            shown = "set" if isinstance(value, Message) or not np.isscalar(value) else value
            raise InvalidFieldError(f"sampling_params.{field}", shown, "unset: this release does not support it")


_RESERVED_REQUEST_FIELDS: dict[str, Callable[[generation_service_pb2.GenerateRequest], bool]] = {
    "priority": lambda request: request.priority == 0,
    "tenant": lambda request: not request.tenant,
    "cache_salt": lambda request: not request.cache_salt,
    "lora_adapter": lambda request: not request.lora_adapter,
}

_RESERVED_SAMPLING_FIELDS: dict[str, Callable[[generation_pb2.SamplingParams], bool]] = {
    "min_tokens": lambda params: params.min_tokens == 0,
    "n": lambda params: not params.HasField("n") or params.n == 1,
    "best_of": lambda params: not params.HasField("best_of") or params.best_of == 1,
    "beam_width": lambda params: params.beam_width == 0,
    "repetition_penalty": lambda params: not params.HasField("repetition_penalty") or params.repetition_penalty == 1,
    "presence_penalty": lambda params: params.presence_penalty == 0,
    "frequency_penalty": lambda params: params.frequency_penalty == 0,
    "logit_bias": lambda params: not params.logit_bias,
    "grammar": lambda params: not params.HasField("grammar"),
}


def check_prompt(token_ids: Sequence[int], field: str, limits: PromptLimits) -> Int32Array:
    """Return the prompt as an array, [num_prompt_tokens].

    A prompt leaves room for at least one token of output.
    """
    num_tokens = len(token_ids)
    _require(num_tokens >= 1, field, "empty", "at least 1 token long")
    longest = min(limits.max_model_len, limits.max_cached_tokens) - 1
    cause = "max_model_len" if limits.max_model_len <= limits.max_cached_tokens else "the size of the KV cache"
    _require(
        num_tokens <= longest,
        field,
        f"{num_tokens} tokens long",
        f"at most {longest} tokens long ({cause} is {longest + 1}, and one token is left for the output)",
    )
    prompt = np.array(token_ids, np.int64)
    outside = prompt[(prompt < 0) | (prompt >= limits.vocab_size)]
    if len(outside):
        raise InvalidFieldError(field, f"a list with token id {outside[0]}", f"ids from 0 to {limits.vocab_size - 1}")
    return prompt.astype(np.int32)


def sampling_row(params: generation_pb2.SamplingParams) -> SamplingRow:
    """Return the numbers that the executor's sampler needs."""
    temperature = params.temperature if params.HasField("temperature") else 1.0
    top_p = params.top_p if params.HasField("top_p") else 1.0
    _require_number("temperature", temperature, 0 <= temperature <= MAX_TEMPERATURE, f"from 0 to {MAX_TEMPERATURE:g}")
    _require_number("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1")
    _require_number("min_p", params.min_p, 0 <= params.min_p <= 1, "from 0 to 1")
    _require(params.top_k <= INT32_MAX, "sampling_params.top_k", params.top_k, f"from 0 to {INT32_MAX}")
    _require(
        params.logprobs == 0,
        "sampling_params.logprobs",
        params.logprobs,
        "0 (the sampled token's) or unset: this release does not support alternatives",
    )
    return SamplingRow(
        temperature=temperature,
        top_k=params.top_k,
        top_p=top_p,
        min_p=params.min_p,
        seed=params.seed if params.HasField("seed") else secrets.randbits(64),
        num_logprobs=0 if params.HasField("logprobs") else NO_LOGPROBS,
    )


def stop_conditions(params: generation_pb2.SamplingParams, vocab_size: int) -> StopConditions:
    """Return the conditions on ids and lengths."""
    max_tokens = params.max_tokens if params.HasField("max_tokens") else None
    _require(max_tokens is None or max_tokens >= 1, "sampling_params.max_tokens", max_tokens, "at least 1")
    field = "sampling_params.stop_token_ids"
    num_ids = len(params.stop_token_ids)
    _require(num_ids <= MAX_STOP_TOKEN_IDS, field, f"{num_ids} ids long", f"at most {MAX_STOP_TOKEN_IDS} ids long")
    for token_id in params.stop_token_ids:
        _require(
            0 <= token_id < vocab_size, field, f"a list with token id {token_id}", f"ids from 0 to {vocab_size - 1}"
        )
    return StopConditions(
        max_tokens=None if max_tokens is None else min(max_tokens, INT32_MAX // 2),
        stop_token_ids=frozenset(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
    )


def text_options(params: generation_pb2.SamplingParams) -> TextOptions:
    """Return how tokens become text, and where text ends."""
    field = "sampling_params.stop"
    num_stops = len(params.stop)
    _require(num_stops <= MAX_STOP_STRINGS, field, f"{num_stops} strings", f"at most {MAX_STOP_STRINGS} strings")
    for stop in params.stop:
        shown = f"a list with a string of {len(stop)} characters"
        limit = f"strings of 1 to {MAX_STOP_STRING_LENGTH} characters"
        _require(1 <= len(stop) <= MAX_STOP_STRING_LENGTH, field, shown, limit)
    return TextOptions(
        stop_strings=tuple(params.stop),
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens if params.HasField("skip_special_tokens") else True,
    )


def refuse_unknown_fields(message: Message, name: str) -> None:
    """Refuse fields of a newer client that this release does not know, also in nested messages."""
    unknown = unknown_fields.UnknownFieldSet(message)
    if len(unknown):
        field = f"field {unknown[0].field_number} of {name}"
        raise InvalidFieldError(field, "set", "unset: this release does not know it")
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for nested in value if isinstance(value, Sequence) else (value,):
                refuse_unknown_fields(nested, descriptor.message_type.name)


def _require(holds: bool, field: str, value: object, limit: str) -> None:
    if not holds:
        raise InvalidFieldError(field, value, limit)


def _require_number(field: str, value: float, holds: bool, limit: str) -> None:
    """Require a finite number; NaN fails every comparison, so `holds` covers it."""
    _require(holds and math.isfinite(value), f"sampling_params.{field}", f"{value:g}", limit)
