"""Calls of tools by a grammar: what the readers of a format read is allowed, and nothing else where it is forced."""

import json
from typing import Any

import pytest

from executor_svc.fake.tokenizer import fake_tokenizer_files
from octavo_shared.errors import InvalidFieldError
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.grammar.matcher import MatcherTokenizer, check_grammar
from octavo_shared.step_wire.executor_info import TokenizerFile
from scheduler_svc.front.grammars.chat_grammar import chat_grammar, check_chat_grammar
from scheduler_svc.front.grammars.parts import object_part
from scheduler_svc.front.grammars.reading import read_grammar
from scheduler_svc.front.text.tokenizer import Tokenizer
from scheduler_svc.front.tool_calls.chat_format import ChatFormat
from scheduler_svc.front.tool_calls.formats import HARMONY_MARKERS, TOOL_CALL_FORMATS, JsonBody, NamedBody
from scheduler_svc.front.tool_calls.tool_choice import check_tools
from tests.support.each_row import each_row
from tests.support.grammars import byte_matcher, num_followed

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, *, strict: bool | None = None, schema: Any = CITY) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


STRICT = [tool("weather", strict=True), tool("note", schema={"type": "object", "uniqueItems": True})]


def grammar_of(
    name: str,
    text: str = "",
    *,
    tools: Any = STRICT,
    response: bool = False,
    reasoning: str = "none",
    **fields: Any,
) -> Grammar:
    """Return the grammar of a request whose prompt ends with a text."""
    tokenizer = Tokenizer(fake_tokenizer_files())
    chat_format = ChatFormat.of(tokenizer, name, reasoning)
    asked = check_tools(tools, **fields)
    check_chat_grammar(chat_format, asked)
    part = object_part("response_format") if response else None
    return read_grammar(chat_grammar(chat_format, asked, part, tokenizer.encode(text or "x")))[1]


def allows(grammar: Grammar, text: str) -> bool:
    return num_followed(grammar, text)[1]


def call(name: str = "weather", arguments: str = '{"city": "Rome"}', key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in calls)


# By format: how its template writes two calls.
TWO_CALLS = {
    "hermes": hermes(call(), call("note", "{}")),
    "llama3_json": f"{call(key='parameters')}; {call('note', '{}', 'parameters')}",
    "json": call(),
    "granite": f"<|tool_call|>[{call()}, {call('note', '{}')}]",
    "phi4_mini_json": f"functools[{call()}, {call('note', '{}')}]",
    "hunyuan_a13b": f"<tool_calls>[\n{call()},\n{call('note', '{}')}\n]</tool_calls>",
    "mistral": f"[TOOL_CALLS][{call()}, {call('note', '{}')}]",
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>note<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v3": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Rome"}\n```'
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>note\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "kimi_k2": (
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Rome"}'
        "<|tool_call_end|><|tool_call_begin|>functions.note:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
}


@each_row(*TWO_CALLS)
def test_a_required_call_is_written_as_the_family_does_and_its_arguments_fit(name: str) -> None:
    text = TWO_CALLS[name]
    grammar = grammar_of(name, tool_choice="required")
    assert check_grammar(byte_matcher(), grammar) == ""
    assert allows(grammar, text)
    assert not allows(grammar, text.replace("city", "town")), "the strict function's arguments are held"
    assert not allows(grammar, text.replace("weather", "whether")), "nobody calls what is not there"
    assert not allows(grammar, "Hello")
    assert not allows(grammar, "")
    named = grammar_of(name, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert allows(named, text) == ("note" not in text)
    one = grammar_of(name, tool_choice="required", parallel_tool_calls=False)
    assert allows(one, text) == ("note" not in text)


def test_the_formats_with_json_in_their_calls_are_in_the_table() -> None:
    assert {row.name for row in TOOL_CALL_FORMATS if isinstance(row.body, JsonBody | NamedBody)} == {*TWO_CALLS}


@each_row(
    ("tool_choice", '"required"', {"tools": [tool("a")], "tool_choice": "required"}),
    ("tools[1].function.strict", "true", {"tools": [tool("a"), tool("b", strict=True)]}),
    ("parallel_tool_calls", "false", {"tools": [tool("a")], "parallel_tool_calls": False}),
)
def test_formats_without_json_are_refused_by_name(field: str, value: str, fields: dict[str, Any]) -> None:
    for name in sorted({row.name for row in TOOL_CALL_FORMATS} - {*TWO_CALLS}):
        with pytest.raises(InvalidFieldError) as caught:
            grammar_of(name, **fields)
        assert str(caught.value) == (
            f"{field} is {value}; it must be unset: the format {name} of this model has no JSON in its calls, so they "
            "cannot be held"
        )


FREE = hermes(call("note", '{"any": [1]}'))

AUTO: list[tuple[dict[str, Any], str, bool]] = [
    ({}, "Hello", True),
    ({}, "", True),
    ({}, f"Let me see.\n{hermes(call(), call())} and", True),
    ({}, f"Let me <tool_cal see.\n{FREE}", True),
    ({}, hermes(call(arguments='{"city": 1}')), False),
    ({}, f"Hello <tool_call> {call('none')}", False),
    ({"parallel_tool_calls": False}, f"Let me see. {hermes(call())}\n", True),
    ({"parallel_tool_calls": False}, hermes(call(), call()), False),
    ({"parallel_tool_calls": False}, "Hello", True),
    ({"response": True}, '{"a": 1}', True),
    ({"response": True}, hermes(call()), True),
    ({"response": True}, "Hello", False),
]


@each_row(*AUTO)
def test_with_auto_text_stays_free_and_calls_are_held(fields: dict[str, Any], text: str, fits: bool) -> None:
    assert allows(grammar_of("hermes", **fields), text) == fits


def test_a_bare_call_is_told_from_text_by_its_beginning() -> None:
    grammar = grammar_of("llama3_json")
    for text, fits in (("Hello {", True), (call(key="parameters"), True), ("", True), ("{", False), (call("f"), False)):
        assert allows(grammar, text) == fits, text


THINKING: list[tuple[str, dict[str, Any], str, bool]] = [
    ("", {"tools": None, "response": True}, '{"a": 1}', True),
    ("", {"tools": None, "response": True}, '<think>\n{"b": 2} so\n</think>\n\n{"a": 1}', True),
    ("", {"tools": None, "response": True}, "<think>\nhm", False),
    ("", {"tools": None, "response": True}, "hm</think>{}", False),
    ("<think>\n", {"tools": None, "response": True}, 'hm <thi </thin\n</think>\n\n{"a": 1}', True),
    ("<think>\n", {"tools": None, "response": True}, '{"a": 1}', False),
    ("<think>\n", {"tools": None, "response": True}, "hm</think>Hello", False),
    ("<think>\n", {"tool_choice": "required"}, f"hm</think>\n{hermes(call())}", True),
    ("<think>\n", {"tool_choice": "required"}, hermes(call()), False),
    ("<think>\n", {}, f"hm {hermes('free')}</think>\nWell. {hermes(call())}", True),
    ("<think>\n", {}, f"hm</think>\n{hermes('free')}", False),
]


@each_row(*THINKING)
def test_reasoning_is_free_and_ends_before_what_is_held(
    prompt: str, fields: dict[str, Any], text: str, fits: bool
) -> None:
    assert allows(grammar_of("hermes", prompt, reasoning="qwen3", **fields), text) == fits


ROME, ANALYSIS = '{"city": "Rome"}', "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
TO_WEATHER = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
FINAL, JSON_FINAL = "<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>"
REQUIRED, ONLY_RESPONSE = {"tool_choice": "required"}, {"tools": None, "response": True}

HARMONY_TEXTS: list[tuple[dict[str, Any], str, bool]] = [
    (REQUIRED, f"{ANALYSIS}{ANALYSIS}{PREAMBLE}{TO_WEATHER}{ROME}", True),
    (REQUIRED, f" to=functions.weather<|channel|>commentary json<|message|>{ROME}", True),
    (REQUIRED, '<|channel|>commentary to=functions.note<|message|>{"any": [1]}', True),
    (REQUIRED, f"{TO_WEATHER.replace('weather', 'whether')}{ROME}", False),
    (REQUIRED, f"{TO_WEATHER}{{}}", False),
    (REQUIRED, f"{ANALYSIS}{FINAL}Hello", False),
    (REQUIRED, f"{TO_WEATHER}{ROME}<|start|>assistant{TO_WEATHER}{ROME}", False),
    (REQUIRED, "Hello", False),
    ({"tool_choice": {"type": "function", "function": {"name": "note"}}}, f"{TO_WEATHER}{ROME}", False),
    ({}, f"{ANALYSIS}{PREAMBLE}{FINAL}Hello", True),
    ({}, f"{ANALYSIS}{TO_WEATHER}{ROME}", True),
    ({}, f'{ANALYSIS}{TO_WEATHER}{{"town": 1}}', False),
    ({}, ANALYSIS, False),
    (ONLY_RESPONSE, f'{ANALYSIS}{FINAL}{{"a": 1}}', True),
    (ONLY_RESPONSE, f"{JSON_FINAL}{{}}", True),
    (ONLY_RESPONSE, f"{ANALYSIS}{FINAL}Hello", False),
    (ONLY_RESPONSE, f"{PREAMBLE}{FINAL}{{}}", False),
    (ONLY_RESPONSE, f"{TO_WEATHER}{ROME}", False),
    ({"response": True}, f"{ANALYSIS}{TO_WEATHER}{ROME}", True),
    ({"response": True}, f"{ANALYSIS}{FINAL}Hello", False),
]


@each_row(*HARMONY_TEXTS)
def test_in_harmony_thoughts_are_free_and_the_last_message_is_held(
    fields: dict[str, Any], text: str, fits: bool
) -> None:
    files = special_files(*HARMONY_MARKERS)
    tokenizer, matcher = Tokenizer(files), MatcherTokenizer.load(files, (257, 264, 265), 266)
    asked = check_tools(**{"tools": STRICT, **{name: fields[name] for name in fields if name != "response"}})
    part = object_part("response_format") if "response" in fields else None
    held = chat_grammar(ChatFormat.of(tokenizer, "openai", "openai_gptoss"), asked, part, tokenizer.encode("x"))
    assert num_followed(read_grammar(held)[1], tokenizer.encode(text), matcher)[1] == fits


def test_in_harmony_markers_may_be_text() -> None:
    grammar = grammar_of("openai", reasoning="openai_gptoss", tool_choice="required")
    assert check_grammar(byte_matcher(), grammar) == ""
    for text, fits in ((f"{ANALYSIS}{PREAMBLE}{TO_WEATHER}{ROME}", True), (f"{TO_WEATHER}{{}}", False), ("Hi", False)):
        assert allows(grammar, text) == fits, text


def special_files(*markers: str) -> tuple[TokenizerFile, ...]:
    """Return the fake executor's tokenizer with special tokens more, from id 259."""
    files = {file.name: file.content for file in fake_tokenizer_files()}
    described = json.loads(files["tokenizer.json"])
    flags = described["added_tokens"][0]
    described["added_tokens"] += [{**flags, "id": 259 + place, "content": text} for place, text in enumerate(markers)]
    return (TokenizerFile("tokenizer.json", json.dumps(described).encode()),)


def test_markers_that_are_special_tokens_are_named_by_their_ids() -> None:
    files = special_files("<tool_call>", "</tool_call>", "<think>", "</think>")
    tokenizer, matcher = Tokenizer(files), MatcherTokenizer.load(files, (257,), 263)
    chat_format, tools = ChatFormat.of(tokenizer, "hermes", "qwen3"), check_tools(STRICT)
    _, grammar = read_grammar(chat_grammar(chat_format, tools, None, tokenizer.encode("x")))
    for text, fits in (
        ("Hello", True),
        (f"<think>hm</think>\nWell. {hermes(call(), call('note', '{}'))}", True),
        (f"<think>hm</think>\nWell. {hermes(call(arguments='{}'))}", False),
        ("<think>hm", False),
        ("Hello <think>", False),
    ):
        ids = tokenizer.encode(text)
        assert (259 in ids) == ("<tool_call>" in text)
        assert num_followed(grammar, ids, matcher)[1] == fits, text
