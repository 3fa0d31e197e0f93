"""Numbers at and beyond the ends of what can travel: each is taken, or refused with its own value and a true limit."""

import json
import re
import typing
from decimal import Decimal

import pytest

from scheduler_svc.front.openai.fields import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    RequestFields,
    TokenizeFields,
)
from tests.contract.openai.api import HELLO, Api, Json

# As they stand in JSON; NaN is refused before any field is read.
VALUES = (
    *("2147483648", "4294967296", "9223372036854775808", "18446744073709551616"),
    *("-1", "-2147483649", "1e400", "3e38", "1e39", "1.0000001", "100.00001", "true", '"3"'),
)
# What a field needs beside it so that only its own number can be wrong.
BESIDE: dict[str, str] = {
    "length_penalty": '"n": 2, "use_beam_search": true',
    "top_logprobs": '"logprobs": true',
    "n": '"temperature": 1',
    "best_of": '"temperature": 1',
}
# Of these the field takes an integer of any size.
CUT = ("max_tokens", "max_completion_tokens")

_RANGE = re.compile(
    r"must be (?:from (\S+)(?: \(n\))? to ([^ ,;]+)|at least (\S+)|above (\S+) and at most (\S+)|(\S+):)"
)


def numeric_fields(kind: type[RequestFields]) -> dict[str, type]:
    """Return the fields that are one number, with its type."""
    found = {}
    for name, field in kind.model_fields.items():
        types = set(typing.get_args(field.annotation)) - {type(None)}
        if types in ({int}, {float}):
            found[name] = types.pop()
    return found


def is_within(value: str, words: str) -> bool | None:
    """Return whether a value is in the range that a refusal names; None: it names none."""
    match = _RANGE.search(words)
    if match is None:
        return None
    low, high, least, above, most, only = match.groups()
    number = Decimal(value)
    if only is not None:
        return number == Decimal(only)
    bounds = Decimal(low or least or above), Decimal(high or most or "inf")
    return bounds[0] < number <= bounds[1] if above else bounds[0] <= number <= bounds[1]


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/completions", CompletionFields), ("/v1/chat/completions", ChatFields)]
)
async def test_a_number_is_taken_or_refused_with_its_value_and_a_true_limit(
    api: Api, path: str, kind: type[RequestFields]
) -> None:
    fields = numeric_fields(kind)
    assert len(fields) > 15
    wrong = []
    for name, number_type in fields.items():
        for value in VALUES:
            prompt = '"prompt": "a"' if kind is CompletionFields else f'"messages": {json.dumps(HELLO)}'
            parts = ['"model": "fake"', '"max_tokens": 3' if name not in CUT else '"stop_token_ids": [65]', prompt]
            parts += [*filter(None, [BESIDE.get(name)]), f'"{name}": {value}']
            body = "{" + ", ".join(parts) + "}"
            answer = await api.send("POST", path, data=body, headers={"Content-Type": "application/json"})
            if problem := judged(name, number_type, value, answer.status, answer.json):
                wrong.append((name, value, problem, answer.text[:200]))
    assert not wrong, "\n".join(map(str, wrong))


def judged(name: str, number_type: type, value: str, status: int, answer: Json) -> str:
    """Return what is wrong with an answer; empty: nothing."""
    is_huge = value == "1e400"
    is_number = value not in ("true", '"3"')
    is_whole = is_number and float(value).is_integer() if not is_huge else False
    if status == 200:
        return "" if is_number and (number_type is float or is_whole) else "is no such number, and was taken"
    error = answer["error"]
    if status != 400 or error["param"] != name:
        return f"status {status}, param {error['param']}"
    if name in CUT and number_type is int and value.isdigit():
        return "should be cut"
    shown = re.match(rf"{name} is (.+?); it must be ", error["message"])
    if shown is None:
        return "no value"
    if not is_number:
        return "" if shown[1] == value else "another value"
    if float(shown[1]) != float(value) and not is_huge:
        return f"{shown[1]} is another value"
    return "its value is within its limit" if is_within(value, error["message"]) else ""


async def test_not_a_number_is_no_json(api: Api) -> None:
    for value in ("NaN", "Infinity", "-Infinity"):
        body = f'{{"model": "fake", "prompt": "a", "temperature": {value}}}'
        answer = await api.send("POST", "/v1/completions", data=body, headers={"Content-Type": "application/json"})
        assert (answer.status, "not valid JSON" in answer.error["message"]) == (400, True), answer.text


async def test_ids_beyond_the_vocabulary_are_told_as_they_were_sent(api: Api) -> None:
    for size in (2**31, 2**32, 2**63, 2**64):
        for fields in ({"stop_token_ids": [size]}, {"allowed_token_ids": [65, size]}, {"logit_bias": {str(size): 1}}):
            answer = await api.complete(**fields)
            [name] = fields
            assert (answer.status, answer.error["param"]) == (400, name)
            assert f"with token id {size}; it must be ids from 0 to 258" in answer.error["message"]
        prompt = await api.complete(prompt=[size])
        tokens = await api.send("POST", "/detokenize", json={"tokens": [65, size]})
        for answer in (prompt, tokens):
            assert f"a list with token id {size}; it must be ids from 0 to 258" in answer.error["message"]


BODIES: dict[str, tuple[type[RequestFields], str]] = {
    "/v1/completions": (CompletionFields, '"model": "fake", "max_tokens": 3, "prompt": "a"'),
    "/v1/chat/completions": (ChatFields, f'"model": "fake", "max_tokens": 3, "messages": {json.dumps(HELLO)}'),
    "/tokenize": (TokenizeFields, '"prompt": "a"'),
    "/detokenize": (DetokenizeFields, '"tokens": [65]'),
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_large_number_is_nowhere_our_fault(api: Api, path: str) -> None:
    """Whatever a field is: in its place, in a list of it, and in an object as name and value."""
    kind, others = BODIES[path]
    wrong = []
    for name in set(kind.model_fields).difference(CUT):
        for value in (str(2**40), f"[65, {2**40}]", f"[[{2**40}]]", f'{{"65": {2**40}}}', f'{{"{2**40}": 1}}'):
            body = f'{{{others}, "{name}": {value}}}'
            answer = await api.send("POST", path, data=body, headers={"Content-Type": "application/json"})
            if answer.status not in (200, 400, 404):
                wrong.append((name, value, answer.text[:200]))
    assert not wrong, "\n".join(map(str, wrong))
