"""What a family's template writes of an assistant's turn is read as the same turn, in every split."""

import json
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import pytest

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.text.chat_template import ChatTemplate
from scheduler_svc.front.text.conversation import Conversation
from scheduler_svc.front.tool_calls.formats import TOOL_CALL_FORMATS, reasoning_format, tool_call_format
from scheduler_svc.front.tool_calls.reasoning import ReasoningParser, opens_reasoning
from tests.support.each_row import each_row
from tests.support.family_templates import EOS, FAMILIES, Family
from tests.unit.scheduler_svc.front.tool_calls.parsing import TOOLS, Parsed, parse

ARGUMENTS = {"city": 'Zürich "7"\n <b>', "days": 3, "exact": True, "places": ["é", {"a": 1}]}
USER = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "content": "sunny"}
DEFINITIONS = [
    {"type": "function", "function": {"name": name, "description": "It.", "parameters": schema}}
    for name, schema in TOOLS.items()
]


def call(name: str, arguments: Mapping[str, Any], call_id: str) -> Mapping[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


CALLS = [call("get_weather", ARGUMENTS, "abcdefgh1"), call("now", {}, "abcdefgh2")]

TURNS: Mapping[str, Mapping[str, Any]] = {
    "a call": {"content": "", "tool_calls": CALLS[:1]},
    "a call without arguments": {"content": "", "tool_calls": CALLS[1:]},
    "two calls": {"content": "", "tool_calls": CALLS},
    "all": {"content": "I look.", "tool_calls": CALLS, "reasoning_content": "Hm, a <tool?"},
}


def written(template: ChatTemplate, turn: Mapping[str, Any]) -> tuple[str, str]:
    """Return a prompt, and what the template writes of the turn that follows it, without its end."""
    assistant = {"role": "assistant", **turn}
    prompt = template.render(Conversation([USER], DEFINITIONS))
    whole = template.render(Conversation([USER, assistant], DEFINITIONS, add_generation_prompt=False))
    assert whole.startswith(prompt)
    assert whole.endswith(EOS)
    assert "sunny" in template.render(Conversation([USER, assistant, RESULT], DEFINITIONS))
    return prompt, whole[len(prompt) :].removesuffix(EOS)


def read(family: Family, prompt: str, pieces: Iterable[str]) -> Parsed:
    reasoning = None
    if family.reasoning is not None:
        found = reasoning_format("auto", family.source)
        assert found is not None
        reasoning = ReasoningParser(found, starts_inside=opens_reasoning(found, prompt))
    return parse(family.tool_calls, pieces, reasoning=reasoning)


@each_row(*FAMILIES.values())
def test_template_shows_tools_and_how_calls_are_written(family: Family) -> None:
    calls, reasoning = tool_call_format("auto", family.source), reasoning_format("auto", family.source)

    assert calls is not None
    assert (calls.name, reasoning and reasoning.name) == (family.tool_calls, family.reasoning)
    assert ChatTemplate(family.source, {"bos_token": "<s>", "eos_token": EOS}).knows_tools


def test_every_format_has_a_template() -> None:
    named = {row.name for row in TOOL_CALL_FORMATS} - {"json"}  # no family's

    assert {family.tool_calls for family in FAMILIES.values()} == named


@each_row(*product(TURNS.values(), FAMILIES.values()))
def test_a_turn_that_the_template_writes_is_read_back(turn: Mapping[str, Any], family: Family) -> None:
    template = ChatTemplate(family.source, {"bos_token": "<s>", "eos_token": EOS})
    calls = turn["tool_calls"]
    if family.takes_one_call and len(calls) > 1:
        with pytest.raises(InvalidFieldError, match="single tool-calls"):
            written(template, turn)
        return
    prompt, text = written(template, turn)

    whole = read(family, prompt, [text])

    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == [
        (called["function"]["name"], called["function"]["arguments"]) for called in calls
    ]
    assert whole.content.strip() == ("" if family.drops_content else turn["content"])
    assert whole.reasoning.strip() == (turn.get("reasoning_content", "") if family.reasoning else "")
    assert read(family, prompt, text) == whole  # character by character
    if len(calls) == 2 or family.takes_one_call:
        for cut in range(len(text)):
            assert read(family, prompt, (text[:cut], text[cut:])) == whole
