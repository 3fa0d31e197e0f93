"""How the served model writes tool calls and reasoning, and the parser of one output: reasoning, content, calls."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Self

from octavo_shared.errors import InvalidFieldError
from octavo_shared.step_wire.step import Int32Array
from scheduler_svc.front.text.json_text import shown_json
from scheduler_svc.front.text.tokenizer import Tokenizer
from scheduler_svc.front.tool_calls.events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    merged,
)
from scheduler_svc.front.tool_calls.formats import (
    AUTO,
    HARMONY,
    HARMONY_MARKERS,
    HARMONY_REASONING,
    ReasoningFormat,
    ToolCallFormat,
    reasoning_format,
    tool_call_format,
)
from scheduler_svc.front.tool_calls.harmony import HarmonyParser, num_reasoning_tokens
from scheduler_svc.front.tool_calls.parser import ToolCallParser
from scheduler_svc.front.tool_calls.reasoning import ReasoningParser, opens_reasoning
from scheduler_svc.front.tool_calls.tool_choice import RequestedTools


class OutputParser:
    """Parses one output.

    The joined deltas are the same for any split of the text. Calls inside the reasoning are thoughts. But a model that
    ends its output behind such a call, with the reasoning still open, waits for the result: so its last calls count.

    Args:
        reasoning: Separates the reasoning; None: there is none.
        tool_calls: Finds tool calls, or reads harmony; None: no tools in the request, or `tool_choice` is none.
        end_tokens: The texts of the special tokens that may end the output. One of them at the very end is left out.
            They are in the text if `skip_special_tokens` is off, which the markers of some families need.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tool_calls: ToolCallParser | HarmonyParser | None,
        end_tokens: Collection[str] = (),
    ) -> None:
        self._reasoning = reasoning
        self._tool_calls = tool_calls
        self._end_tokens = tuple(filter(None, end_tokens))
        self._tail = ""  # may be an end token
        self._thoughts: list[str] = []  # the reasoning, which may contain calls

    def feed(self, text: str) -> list[OutputEvent]:
        """Add text; return the events that it makes certain."""
        return self._parse(self._without_tail(text))

    def finish(self, *, is_cut: bool = False) -> list[OutputEvent]:
        """Return the remaining events: the output has ended; `is_cut`: at a limit, so the model had more to say."""
        events = self._parse("" if self._tail in self._end_tokens else self._tail)
        is_open = self._reasoning is not None and self._reasoning.is_open
        if self._reasoning is not None:
            reasoning, answer = self._reasoning.finish()
            events += self._noted(reasoning)
            events += self._parse_answer(answer)
        if self._tool_calls is not None:
            thoughts = "".join(self._thoughts) if is_open and not is_cut else ""
            rest = [*self._tool_calls.feed(thoughts), *self._tool_calls.finish()]
            events += _last_calls(rest) if is_open else rest
        return merged(events)

    def _without_tail(self, text: str) -> str:
        """Return the text up to what may be an end token at the end of the output."""
        if not self._end_tokens:
            return text
        text = self._tail + text
        longest = max(map(len, self._end_tokens))
        for start in range(max(0, len(text) - longest), len(text)):
            if any(token.startswith(text[start:]) for token in self._end_tokens):
                self._tail = text[start:]
                return text[:start]
        self._tail = ""
        return text

    def _parse(self, text: str) -> list[OutputEvent]:
        if self._reasoning is None:
            return self._parse_answer(text)
        reasoning, answer = self._reasoning.feed(text)
        return merged(self._noted(reasoning) + self._parse_answer(answer))

    def _noted(self, reasoning: list[OutputEvent]) -> list[OutputEvent]:
        if self._tool_calls is not None:
            self._thoughts += [event.text for event in reasoning if isinstance(event, ReasoningDelta)]
        return reasoning

    def _parse_answer(self, text: str) -> list[OutputEvent]:
        if self._tool_calls is not None:
            return self._tool_calls.feed(text)
        return [ContentDelta(text)] if text else []


def _last_calls(events: Sequence[OutputEvent]) -> list[OutputEvent]:
    """Return the whole calls that only whitespace follows, with indices from 0."""
    last: list[ToolCallBegin | ToolCallArguments] = []
    for event in events:
        match event:
            case ToolCallBegin() | ToolCallArguments():
                last.append(event)
            case ContentDelta(text) if not text.strip():
                pass
            case _:
                last.clear()
    return [replace(event, index=event.index - last[0].index) for event in last]


# How much of a prompt's end shows whether it opens the reasoning; a marker may be several tokens.
NUM_LAST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The formats of a model's chats. Make it once, when the model is loaded.

    Attributes:
        tool_calls: The format of its tool calls; None: unknown.
        reasoning: How it marks reasoning; None: as far as is known, it does not.
    """

    tokenizer: Tokenizer
    tool_calls: ToolCallFormat | None
    reasoning: ReasoningFormat | None

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> Self:
        """Return the formats with these names: auto, none, or a name in formats.py."""
        template = "" if tokenizer.tool_template is None else tokenizer.tool_template.source
        return cls(
            tokenizer, tool_call_format(tool_call_parser, template), reasoning_format(reasoning_parser, template)
        )

    def check_tools(self, tools: RequestedTools | None) -> None:
        """Refuse tools that the model would not see, or whose calls could not be found.

        Raises: InvalidFieldError: `tools` cannot be used with this model.
        """
        if tools is None:
            return
        template = self.tokenizer.tool_template
        if template is None or not template.knows_tools:
            rule = "unset: this model's chat template does not support tools, so the model would not see them"
            raise InvalidFieldError("tools", "set", rule)
        if self.tool_calls is None:
            rule = "unset: the tool-call format of this model is unknown; start the scheduler with --tool-call-parser"
            raise InvalidFieldError("tools", "set", rule)

    @property
    def is_harmony(self) -> bool:
        """Whether the model writes OpenAI's harmony."""
        return self.tool_calls is HARMONY or self.reasoning is HARMONY_REASONING

    def check_effort(self, effort: str | None) -> None:
        """Refuse an effort that the model does not know. Raises InvalidFieldError."""
        efforts = () if self.reasoning is None else self.reasoning.efforts
        if efforts and effort is not None and effort not in efforts:
            rule = f"one of {', '.join(efforts)}, or unset: the model knows no others"
            raise InvalidFieldError("reasoning_effort", shown_json(effort), rule)

    def needs_special_tokens(self, tools: RequestedTools | None) -> bool:
        """Return whether the text must have special tokens (`skip_special_tokens` off), as markers are among them."""
        markers: list[str] = [*HARMONY_MARKERS] if self.is_harmony else []
        if self.reasoning is not None:
            markers += [self.reasoning.begin, self.reasoning.end]
        if self.tool_calls is not None and tools is not None:
            markers += self.tool_calls.markers
        return any(self.tokenizer.id_of(marker) in self.tokenizer.special_token_ids for marker in markers)

    def opens_reasoning(self, prompt_token_ids: Sequence[int] | Int32Array) -> bool:
        """Return whether a prompt ends with the marker in front of reasoning."""
        if self.reasoning is None:
            return False
        return opens_reasoning(self.reasoning, self._end_of(prompt_token_ids))

    def _end_of(self, prompt_token_ids: Sequence[int] | Int32Array) -> str:
        last = [int(token_id) for token_id in prompt_token_ids[-NUM_LAST_TOKENS:]]
        return self.tokenizer.decode(last, skip_special_tokens=False)

    def output_parser(
        self,
        tools: RequestedTools | None,
        prompt_token_ids: Sequence[int] | Int32Array,
        end_token_ids: Collection[int],
        output_id: str = "",
    ) -> OutputParser:
        """Return the parser of one output.

        Args:
            tools: The request's tools.
            prompt_token_ids: The request's prompt, which may open the reasoning.
            end_token_ids: The tokens that may end the output and must not be seen in it. Give them if the text has
                special tokens only because `needs_special_tokens` says so.
            output_id: The output's; the ids of its calls derive from it.
        """
        special_ids = self.tokenizer.special_token_ids.intersection(end_token_ids)
        end_tokens = [self.tokenizer.token_of(token_id) for token_id in special_ids]
        if self.is_harmony:
            has_reasoning = self.reasoning is not None
            prompt = self._end_of(prompt_token_ids)
            parser = HarmonyParser(self._names_of(tools), output_id, prompt, tells_reasoning=has_reasoning)
            return OutputParser(None, parser, [token for token in end_tokens if token not in HARMONY_MARKERS])
        reasoning = tool_calls = None
        if self.reasoning is not None:
            reasoning = ReasoningParser(self.reasoning, starts_inside=self.opens_reasoning(prompt_token_ids))
        if self.tool_calls is not None and tools is not None:
            tool_calls = ToolCallParser(self.tool_calls, tools.schemas, output_id)
        return OutputParser(reasoning, tool_calls, end_tokens)

    def num_harmony_reasoning_tokens(self, tools: RequestedTools | None, token_ids: Sequence[int]) -> int | None:
        """Return the number of reasoning tokens in an output in harmony, with markers; None: markers are no tokens."""
        return num_reasoning_tokens(self.tokenizer, token_ids, self._names_of(tools))

    def _names_of(self, tools: RequestedTools | None) -> Collection[str]:
        """Return the names of the tools of which calls are found."""
        return () if tools is None or self.tool_calls is None else tools.schemas
