"""Every field of the Responses API: carried, without effect, or refused.

docs/reference/responses-fields.md is made from this.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any

from pydantic import Field

from scheduler_svc.front.openai.field_reader import OtherFields
from scheduler_svc.front.openai.fields import DecodingFields, RequestFields
from scheduler_svc.front.openai.other_fields import NO_EFFECT as NO_EFFECT_IN_CHATS
from scheduler_svc.front.openai.other_fields import FieldRule

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"

# What an answer may have beside its items; the last values are for tools that do not exist here.
INCLUDABLE = (
    *(LOGPROBS, ENCRYPTED_REASONING, "file_search_call.results", "web_search_call.results"),
    *("web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url"),
    "code_interpreter_call.outputs",
)

# The items that are carried, and the fields that each may have beside its type, its id and its status.
ITEM_FIELDS: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content", "phase"),
    "function_call": ("call_id", "name", "arguments", "namespace", "caller"),
    "function_call_output": ("call_id", "output", "caller", "name", "namespace"),
    "custom_tool_call": ("call_id", "name", "input", "namespace", "caller"),
    "custom_tool_call_output": ("call_id", "output", "caller", "name"),
    "reasoning": ("summary", "content", "encrypted_content"),
}

# Notes of what another server did with tools that do not exist here: the results are in the messages.
ITEMS_LEFT_OUT = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_list_tools"),
)
_OF_EVERY_ITEM = ("type", "id", "status", "internal_chat_message_metadata_passthrough")

# The parts of a message, of an output and of reasoning that are texts, and the field with the text.
TEXT_PARTS: Mapping[str, str] = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
    "summary_text": "text",
    "reasoning_text": "text",
}
_OF_PARTS = ("type", "text", "refusal", "annotations", "logprobs", "prompt_cache_breakpoint", "cache_control")

TOOL_FIELDS = ("type", "name", "description", "parameters", "strict")

# Fields of a tool that ask for nothing here: where calls may come from, and tools that are shown later.
_OF_EVERY_TOOL = ("allowed_callers", "defer_loading", "output_schema")
_FIELDS_OF_TOOLS: Mapping[str, tuple[str, ...]] = {
    "function": (*TOOL_FIELDS, *_OF_EVERY_TOOL),
    "custom": ("type", "name", "description", "format", *_OF_EVERY_TOOL),
    "namespace": ("type", "name", "description", "tools"),
}

# The fields of objects that a request has once.
_OBJECT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": ("format",),
    "reasoning": ("effort", "summary"),
    "tool_choice": ("type", "name", "namespace", "mode", "tools"),
}


class ResponseFields(DecodingFields):
    """Of /v1/responses."""

    input: str | list[Any] = Field(
        description=(
            "A string, or a list of items: `message`, `function_call`, `custom_tool_call`, the output of either, and "
            "`reasoning`. What another server's tools did is left out: "
            f"{', '.join(f'`{kind}`' for kind in ITEMS_LEFT_OUT)}. Parts that are not texts, and all other items, are "
            "rejected."
        )
    )
    instructions: str | None = Field(None, description="A system message in front of the input.")
    max_output_tokens: int | None = Field(
        None, description="Maximum number of tokens to generate, reasoning included. Default: as many as fit."
    )
    tools: list[Any] | None = Field(
        None,
        description=(
            "What the model may call: `function`, of which `strict` true holds the arguments to `parameters`; "
            "`custom`, to the model a function of one text, whose `format` is told and not held; and `namespace` with "
            "such tools, to the model NAMESPACE__NAME. Other tools do not exist here: they are left out, and named in "
            "the header `x-octavo-ignored-fields`."
        ),
    )
    tool_choice: Any = Field(
        None,
        description=(
            "auto, none (the model gets no tools), required, the function that is called, or `allowed_tools`: then "
            "the model gets only these. Another type of tool is rejected."
        ),
    )
    parallel_tool_calls: bool | None = Field(None, description="False: the answer has one call at most.")
    text: Any = Field(
        None,
        description=(
            "`format`: `text`, `json_object`, or `json_schema`, which holds with `strict` true; otherwise the last "
            "message of the user asks for it. `verbosity` is given to the chat template, or named as above."
        ),
    )
    reasoning: Any = Field(
        None,
        description=(
            "`effort` is given to the chat template as in chats, or named as above. With "
            "`summary` the reasoning is told as a summary, whole; without it as `reasoning_text`."
        ),
    )
    include: list[str] | None = Field(
        None,
        description=(
            f"`{LOGPROBS}`; `{ENCRYPTED_REASONING}`: the reasoning itself in base64, so that clients that drop the "
            "text can send it back. The other values of the API ask for nothing here."
        ),
    )
    top_logprobs: int | None = Field(
        None, description=f"Number of alternatives for each token, with `{LOGPROBS}` in `include`."
    )
    metadata: dict[str, str] | None = Field(None, description="Returned as it was sent.")
    truncation: str | None = Field(
        None, description="`disabled`: a prompt that is too long is rejected. `auto` is rejected."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Extra variables for the chat template, such as `enable_thinking` (vLLM's field)."
    )


NO_EFFECT: Mapping[str, FieldRule] = {
    **{name: rule for name, rule in NO_EFFECT_IN_CHATS.items() if name != "metadata"},
    "max_tool_calls": FieldRule((), "it counts calls of built-in tools, of which there are none"),
    "client_metadata": FieldRule((), "a label for the operator; Octavo ignores it"),
}

_NOT_STORED = "nothing is stored; send the whole conversation as `input`"

REFUSED: Mapping[str, FieldRule] = {
    "previous_response_id": FieldRule((), _NOT_STORED),
    "conversation": FieldRule((), _NOT_STORED),
    "background": FieldRule((False,), "nothing is stored; use `stream`"),
    "background_options": FieldRule(({},), "nothing is stored; use `stream`"),
    "prompt": FieldRule((), "there are no stored prompts; send `instructions` and `input`"),
    "service_tier": FieldRule(("auto", "default"), "there are no service tiers"),
    "stream_options": FieldRule(({}, {"include_obfuscation": False}), "events are not padded"),
    "context_management": FieldRule(([],), "the conversation is taken as it was sent"),
    "moderation": FieldRule((), "there is no moderation"),
    "image": FieldRule((), "the model handles text only"),
}


def unknown_inside(fields: RequestFields, notes: Collection[str]) -> Iterator[str]:
    """Yield the paths of unknown fields inside known ones."""
    del notes  # known in every part
    assert isinstance(fields, ResponseFields)
    for place, item in enumerate(fields.input if isinstance(fields.input, list) else ()):
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if isinstance(kind, str) and kind in ITEM_FIELDS:
            yield from _unknown(item, f"input[{place}]", (*_OF_EVERY_ITEM, *ITEM_FIELDS[kind]))
            for name in ("content", "output", "summary"):
                parts = item.get(name)
                for number, part in enumerate(parts if isinstance(parts, list) else ()):
                    if isinstance(part, Mapping) and isinstance(kind := part.get("type"), str) and kind in TEXT_PARTS:
                        yield from _unknown(part, f"input[{place}].{name}[{number}]", _OF_PARTS)
    for name, known in _OBJECT_FIELDS.items():
        if name != "text":  # `chat_format` names what it leaves out of `text`
            yield from _unknown(getattr(fields, name), name, known)
    for place, tool in enumerate(fields.tools or ()):
        yield from _unknown_in_tool(tool, f"tools[{place}]")
        inner = tool.get("tools") if isinstance(tool, Mapping) and tool.get("type") == "namespace" else None
        for number, one in enumerate(inner if isinstance(inner, list) else ()):
            yield from _unknown_in_tool(one, f"tools[{place}].tools[{number}]")


def _unknown_in_tool(tool: object, path: str) -> Iterator[str]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if isinstance(kind, str) and kind in _FIELDS_OF_TOOLS:
        yield from _unknown(tool, path, _FIELDS_OF_TOOLS[kind])


def _unknown(value: object, path: str, known: Collection[str]) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from (
            f"{path}.{name}" for name, inner in value.items() if name not in known and inner not in (None, False, [])
        )


OTHER_FIELDS = OtherFields(
    NO_EFFECT, REFUSED, unknown_inside, {*_OF_EVERY_ITEM, *_OF_PARTS, *TOOL_FIELDS, *chain(*ITEM_FIELDS.values())}
)
