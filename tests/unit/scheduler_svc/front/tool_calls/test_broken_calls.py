"""Calls that are not as their format has them: cut, wrong, without an end or an opening, or in the reasoning."""

import json
import re
from dataclasses import dataclass
from itertools import accumulate

import pytest

from scheduler_svc.front.tool_calls.formats import REASONING_FORMATS, TOOL_CALL_FORMATS
from scheduler_svc.front.tool_calls.reasoning import ReasoningParser
from tests.unit.scheduler_svc.front.tool_calls.parsing import Parsed, parse

ROME = ("get_weather", {"city": "Rome", "days": 5})
JSON = '{"name": "get_weather", "arguments": {"city": "Rome", "days": 5}}'
ARGUMENTS = '{"city": "Rome", "days": 5}'
TAGS = "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n5\n</parameter>\n</function>"
GLM = (
    "get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
)
MINIMAX = (
    '<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n'
    '<parameter name="days">5</parameter>\n</invoke>'
)
TAGGED = ("qwen3_coder", "seed_oss", "minimax_m2", "glm45")


@dataclass(frozen=True)
class Written:
    """How a format writes a call; it is whole once the body is there. `is_bare`: it shows without its opening."""

    opening: str
    body: str
    closing: str
    is_bare: bool = False

    @property
    def text(self) -> str:
        return self.opening + self.body + self.closing


WRITTEN = {
    "deepseek_v3": Written(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        f"function<｜tool▁sep｜>get_weather\n```json\n{ARGUMENTS}",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": Written(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        f"get_weather<｜tool▁sep｜>{ARGUMENTS}",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi_k2": Written(
        "<|tool_calls_section_begin|><|tool_call_begin|>",
        f"functions.get_weather:0<|tool_call_argument_begin|>{ARGUMENTS}",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "glm45": Written("<tool_call>", GLM, ""),
    "minimax_m2": Written("<minimax:tool_call>\n", MINIMAX, "\n</minimax:tool_call>", is_bare=True),
    "seed_oss": Written("<seed:tool_call>\n", TAGS, "\n</seed:tool_call>", is_bare=True),
    "qwen3_coder": Written("<tool_call>\n", TAGS, "\n</tool_call>", is_bare=True),
    "mistral": Written("[TOOL_CALLS]", f"get_weather[ARGS]{ARGUMENTS}", ""),
    "granite": Written("<|tool_call|>", f"[{JSON}", "]"),
    "phi4_mini_json": Written("functools", f"[{JSON}", "]"),
    "hunyuan_a13b": Written("<tool_calls>", f"[{JSON}", "]</tool_calls>"),
    "hermes": Written("<tool_call>\n", JSON, "\n</tool_call>"),
    "llama3_json": Written("<|python_tag|>", JSON, "", is_bare=True),
    "pythonic": Written("<|python_start|>", '[get_weather(city="Rome", days=5)', "]<|python_end|>", is_bare=True),
    "olmo3": Written("<function_calls>\n", 'get_weather(city="Rome", days=5)', "\n</function_calls>"),
    "json": Written("", JSON, "", is_bare=True),
}
FORMATS = pytest.mark.parametrize("name", WRITTEN)


def test_every_format_is_written() -> None:
    assert set(WRITTEN) == {row.name for row in TOOL_CALL_FORMATS}
    for name, written in WRITTEN.items():
        parsed = parse(name, [written.text])
        assert (loaded(parsed), parsed.content, parsed.remains) == ([ROME], "", []), name


def loaded(parsed: Parsed) -> list[tuple[str, object]]:
    return [(name, json.loads(arguments)) for name, arguments in parsed.calls]


def parsed_in_every_split(name: str, text: str, *, is_cut: bool = False, thinks: bool = False) -> Parsed:
    """Return the result, which is the same for every split in two, and for each character alone."""

    def result(*pieces: str) -> Parsed:
        reasoning = ReasoningParser(REASONING_FORMATS[1], starts_inside=False) if thinks else None
        return parse(name, pieces, reasoning=reasoning, is_cut=is_cut)

    whole = result(text)
    assert result(*text) == whole
    for cut in range(1, len(text)):
        assert result(text[:cut], text[cut:]) == whole
    return whole


@FORMATS
def test_a_call_that_is_cut_off_is_content_and_cannot_be_run(name: str) -> None:
    written = WRITTEN[name]
    least = len(written.opening + written.body)
    first_argument = written.text.index("Rome") + len("Rome")
    for prefix in accumulate(written.text):
        parsed = parse(name, prefix)
        assert parse(name, [prefix]) == parsed
        if len(prefix) >= least:
            assert (loaded(parsed), parsed.remains) == ([ROME], []), prefix
        else:
            assert (parsed.content, parsed.calls) == (prefix, []), prefix  # what remains cannot be completed either
            assert not parsed.remains or len(prefix) > first_argument, prefix
    assert parse(name, written.text[: least - 1]).remains


# what is wrong: of all formats that write arguments as JSON, as Python, or between tags
WRONG = {
    "JSON": [
        ("NaN", "5", "NaN"),
        ("a comma too many", "5}", "5,}"),
        ("a comma too many, one argument", ', "days": 5}', ",}"),
        ("no value", "5}", "}"),
        ("Python", '"days"', "'days'"),
    ],
    "Python": [("NaN", "5", "NaN"), ("no quotes", '"Rome"', "Rome"), ("no value", "5", "")],
    "tags": [
        ("no end of a value", "5\n</parameter>", "5\n"),
        ("no end of a value", "5</parameter>", "5"),
        ("no end of a value", "5</arg_value>", "5"),
        ("an unknown tag", "<parameter=days>", "<param=days>"),
        ("an unknown tag", '<parameter name="days">', '<param name="days">'),
        ("an unknown tag", "<arg_key>days", "<key>days"),
    ],
}


def wrong_texts(name: str) -> list[str]:
    kind = "tags" if name in TAGGED else "Python" if name in ("pythonic", "olmo3") else "JSON"
    text = WRITTEN[name].text
    return [text.replace(old, new) for _, old, new in WRONG[kind] if old in text]


@FORMATS
def test_a_call_that_is_wrong_is_content_and_the_next_one_is_found(name: str) -> None:
    good = WRITTEN[name]
    for wrong in wrong_texts(name):
        alone = parsed_in_every_split(name, wrong)
        assert (alone.content, alone.calls, alone.ends_broken) == (wrong, [], True), wrong
        if name == "json":
            continue  # it has no marker by which the next one would be found
        both = parsed_in_every_split(name, f"{wrong}\n{good.text}")
        assert (both.content.strip(), loaded(both), both.ends_broken) == (wrong, [ROME], False), wrong
        assert both.remains == alone.remains


def without_first_end(text: str) -> str:
    return re.sub(r"\n?</(parameter|arg_value)>", "", text, count=1)


@pytest.mark.parametrize("name", TAGGED)
def test_a_value_without_an_end_ends_where_the_next_argument_of_the_schema_begins(name: str) -> None:
    text = WRITTEN[name].text
    unknown = text.replace("days", "nights")  # what the schema has not is text, unless it has nothing
    no_schema = text.replace("get_weather", "now")

    assert loaded(parsed_in_every_split(name, without_first_end(text))) == [ROME]
    assert loaded(parsed_in_every_split(name, unknown)) == [("get_weather", {"city": "Rome", "nights": "5"})]
    [(_, arguments)] = parsed_in_every_split(name, without_first_end(unknown)).calls
    assert list(json.loads(arguments)) == ["city"]
    assert "nights" in arguments
    assert loaded(parsed_in_every_split(name, without_first_end(no_schema))) == [("now", {"city": "Rome", "days": "5"})]


@FORMATS
def test_a_call_without_its_opening_is_a_call_where_it_cannot_be_anything_else(name: str) -> None:
    written = WRITTEN[name]
    bare = written.body + written.closing

    parsed = parsed_in_every_split(name, bare)

    assert (loaded(parsed), parsed.content) == (([ROME], "") if written.is_bare else ([], bare))
    if written.is_bare and name in TAGGED:
        inside = parsed_in_every_split(name, f"I look: {bare}\nDone.")
        assert (loaded(inside), inside.content) == ([ROME], "I look: \nDone.")


@FORMATS
def test_a_call_at_the_end_of_reasoning_that_nobody_closed_is_a_call(name: str) -> None:
    thought = "" if name == "json" else "Hm.\n"  # its calls come first
    text = WRITTEN[name].text

    closed = parsed_in_every_split(name, f"<think>{thought}{text}</think>", thinks=True)
    open_ = parsed_in_every_split(name, f"<think>{thought}{text}\n", thinks=True)
    goes_on = parsed_in_every_split(name, f"<think>{thought}{text}\nNo.", thinks=True)
    is_cut = parsed_in_every_split(name, f"<think>{thought}{text}", thinks=True, is_cut=True)
    second = parsed_in_every_split(name, f"<think>{thought}{text}\nOr rather\n{text}", thinks=True)

    assert (loaded(open_), open_.reasoning.strip(), open_.content) == ([ROME], thought + text, "")
    assert loaded(second) == ([] if name == "json" else [ROME])
    for parsed in (closed, goes_on, is_cut):
        assert (parsed.calls, parsed.content) == ([], "")
        assert text in parsed.reasoning
