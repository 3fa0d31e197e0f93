"""The formats of a model, and the way of a request with tools from its tokens to its events."""

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import pytest
import tokenizers

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.front.text.output_text import OutputText, TextOptions
from scheduler_svc.front.text.tokenizer import Tokenizer
from scheduler_svc.front.tool_calls.chat_format import ChatFormat
from scheduler_svc.front.tool_calls.formats import (
    HARMONY,
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    ReasoningFormat,
    ToolCallFormat,
    reasoning_format,
    tool_call_format,
)
from scheduler_svc.front.tool_calls.tool_choice import RequestedTools, check_tools
from tests.support.each_row import each_row
from tests.support.tokenizers import EOS, byte_level_backend, make_tokenizer
from tests.unit.scheduler_svc.front.tool_calls.parsing import TOOLS, Parsed

TOOL_LIST = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
TURNS = "{% for message in messages %}{{ message.content }}{% endfor %}"

# The words by which the templates of the families show their format, in short; test_round_trip.py has whole ones.
HERMES = """within <tool_call></tool_call> XML tags: {"name": <function-name>, "arguments": <args-json-object>}"""
TEMPLATES: Mapping[str, tuple[str, str | None, str | None]] = {
    "qwen2.5": (TOOL_LIST + HERMES + TURNS, "hermes", None),
    "qwen3": (TOOL_LIST + HERMES + "{{ '' if '</think>' in '' }}" + TURNS, "hermes", "deepseek_r1"),
    "qwen3-coder": (TOOL_LIST + "<tool_call>\n<function=f>\n<parameter=a>" + TURNS, "qwen3_coder", None),
    "mistral": ("[AVAILABLE_TOOLS]" + TOOL_LIST + "[TOOL_CALLS][" + TURNS, "mistral", None),
    "magistral": ("[THINK][/THINK][AVAILABLE_TOOLS]" + TOOL_LIST + "[TOOL_CALLS]" + TURNS, "mistral", "mistral"),
    "llama3.1": (
        TOOL_LIST + '<|python_tag|> {"parameters": dictionary of argument name and its value}' + TURNS,
        "llama3_json",
        None,
    ),
    "functionary": (TOOL_LIST + "<|python_tag|> <function=f>{}</function>" + TURNS, None, None),
    "minimax-m3": (TOOL_LIST + '<tool_call>]<]minimax[>[<invoke name="f">' + TURNS, None, None),
    "apriel": (TOOL_LIST + HERMES + "<tool_calls>[]</tool_calls>" + TURNS, "hunyuan_a13b", None),
    "gpt-oss": (TOOL_LIST + "<|channel|>analysis<|message|><|end|> json<|call|>" + TURNS, "openai", "openai_gptoss"),
    "phi-4": (TOOL_LIST + "<|end|>" + TURNS, None, None),
    "unknown": (TOOL_LIST + TURNS, None, None),
}


@each_row(*TEMPLATES.values())
def test_template_says_how_the_model_writes(template: str, tool_calls: str | None, reasoning: str | None) -> None:
    found_calls, found_reasoning = tool_call_format("auto", template), reasoning_format("auto", template)

    assert (found_calls and found_calls.name) == tool_calls
    assert (found_reasoning and found_reasoning.name) == reasoning


def test_a_setting_counts_more_than_the_template() -> None:
    template = TEMPLATES["qwen3"][0]

    for row in (*TOOL_CALL_FORMATS, HARMONY):
        assert tool_call_format(row.name, template) is row
    for reasoning in REASONING_FORMATS:
        assert reasoning_format(reasoning.name, template) is reasoning
    assert tool_call_format("none", template) is None
    assert reasoning_format("none", template) is None


@each_row(("tool_call_parser", (*TOOL_CALL_FORMATS, HARMONY)), ("reasoning_parser", REASONING_FORMATS))
def test_settings_have_a_name_for_each_format(
    field: str, rows: tuple[ToolCallFormat, ...] | tuple[ReasoningFormat, ...]
) -> None:
    names = get_args(SchedulerConfig.model_fields[field].annotation)

    assert sorted(names) == sorted(["auto", "none", *(row.name for row in rows)])


@each_row(*TOOL_CALL_FORMATS, HARMONY, *REASONING_FORMATS)
def test_docs_have_each_format(row: ToolCallFormat | ReasoningFormat) -> None:
    text = (Path(__file__).parents[5] / "docs" / "openai.md").read_text("utf-8").replace("\\|", "|")
    lines = [line for line in text.splitlines() if f"`{row.name}`" in line.split(" | ")[0]]
    begin = (row.begin,) if isinstance(row, ReasoningFormat) else row.begin
    is_mostly_bare = isinstance(row, ToolCallFormat) and row.may_be_bare

    assert lines
    assert is_mostly_bare or any(marker in line for line in lines for marker in begin)


def requested() -> RequestedTools:
    tools = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
    checked = check_tools(tools)
    assert checked is not None
    return checked


@each_row(
    (None, "does not support tools"),
    (TURNS + "<tool_call>", "does not support tools"),
    ("{% if tools %}Environment: ipython <tool_call>{% endif %}" + TURNS, "does not support tools"),
    ("{% if tools %}{{ raise_exception('no') }}{% endif %}<tool_call>" + TURNS, "does not support tools"),
    (TEMPLATES["unknown"][0], "--tool-call-parser"),
)
def test_tools_that_would_be_lost_are_refused(template: str | None, says: str) -> None:
    chat_format = ChatFormat.of(make_tokenizer(byte_level_backend(), template))

    with pytest.raises(InvalidFieldError, match=says) as caught:
        chat_format.check_tools(requested())

    assert caught.value.field == "tools"
    chat_format.check_tools(None)


def tokenizer_with(template: str, added: tuple[str, ...], *, special: bool) -> Tokenizer:
    """A tokenizer with the markers of a family as tokens, as that family has them."""
    backend = byte_level_backend()
    tokens = [tokenizers.AddedToken(token, special=special, normalized=False) for token in added]
    if special:
        backend.add_special_tokens(tokens)
    else:
        backend.add_tokens(tokens)
    return make_tokenizer(backend, template)


# template, markers that are tokens, whether special ones, prompt, output, whether special tokens are needed, result
MODELS = [
    (
        "qwen3",
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        False,
        "hi<think>\n",
        'Hm.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        False,
        Parsed(reasoning="Hm.\n", calls=[("now", "{}")]),
    ),
    (
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        True,
        "hi",
        'Ünd[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich 🦊"}[TOOL_CALLS]now[ARGS]{}',
        True,
        Parsed("Ünd", [("get_weather", '{"city": "Zürich 🦊"}'), ("now", "{}")]),
    ),
    (
        "llama3.1",
        ("<|python_tag|>",),
        True,
        "hi",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        True,
        Parsed(calls=[("get_weather", '{"city": "Oslo"}')]),
    ),
]


@each_row(*MODELS)
def test_tokens_become_events(
    model: str,
    added: tuple[str, ...],
    special: bool,
    prompt: str,
    output: str,
    needs_special_tokens: bool,
    expected: Parsed,
) -> None:
    tokenizer = tokenizer_with(TEMPLATES[model][0], added, special=special)
    chat_format, tools = ChatFormat.of(tokenizer), requested()
    end_id = tokenizer.id_of(EOS)
    assert end_id is not None
    assert chat_format.needs_special_tokens(tools) is needs_special_tokens
    assert chat_format.needs_special_tokens(None) is False

    text = OutputText(tokenizer, TextOptions(skip_special_tokens=not needs_special_tokens))
    parser = chat_format.output_parser(tools, tokenizer.encode(prompt), {end_id})
    parsed = Parsed()
    for token_id in [*tokenizer.encode_part(output), end_id]:
        parsed.add(parser.feed(text.push(token_id)[0]))
    parsed.add(parser.feed(text.finish()))
    parsed.add(parser.finish())

    assert (parsed.content, parsed.calls, parsed.reasoning) == (expected.content, expected.calls, expected.reasoning)
