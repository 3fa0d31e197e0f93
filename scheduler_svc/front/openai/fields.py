"""Every field of a request, and what becomes of it: carried, without effect, or refused.

The models have the fields that are carried, with their types; ranges are the native API's to check. The tables have the
others: a field that has no effect here asks for nothing that could change an answer; one that is refused may be there
with a value that asks for nothing. docs/reference/openai-fields.md is made from both. All else is unknown.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from reprlib import Repr
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from scheduler_svc.front.openai.errors import ApiError
from shared.errors import InvalidFieldError

_Fields = TypeVar("_Fields", bound="RequestFields")


class _FailFast(FailFast):
    """Ends the check of a list at its first mistake: a million of them take seconds. In unions it must be hashable."""

    __hash__ = object.__hash__


Texts = Annotated[list[str], _FailFast()]
TokenIds = Annotated[list[int], _FailFast()]

IGNORED_HEADER = "x-octavo-ignored-fields"


@dataclass(frozen=True, slots=True)
class FieldRule:
    """A field that is not carried.

    Attributes:
        neutral: Values that ask for nothing, beside null.
        why: Of a refused one: what is the case, and what serves instead. Of one without effect: why not.
    """

    neutral: tuple[object, ...]
    why: str


class UnknownFields(Enum):
    """What becomes of fields that nobody knows."""

    REFUSE = "refuse"
    IGNORE = "ignore"


class RequestFields(BaseModel):
    """Fields of any request. A field that is absent or null is unset."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    model: str | None = Field(None, description="The name of the served model; another one is 404.")


class Message(BaseModel):
    """One message of a conversation; `content` is a text, or a list of parts that are texts."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[Any] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None
    reasoning_content: str | None = None


Messages = Annotated[list[Message], _FailFast()]


class StreamOptions(BaseModel):
    """What a stream has beside its text."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class TemplateFields(BaseModel):
    """What a chat template gets beside the messages."""

    tools: list[Any] | None = Field(None, description="Functions that the model may call; the chat template gets them.")
    add_generation_prompt: bool | None = Field(
        None, description="Whether the prompt ends with the beginning of the assistant's turn. Default: true."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables of the chat template, such as `enable_thinking`."
    )


class SamplingFields(RequestFields):
    """What completions and chats have in common. What is unset gets the model's default, else the native API's."""

    temperature: float | None = Field(None, description="0: always the likeliest token.")
    top_p: float | None = Field(None, description="Keep the likeliest tokens whose probabilities add up to this.")
    frequency_penalty: float | None = Field(None, description="Makes tokens less likely each time they come.")
    presence_penalty: float | None = Field(None, description="Makes tokens that are in the output less likely.")
    logit_bias: dict[str, float] | None = Field(
        None, description="Added to the logits of tokens, by token id; at most 300."
    )
    max_tokens: int | None = Field(
        None, description="Most tokens to make. Default: 16 in completions, as many as fit in chats."
    )
    n: int | None = Field(None, description="Number of choices. At temperature 0 they are equal, and computed once.")
    seed: int | None = Field(None, description="Equal seeds give equal outputs; a negative one is as good as any.")
    stop: str | Texts | None = Field(None, description="The output ends before the first of these; at most 16.")
    stream: bool | None = Field(None, description="Whether the answer comes in pieces, as server-sent events.")
    stream_options: StreamOptions | None = Field(
        None, description="`include_usage`, `continuous_usage_stats`; `include_obfuscation` must be false."
    )
    # vLLM's
    top_k: int | None = Field(None, description="Keep so many of the likeliest tokens; 0 or -1: all.")
    min_p: float | None = Field(None, description="Drop tokens less likely than this share of the likeliest one.")
    typical_p: float | None = Field(None, description="Keep the tokens of typical information up to this probability.")
    repetition_penalty: float | None = Field(None, description="Makes tokens of prompt and output less likely.")
    min_tokens: int | None = Field(None, description="Fewest tokens of an output.")
    ignore_eos: bool | None = Field(None, description="Go on after end-of-sequence tokens.")
    stop_token_ids: TokenIds | None = Field(None, description="The output ends at the first of these tokens.")
    include_stop_str_in_output: bool | None = Field(None, description="Leave the stop string in the text.")
    skip_special_tokens: bool | None = Field(None, description="Keep special tokens out of the text. Default: true.")
    bad_words: Texts | None = Field(None, description="Strings that the output never holds.")
    allowed_token_ids: TokenIds | None = Field(None, description="The only tokens that may come.")
    banned_token_ids: TokenIds | None = Field(None, description="Tokens that never come (Octavo's own).")
    priority: int | None = Field(None, description="Smaller is served first, with --policy priority.")
    cache_salt: str | None = Field(None, description="Prompts share cached blocks only with equal salts.")
    request_id: str | None = Field(None, description="Part of the answer's `id`; it wins over X-Request-Id.")
    prompt_logprobs: int | None = Field(None, description="Log-probabilities of the prompt, with so many alternatives.")
    return_token_ids: bool | None = Field(None, description="Token ids of prompt and outputs beside their texts.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Tokens in `logprobs` are called `token_id:ID`, and not by their text."
    )
    use_beam_search: bool | None = Field(
        None, description="A beam search; its width is `beam_width`, else `best_of`, else `n`."
    )
    beam_width: int | None = Field(None, description="Width of the beam search (Octavo's own).")
    length_penalty: float | None = Field(None, description="Beams only: above 0 favours long ones.")
    early_stopping: bool | Literal["never"] | None = Field(
        None, description="Beams only: when the search ends, as in transformers (Octavo's own)."
    )


class CompletionFields(SamplingFields):
    """Of /v1/completions."""

    prompt: Any = Field(
        None, description="A text, token ids, or a list of either: a choice for each, and for each of n."
    )
    best_of: int | None = Field(None, description="Outputs to make; the n likeliest are returned.")
    echo: bool | None = Field(None, description="Begin the text with the prompt; with max_tokens 0 nothing follows.")
    logprobs: int | None = Field(None, description="Log-probabilities, with so many alternatives for each token.")
    add_special_tokens: bool | None = Field(
        None, description="Whether text prompts get the special tokens that the tokenizer adds. Default: true."
    )


class ChatFields(SamplingFields, TemplateFields):
    """Of /v1/chat/completions."""

    messages: Messages = Field(description="The conversation: texts, with roles, names, calls and results of tools.")
    max_completion_tokens: int | None = Field(None, description="Most tokens to make. Default: as many as fit.")
    logprobs: bool | None = Field(None, description="Whether to return log-probabilities.")
    top_logprobs: int | None = Field(None, description="Alternatives for each token, with `logprobs`.")
    tool_choice: Any = Field(None, description="auto or none; none: the model gets no tools. Nothing can force a call.")
    parallel_tool_calls: bool | None = Field(None, description="Must be true: a model may call several tools at once.")


class TokenizeFields(RequestFields, TemplateFields):
    """Of /tokenize."""

    prompt: str | None = Field(None, description="A text.")
    messages: Messages | None = Field(None, description="A conversation, instead of a text.")
    add_special_tokens: bool | None = Field(
        None, description="Whether a text gets the special tokens that the tokenizer adds. Default: true."
    )
    return_token_strs: bool | None = Field(None, description="Tokens as the vocabulary writes them, too.")


class DetokenizeFields(RequestFields):
    """Of /detokenize."""

    tokens: TokenIds = Field(description="Token ids.")


_LABEL = "a label for whoever runs the server; nothing here reads it"
_NO_GRAMMARS = "this release does not constrain what the model writes"
_TEXT_ONLY = "the model reads and writes text"
_ONE_MODEL = "nothing here chooses among services"

NO_EFFECT: Mapping[str, FieldRule] = {
    "user": FieldRule((), _LABEL),
    "safety_identifier": FieldRule((), _LABEL),
    "metadata": FieldRule((), _LABEL),
    "prompt_cache_key": FieldRule((), "prefixes are found by their content; `cache_salt` keeps them apart"),
    "prompt_cache_retention": FieldRule((), "prefixes stay cached until their blocks are needed"),
    "prompt_cache_options": FieldRule((), "prefixes stay cached until their blocks are needed"),
}

REFUSED: Mapping[str, FieldRule] = {
    "suffix": FieldRule(("",), "text is not filled in between two others"),
    "audio": FieldRule((), _TEXT_ONLY),
    "modalities": FieldRule((["text"],), _TEXT_ONLY),
    "function_call": FieldRule(("none",), "use `tools`"),
    "functions": FieldRule(([],), "use `tools`"),
    "moderation": FieldRule((), "nothing here judges texts"),
    "prediction": FieldRule((), "drafts of a text are not used"),
    "reasoning_effort": FieldRule((), "set what the chat template knows with `chat_template_kwargs`"),
    "verbosity": FieldRule((), "ask for it in the prompt"),
    "response_format": FieldRule(({"type": "text"},), _NO_GRAMMARS),
    "service_tier": FieldRule(("auto", "default"), _ONE_MODEL),
    "store": FieldRule((False,), "nothing is stored"),
    "web_search_options": FieldRule((), "nothing here searches the web"),
    # vLLM's
    "continue_final_message": FieldRule((False,), "send the rendered text to /v1/completions"),
    "chat_template": FieldRule((), "programs of callers are never run"),
    "documents": FieldRule(([],), "send them with `chat_template_kwargs`"),
    "truncate_prompt_tokens": FieldRule((), "a prompt that is too long is refused, never cut"),
    "spaces_between_special_tokens": FieldRule((True,), "tokens become text as the tokenizer says"),
    "logits_processors": FieldRule(([],), "programs of callers are never run"),
    "prompt_embeds": FieldRule((), "a prompt is tokens"),
    "mm_processor_kwargs": FieldRule(({},), _TEXT_ONLY),
    "structured_outputs": FieldRule(({},), _NO_GRAMMARS),
    "guided_json": FieldRule((), _NO_GRAMMARS),
    "guided_regex": FieldRule((), _NO_GRAMMARS),
    "guided_choice": FieldRule((), _NO_GRAMMARS),
    "guided_grammar": FieldRule((), _NO_GRAMMARS),
    "guided_decoding_backend": FieldRule((), _NO_GRAMMARS),
    "guided_whitespace_pattern": FieldRule((), _NO_GRAMMARS),
    "kv_transfer_params": FieldRule(({},), "blocks do not move between executors"),
    "vllm_xargs": FieldRule(({},), "there are no plug-ins"),
    "lora_path": FieldRule((), "adapters are not supported; merge them into the model"),
}

# All but ASCII that prints, and the comma, which is between names.
_NOT_IN_HEADERS = re.compile(r"[^\x20-\x2b\x2d-\x7e]")

_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 100


class Reader:
    """Makes the fields of requests from JSON objects.

    Args:
        unknown: What becomes of fields that nobody knows.
    """

    def __init__(self, unknown: UnknownFields) -> None:
        self._unknown = unknown

    def read(self, parsed: dict[str, Any], kind: type[_Fields], headers: dict[str, str]) -> _Fields:
        """Return the fields; the names of unknown ones that are ignored go into `headers`.

        Raises: OctavoServiceError: one is refused, unknown, or of a wrong type.
        """
        try:
            fields = kind.model_validate(parsed)
        except ValidationError as error:
            raise _first_of(error) from error
        ignored = [name for name in fields.model_extra or () if not _is_known(name, parsed[name])]
        if ignored and self._unknown is UnknownFields.REFUSE:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"{ignored[0][:64]!r} is not a field of this request; leave it out, or start the scheduler with "
                "--openai-unknown-fields ignore",
                param=ignored[0][:64],
                code="unknown_parameter",
            )
        if ignored:
            headers[IGNORED_HEADER] = ", ".join(map(_header_name, ignored[:32]))
        return fields


def _is_known(name: str, value: object) -> bool:
    """Return whether a field that is not carried is known. Raises ApiError: it is refused."""
    if name in NO_EFFECT:
        return True
    rule = REFUSED.get(name)
    if rule is None:
        return False
    if value is None or any(value == neutral and type(value) is type(neutral) for neutral in rule.neutral):
        return True
    allowed = " or ".join(["unset", *map(_shown, rule.neutral)])
    raise ApiError(
        HTTPStatus.BAD_REQUEST,
        f"{name} is {_shown(value)}; it must be {allowed}: {rule.why}",
        param=name,
        code="unsupported_parameter",
    )


# What pydantic calls a mistake, and the end of the sentence "... must be".
_RULES = {
    "missing": "set",
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of at most 64 bits",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "literal_error": "one of the values that the API names",
}


def _first_of(error: ValidationError) -> InvalidFieldError:
    """Return what is wrong first, in our words."""
    problem = error.errors(include_url=False, include_context=False)[0]
    place = [str(part)[:64] for part in problem["loc"]]
    # Behind a field that has several types comes the type that was tried.
    path = [part for part in place if not part.endswith("]") and part not in ("str", "bool", "function-before")]
    value = "absent" if problem["type"] == "missing" else _shown(problem["input"])
    rule = _RULES.get(problem["type"], problem["msg"])
    if path == ["stop"] or (path and path[0] == "stop"):
        rule = "a text, or an array of texts"
    return InvalidFieldError(".".join(path), value, rule)


def _shown(value: object) -> str:
    """Return the beginning of a value, however large it is."""
    if isinstance(value, bool):
        return str(value).lower()
    return _REPR.repr(value)


def _header_name(name: str) -> str:
    """Return a name as a header can hold it, in a list."""
    return _NOT_IN_HEADERS.sub("?", name[:64])
