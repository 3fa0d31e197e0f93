"""Makes native requests of OpenAI's fields. Nothing is checked here that the native API checks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.sampling_params_table import INT32_MAX, UINT32_MAX
from octavo_shared.errors import InvalidFieldError
from octavo_shared.step_wire.token_rules import MAX_BIASED_TOKENS
from scheduler_svc.front.api.generation import GrammarMaker
from scheduler_svc.front.api.group_validation import priority_rule
from scheduler_svc.front.api.request_limits import RequestLimits, unknown_token
from scheduler_svc.front.api.request_validation import require_delta_interval
from scheduler_svc.front.grammars.parts import AskedGrammar, Part, whole
from scheduler_svc.front.openai.field_reader import in_place_of
from scheduler_svc.front.openai.fields import ChatFields, CompletionFields, SamplingFields
from scheduler_svc.front.openai.messages import CONVERSATION_NAMES, chat_messages
from scheduler_svc.front.openai.structured import add_advice, advised_schema, asked_part
from scheduler_svc.front.text.json_text import shown_json

# OpenAI's default for completions; that of chats is as many as fit.
DEFAULT_COMPLETION_TOKENS = 16

# The most choices of one prompt that are equal and computed once, as in OpenAI's API.
MAX_EQUAL_CHOICES = 128

# The most prompts of one request: each is a request of its own for the engine.
MAX_PROMPTS = 1024

_SAME_NAMES = (
    *("temperature", "top_p", "frequency_penalty", "presence_penalty", "min_p", "typical_p", "repetition_penalty"),
    *("min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs"),
    *("length_penalty", "no_repeat_ngram_size"),
)
_SAME_LISTS = {
    "stop_token_ids": "stop_token_ids",
    "bad_words": "banned_words",
    "allowed_token_ids": "allowed_token_ids",
    "banned_token_ids": "banned_token_ids",
}
_EARLY_STOPPING = {
    True: generation_pb2.EARLY_STOPPING_TRUE,
    False: generation_pb2.EARLY_STOPPING_FALSE,
    "never": generation_pb2.EARLY_STOPPING_NEVER,
}

_TOP_K_OFF = -1
_UINT64_MASK = 2**64 - 1

# Digits of a token id: enough for any number of 64 bits.
_MAX_KEY_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for, in the terms of the native API.

    Attributes:
        requests: One for each prompt, without ids.
        num_copies: How often each output is returned: n of a greedy request, which has n equal outputs.
        num_alternatives: Alternatives of each token; None: no log-probabilities were asked for.
        names: OpenAI's names of the fields that the native API calls otherwise.
        numbers: The sampling parameters as they were sent, by the native name.
        part: What each answer follows; None: nothing.
        make_grammar: Makes the grammar of the outputs from the prompt; None: they have none.
    """

    requests: Sequence[pb.GenerateRequest]
    num_copies: int
    num_alternatives: int | None
    names: Mapping[str, str]
    numbers: Mapping[str, float]
    part: Part | None = None
    make_grammar: GrammarMaker | None = None


def asked_completion(fields: CompletionFields, limits: RequestLimits) -> Asked:
    """Return what a completion asks for. Raises InvalidFieldError: a field is wrong."""
    _check_stream(fields)
    numbers = _Numbers()
    params, num_copies = numbers.params, _set_sampling_params(numbers, fields, limits, fields.best_of)
    max_tokens = DEFAULT_COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    if max_tokens == 0 and fields.echo:  # the prompt alone: one token is generated, and not returned
        max_tokens = 1
    numbers.set("max_tokens", max_tokens)
    names = {"banned_words": "bad_words"}
    if fields.logprobs is not None:
        numbers.set("logprobs", fields.logprobs)
        if fields.echo and limits.max_encoder_tokens:
            rule = "unset with echo: the prompt is the encoder's input, whose tokens have no log-probabilities"
            raise InvalidFieldError("logprobs", fields.logprobs, rule)
        if fields.echo and fields.prompt_logprobs is None:
            numbers.set("prompt_logprobs", fields.logprobs)
            names["prompt_logprobs"] = "logprobs"
    requests = []
    for prompt in prompts_of(fields.prompt, in_place_of("prompt", fields.model_extra or (), CompletionFields)):
        request = _request(fields, params, limits)
        if isinstance(prompt, str):
            request.text = prompt
            if fields.add_special_tokens is not None:
                request.add_special_tokens = fields.add_special_tokens
        else:
            extend_ids(request.token_ids.ids, "prompt", prompt, limits)
        requests.append(request)
    part = asked_part(fields)
    if advised_schema(fields):
        rule = "true: a completion has no instructions that could ask for the schema"
        raise InvalidFieldError("response_format.json_schema.strict", "false", rule)
    make_grammar = None if part is None else _always(whole(part))
    return Asked(requests, num_copies, fields.logprobs, names, numbers.sent, part, make_grammar)


def asked_chat(fields: ChatFields, limits: RequestLimits) -> Asked:
    """Return what a chat asks for. Raises InvalidFieldError: a field is wrong."""
    _check_stream(fields)
    numbers = _Numbers()
    num_copies = _set_sampling_params(numbers, fields, limits, None)
    name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    if fields.max_completion_tokens is not None and fields.max_tokens not in (None, fields.max_completion_tokens):
        raise InvalidFieldError("max_tokens", fields.max_tokens, "unset with max_completion_tokens, which replaces it")
    max_tokens = getattr(fields, name)
    if max_tokens is not None:
        numbers.set("max_tokens", max_tokens)
    num_alternatives = None
    if fields.logprobs:
        num_alternatives = fields.top_logprobs or 0
        numbers.set("logprobs", num_alternatives)
    elif fields.top_logprobs:
        raise InvalidFieldError("top_logprobs", fields.top_logprobs, "0 or unset without logprobs true")
    request = _request(fields, numbers.params, limits)
    request.messages.CopyFrom(chat_messages(fields.messages, fields))
    names = {
        "banned_words": "bad_words",
        "max_tokens": name,
        "logprobs": "top_logprobs",
        **CONVERSATION_NAMES,
    }
    part = asked_part(fields)
    if schema := advised_schema(fields):
        add_advice(request.messages, schema)
    return Asked([request], num_copies, num_alternatives, names, numbers.sent, part)


def _check_stream(fields: SamplingFields) -> None:
    if fields.stream and fields.prompt_logprobs is not None:
        raise InvalidFieldError("prompt_logprobs", fields.prompt_logprobs, "unset with stream")
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise InvalidFieldError("stream_options", "set", "unset without stream true")
    if options is not None and options.include_obfuscation:
        raise InvalidFieldError("stream_options.include_obfuscation", "true", "false or unset: chunks are not padded")


def _always(grammar: AskedGrammar) -> GrammarMaker:
    """Return what makes a grammar whatever the prompt is."""
    return lambda prompt_token_ids: grammar


def prompts_of(
    prompt: Any, in_its_place: str = "", field: str = "prompt", most: int = MAX_PROMPTS
) -> Sequence[str | list[int]]:
    """Return the prompts: each a text or token ids.

    Args:
        prompt: The field's value.
        in_its_place: What the error says of another field if there is no prompt.
        field: The field's name.
        most: How many prompts there may be.

    Raises: InvalidFieldError: there are none, or too many.
    """
    rule = "a string, an array of token ids, or an array of strings or of token-id arrays"
    if isinstance(prompt, str):
        return [prompt]
    if prompt is None:
        raise InvalidFieldError(field, "absent", rule + in_its_place)
    if not isinstance(prompt, list) or not prompt:
        raise InvalidFieldError(field, "an empty array" if prompt == [] else f"of type {_kind(prompt)}", rule)
    if type(prompt[0]) is int:
        return [_token_ids(prompt, field)]
    if len(prompt) > most:
        raise InvalidFieldError(field, f"{len(prompt)} {field}s", f"at most {most} {field}s")
    for place, item in enumerate(prompt):
        if isinstance(item, list):
            _token_ids(item, f"{field}[{place}]")
        elif not isinstance(item, str):
            raise InvalidFieldError(f"{field}[{place}]", f"of type {_kind(item)}", "a string or an array of token ids")
    return prompt


def _token_ids(ids: list[Any], path: str) -> list[int]:
    if not all(type(token_id) is int for token_id in ids):
        raise InvalidFieldError(path, "an array with elements that are not whole numbers", "an array of token ids")
    return ids


def _kind(value: object) -> str:
    names = {dict: "object", list: "array", bool: "boolean", str: "string", int: "number", float: "number"}
    return names.get(type(value), "null")


def _request(
    fields: SamplingFields, params: generation_pb2.SamplingParams, limits: RequestLimits
) -> pb.GenerateRequest:
    request = pb.GenerateRequest(sampling_params=params, cache_salt=fields.cache_salt or "", model=fields.model or "")
    set_priority(request, fields.priority, limits)
    if fields.speculate is not None:
        request.speculate = fields.speculate
    if fields.min_delta_interval_ms is not None:
        require_delta_interval(fields.min_delta_interval_ms)
        request.min_delta_interval_ms = fields.min_delta_interval_ms
    return request


def set_priority(request: Any, priority: int | None, limits: RequestLimits) -> None:
    """Set the priority of a native request. Raises InvalidFieldError: the field cannot hold it."""
    if priority is not None:
        try:
            request.priority = priority
        except ValueError:
            raise InvalidFieldError("priority", priority, priority_rule(limits)) from None


class _Numbers:
    """Sets sampling parameters; the native API checks their ranges.

    Attributes:
        sent: Their values as they were sent, by name.
    """

    def __init__(self) -> None:
        self.params = generation_pb2.SamplingParams()
        self.sent: dict[str, float] = {}

    def set(self, name: str, value: float) -> None:
        """Set one; a value that its type cannot hold becomes a number that is out of range, too."""
        self.sent[name] = value
        if type(value) is float:
            fitting = value
        elif name == "max_tokens":  # the only one that is cut if it is too large
            fitting = min(max(value, 0), UINT32_MAX)
        else:
            fitting = value if 0 <= value <= UINT32_MAX else UINT32_MAX
        setattr(self.params, name, fitting)


def _set_sampling_params(numbers: _Numbers, fields: SamplingFields, limits: RequestLimits, best_of: int | None) -> int:
    """Set the parameters but for lengths and log-probabilities, and return how often each output is returned."""
    params = numbers.params
    for name in _SAME_NAMES:
        value = getattr(fields, name)
        if value is not None:
            numbers.set(name, value)
    for name, native in _SAME_LISTS.items():
        extend_ids(getattr(params, native), name, getattr(fields, name) or (), limits)
    params.stop.extend([fields.stop] if isinstance(fields.stop, str) else fields.stop or [])
    if fields.top_k is not None:
        numbers.set("top_k", 0 if fields.top_k == _TOP_K_OFF else fields.top_k)
    if fields.seed is not None:
        if not -(2**63) <= fields.seed < 2**64:
            raise InvalidFieldError("seed", fields.seed, f"from {-(2**63)} to {2**64 - 1}")
        params.seed = fields.seed & _UINT64_MASK
    _set_biases(params, fields.logit_bias or {}, limits)
    num_copies = 1
    if fields.use_beam_search or fields.beam_width:
        width = fields.beam_width or best_of or fields.n or 1
        numbers.set("beam_width", width)
        numbers.set("n", 1 if fields.n is None else fields.n)
    elif _is_greedy(params, limits):
        num_copies = 1 if fields.n is None else fields.n
        if not 1 <= num_copies <= MAX_EQUAL_CHOICES:
            raise InvalidFieldError("n", num_copies, f"from 1 to {MAX_EQUAL_CHOICES}")
        if best_of is not None and best_of < num_copies:
            raise InvalidFieldError("best_of", best_of, f"at least {num_copies} (n)")
    else:
        if fields.n is not None:
            numbers.set("n", fields.n)
        if best_of is not None:
            numbers.set("best_of", best_of)
    if fields.early_stopping is not None:
        params.early_stopping = _EARLY_STOPPING[fields.early_stopping]
    return num_copies


def _is_greedy(params: generation_pb2.SamplingParams, limits: RequestLimits) -> bool:
    """Return whether all outputs of a prompt would be equal."""
    if params.HasField("temperature"):
        return params.temperature == 0
    return limits.sampling_defaults.get("temperature", 1) == 0


def extend_ids(field: Any, name: str, values: Sequence[int], limits: RequestLimits) -> None:
    """Put token ids into a field. Raises InvalidFieldError: one is so large that the field cannot hold it."""
    try:
        field.extend(values)
    except ValueError:
        outside = next(token_id for token_id in values if not 0 <= token_id < limits.vocab_size)
        raise unknown_token(name, outside, limits.vocab_size) from None


def _set_biases(params: generation_pb2.SamplingParams, biases: Mapping[str, float], limits: RequestLimits) -> None:
    if len(biases) > MAX_BIASED_TOKENS:
        raise InvalidFieldError("logit_bias", f"{len(biases)} ids long", f"at most {MAX_BIASED_TOKENS} ids long")
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_KEY_DIGITS):
            raise InvalidFieldError(
                "logit_bias", f"an object with the name {shown_json(key[:64])}", "biases by token id"
            )
        if int(key) > INT32_MAX:
            raise unknown_token("logit_bias", int(key), limits.vocab_size)
        params.logit_bias.add(token_id=int(key), bias=bias)
