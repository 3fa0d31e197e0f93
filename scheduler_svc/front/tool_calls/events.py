"""What the text of an output means to a client: events, in the order of the text."""

from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the model's reasoning before its answer (`reasoning_content`)."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """The model calls a tool. `index` counts the calls of one output from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the arguments of the last call: JSON text of an object, as the model wrote it."""

    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class ToolCallBroken:
    """The last call broke off, so there is none: all of its text is content.

    If events have already reported that call, `index` is its index. Its arguments then stay incomplete JSON.
    """

    index: int | None


OutputEvent = ContentDelta | ReasoningDelta | ToolCallBegin | ToolCallArguments | ToolCallBroken


def merged(events: list[OutputEvent]) -> list[OutputEvent]:
    """Return the events with neighbouring deltas of one type joined, so that a piece of text makes few messages."""
    joined: list[OutputEvent] = []
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "index", None))):
        alike = list(group)
        match alike[0]:
            case ContentDelta():
                joined.append(ContentDelta("".join(each.text for each in alike if isinstance(each, ContentDelta))))
            case ReasoningDelta():
                joined.append(ReasoningDelta("".join(each.text for each in alike if isinstance(each, ReasoningDelta))))
            case ToolCallArguments(index):
                deltas = (each.delta for each in alike if isinstance(each, ToolCallArguments))
                joined.append(ToolCallArguments(index, "".join(deltas)))
            case _:
                joined += alike
    return joined
