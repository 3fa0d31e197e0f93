"""What clients send is read in a time that grows with its size: twice as much takes at most 2.5 times as long."""

import gc
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from executor_svc.fake.tokenizer import fake_tokenizer_files
from octavo.batch.batch_file import json_object
from octavo.generation.v1 import generation_pb2
from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.grammars.parts import message_part, whole
from scheduler_svc.front.grammars.reading import read_grammar
from scheduler_svc.front.text.chat_template import ChatTemplate
from scheduler_svc.front.text.conversation import Conversation
from scheduler_svc.front.text.stop_strings import StopStringMatcher
from scheduler_svc.front.text.tokenizer import Tokenizer
from scheduler_svc.front.tool_calls.formats import REASONING_FORMATS, TOOL_CALL_FORMATS
from scheduler_svc.front.tool_calls.parser import ToolCallParser
from scheduler_svc.front.tool_calls.reasoning import ReasoningParser

# Sizes of the inputs that are compared: two doublings lie between them.
SMALL, LARGE = 1000, 4000
MOST_PER_DOUBLING = 2.5


def grammar(kind: str, make: Callable[[int], Any]) -> Callable[[int], Callable[[], object]]:
    """Return what makes the reading of a grammar of some size."""

    def reading(size: int) -> Callable[[], object]:
        made = make(size)
        message = generation_pb2.Grammar()
        setattr(message, kind, made if isinstance(made, str) else json.dumps(made))
        return partial(read, message)

    return reading


def read(message: generation_pb2.Grammar) -> None:
    """Read a grammar, which may be wrong, but not too large to be read."""
    try:
        read_grammar(whole(message_part(message, "grammar")))
    except InvalidFieldError as error:
        if "bytes long" in str(error):
            raise


def chained(size: int) -> dict[str, Any]:
    """Return a schema with as many references to a chain as the chain has links."""
    defs = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(size)}
    end = {"type": "object", "properties": {"kind": {"const": "x"}}, "required": ["kind"]}
    return {"$defs": {**defs, f"d{size}": end}, "oneOf": [{"$ref": "#/$defs/d0"}] * size}


def tagged(size: int) -> dict[str, Any]:
    """Return a schema with as many references to one object as that has properties."""
    names = [f"p{index}" for index in range(size)]
    end = {"type": "object", "properties": {name: {"const": "x"} for name in names}, "required": names}
    return {"$defs": {"d": end}, "oneOf": [{"$ref": "#/$defs/d"}] * size}


def output(make: Callable[[int], str], parser: Callable[[], Any]) -> Callable[[int], Callable[[], object]]:
    """Return what makes the parsing of an output of some size that comes whole."""

    def reading(size: int) -> Callable[[], object]:
        text = make(size)

        def read() -> None:
            parsing = parser()
            parsing.feed(text)
            parsing.finish()

        return read

    return reading


def tool_calls(name: str) -> Callable[[], ToolCallParser]:
    """Return what opens a parser of a format."""
    [call_format] = (row for row in TOOL_CALL_FORMATS if row.name == name)
    return lambda: ToolCallParser(call_format, {"weather": {"type": "object"}}, "x")


def stop_strings(size: int) -> Callable[[], object]:
    """Return the search in a text that begins them again and again."""

    def read() -> None:
        matcher = StopStringMatcher(["ab" * 500 + "x", "b" * 1024], include_stop_str_in_output=False)
        matcher.push("a" * size, may_stop=False)
        for _ in range(size):
            matcher.push("ab")
        matcher.finish()

    return read


def rendering(size: int) -> Callable[[], object]:
    """Return the rendering of a conversation of many messages."""
    template = ChatTemplate("{% for turn in messages %}{{ turn.role + turn.content }}{% endfor %}", {})
    chat = Conversation.of_turns([("user", "Hello"), ("system", "Be brief.")] * (size // 10))
    return partial(template.render, chat)


def banned_words(size: int) -> Callable[[], object]:
    """Return the tokenizing of a long text, as that of banned words."""
    return partial(Tokenizer(fake_tokenizer_files()).encode_part, "word" * (size // 4))


READERS: dict[str, Callable[[int], Callable[[], object]]] = {
    "lark: a text without an end": grammar("lark", lambda size: 'start: "a"\n' + r"\"" * 5 * size),
    "lark: an expression without an end": grammar("lark", lambda size: "start: /" + r"\/" * 5 * size),
    "lark: texts": grammar("lark", lambda size: "start: " + '"a" ' * size),
    "regex: classes without an end": grammar("regex", lambda size: "[" * 5 * size),
    "schema: places below a long name": grammar(
        "json_schema", lambda size: {"properties": {"n" * 30 * size: {"anyOf": [{}] * size}}}
    ),
    "schema: classes without an end": grammar("json_schema", lambda size: {"pattern": "[" * 5 * size + "\\"}),
    "schema: escapes without an end": grammar("json_schema", lambda size: {"pattern": r"\x{0" * 5 * size}),
    "schema: a long place behind references": grammar(
        "json_schema",
        lambda size: {"$defs": {"n" * 9 * size: {}}, "anyOf": [{"$ref": "#/$defs/" + "n" * 9 * size}] * 2},
    ),
    "schema: alternatives that lead into a chain": grammar("json_schema", chained),
    "schema: alternatives with many constants": grammar("json_schema", tagged),
    "schema: constants": grammar("json_schema", lambda size: {"enum": [f"text {index}" for index in range(size)]}),
    "calls: JSON": output(lambda size: "<tool_call>" * size, tool_calls("hermes")),
    "calls: JSON that nests": output(lambda size: "<tool_call>" + '{"a":[' * size, tool_calls("hermes")),
    "calls: names in front": output(lambda size: "<｜tool▁call▁begin｜>" * 2 * size, tool_calls("deepseek_v3")),
    "calls: tags": output(lambda size: "<tool_call><function=weather>" * size, tool_calls("qwen3_coder")),
    "calls: as in Python": output(lambda size: '[weather(a="' + "'" * size, tool_calls("pythonic")),
    "reasoning that begins again": output(
        lambda size: "<think> " * size, lambda: ReasoningParser(REASONING_FORMATS[0], starts_inside=False)
    ),
    "stop strings": stop_strings,
    "a chat template": rendering,
    "banned words": banned_words,
    "a line of a batch": lambda size: partial(json_object, b'{"custom_id": "' + b"\\u0041" * 9 * size + b'"}'),
}


def time_of(read: Callable[[], object]) -> float:
    """Return the CPU time of one reading, the least of some, in seconds."""
    times: list[float] = []
    while len(times) < 2 or (len(times) < 20 and sum(times) < 0.02):
        begun_at_s = time.thread_time()
        read()
        times.append(time.thread_time() - begun_at_s)
    return min(times)


def growth(reading: Callable[[int], Callable[[], object]]) -> float:
    """Return by how much the time grows with each doubling."""
    return float((time_of(reading(LARGE)) / time_of(reading(SMALL))) ** 0.5)


@pytest.mark.parametrize("name", READERS)
def test_twice_as_much_takes_no_more_than_twice_as_long(name: str) -> None:
    gc.collect()
    gc.disable()
    try:
        told = growth(READERS[name])
        assert told <= MOST_PER_DOUBLING or growth(READERS[name]) <= MOST_PER_DOUBLING, told
    finally:
        gc.enable()
