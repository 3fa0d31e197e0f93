"""What clients send is read in a time that grows with its size: twice as much takes at most 2.5 times as long."""

import gc
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest

from executor_svc.fake.tokenizer import fake_tokenizer_files
from executor_svc.fake.worker import FakeWorker
from octavo.batch.batch_file import BatchFile, json_object
from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.api.pooling_validation import MAX_INPUTS, check_pooling
from scheduler_svc.front.api.request_limits import FrontSettings
from scheduler_svc.front.grammars.mask_cost import too_dear
from scheduler_svc.front.grammars.parts import message_part, whole
from scheduler_svc.front.grammars.reading import read_grammar
from scheduler_svc.front.text.chat_template import ChatTemplate
from scheduler_svc.front.text.conversation import Conversation
from scheduler_svc.front.text.output_text import StopStringMatcher
from scheduler_svc.front.text.text_model import TextModel
from scheduler_svc.front.text.tokenizer import Tokenizer
from scheduler_svc.front.tool_calls.formats import (
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    HarmonyBody,
    JsonBody,
    NamedBody,
    PythonicBody,
    Slot,
    ToolCallFormat,
    XmlBody,
)
from scheduler_svc.front.tool_calls.harmony import HarmonyParser
from scheduler_svc.front.tool_calls.parser import ToolCallParser
from scheduler_svc.front.tool_calls.reasoning import ReasoningParser
from scheduler_svc.request.served_model import ServedModel

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
    """Read a grammar, which may be wrong, but not too large to be read, and look at the cost of its masks."""
    asked = message_part(message, "grammar")
    try:
        parts, _ = read_grammar(whole(asked))
        for part in parts:
            too_dear(part.rules)
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


def output(
    make: Callable[[int], str], parser: Callable[[], Any], piece_chars: int = 0
) -> Callable[[int], Callable[[], object]]:
    """Return what makes the parsing of an output of some size, which comes in pieces of some size; 0: whole."""

    def reading(size: int) -> Callable[[], object]:
        text = make(size)
        pieces = [text[start : start + piece_chars] for start in range(0, len(text), piece_chars or len(text))]

        def read() -> None:
            parsing = parser()
            for piece in pieces if piece_chars else [text]:
                parsing.feed(piece)
            parsing.finish()

        return read

    return reading


def tool_calls(name: str, num_arguments: int = 1) -> ToolCallParser:
    """Open a parser of a format; the tool has so many arguments."""
    [call_format] = (row for row in TOOL_CALL_FORMATS if row.name == name)
    properties = {f"a{index}": {"type": "string"} for index in range(num_arguments)}
    return ToolCallParser(call_format, {"weather": {"type": "object", "properties": properties}}, "x")


def opening(call_format: ToolCallFormat) -> str:
    """Return the beginning of a call, into the text of its first argument."""
    begin = call_format.begin[-1] if call_format.begin else ""
    match call_format.body:
        case JsonBody():
            return begin + '{"name": "weather", "arguments": {"a0": "'
        case PythonicBody():
            return begin + '[weather(a0="'
        case NamedBody() as body:
            slots = {Slot.NAME: "weather", Slot.ID: "1"}
            return (
                begin
                + "".join(slots[part] if isinstance(part, Slot) else part for part in body.headers[0])
                + '{"a0": "'
            )
        case XmlBody() as body:
            return f"{begin}{body.function}weather{body.name_end}{body.key}a0{body.key_end}{body.value}"
        case HarmonyBody():
            raise AssertionError("no row of the table has it")


def calls_of_format(call_format: ToolCallFormat) -> Mapping[str, Callable[[int], Callable[[], object]]]:
    """Return readers of calls that begin again and again, whole and in pieces, and of one argument without an end."""
    begun, parser = opening(call_format), partial(tool_calls, call_format.name)
    at_once = output(lambda size: begun * (size // 64), parser)
    pieces = output(lambda size: begun[:-1] * (size // 64), parser, 3)

    def both(size: int) -> Callable[[], object]:
        readers = at_once(size), pieces(size)
        return lambda: [read() for read in readers]

    endless = output(lambda size: begun + "x" * 50 * size, parser, 80)
    name = f"calls of {call_format.name}"
    return {f"{name}: beginnings": both, f"{name}: an argument without an end": endless}


def batch_file(size: int) -> Callable[[], object]:
    """Return the reading of a file of many requests."""
    lines = "".join(f'{{"custom_id": "{number}"}}\n' for number in range(size))

    def read() -> None:
        with NamedTemporaryFile() as file:
            file.write(lines.encode())
            file.flush()
            BatchFile(Path(file.name))

    return read


def embedded(make: Callable[[int], list[str]]) -> Callable[[int], Callable[[], object]]:
    """Return what makes the check of inputs to embed."""
    worker = FakeWorker(max_model_len=2**17, max_num_batched_tokens=2**17, has_pooling=True)
    model = TextModel(ServedModel(worker.info, 64, 4), Tokenizer(worker.tokenizer_files()))

    def reading(size: int) -> Callable[[], object]:
        inputs = [pb.EmbedInput(text=text) for text in make(size)]
        return partial(check_pooling, pb.EmbedRequest(inputs=inputs), model, FrontSettings(1), str)

    return reading


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


harmony = partial(HarmonyParser, ("weather",), "x")

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
    "schema: alternatives that lead into a chain": grammar("json_schema", lambda size: chained(size // 4)),
    "schema: alternatives with many constants": grammar("json_schema", lambda size: tagged(size // 4)),
    "schema: constants": grammar("json_schema", lambda size: {"enum": [f"text {index}" for index in range(size)]}),
    **{name: reading for row in TOOL_CALL_FORMATS for name, reading in calls_of_format(row).items()},
    "calls: markers": output(lambda size: "<tool_call>" * (size // 4), partial(tool_calls, "hermes")),
    "calls: JSON that nests": output(lambda size: "<tool_call>" + '{"a":[' * size, partial(tool_calls, "hermes")),
    "calls: quotes in Python": output(lambda size: '[weather(a="' + "'" * size, partial(tool_calls, "pythonic")),
    "calls: ends of arguments": output(
        lambda size: opening(TOOL_CALL_FORMATS[6]) + "\n</param" * (size // 4), partial(tool_calls, "qwen3_coder")
    ),
    "calls: as many arguments as the tool has": lambda size: output(
        lambda _: "<tool_call><function=weather>" + "".join(f"<parameter=a{n}>x" for n in range(size // 16)),
        partial(tool_calls, "qwen3_coder", size),
    )(size),
    "reasoning that begins again": output(
        lambda size: "<think> " * size, lambda: ReasoningParser(REASONING_FORMATS[0], starts_inside=False)
    ),
    "harmony: messages": output(lambda size: "<|start|>assistant<|channel|>" * (size // 4), harmony),
    "harmony: a header without an end": output(lambda size: "<|start|>" + "a to=" * size, harmony, 3),
    "harmony: a text without an end": output(
        lambda size: "<|channel|>final<|message|>" + "<|" * 50 * size, harmony, 80
    ),
    "stop strings": stop_strings,
    "a chat template": rendering,
    "banned words": banned_words,
    "a line of a batch": lambda size: partial(json_object, b'{"custom_id": "' + b"\\u0041" * 9 * size + b'"}'),
    "lines of a batch": batch_file,
    "a long input to embed": embedded(lambda size: ["word " * size]),
    "many inputs to embed": embedded(lambda size: ["x"] * (size * MAX_INPUTS // LARGE)),
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
        told: list[float] = []  # a busy machine disturbs one
        while not told or (min(told) > MOST_PER_DOUBLING and len(told) < 3):
            told.append(growth(READERS[name]))
        assert min(told) <= MOST_PER_DOUBLING, told
    finally:
        gc.enable()
