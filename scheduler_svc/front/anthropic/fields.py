"""Every field of the Messages API: carried, without effect, or refused.

docs/reference/messages-fields.md is made from this.
"""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from scheduler_svc.front.openai.field_reader import OtherFields
from scheduler_svc.front.openai.fields import FailFastList, RequestFields, Texts
from scheduler_svc.front.openai.other_fields import FieldRule

# A block's mark for Anthropic's prompt cache. Here prefixes are found by their content.
CACHE_CONTROL = "cache_control"

# A conversation stored on Anthropic's servers. The tool runner of Anthropic's client asks for one by default.
THREAD = "thread"

# The blocks that are carried, and the fields that each may have.
BLOCK_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": ("text", "citations"),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input", "caller"),
    "tool_result": ("tool_use_id", "content", "is_error"),
}

# The fields of objects that a request has once.
_OBJECT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "tool_choice": ("type", "name", "disable_parallel_tool_use"),
    "thinking": ("type", "budget_tokens", "display"),
    "output_config": ("format", "effort"),
}

# Fields of a tool; the last two change only what Anthropic's servers do with it.
TOOL_FIELDS = ("type", "name", "description", "input_schema", "strict", CACHE_CONTROL, "eager_input_streaming")


class Turn(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str = Field(
        description=(
            "`user`, `assistant`, or `system`: its text becomes the user's, between `<system-reminder>` tags. Messages "
            "of one role in a row become one turn."
        )
    )
    content: str | list[Any] = Field(
        description=(
            "A string, or a list of blocks: `text` and `tool_result` of the user, `text`, `thinking`, "
            "`redacted_thinking` (its text is unknown, so it is left out) and `tool_use` of the assistant. Images, "
            "documents and other blocks are rejected."
        )
    )


class ConversationFields(RequestFields):
    """What both endpoints have in common."""

    messages: Annotated[list[Turn], FailFastList()] = Field(
        description="The conversation; the last message is the user's: an answer that was begun is not continued."
    )
    system: str | list[Any] | None = Field(None, description="Instructions: a string, or a list of text blocks.")
    tools: list[Any] | None = Field(
        None,
        description=(
            "Tools with `name`, `description`, `input_schema`, and `strict`: true holds the calls to the schema. Tools "
            "that run on Anthropic's servers, and those with a schema of Anthropic's, are rejected."
        ),
    )
    tool_choice: Any = Field(
        None,
        description=(
            "`auto`, `any`, `tool` with its name, or `none` (the model gets no tools); with "
            "`disable_parallel_tool_use` the answer has one call at most."
        ),
    )
    thinking: Any = Field(
        None,
        description=(
            "`disabled`, the default: the chat template is told so (`enable_thinking`, `thinking`), and a model that "
            "thinks all the same does so unseen. `enabled`: the template is told so, and the answer has `thinking` "
            "blocks if the model thinks. `adaptive`: the template or `effort` decides. `budget_tokens` is no "
            "limit: without `effort` the template gets it as `low`, `medium` (from 2048) or `high` (from 4096). "
            "`display` may be `omitted`."
        ),
    )
    output_config: Any = Field(
        None,
        description="`format` of type `json_schema`: the answer follows the schema. `effort` is given to the "
        "chat template, as `reasoning_effort` of chats.",
    )


class MessagesFields(ConversationFields):
    """Of /v1/messages."""

    max_tokens: int = Field(description="Maximum number of tokens to generate; reduced to what fits in the context.")
    stop_sequences: Texts | None = Field(
        None, description="Stop strings: the answer ends before the first of these; at most 16."
    )
    stream: bool | None = Field(None, description="Whether to stream the answer as server-sent events.")
    temperature: float | None = Field(None, description="0: greedy decoding.")
    top_p: float | None = Field(
        None, description="Nucleus sampling: keep the most likely tokens whose probabilities add up to this."
    )
    top_k: int | None = Field(None, description="Sample from this many of the most likely tokens.")
    seed: int | None = Field(None, description="Equal seeds give equal answers (specific to Octavo).")
    speculate: bool | None = Field(
        None, description="False: one token a step, also where the server speculates (specific to Octavo)."
    )


class CountTokensFields(ConversationFields):
    """Of /v1/messages/count_tokens."""


NO_EFFECT: Mapping[str, FieldRule] = {
    "metadata": FieldRule((), "a label for the operator; Octavo ignores it"),
    CACHE_CONTROL: FieldRule((), "prefixes are cached by their content, whatever it says; in blocks and tools too"),
    "context_management": FieldRule((), "the conversation is taken as it was sent"),
}

REFUSED: Mapping[str, FieldRule] = {
    THREAD: FieldRule((), "conversations are not stored; send the whole one"),
    "service_tier": FieldRule(("auto", "standard_only"), "there are no service tiers"),
    "container": FieldRule((), "there are no containers"),
    "mcp_servers": FieldRule(([],), "the client calls MCP servers, and sends their tools as `tools`"),
    "inference_geo": FieldRule((), "there are no regions"),
    "speed": FieldRule(("standard",), "there is one speed"),
    "output_format": FieldRule((), "use `output_config.format`"),
}


def unknown_inside(fields: RequestFields, notes: Collection[str]) -> Iterator[str]:
    """Yield the paths of unknown fields inside known ones; `notes` are known in blocks."""
    assert isinstance(fields, ConversationFields)
    for place, turn in enumerate(fields.messages):
        yield from (f"messages[{place}].{name}" for name in turn.model_extra or {})
        yield from _in_blocks(turn.content, f"messages[{place}].content", notes)
    yield from _in_blocks(fields.system, "system", notes)
    objects = {name: (getattr(fields, name), known) for name, known in _OBJECT_FIELDS.items()}
    objects |= {f"tools[{place}]": (tool, TOOL_FIELDS) for place, tool in enumerate(fields.tools or ())}
    for path, (value, known) in objects.items():
        if isinstance(value, Mapping):
            yield from (f"{path}.{name}" for name, inner in value.items() if _asks(name, inner, known))


def _in_blocks(content: object, path: str, notes: Collection[str]) -> Iterator[str]:
    for place, block in enumerate(content if isinstance(content, list) else ()):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if isinstance(kind, str) and kind in BLOCK_FIELDS:
            known = ("type", *BLOCK_FIELDS[kind], *notes)
            yield from (f"{path}[{place}].{name}" for name, value in block.items() if _asks(name, value, known))
            if kind == "tool_result":
                yield from _in_blocks(block.get("content"), f"{path}[{place}].content", notes)


def _asks(name: str, value: object, known: Collection[str]) -> bool:
    """Return whether a field is unknown, and asks for something."""
    return name not in known and value is not None and value is not False


OTHER_FIELDS = OtherFields(
    NO_EFFECT, REFUSED, unknown_inside, {*Turn.model_fields, *TOOL_FIELDS, *chain.from_iterable(BLOCK_FIELDS.values())}
)
