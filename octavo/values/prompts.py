"""From what callers give as prompts to what travels: text, token ids, conversations, and lists of them.

What is no prompt is refused here, in one sentence that names the place; what a prompt may hold is the scheduler's to
say. Next: octavo/client.py, which sends one, and octavo/local/llm.py, which sends many.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import SupportsIndex, cast

from octavo.errors import InvalidRequestError
from octavo.generation.v1 import generation_service_pb2
from octavo.values.outputs import Prompt
from octavo.values.sampling_params import SamplingParams
from octavo.values.wording import kind_of

_HIGHEST_TOKEN_ID = 2**31 - 1

_KINDS_OF_FIELDS = {
    "priority": "a whole number from -2^31 to 2^31-1",
    "min_delta_interval_ms": "a whole number from 0 to 10000",
}

_KINDS = "it must be text, a list of token ids, or a conversation such as [{'role': 'user', 'content': 'Hello'}]"
_CONVERSATION = "a conversation is a list such as [{'role': 'user', 'content': 'Hello'}]"


def generate_request(
    prompt: object,
    sampling_params: SamplingParams | None,
    *,
    request_id: str = "",
    priority: int = 0,
    tenant: str = "",
    cache_salt: str = "",
    lora_adapter: str = "",
    speculate: bool = True,
    encoder_prompt: object = None,
    min_delta_interval_ms: int = 0,
    model: str = "",
    name: str = "prompt",
    encoder_name: str = "encoder_prompt",
) -> generation_service_pb2.GenerateRequest:
    """Return the message of a call; the arguments are as in `Client.stream`.

    `model` is that of the client; `name` and `encoder_name` are what the caller calls the prompts.

    Raises:
        InvalidRequestError: a value does not fit its field at all.
    """
    request = generation_service_pb2.GenerateRequest(model=model)
    set_prompt(request, prompt, name=name)
    if encoder_prompt is not None:
        _set_encoder_prompt(request, encoder_prompt, encoder_name)
    if sampling_params is not None:
        request.sampling_params.CopyFrom(sampling_params.to_proto())
    fields = {"request_id": request_id, "priority": priority, "tenant": tenant, "cache_salt": cache_salt}
    fields["lora_adapter"] = lora_adapter
    if not _checked_bool(speculate, "speculate"):  # else as the scheduler does; earlier releases do not know it
        request.speculate = False
    if min_delta_interval_ms != 0:  # a scheduler of an earlier release does not know it
        fields["min_delta_interval_ms"] = min_delta_interval_ms
    for field, value in fields.items():
        try:
            if isinstance(value, bool):
                raise TypeError("it is neither a number nor a string")
            setattr(request, field, value)
        except (TypeError, ValueError) as error:
            kind = _KINDS_OF_FIELDS.get(field, "a string")
            raise InvalidRequestError(f"{field} is {value!r}; it must be {kind}", field=field) from error
    return request


def set_prompt(request: generation_service_pb2.GenerateRequest, prompt: object, *, name: str = "prompt") -> None:
    """Put one prompt into a request.

    Args:
        request: It gets the prompt.
        prompt: Text, token ids (a list, or an array of numpy or torch), or a conversation.
        name: What the caller calls the prompt, for the sentence.

    Raises:
        InvalidRequestError: it is none of these.
    """
    if isinstance(prompt, str):
        _set_text(request, prompt, name)
        return
    items = to_list(prompt)
    if items is None:
        raise _refusal(f"{name} is {_shown(prompt)}; {_KINDS}{_remedy(prompt)}", name)
    if items and isinstance(items[0], Mapping):
        request.messages.messages.extend(_to_message(item, f"{name}[{place}]") for place, item in enumerate(items))
    elif items and (isinstance(items[0], str) or to_list(items[0]) is not None):
        what = "texts" if isinstance(items[0], str) else "lists"
        raise _refusal(f"{name} is a list of {what}; it takes one prompt: {_KINDS}", name)
    else:
        request.token_ids.ids.extend(_to_token_ids(items, name))
        request.token_ids.SetInParent()  # an empty list is a prompt too, for the scheduler to refuse


def _set_encoder_prompt(request: generation_service_pb2.GenerateRequest, encoder_prompt: object, name: str) -> None:
    """Put the input of an encoder into a request. Raises InvalidRequestError: it is neither text nor token ids."""
    given = generation_service_pb2.GenerateRequest()
    set_prompt(given, encoder_prompt, name=name)
    match given.WhichOneof("prompt"):
        case "text":
            request.encoder_prompt.text = given.text
        case "token_ids":
            request.encoder_prompt.token_ids.CopyFrom(given.token_ids)
        case _:
            raise _refusal(f"{name} is a conversation; it must be text or a list of token ids", name)


def tokenize_request(
    prompt: object, add_special_tokens: bool | None, model: str = ""
) -> generation_service_pb2.TokenizeRequest:
    """Return the message that asks for the tokens of a text or a conversation; arguments as in `Client.tokenize`.

    Raises:
        InvalidRequestError: a value does not fit.
    """
    holder = generation_service_pb2.GenerateRequest()
    set_prompt(holder, prompt)
    match holder.WhichOneof("prompt"):
        case "text":
            request = generation_service_pb2.TokenizeRequest(text=holder.text, model=model)
        case "messages":
            request = generation_service_pb2.TokenizeRequest(messages=holder.messages, model=model)
        case _:
            raise _refusal("prompt is a list of token ids already; it must be text or a conversation", "prompt")
    if add_special_tokens is not None:
        request.add_special_tokens = _checked_bool(add_special_tokens, "add_special_tokens")
    return request


def detokenize_request(
    token_ids: object, skip_special_tokens: bool | None, model: str = ""
) -> generation_service_pb2.DetokenizeRequest:
    """Return the message that asks for the text of tokens; the arguments are as in `Client.detokenize`.

    Raises:
        InvalidRequestError: a value does not fit.
    """
    items = to_list(token_ids)
    if items is None:
        raise _refusal(f"token_ids is {_shown(token_ids)}; it must be a list of token ids", "token_ids")
    ids = _to_token_ids(items, "token_ids")
    request = generation_service_pb2.DetokenizeRequest(token_ids=ids, model=model)
    if skip_special_tokens is not None:
        request.skip_special_tokens = _checked_bool(skip_special_tokens, "skip_special_tokens")
    return request


def list_prompts(prompts: object, name: str = "prompts") -> list[Prompt]:
    """Return the prompts of `LLM.generate`: one text, one list of token ids, or any number of either.

    `name`: what the caller calls them.

    Raises:
        InvalidRequestError: it is a conversation, or nothing that holds prompts.
    """
    if isinstance(prompts, str):
        return [prompts]
    items = list_items(prompts)
    if items is None:
        kinds = "it must be a text, a list of texts, or lists of token ids"
        raise _refusal(f"{name} is {_shown(prompts)}; {kinds}{_remedy(prompts)}", name)
    if items and (isinstance(items[0], int | float) or _is_token_id(items[0])):
        return [cast("list[int]", items)]
    for place, item in enumerate(items):
        if isinstance(item, Mapping) or _is_conversation(item):
            what = "a message" if isinstance(item, Mapping) else "a conversation"
            raise _refusal(f"{name}[{place}] is {what}; `chat` answers conversations, `generate` takes text", name)
    return [_plain(item) for item in items]


def list_encoder_prompts(encoder_prompts: object, num_prompts: int, name: str) -> list[Prompt | None]:
    """Return what an encoder reads beside each prompt; None: nothing.

    Args:
        encoder_prompts: As `list_prompts` takes them; None: there are none.
        num_prompts: How many prompts there are.
        name: What the caller calls these.

    Raises:
        InvalidRequestError: there are others than one for each prompt.
    """
    if encoder_prompts is None:
        return [None] * num_prompts
    found: list[Prompt] = list_prompts(encoder_prompts, "encoder_prompts")
    if len(found) != num_prompts:
        counts = f"encoder_prompts has {len(found)} for {num_prompts} {name}"
        raise _refusal(f"{counts}; give one for each, or none: then the encoder reads {name}", "encoder_prompts")
    return list(found)


def list_conversations(conversations: object) -> list[Prompt]:
    """Return the conversations of `LLM.chat`: one, or any number of them.

    Raises:
        InvalidRequestError: it holds no conversations.
    """
    items = list_items(conversations)
    if items is None:
        raise _no_conversation(conversations, "conversations")
    if items and isinstance(items[0], Mapping):
        return [cast("list[Mapping[str, object]]", items)]
    for place, item in enumerate(items):
        if not _is_conversation(item):
            raise _no_conversation(item, f"conversations[{place}]")
    return [_plain(item) for item in items]


def _set_text(request: generation_service_pb2.GenerateRequest, text: str, name: str) -> None:
    try:
        request.text = text
    except UnicodeEncodeError as error:
        raise _refusal(f"{name}{_no_unicode(error)}", name) from error


def _to_token_ids(items: list[object], name: str) -> list[int]:
    wrong = next((place for place, item in enumerate(items) if not _is_token_id(item)), None)
    if wrong is not None:
        shown, limit = _shown(items[wrong]), f"a token id is a whole number from 0 to {_HIGHEST_TOKEN_ID:,}"
        raise _refusal(f"{name}[{wrong}] is {shown}; {limit}", name)
    return cast("list[int]", items)


def _checked_bool(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise _refusal(f"{name} is {_shown(value)}; it must be True or False", name)
    return value


def _to_message(item: object, name: str) -> generation_service_pb2.ChatMessage:
    """Return one turn; what it has beside role and content, such as tool calls, is refused unless it is None."""
    if not isinstance(item, Mapping):
        raise _refusal(f"{name} is {_shown(item)}; a message is {{'role': ..., 'content': ...}}", name)
    missing = [key for key in ("role", "content") if key not in item]
    if missing:
        raise _refusal(f"{name} has no {missing[0]!r}; a message is {{'role': ..., 'content': ...}}", name)
    others = [key for key, value in item.items() if key not in ("role", "content") and value is not None]
    if others:
        raise _refusal(f"{name} has {others[0]!r}, which Octavo does not support; a message is role and content", name)
    role, content = item["role"], _to_content(item["content"], f"{name}['content']")
    if not isinstance(role, str):
        raise _refusal(f"{name}['role'] is {_shown(role)}; it must be text, such as 'user'", name)
    try:
        return generation_service_pb2.ChatMessage(role=role, content=content)
    except UnicodeEncodeError as error:
        raise _refusal(f"{name}{_no_unicode(error)}", name) from error


def _to_content(content: object, name: str) -> str:
    """Return the text of a message; parts as OpenAI's API has them are joined by line breaks, as vLLM does."""
    if isinstance(content, str):
        return content
    parts = to_list(content)
    if parts is None:
        raise _refusal(f"{name} is {_shown(content)}; it must be text, or a list of text parts", name)
    return "\n".join(_to_text(part, f"{name}[{place}]") for place, part in enumerate(parts))


def _to_text(part: object, name: str) -> str:
    match part:
        case str():
            return part
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            raise _refusal(f"{name} is of the type {kind!r}; only parts of the type 'text' are supported", name)
    raise _refusal(f"{name} is {_shown(part)}; a text part is {{'type': 'text', 'text': ...}}", name)


def to_list(value: object) -> list[object] | None:
    """Return the items of a list, a tuple or an array; None: it is none of them."""
    to_list = getattr(value, "tolist", None)  # arrays of numpy and of torch
    if callable(to_list):
        value = to_list()
    if isinstance(value, str | bytes | bytearray | memoryview) or not isinstance(value, Sequence):
        return None
    return list(value)


def list_items(value: object) -> list[object] | None:
    """Return the items of anything that has them in an order, generators too; None: it has none."""
    if (items := to_list(value)) is not None:
        return items
    has_no_items = isinstance(value, str | bytes | bytearray | memoryview | Mapping | set | frozenset)
    return None if has_no_items or not isinstance(value, Iterable) else list(value)


def _is_conversation(value: object) -> bool:
    items = None if isinstance(value, str) else to_list(value)
    return bool(items) and items is not None and isinstance(items[0], Mapping)


def _is_token_id(value: object) -> bool:
    """Return whether it is a whole number that fits; which ids the model has is the scheduler's to say."""
    if type(value) is int:  # nearly always, and prompts can be long
        return -(2**31) <= value <= _HIGHEST_TOKEN_ID
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return False
    try:
        return -(2**31) <= index(value) <= _HIGHEST_TOKEN_ID
    except TypeError:  # an array of several numbers
        return False


def _plain(item: object) -> Prompt:
    """Return a prompt with lists in place of arrays; what is no prompt stays as it is, for `set_prompt` to refuse."""
    items = to_list(item)
    return cast("Prompt", item if items is None else items)


def _no_conversation(value: object, name: str) -> InvalidRequestError:
    remedy = "`generate` completes text, and " if isinstance(value, str) else ""
    what = "empty" if to_list(value) == [] else _shown(value)
    return _refusal(f"{name} is {what}; {remedy}{_CONVERSATION}", name)


def _remedy(value: object) -> str:
    return "; decode bytes first" if isinstance(value, bytes | bytearray) else ""


def _shown(value: object) -> str:
    """Return a small value as it is, of others the kind: prompts can be long, and private."""
    return repr(value) if isinstance(value, int | float | None) else kind_of(value)


def _no_unicode(error: UnicodeEncodeError) -> str:
    code = ord(error.object[error.start])
    return (
        f" has the lone surrogate U+{code:04X} at {error.start}, which is not valid Unicode; check how the text was "
        "decoded"
    )


def _refusal(sentence: str, name: str) -> InvalidRequestError:
    return InvalidRequestError(sentence, field=name.partition("[")[0])
