"""Outputs as each family writes them, and as it should not, in every split."""

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.front.tool_calls.events import ContentDelta, ToolCallArguments, ToolCallBegin
from scheduler_svc.front.tool_calls.formats import TOOL_CALL_FORMATS, openai_call_id
from scheduler_svc.front.tool_calls.parser import MAX_GAP_CHARS, ToolCallParser
from tests.support.each_row import each_row
from tests.unit.scheduler_svc.front.tool_calls.parsing import TOOLS, format_named, parse

PARIS = '{"city": "Paris"}'
ODD = '{ "city":"Lyon \\"7\\u00e9\\" \\\\ </tool_call> 🦊" ,"days" : [1,-2.5e+3, true,null,{"a":{}}] }'

# format, text, content, calls
CALLS = [
    (
        "hermes",
        'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": ' + PARIS + "}\n</tool_call>",
        "Sure.\n",
        [("get_weather", PARIS)],
    ),
    (
        "hermes",
        '<tool_call>{"name":"get_weather","arguments":'
        + ODD
        + '}</tool_call>\n<tool_call>{"arguments": {}, "name": "now"}</tool_call>\nDone.',
        "\nDone.",
        [("get_weather", ODD), ("now", "{}")],
    ),
    (
        "hermes",
        '<tool_call>[{"name": "now"}, {"name": "get_weather", "arguments": ' + PARIS + "}]</tool_call>",
        "",
        [("now", "{}"), ("get_weather", PARIS)],
    ),
    (
        "hermes",
        '<tool_call>{"id": 1.5, "name": "now", "arguments": null, "why": ["arguments", {"name": "now"}]}',
        "",
        [("now", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": "{\\"city\\": \\"Paris\\"}", "name": "get_weather"}</tool_call>',
        "",
        [("get_weather", PARIS)],
    ),
    ("hermes", '<tool_call>\n<tool_call>\n{"name": "now"}\n</tool_call>', "<tool_call>\n", [("now", "{}")]),
    ("llama3_json", '{"name": "get_weather", "parameters": ' + PARIS + "}", "", [("get_weather", PARIS)]),
    ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', "", [("now", "{}")]),
    (
        "llama3_json",
        '\n{"name": "now", "parameters": {}}; {"name": "get_weather", "arguments": '
        + PARIS
        + "}\n\nThat is all; {really}",
        "\n\nThat is all; {really}",
        [("now", "{}"), ("get_weather", PARIS)],
    ),
    ("llama3_json", 'I call <|python_tag|>{"name": "now"};', "I call ;", [("now", "{}")]),
    (
        "json",
        '[{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": ' + PARIS + "}]",
        "",
        [("now", "{}"), ("get_weather", PARIS)],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": '
        + PARIS
        + ', "id": "VvvODy9mT"}, {"name": "now", "arguments": {}}]',
        "",
        [("get_weather", PARIS), ("now", "{}")],
    ),
    (
        "mistral",
        "Let me see.[TOOL_CALLS]get_weather[ARGS]" + ODD + "[TOOL_CALLS]now{}",
        "Let me see.",
        [("get_weather", ODD), ("now", "{}")],
    ),
    ("mistral", "[TOOL_CALLS]get_weather[CALL_ID]VvvODy9mT[ARGS]" + PARIS, "", [("get_weather", PARIS)]),
    ("mistral", "[TOOL_CALLS]now[ARGS] \n{}", "", [("now", "{}")]),
    ("mistral", "[TOOL_CALLS]now[ARX]{}[TOOL_CALLS]now{}", "[TOOL_CALLS]now[ARX]{}", [("now", "{}")]),
    (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRio <br>\n\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "I look.\n",
        [("get_weather", '{"city": "Rio <br>\\n", "days": 3}'), ("now", "{}")],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "now"}\n{"name": "get_weather", "arguments": ' + PARIS + "}\n</tool_call>",
        "",
        [("now", "{}"), ("get_weather", PARIS)],
    ),
    ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]\n{"a": 1}', '\n{"a": 1}', [("now", "{}")]),
    ("phi4_mini_json", 'Use functools: functools[{"name": "now"}]', "Use functools: ", [("now", "{}")]),
    ("hunyuan_a13b", '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>', "", [("now", "{}")]),
    ("llama3_json", '<|python_start|>{"name": "now"}<|python_end|>', "", [("now", "{}")]),
    (
        "deepseek_v3",
        "Ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Ok",
        [("now", "{}"), ("now", "{}")],
    ),
    ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{} ```", " ```", [("now", "{}")]),
    (
        "glm45",
        "<tool_call>\nget_weather<arg_key>city</arg_key>\n<arg_value>\n<a></arg_valu>\n</arg_value>"
        "<arg_key>days</arg_key><arg_value> 3\n</arg_value>\n</tool_call><tool_call>now</tool_call>",
        "",
        [("get_weather", '{"city": "\\n<a></arg_valu>\\n", "days": 3}'), ("now", "{}")],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">\n\n"Rio"\n<b\n</parameter>\n'
        '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        [("get_weather", '{"city": "\\n\\"Rio\\"\\n<b"}'), ("now", "{}")],
    ),
    (
        "seed_oss",
        "<seed:tool_call><function=get_weather><parameter=places>['a', \"b\"]</parameter>"
        "<parameter=exact>True</parameter></function></seed:tool_call>",
        "",
        [("get_weather", '{"places": ["a", "b"], "exact": true}')],
    ),
    (
        "pythonic",
        "[get_weather(city='it\\'s, \"(1)\"', days = -3, places=[{'a': (1, 2)}, None], exact=true), now( )]",
        "",
        [
            ("get_weather", '{"city": "it\'s, \\"(1)\\"", "days": -3, "places": [{"a": [1, 2]}, null], "exact": true}'),
            ("now", "{}"),
        ],
    ),
    ("pythonic", "Look: <|python_start|>[now()]<|python_end|>", "Look: ", [("now", "{}")]),
    (
        "olmo3",
        '<function_calls>\nnow()\nget_weather(city="Paris")\n</function_calls>',
        "",
        [("now", "{}"), ("get_weather", PARIS)],
    ),
]

# format, text: no call is in it
NO_CALLS = [
    ("hermes", "a < b, <tool_calls>, <tool"),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Par'),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {"city": "Paris"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 01}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\n"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b\nc"}}</tool_call>'),
    ("hermes", "<tool_call>{'name': 'now'}</tool_call>"),
    ("hermes", '<tool_call>{"name": ["now"]}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", "</tool_call> <tool_call>"),
    ("hermes", '<tool_call>{"name": "now", "name": "now"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": ' + '{"a": ' + "[" * 200),
    ("hermes", "\n \n"),
    ("llama3_json", 'The answer is {"name": "now", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>brave_search.call(query="now")'),
    ("json", '; {"name": "now"}'),
    ("json", '{"city": {"name": "now", "arguments": {}}}'),
    ("json", '[1, 2, {"name": "now", "arguments": {}}]'),
    ("mistral", "[TOOL_CALLS]get_weather [ARGS]{}"),
    ("mistral", "[TOOL_CALLS]get_weather[ARG]{}"),
    ("mistral", "[TOOL_CALLS]rm[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]now[ARGS]"),
    ("mistral", "[TOOL_CALLS] and [TOOL_CALLS"),
    ("qwen3_coder", "<tool_call><function=rm></function></tool_call>"),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=city>Paris</parameter>"),
    ("qwen3_coder", "<tool_call><function=get_weather>Paris</function></tool_call>"),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=the city>Paris</parameter></function></tool_call>"),
    ("qwen3_coder", "<tool_call><function=get_weather><parameter=city>\nParis\n</para"),
    ("qwen3_coder", f"<tool_call><function=get_weather><parameter={'a' * 300}>1</parameter></function></tool_call>"),
    ("pythonic", f"[get_weather({'a' * 300}=1)]"),
    ("mistral", f"[TOOL_CALLS]now[ARGS]{' ' * 600}{{}}"),
    ("glm45", "<tool_call>rm</tool_call>"),
    ("glm45", "<tool_call>now<arg_value>1</arg_value></tool_call>"),
    ("minimax_m2", '<minimax:tool_call><invoke name="now"/></minimax:tool_call>'),
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n{}"),
    ("kimi_k2", "<|tool_call_begin|>functions.now<|tool_call_argument_begin|>{}"),
    ("kimi_k2", f"<|tool_call_begin|>functions.now:{'1' * 65}<|tool_call_argument_begin|>{{}}"),
    ("kimi_k2", "<|tool_call_begin|>functions.rm:0<|tool_call_argument_begin|>{}"),
    ("pythonic", "now()"),
    ("pythonic", "[1, now()]"),
    ("pythonic", "[get_weather('Paris')]"),
    ("pythonic", "[get_weather(city=Paris)]"),
    ("pythonic", "[get_weather(city={'Paris'})]"),
    ("pythonic", "[get_weather(city=b'Paris')]"),
    ("pythonic", "[get_weather(city='\\ud800')]"),
    ("pythonic", "[get_weather(days=1j)]"),
    ("pythonic", f"[get_weather(places={'[' * 300}{']' * 300})]"),
    ("pythonic", "[get_weather(city='Paris"),
    ("olmo3", "<function_calls>\nrm()\n</function_calls>"),
]
TEXTS = [(row[0], row[1]) for row in CALLS] + NO_CALLS


@each_row(*CALLS)
def test_calls_are_found_and_all_else_is_content(
    call_format: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    parsed = parse(call_format, [text])

    assert (parsed.content, parsed.calls) == (content, calls)
    assert parsed.ids == [format_named(call_format).call_id("a", number) for number in range(len(calls))]


@each_row(*NO_CALLS)
def test_what_is_no_call_is_content_to_the_last_character(call_format: str, text: str) -> None:
    parsed = parse(call_format, [text])

    assert (parsed.content, parsed.calls) == (text, [])


@each_row(*TEXTS)
def test_any_cut_gives_the_same_result(call_format: str, text: str) -> None:
    whole = parse(call_format, [text])

    assert parse(call_format, text) == whole  # character by character
    for cut in range(0, len(text), 1 + len(text) // 200):
        assert parse(call_format, (text[:cut], text[cut:])) == whole


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "[CALL_ID]"),
        *("<function=now>", "</function>", "<parameter=city>", "<parameter=days>", "</parameter>"),
        *("<arg_key>city</arg_key>", "<arg_value>", "</arg_value>", '<invoke name="now">', "</minimax:tool_call>"),
        *("<minimax:tool_call>", "<seed:tool_call>", "<function_calls>", "<|tool_call|>", "functools", "<tool_calls>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "function<｜tool▁sep｜>now\n```json\n", "<｜tool▁sep｜>"),
        *("<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>", "get_weather(city='", "'", "now()", ")"),
        *('{"name": "now", "arguments": {}}', '{"name":', '"now"', '"arguments": ', ODD, "now"),
        *("</function>\n</tool_call>", "<arg_key>days</arg_key>", '<parameter name="city">', '{"a": 1, "b": "'),
        *("{", "}", "[", "]", ",", ";", "<", '"', "\\", "1", "null", "text", "🦊", "\n", " " * 40),
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    call_format=st.sampled_from([row.name for row in TOOL_CALL_FORMATS]),
    fragments=st.lists(FRAGMENTS, max_size=14),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_any_text_in_any_split_gives_one_result_and_loses_nothing(
    call_format: str, fragments: list[str], cuts: list[int]
) -> None:
    text = "".join(fragments)
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(places)]

    parsed = parse(call_format, pieces)

    assert parsed == parse(call_format, [text])
    assert parsed.calls or parsed.content == text  # also where the stream shows what remains of a call
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in parsed.calls)


def test_arguments_and_content_do_not_wait() -> None:
    parser = ToolCallParser(format_named("hermes"), TOOLS, "a")

    assert parser.feed("a < b <tool") == [ContentDelta("a < b ")]
    assert parser.feed("s") == [ContentDelta("<tools")]
    assert parser.feed('<tool_call>\n{"name": "now", "arguments": ') == []
    assert parser.feed('{"a": "b", ') == []
    assert parser.feed('"') == [ToolCallBegin(0, openai_call_id("a", 0), "now"), ToolCallArguments(0, '{"a": "b", "')]
    assert parser.feed('c": "d') == [ToolCallArguments(0, 'c": "d')]
    assert parser.feed('"}') == [ToolCallArguments(0, '"')]
    assert parser.feed("}\n</tool_call>") == [ToolCallArguments(0, "}")]
    assert parser.finish() == []


def test_a_string_between_tags_does_not_wait_for_its_end() -> None:
    parser = ToolCallParser(format_named("qwen3_coder"), TOOLS, "a")

    assert parser.feed("<tool_call>\n<function=get_weather>\n<parameter=exact>True</parameter>") == []
    begun = parser.feed("<parameter=city>\nSão")
    assert begun == [
        ToolCallBegin(0, openai_call_id("a", 0), "get_weather"),
        ToolCallArguments(0, '{"exact": true, "city": "São'),
    ]
    assert parser.feed(' "P"\n') == [ToolCallArguments(0, ' \\"P\\"')]
    assert parser.feed("</para") == []
    assert parser.feed("\n") == [ToolCallArguments(0, "\\n</para")]
    assert parser.feed("</parameter>\n<parameter=days>\n1") == [ToolCallArguments(0, '", "days": ')]
    assert parser.feed("2\n</parameter>\n</function>") == [ToolCallArguments(0, "12}")]


def test_ids_that_the_model_writes_are_kept_unless_it_writes_one_twice() -> None:
    call = "<|tool_call_begin|>functions.now:7<|tool_call_argument_begin|>{}<|tool_call_end|>"

    parsed = parse("kimi_k2", [f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>"])

    assert (parsed.ids, parsed.calls, parsed.content) == (
        ["functions.now:7", openai_call_id("a", 1)],
        [("now", "{}")] * 2,
        "",
    )


@each_row(
    ("mistral", "[TOOL_CALLS]no", "t"),
    ("qwen3_coder", "<tool_call>\n<function=no", "t"),
    ("hermes", '<tool_call>{"name": "not', '"'),
    ("hermes", '<tool_call>{"name": "now", "arguments": ', "["),
    ("hermes", '<tool_call>{"name": ', "5"),
    ("json", '{"type": "x", "summary', '"'),
)
def test_what_cannot_become_a_call_does_not_wait(call_format: str, text: str, last: str) -> None:
    parser = ToolCallParser(format_named(call_format), TOOLS, "a")

    assert parser.feed(text) == []
    assert parser.feed(last)[-1] == ContentDelta(text + last)


def test_endless_whitespace_is_content() -> None:
    parser = ToolCallParser(format_named("hermes"), TOOLS, "a")

    assert parser.feed("\n" * MAX_GAP_CHARS) == []
    assert parser.feed("\n") == [ContentDelta("\n" * (MAX_GAP_CHARS + 1))]


def test_ids_are_those_that_the_family_s_template_takes_back() -> None:
    ids = {
        row.name: {row.call_id("a", index) for index in range(10)} | {row.call_id("b", index) for index in range(10)}
        for row in TOOL_CALL_FORMATS
    }

    assert all(len(made) == 20 for made in ids.values())
    assert all(len(call_id) == 9 and call_id.isalnum() and call_id.isascii() for call_id in ids["mistral"])
    assert all(call_id.startswith("call_") for call_id in ids["hermes"])
