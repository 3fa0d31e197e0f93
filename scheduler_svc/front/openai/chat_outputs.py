"""The outputs of a chat as OpenAI's messages: content, reasoning and tool calls."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.api.generation import GrammarMaker
from scheduler_svc.front.grammars.chat_grammar import chat_grammar, check_chat_grammar
from scheduler_svc.front.openai.answering import finish_reason
from scheduler_svc.front.openai.fields import ChatFields
from scheduler_svc.front.openai.requests import Asked
from scheduler_svc.front.output import Output
from scheduler_svc.front.response import Response
from scheduler_svc.front.text.text_model import TextModel
from scheduler_svc.front.tool_calls.chat_format import ChatFormat, OutputParser
from scheduler_svc.front.tool_calls.events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallBroken,
)
from scheduler_svc.front.tool_calls.tool_choice import RequestedTools, check_tools

# Parsing this many tokens takes a few milliseconds.
FEW_PARSED_TOKENS = 1024


class ChatFormats:
    """Knows how the served model writes tool calls and reasoning.

    Args:
        tool_call_parser: Name of the format of calls.
        reasoning_parser: Name of the format of reasoning.
    """

    def __init__(self, tool_call_parser: str, reasoning_parser: str) -> None:
        self._parsers = tool_call_parser, reasoning_parser
        self._formats: dict[str, ChatFormat] = {}  # by model, for its last tokenizer

    def outputs(self, fields: ChatFields, asked: Asked, model: TextModel) -> "ChatOutputs":
        """Return the parser of a request's outputs, and adapt the request to it; errors as in `ChatOutputs`."""
        if self._parsers[0] == "none" and fields.tools and fields.tool_choice != "none":
            rule = "unset: this server was started with --tool-call-parser none, so it cannot parse tool calls"
            raise InvalidFieldError("tools", "set", rule)
        if (known := self._formats.get(model.name)) is None or known.tokenizer is not model.tokenizer:
            known = self._formats[model.name] = ChatFormat.of(model.tokenizer, *self._parsers)
        return ChatOutputs(fields, asked, model, known)


class ChatOutputs:
    """Parses the outputs of one request.

    Args:
        asked: The same as native requests, which are changed to what the parser needs.

    Raises: InvalidFieldError: its tools are wrong, or cannot be used.
    """

    def __init__(self, fields: ChatFields, asked: Asked, model: TextModel, chat_format: ChatFormat) -> None:
        self._tools: RequestedTools | None = check_tools(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
        chat_format.check_tools(self._tools)
        check_chat_grammar(chat_format, self._tools)
        chat_format.check_effort(fields.reasoning_effort)
        self._format = chat_format
        self._part = asked.part
        self.tells_reasoning = fields.include_reasoning is not False
        self._end_token_ids: set[int] = set()
        self._skips_special_tokens = hides_special = fields.skip_special_tokens is not False
        self._untold_ids = model.tokenizer.special_token_ids if hides_special else frozenset[int]()
        [request] = asked.requests
        if self._tools is None:
            request.messages.tools_json = ""  # `tool_choice` is none
        if fields.skip_special_tokens is not False and chat_format.needs_special_tokens(self._tools):
            request.sampling_params.skip_special_tokens = self._skips_special_tokens = False
            self._end_token_ids = {*model.info.eos_token_ids, *(fields.stop_token_ids or ())}

    @property
    def make_grammar(self) -> GrammarMaker | None:
        """What makes the grammar of the outputs; None: they follow none."""
        if self._part is None and (self._tools is None or self._tools.holds is None):
            return None
        return partial(chat_grammar, self._format, self._tools, self._part)

    @property
    def are_plain(self) -> bool:
        """Whether all text is content."""
        return self._tools is None and self._format.reasoning is None and not self._format.is_harmony

    def parser(self, response: Response, output_index: int) -> OutputParser:
        """Return the parser of one output."""
        prompt, output_id = response.request.prompt_token_ids, f"{response.request_id}-{output_index}"
        return self._format.output_parser(self._tools, prompt, self._end_token_ids, output_id)

    def num_content_tokens(self, output: Output) -> int:
        """Return how many tokens of an output have entries in `logprobs`: all but the special one that ended it."""
        has_end = output.stop_token_id in self._untold_ids
        return len(output.token_ids) - has_end

    def num_reasoning_tokens(self, response: Response) -> int | None:
        """Return the number of reasoning tokens in all outputs, with markers; None: the model's format is unknown."""
        reasoning_format = self._format.reasoning
        if reasoning_format is None:
            return None
        if self._format.is_harmony:
            numbers = [
                self._format.num_harmony_reasoning_tokens(self._tools, one.token_ids) for one in response.outputs
            ]
            return None if None in numbers else sum(filter(None, numbers))
        end_id = self._format.tokenizer.id_of(reasoning_format.end)
        return sum(self._num_thought(response, output, end_id) for output in response.outputs)

    def _num_thought(self, response: Response, output: Output, end_id: int | None) -> int:
        parser = self._format.output_parser(None, response.request.prompt_token_ids, ())
        events = [*parser.feed(output.text), *parser.finish()]
        if not any(isinstance(event, ReasoningDelta) for event in events):
            return 0
        ids, answer = output.token_ids, "".join(event.text for event in events if isinstance(event, ContentDelta))
        if not answer:
            return self.num_content_tokens(output)
        if end_id in ids:
            return ids.index(end_id) + 1
        begin = len(output.text) - len(answer)
        decode, skips = self._format.tokenizer.decode, self._skips_special_tokens
        return bisect_left(range(len(ids)), begin, key=lambda num: len(decode(ids[:num], skips)))

    def message(self, response: Response, output: Output) -> tuple[dict[str, Any], str]:
        """Return the message of a whole output, and why it ended."""
        if self.are_plain:
            return {"role": "assistant", "content": output.text, "refusal": None}, finish_reason(output)
        parser = self.parser(response, output.output_index)
        reason = finish_reason(output)
        events = [*parser.feed(output.text), *parser.finish(is_cut=reason == "length")]
        content = "".join(event.text for event in events if isinstance(event, ContentDelta))
        reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
        calls = _calls(events)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning and self.tells_reasoning:
            message |= _reasoning(reasoning)
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        ending = CallsEnding()
        ending.add(events)
        return message, ending.of(reason)


class OutputDeltas:
    """The deltas of one output of a stream.

    Args:
        parser: Parses the output; None: all text is content.
        tells_reasoning: Whether the client gets the reasoning.
    """

    def __init__(self, parser: OutputParser | None, *, tells_reasoning: bool) -> None:
        self._parser = parser
        self._tells_reasoning = tells_reasoning
        self._ending = CallsEnding()

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Return the deltas of more text."""
        if self._parser is None:
            return [{"content": text}] if text else []
        return self._deltas(self._parser.feed(text))

    def finish(self, output: Output) -> list[dict[str, Any]]:
        """Return the last deltas: the output has ended."""
        is_cut = finish_reason(output) == "length"
        return [] if self._parser is None else self._deltas(self._parser.finish(is_cut=is_cut))

    def end_of(self, output: Output) -> str:
        """Return why the output ended."""
        return self._ending.of(finish_reason(output))

    def _deltas(self, events: Sequence[OutputEvent]) -> list[dict[str, Any]]:
        self._ending.add(events)
        told = [event for event in events if self._tells_reasoning or not isinstance(event, ReasoningDelta)]
        return [_delta(event) for event in told if not isinstance(event, ToolCallBroken)]


class CallsEnding:
    """How the calls of an output change its `finish_reason`: clients run all calls of a message that ends for them."""

    def __init__(self) -> None:
        self._ends_with_call = False
        self._shows_broken = False

    def add(self, events: Sequence[OutputEvent]) -> None:
        """Add the next events of the output."""
        for event in events:
            if isinstance(event, ToolCallBegin):
                self._ends_with_call = True
            elif isinstance(event, ToolCallBroken):
                self._ends_with_call = False
                self._shows_broken |= event.index is not None

    def of(self, reason: str) -> str:
        """Return the `finish_reason` of the output, given why it ended."""
        return "tool_calls" if reason == "stop" and self._ends_with_call and not self._shows_broken else reason


def _reasoning(text: str) -> dict[str, Any]:
    """Return reasoning under both of its names: vLLM's and LiteLLM's older one, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _calls(events: Sequence[OutputEvent]) -> list[dict[str, Any]]:
    """Return the whole calls."""
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, ToolCallBegin):
            function = {"name": event.name, "arguments": ""}
            calls.append({"id": event.id, "type": "function", "function": function})
        elif isinstance(event, ToolCallArguments):
            calls[-1]["function"]["arguments"] += event.delta
        elif isinstance(event, ToolCallBroken) and event.index is not None:
            calls.pop()
    return calls


def _delta(event: ContentDelta | ReasoningDelta | ToolCallBegin | ToolCallArguments) -> dict[str, Any]:
    match event:
        case ContentDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return _reasoning(text)
        case ToolCallBegin(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolCallArguments(index, delta):
            return {"tool_calls": [{"index": index, "function": {"arguments": delta}}]}
