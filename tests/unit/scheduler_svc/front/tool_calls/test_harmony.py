"""OpenAI's harmony: messages of an output, in any split, and conversations as gpt-oss's template takes them."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.front.text.chat_template import ChatTemplate
from scheduler_svc.front.text.conversation import Conversation
from scheduler_svc.front.text.output_text import OutputText, TextOptions
from scheduler_svc.front.tool_calls.chat_format import ChatFormat, OutputParser
from scheduler_svc.front.tool_calls.formats import HARMONY_MARKERS, TOOL_CALL_FORMATS
from scheduler_svc.front.tool_calls.harmony import MAX_HEADER_CHARS, HarmonyParser
from scheduler_svc.front.tool_calls.tool_choice import check_tools
from tests.support.each_row import each_row
from tests.support.family_templates import FAMILIES, GPT_OSS
from tests.support.tokenizers import byte_level_backend, make_tokenizer
from tests.unit.scheduler_svc.front.tool_calls.parsing import TOOLS, Parsed

START = "<|start|>assistant"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
COMMENTARY = "<|channel|>commentary<|message|>"
THOUGHT = f"{ANALYSIS}Hm, a < b.<|end|>"
TO_WEATHER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
ARGUMENTS = '{"city": "Zürich <|x|>", "days": 1}'
CALLED = [("get_weather", ARGUMENTS)]

# What the model writes behind the prompt: thoughts, content, calls.
OUTPUTS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (f"{THOUGHT}{START}{FINAL}Yes.<|return|>", "Hm, a < b.", "Yes.", []),
    (f"{THOUGHT}{START}{TO_WEATHER}{ARGUMENTS}<|call|>", "Hm, a < b.", "", CALLED),
    # the ways of writing a recipient: in the role, without a space, on the channel of thoughts, without its namespace
    (f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>", "", "", CALLED),
    (f"<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>{ARGUMENTS}", "", "", CALLED),
    (f"<|channel|>analysis to=functions.get_weather code<|message|>\n{ARGUMENTS}\n<|call|>", "", "", CALLED),
    (f"<|channel|>commentary to=get_weather<|message|>{ARGUMENTS}<|call|>", "", "", CALLED),
    ("<|channel|>commentary to=functions.now json<|message|><|call|>", "", "", [("now", "{}")]),
    (f"{TO_WEATHER}{ARGUMENTS}}}<|call|>", "", "", CALLED),
    # several messages of one kind
    (f"{COMMENTARY}I look.<|end|>{START}{FINAL}Yes.", "", "I look.\n\nYes.", []),
    (f"{THOUGHT}{START}{ANALYSIS}So.<|end|>{START}{COMMENTARY}I look.<|end|>", "Hm, a < b.\n\nSo.", "I look.", []),
    (f"{TO_WEATHER}{ARGUMENTS}<|call|>\n{START}{FINAL}Yes.", "", "Yes.", CALLED),
    # what is for nobody here, and what the model plays
    ("<|channel|>analysis to=browser.search code<|message|>{}<|call|>", "{}", "", []),
    ("<|channel|>commentary to=python code<|message|>1<|call|>", "1", "", []),
    ("<|channel|>commentary to=functions.rm json<|message|>{}<|call|>", "{}", "", []),
    (f"{FINAL}Yes.<|end|><|start|>user<|message|>And?<|end|>{START}{FINAL}No.", "", "Yes.\n\nNo.", []),
    ("<|start|>functions.now to=assistant<|channel|>commentary<|message|>noon<|end|>", "", "", []),
    # forgotten and odd markers
    (f"{ANALYSIS}Hm.{FINAL}Yes.", "Hm.", "Yes.", []),
    (f"{ANALYSIS}Hm.{START}{FINAL}Yes.<|message|> <|constrain|>No.", "Hm.", "Yes. No.", []),
    (f"{THOUGHT}{FINAL}Yes.", "Hm, a < b.", "Yes.", []),
    (f"{START}{FINAL}Yes.", "", "Yes.", []),
    (f"{THOUGHT}assistant{FINAL}Yes.", "Hm, a < b.", "Yes.", []),
    ("<|channel|>final <|constrain|>json<|message|>{}", "", "{}", []),
    ("<|channel|>odd<|message|>Yes.", "", "Yes.", []),
    ("Yes, to be < <|end <|", "", "Yes, to be < <|end ", []),
    ("to", "", "to", []),
    (f"<|start|>{'x' * MAX_HEADER_CHARS}x{FINAL}Yes.", "", "Yes.", []),
    # broken calls are content, and what is cut of a header or a marker is nothing
    (f'{TO_WEATHER}{{"city": x}}<|call|>', "", '{"city": x}', []),
    (f"{TO_WEATHER}{ARGUMENTS[:-3]}", "", ARGUMENTS[:-3], []),
    (TO_WEATHER, "", "", []),
    (" to=functions.get_wea", "", "", []),
    (f"{THOUGHT}<|start|>assis", "Hm, a < b.", "", []),
    (f"{FINAL}Yes.<|retu", "", "Yes.", []),
    ("", "", "", []),
]


def parse(pieces: Iterable[str], prompt: str = START, tools: Mapping[str, Any] = TOOLS) -> Parsed:
    parser = OutputParser(None, HarmonyParser(tools, "a", prompt))
    parsed = Parsed(thinks_first=False)
    for piece in pieces:
        parsed.add(parser.feed(piece))
    parsed.add(parser.finish())
    return parsed


@each_row(*OUTPUTS)
def test_messages_are_told_apart_however_the_text_is_cut(
    text: str, reasoning: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in [[text], text, *((text[:cut], text[cut:]) for cut in range(len(text)))]:
        parsed = parse(pieces)
        assert (parsed.reasoning, parsed.content, parsed.calls) == (reasoning, content, calls), pieces
    assert parse([text], "").calls == calls


FRAGMENTS = st.sampled_from(
    [
        *(*HARMONY_MARKERS, "assistant", " to=functions.now", "analysis", "commentary", "final", "json", "{}"),
        *(
            TO_WEATHER,
            FINAL,
            THOUGHT,
            START,
            "x" * 300,
            " " * 300,
            '{"a": 1, "',
            "<|",
            "<",
            "text",
            " ",
            "\n",
            "user",
            "🦊",
        ),
    ]
)


@settings(max_examples=300, deadline=None)
@given(fragments=st.lists(FRAGMENTS, max_size=14), size=st.integers(1, 9))
def test_any_split_gives_one_result_and_no_marker_is_in_it(fragments: list[str], size: int) -> None:
    text = "".join(fragments)

    parsed = parse(text[place : place + size] for place in range(0, len(text), size))

    assert parsed == parse([text])
    assert not any(marker in told for marker in HARMONY_MARKERS for told in (parsed.content, parsed.reasoning))
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in parsed.calls)


@each_row(
    (f"{FINAL}Be", " brief.<|end|>", "", " brief."),
    (ANALYSIS, "Hm.", "Hm.", ""),
    ("", FINAL + "Yes.", "", "Yes."),
    (f"{FINAL}Yes.<|end|>", f"{START}{FINAL}No.", "", "No."),
)
def test_the_prompt_begins_the_first_message(prompt: str, text: str, reasoning: str, content: str) -> None:
    parsed = parse([text], f"hi<|end|>{START}{prompt}")

    assert (parsed.reasoning, parsed.content) == (reasoning, content)


def test_arguments_do_not_wait_and_a_call_that_breaks_off_later_cannot_be_run() -> None:
    parser = HarmonyParser(TOOLS, "a")
    parser.feed(f'{TO_WEATHER}{{"city": "Rome", "')

    assert [event.delta for event in parser.feed('days": 1')] == ['days": 1']  # type: ignore[union-attr]
    assert parse([f'{TO_WEATHER}{{"city": "Rome", "days": oops}}<|call|>']).remains


RETURN, CALL = "<|return|>", "<|call|>"


@each_row(
    (f"{FINAL}Yes. 🦊{RETURN}", "Yes. 🦊", []),
    (f"{TO_WEATHER}{ARGUMENTS}{CALL}", "", CALLED),
    (f"<|channel|>commentary to=functions.now json<|message|>{CALL}", "", [("now", "{}")]),
)
def test_tokens_become_events_with_the_tokens_that_end_an_output(
    last: str, content: str, calls: list[tuple[str, str]]
) -> None:
    backend = byte_level_backend()
    backend.add_special_tokens([*HARMONY_MARKERS])
    tokenizer = make_tokenizer(backend, GPT_OSS)
    chat_format = ChatFormat.of(tokenizer)
    tools = check_tools([{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS])
    chat_format.check_tools(tools)
    assert chat_format.is_harmony
    assert chat_format.needs_special_tokens(None)
    prompt = tokenizer.render_chat(Conversation.of_turns([("user", "hi")]))
    ends = tokenizer.encode_part(RETURN + CALL)
    ids = tokenizer.encode_part(f"{THOUGHT}{START}{last}")

    text = OutputText(tokenizer, TextOptions(skip_special_tokens=False))
    parser = chat_format.output_parser(tools, prompt, ends)
    parsed = Parsed()
    for token_id in ids:
        parsed.add(parser.feed(text.push(token_id)[0]))
    parsed.add(parser.feed(text.finish()))
    parsed.add(parser.finish())

    assert (parsed.reasoning, parsed.content, parsed.calls) == ("Hm, a < b.", content, calls)
    num_thoughts = len(tokenizer.encode_part(THOUGHT))
    assert chat_format.num_harmony_reasoning_tokens(tools, ids) == num_thoughts
    assert chat_format.num_harmony_reasoning_tokens(tools, ids[: num_thoughts - 1]) == num_thoughts - 1


def test_only_its_template_is_recognised_and_others_are_not() -> None:
    for source in (family.source for family in FAMILIES.values()):
        assert not ChatFormat.of(make_tokenizer(byte_level_backend(), source)).is_harmony
    assert "openai" not in {row.name for row in TOOL_CALL_FORMATS}, "parser.py does not read it"


DEFINITIONS = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
WEATHER, NOW = (
    {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
    for name, arguments in (("get_weather", {"city": "Rome"}), ("now", {}))
)
USER = {"role": "user", "content": "hi"}
SUNNY = {"role": "tool", "tool_call_id": "call_get_weather", "content": "sunny"}
NOON = {"role": "tool", "tool_call_id": "call_now", "content": "noon"}


def rendered(*turns: Mapping[str, Any], **fields: Any) -> str:
    """Return what gpt-oss's template writes behind the user's message."""
    text = ChatTemplate(GPT_OSS, {}).render(Conversation([USER, *turns], DEFINITIONS, **fields))
    return text.partition("<|start|>user<|message|>hi<|end|>")[2]


def test_reasoning_and_text_of_a_call_are_one_thought_and_calls_come_one_by_one() -> None:
    turn = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [WEATHER, NOW]}
    weather = f'{START} to=functions.get_weather<|channel|>commentary json<|message|>{{"city": "Rome"}}<|call|>'
    now = f"{START} to=functions.now<|channel|>commentary json<|message|>{{}}<|call|>"
    answers = [
        f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"{said}"<|end|>'
        for name, said in (("get_weather", "sunny"), ("now", "noon"))
    ]

    open_ = rendered(turn, SUNNY, NOON)
    closed = rendered(turn, SUNNY, NOON, {"role": "assistant", "content": "Yes."}, USER)

    calls = weather + answers[0] + now + answers[1]
    assert open_ == f"{START}{ANALYSIS}Hm.\n\nI look.<|end|>{calls}{START}"
    assert closed == f"{calls}{START}{FINAL}Yes.<|end|><|start|>user<|message|>hi<|end|>{START}"


@each_row(
    {"content": "Yes.", "reasoning_content": "Hm."},
    {"content": "", "tool_calls": [WEATHER], "reasoning_content": "Hm."},
    {"content": "", "tool_calls": [NOW]},
)
def test_a_turn_that_the_template_writes_is_read_back(turn: Mapping[str, Any]) -> None:
    text = rendered({"role": "assistant", **turn}, add_generation_prompt=False).removeprefix(START)

    parsed = parse(text)

    assert (parsed.content, parsed.reasoning) == (turn["content"], turn.get("reasoning_content", ""))
    functions = [call["function"] for call in turn.get("tool_calls", ())]
    assert [(name, json.loads(text)) for name, text in parsed.calls] == [tuple(one.values()) for one in functions]
