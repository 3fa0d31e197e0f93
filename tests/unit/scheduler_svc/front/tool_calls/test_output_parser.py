"""Reasoning, content, tool calls and end tokens of one output, in any split."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.front.tool_calls.chat_format import OutputParser
from scheduler_svc.front.tool_calls.events import ContentDelta, ReasoningDelta
from scheduler_svc.front.tool_calls.formats import REASONING_FORMATS, ReasoningFormat
from scheduler_svc.front.tool_calls.reasoning import MAX_LEADING_CHARS, ReasoningParser, opens_reasoning
from tests.support.each_row import each_row
from tests.unit.scheduler_svc.front.tool_calls.parsing import Parsed, parse

THINK, SQUARE = REASONING_FORMATS[1], REASONING_FORMATS[2]
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
END_TOKENS = ("<|im_end|>", "</s>")

# format, whether the prompt opens it, text, reasoning, content
OUTPUTS = [
    (THINK, False, "<think>\nWell ...\n</think>\n\nYes.", "Well ...\n", "Yes."),
    (THINK, False, "\n<think></think>Yes.\n", "", "Yes.\n"),
    (THINK, False, "Yes, <think>no</think>.", "", "Yes, <think>no</think>."),
    (THINK, False, "\n\n<thin> ice", "", "\n\n<thin> ice"),
    (THINK, False, " " * 33 + "<think>a</think>", "", " " * 33 + "<think>a</think>"),
    (THINK, False, "<think>a < b </thinks> \n", "a < b </thinks> \n", ""),
    (THINK, False, "<think> <think> a", "a", ""),
    (THINK, True, "\nWell.</think>Yes.", "Well.", "Yes."),
    (THINK, True, "<think>\nWell.</think>Yes.</think>", "Well.", "Yes.</think>"),
    (THINK, True, "\n\n</think>\n\n Yes.", "", "Yes."),
    (THINK, True, "<thi", "<thi", ""),
    (THINK, True, "Well.</thi", "Well.</thi", ""),
    (THINK, True, "Well.</think>\n\n", "Well.", ""),
    (THINK, False, "", "", ""),
    (THINK, False, "<thi", "", "<thi"),
    (SQUARE, False, "[THINK]Well.[/THINK]Yes.", "Well.", "Yes."),
]


def reader(reasoning: ReasoningFormat, starts_inside: bool) -> ReasoningParser:
    return ReasoningParser(reasoning, starts_inside=starts_inside)


@each_row(*OUTPUTS)
def test_reasoning_is_apart_from_the_answer_however_the_text_is_cut(
    reasoning_format: ReasoningFormat, starts_inside: bool, text: str, reasoning: str, content: str
) -> None:
    expected = Parsed(content=content, reasoning=reasoning)

    for pieces in [[text], text, *((text[:cut], text[cut:]) for cut in range(len(text)))]:
        assert parse(None, pieces, reasoning=reader(reasoning_format, starts_inside)) == expected


def test_calls_are_found_in_the_answer_and_not_in_the_reasoning() -> None:
    parsed = parse("hermes", f"<think>I write {CALL}.</think>\n\n{CALL}", reasoning=reader(THINK, False))

    assert (parsed.reasoning, parsed.content, parsed.calls) == (f"I write {CALL}.", "", [("now", "{}")])


def test_bare_call_comes_at_the_beginning_of_the_answer() -> None:
    parsed = parse("llama3_json", 'Hm.</think>\n{"name": "now"}', reasoning=reader(THINK, True))

    assert (parsed.reasoning, parsed.calls) == ("Hm.", [("now", "{}")])


def test_only_what_may_be_a_marker_waits() -> None:
    parser = OutputParser(reader(THINK, False), None)

    assert parser.feed("<think>a < b </") == [ReasoningDelta("a < b ")]
    assert parser.feed("b></think>") == [ReasoningDelta("</b>")]
    assert parser.feed("\nc </think") == [ContentDelta("c </think")]
    assert reader(THINK, False).feed(" " * MAX_LEADING_CHARS) == ([], "")


@each_row(
    ("Yes.<|im_end|>", "Yes."),
    ("a</s>b</s>", "a</s>b"),
    ("</s></s>", "</s>"),
    ("Yes.<|im_end", "Yes.<|im_end"),
    ("<</s>", "<"),
    ("</s", "</s"),
)
def test_an_end_token_at_the_very_end_is_left_out(text: str, content: str) -> None:
    for pieces in [[text], text, *((text[:cut], text[cut:]) for cut in range(len(text)))]:
        assert parse(None, pieces, end_tokens=END_TOKENS) == Parsed(content=content)


def test_an_end_token_behind_a_call_is_left_out() -> None:
    assert parse("hermes", f"{CALL}<|im_end|>", end_tokens=END_TOKENS).content == ""


FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", CALL, "<|im_end|>", "</s>", "<", "\n", "text", "</", "🦊", " " * 20]
)


@settings(max_examples=200, deadline=None)
@given(fragments=st.lists(FRAGMENTS, max_size=10), size=st.integers(1, 9), starts_inside=st.booleans())
def test_any_split_of_all_together_gives_one_result(fragments: list[str], size: int, starts_inside: bool) -> None:
    text = "".join(fragments)
    pieces = [text[place : place + size] for place in range(0, len(text), size)]

    in_pieces = parse("hermes", pieces, reasoning=reader(THINK, starts_inside), end_tokens=END_TOKENS)

    assert in_pieces == parse("hermes", [text], reasoning=reader(THINK, starts_inside), end_tokens=END_TOKENS)


@each_row(
    ("<|im_start|>assistant\n<think>\n", True),
    ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
    ("<think>\na</think><|im_start|>assistant\n", False),
    ("", False),
)
def test_a_prompt_that_ends_with_the_marker_opens_the_reasoning(prompt: str, opens: bool) -> None:
    assert opens_reasoning(THINK, prompt) is opens
