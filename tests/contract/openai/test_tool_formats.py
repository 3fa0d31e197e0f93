"""Each format over HTTP: a model that writes calls as its family's template does, one byte a token."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from executor_svc.fake.scripted_worker import CHAT_TEMPLATE
from scheduler_svc.front.text.chat_template import ChatTemplate
from scheduler_svc.front.text.conversation import Conversation
from scheduler_svc.front.tool_calls.formats import TOOL_CALL_FORMATS
from tests.contract.openai.api import Answer, Api, Json, running_api
from tests.support.echo_worker import EchoWorker
from tests.support.family_templates import EOS, FAMILIES, Family

ARGUMENTS = {"city": 'Zürich "7" 🦊\n <b> or a place with a long name', "exact": True}
PROPERTIES = {"city": {"type": "string"}, "exact": {"type": "boolean"}}
WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": PROPERTIES}}
ONE_OF_EACH = {family.tool_calls: family for family in reversed(FAMILIES.values())}
TOOLS: list[Json] = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]


def turn_of(family: Family) -> Json:
    """Return a turn with all that the family's template writes in one."""
    calls = [
        {"id": f"abcdefgh{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate([("get_weather", ARGUMENTS), ("now", {})])
    ]
    return {
        "role": "assistant",
        "content": "" if family.drops_content else "I look.",
        "tool_calls": calls[:1] if family.takes_one_call else calls,
        "reasoning_content": "Hm.",
    }


def said_by(family: Family) -> str:
    """Return what the family's template writes of the turn."""
    template, user = ChatTemplate(family.source, {"bos_token": "", "eos_token": EOS}), {"role": "user", "content": "x"}
    prompt = template.render(Conversation([user], TOOLS))
    whole = template.render(Conversation([user, turn_of(family)], TOOLS, add_generation_prompt=False))
    return whole.removeprefix(prompt).removesuffix(EOS)


def worker_of(family: Family) -> EchoWorker:
    """Return a model with the words of the family's template, and with its marker as a special token."""
    row = next(row for row in TOOL_CALL_FORMATS if row.name == family.tool_calls)
    thinks = {"deepseek_r1": "</think>", "seed_oss": "</seed:think>", "mistral": "[/THINK]", None: ""}
    template, _, _ = CHAT_TEMPLATE.rpartition("{#")
    return EchoWorker(f"{template}{{# {' '.join(row.template_marks[0])} {thinks[family.reasoning]} #}}", row.begin[-1])


@dataclass
class Told:
    """What an answer says, in the same shape whether it came whole or in pieces."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ended_by: str = ""

    def add(self, message: Json) -> None:
        self.content += message.get("content") or ""
        self.reasoning += message.get("reasoning_content") or ""
        for call in message.get("tool_calls") or []:
            function = call["function"]
            if "name" in function:
                assert call.get("index", len(self.calls)) == len(self.calls)
                self.calls.append((function["name"], function["arguments"]))
            else:
                name, arguments = self.calls[call["index"]]
                self.calls[call["index"]] = name, arguments + function["arguments"]


def told_by(answer: Answer) -> Told:
    told = Told()
    bodies = answer.events if answer.text.startswith("data:") else [answer.json]
    for body in bodies:
        [choice] = body["choices"]
        told.add(choice["message"] if "message" in choice else choice["delta"])
        told.ended_by = choice["finish_reason"] or told.ended_by
    return told


async def ask(api: Api, text: str, **fields: Any) -> tuple[Told, Told]:
    """Return the answer as it comes whole, and as it comes in pieces."""
    request = {"messages": [{"role": "user", "content": f"SAY:{text}"}], "tools": TOOLS, "max_tokens": 1000, **fields}
    whole, streamed = await asyncio.gather(api.chat(**request), api.chat(**request, stream=True))
    assert (whole.status, streamed.status) == (200, 200), whole.text
    return told_by(whole), told_by(streamed)


@pytest.mark.parametrize("family", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
async def test_calls_of_each_format_reach_the_client(family: Family) -> None:
    text, turn = said_by(family), turn_of(family)
    num_bytes = (
        len(text[: text.index("true" if "true" in text else "True")].encode()) - 40
    )  # some markers are one token
    async with running_api(worker_of(family)) as api:
        told, (whole, streamed) = await asyncio.gather(ask(api, text), ask(api, text, max_tokens=num_bytes))

    for answer in told:
        assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == [
            (call["function"]["name"], call["function"]["arguments"]) for call in turn["tool_calls"]
        ]
        assert (answer.content.strip(), answer.ended_by) == (turn["content"], "tool_calls")
        assert answer.reasoning.strip() == ("Hm." if family.reasoning else "")
    assert told[0].calls == told[1].calls
    assert (whole.calls, whole.ended_by) == ([], "length")
    assert "get_weather" in whole.content
    assert streamed == whole  # the first argument is not complete


BROKEN = '<tool_call>{"name": "now", "arguments": {"a": oops}}</tool_call>'
UNKNOWN = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'

SHOWN = '<tool_call>{"name": "now", "arguments": {"a": 1, "b": NaN}}</tool_call>'
OF_SHOWN = ("now", '{"a": 1, "b": ]')  # no client can run it
CALL = ("now", "{}")

# what the model says; content and calls of the answer, what its stream shows before the calls, and why it ends
MALFORMED = [
    (BROKEN, BROKEN, [], [], "stop"),
    (SHOWN, SHOWN, [], [OF_SHOWN], "stop"),
    (f"{UNKNOWN}\n{NOW}", f"{UNKNOWN}\n", [CALL], [], "tool_calls"),
    (f"a {NOW} b {NOW}\n", "a  b ", [CALL] * 2, [], "tool_calls"),
    (f"{BROKEN}{NOW}", BROKEN, [CALL], [], "tool_calls"),
    (f"{NOW}{BROKEN}", BROKEN, [CALL], [], "stop"),
    (f"{SHOWN}{NOW}", SHOWN, [CALL], [OF_SHOWN], "stop"),
]


async def test_what_is_no_call_is_content_and_text_around_calls_stays() -> None:
    async with running_api(EchoWorker()) as api:
        answers = await asyncio.gather(*(ask(api, said) for said, *_ in MALFORMED))

    for (said, content, calls, shown, ended_by), (whole, streamed) in zip(MALFORMED, answers, strict=True):
        assert whole == Told(content, calls=calls, ended_by=ended_by), said
        assert streamed == Told(content, calls=shown + calls, ended_by=ended_by), said
