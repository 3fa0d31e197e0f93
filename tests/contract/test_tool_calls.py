"""Outputs of each family, from the executor's tokens to events, by way of both services."""

import asyncio
from collections.abc import Sequence

import pytest

from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from scheduler_svc.front.tool_calls.chat_format import ChatFormat
from scheduler_svc.front.tool_calls.events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
)
from scheduler_svc.front.tool_calls.tool_choice import check_tools
from tests.support.echo_worker import THIRD_TOKEN, EchoWorker
from tests.support.stack import Stack, running_stack

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "now")]
ZURICH = '{"city": "Zürich 🦊", "text": "\\u00fc \\"]}</tool_call>"}'

# What the model says with each format; the result is the same.
OUTPUTS = {
    "hermes": f'Ünd\n<tool_call>\n{{"name": "get_weather", "arguments": {ZURICH}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "mistral": f"Ünd\n[TOOL_CALLS]get_weather[ARGS]{ZURICH}[TOOL_CALLS]now[ARGS]{{}}",
    "llama3_json": f'Ünd\n<|python_tag|>{{"name": "get_weather", "parameters": {ZURICH}}}; '
    '{"name": "now", "parameters": {}}',
}


async def parsed(stack: Stack, text: str, tool_call_parser: str) -> tuple[str, str, list[tuple[str, str]]]:
    """Return reasoning, content and calls of a streamed output."""
    model = stack.service.generation.model
    assert model is not None
    chat_format, tools = ChatFormat.of(model.tokenizer, tool_call_parser), check_tools(TOOLS)
    chat_format.check_tools(tools)
    request = pb.GenerateRequest(
        messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=f"SAY:{text}")]),
        sampling_params=generation_pb2.SamplingParams(
            max_tokens=1000, skip_special_tokens=not chat_format.needs_special_tokens(tools)
        ),
    )
    parser = chat_format.output_parser(tools, [], model.info.eos_token_ids, is_streamed=True)
    deltas = [event.delta.text async for event in stack.generation.Generate(request) if event.HasField("delta")]
    events = [event for text in deltas for event in parser.feed(text)] + parser.finish()
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ToolCallBegin):
            calls.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            calls[event.index] = (calls[event.index][0], calls[event.index][1] + event.delta)
    return joined(events, ReasoningDelta), joined(events, ContentDelta), calls


def joined(events: Sequence[OutputEvent], kind: type[ContentDelta] | type[ReasoningDelta]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


@pytest.mark.parametrize(
    ("tool_call_parser", "marker"),
    [
        ("hermes", THIRD_TOKEN),  # the model writes the markers byte by byte
        ("hermes", "<tool_call>"),
        ("mistral", "[TOOL_CALLS]"),
        ("llama3_json", "<|python_tag|>"),
    ],
)
async def test_calls_of_each_family_come_through(tool_call_parser: str, marker: str) -> None:
    text = OUTPUTS[tool_call_parser]
    async with running_stack(EchoWorker(marker=marker)) as stack:
        plain, reasoned = await asyncio.gather(
            parsed(stack, text, tool_call_parser),
            parsed(stack, f"<think>\nHm.</think>\n\n{text}", tool_call_parser),
        )

    calls = [("get_weather", ZURICH), ("now", "{}")]
    assert plain == ("", "Ünd\n", calls)
    assert reasoned == ("Hm.", "Ünd\n", calls)
