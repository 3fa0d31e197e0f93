"""The scanner against Python's parser."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.front.tool_calls.json_scanner import (
    MAX_DEPTH,
    JsonObjectScanner,
    Part,
    is_json_object,
    unreadable_end,
)
from tests.support.each_row import each_row
from tests.unit.scheduler_svc.front.tool_calls.parsing import cannot_be_completed

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=3)
TOKENS = st.lists(
    st.sampled_from(
        [
            *'{}[]:,"\\-+.0eE1',
            "true",
            "false",
            "nul",
            "null",
            "\\u00e",
            "\\n",
            '"a"',
            '"a":',
            "01",
            "1.5e-3",
            " ",
            "\n",
            "\t",
        ]
    ),
    max_size=8,
)


def python_takes(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


@settings(max_examples=60, deadline=None)
@given(
    value=OBJECTS, indent=st.sampled_from([None, 1]), is_ascii=st.booleans(), place=st.integers(0, 100), tokens=TOKENS
)
def test_it_takes_the_objects_that_python_takes(
    value: object, indent: int | None, is_ascii: bool, place: int, tokens: list[str]
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    changed = text[:place] + "".join(tokens) + text[place + 1 :]

    assert is_json_object(text)
    assert is_json_object(changed) == (python_takes(changed) and changed == changed.strip())


@settings(max_examples=200, deadline=None)
@given(tokens=TOKENS, in_key=st.booleans())
def test_it_takes_the_values_that_python_takes(tokens: list[str], in_key: bool) -> None:
    joined = "".join(tokens)
    text = f'{{"a": {joined}}}'

    assert is_json_object(text) == python_takes(text)


@each_row(
    "NaN", "-Infinity", "0x1", '"\\x"', '"\\u12g4"', '"\x00"', "1.", "1e", "-", "tru3", "'a'", "[1,]", "[,]", "\u00a0"
)
def test_it_refuses_what_is_no_json(text: str) -> None:
    assert not is_json_object(f'{{"a": {text}}}')
    assert not is_json_object(f'{{"a": {{"b": 1,}}, "c": {text}}}')


@each_row("", "[]", "1", ' {"a": 1}', '{"a": 1} ', '{"a": 1,}', "{,}", '{"a"; 1}', '{"a": 1}}')
def test_only_one_object_and_nothing_else_is_an_object(text: str) -> None:
    assert not is_json_object(text)


def test_depth_has_a_limit() -> None:
    deepest = MAX_DEPTH - 1

    assert is_json_object('{"a": ' + "[" * deepest + "]" * deepest + "}")
    assert not is_json_object('{"a": ' + "[" * (deepest + 1) + "]" * (deepest + 1) + "}")


@settings(max_examples=40, deadline=None)
@given(value=OBJECTS)
def test_every_beginning_can_be_made_unreadable(value: dict[str, object]) -> None:
    text = json.dumps({**value, "z": '}"\\]\u00e9'})

    for end in range(1, len(text)):
        assert cannot_be_completed(text[:end] + unreadable_end(text[:end])), text[:end]
        assert not cannot_be_completed(text[:end])


@settings(max_examples=40, deadline=None)
@given(
    value=st.dictionaries(
        st.text(max_size=3), VALUES.filter(lambda value: not isinstance(value, int | float)), max_size=3
    )
)
def test_own_keys_and_values_are_found(value: dict[str, object]) -> None:
    scanner = JsonObjectScanner()
    found: list[tuple[str, str]] = []
    text = ""

    for character in json.dumps(value):
        part = scanner.take(character)
        text += character if part in (Part.VALUE, Part.VALUE_END) else ""
        if part is Part.VALUE_END:
            found.append((scanner.key, text))
            text = ""

    assert [(key, json.loads(text)) for key, text in found] == list(value.items())
