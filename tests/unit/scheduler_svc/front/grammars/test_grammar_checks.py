"""Grammars on their way into a request: what is sent, what is refused, before and while it is compiled."""

import asyncio
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.generation.v1 import generation_pb2
from octavo_shared.errors import InvalidFieldError, QueueFullError, UnavailableError
from octavo_shared.grammar.grammar import MAX_GRAMMAR_BYTES, Grammar
from scheduler_svc.front.grammars import compiler, grammar_checks
from scheduler_svc.front.grammars.compiler import CompilerHere, CompilerProcess
from scheduler_svc.front.grammars.grammar_checks import GrammarChecks
from scheduler_svc.front.grammars.parts import AskedGrammar, message_part, whole
from scheduler_svc.front.grammars.reading import Verdict, read_grammar
from scheduler_svc.front.text.text_model import TextModel
from scheduler_svc.front.text.tokenizer import Tokenizer
from scheduler_svc.request.served_model import ServedModel
from tests.support.each_row import each_row
from tests.support.grammars import byte_matcher, is_followed
from tests.support.patience import PATIENCE_S


def asked(**kind: Any) -> AskedGrammar:
    return whole(message_part(generation_pb2.Grammar(**kind), "grammar"))


def choice(*texts: str) -> generation_pb2.GrammarChoice:
    return generation_pb2.GrammarChoice(choices=texts)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@each_row(
    ({"json_schema": json.dumps(SCHEMA)}, ['{"a": 1}'], ['{"a": "1"}', '{"a": 1, "b": 2}', ""]),
    ({"json_object": True}, ["{}", '{"a": [1, null]}'], ["[]", "1"]),
    ({"regex": r"a/b\/\\/" + "\n"}, ["a/b/\\/\n"], ["a/b"]),
    ({"regex": "(?i)yes|no"}, ["YES", "no"], ["yes!", ""]),
    ({"choice": choice('a"b', "é\n\\", "/x/")}, ['a"b', "é\n\\", "/x/"], ["a", "/x"]),
    ({"lark": 'start: "%json" a+\na: /@x/'}, ["%json@x@x"], ["%json"]),
)
def test_each_kind_lets_through_what_it_describes(kind: dict[str, Any], fitting: list[str], others: list[str]) -> None:
    _, grammar = read_grammar(asked(**kind))
    for text in fitting:
        assert is_followed(grammar, text), text
    for text in others:
        assert not is_followed(grammar, text), text


@each_row(
    ({}, "grammar is empty; it must be one of json_schema, regex, choice, json_object and lark"),
    ({"json_schema": ""}, "grammar.json_schema is empty; it must be a JSON schema (EOF while parsing"),
    ({"json_schema": "{"}, "grammar.json_schema is {; it must be a JSON schema (EOF while parsing an object"),
    ({"json_schema": '{"a":' * 9999 + "1" + "}" * 9999}, "grammar.json_schema is "),
    (
        {"json_schema": " " * (MAX_GRAMMAR_BYTES + 1)},
        "grammar.json_schema is 262145 bytes long; ",
    ),
    ({"json_object": False}, "grammar.json_object is false; it must be true, or absent"),
    ({"regex": ""}, "grammar.regex is empty; it must be at least 1 character long"),
    (
        {"regex": "é" * MAX_GRAMMAR_BYTES},
        "grammar.regex is 524288 bytes long; it must be a regular expr",
    ),
    ({"regex": "/" * (MAX_GRAMMAR_BYTES - 9)}, "grammar.regex is "),
    ({"choice": choice()}, "grammar.choice is 0 texts long; it must be 1 to 1024 texts long"),
    ({"choice": choice(*map(str, range(1025)))}, "grammar.choice is 1025 texts long"),
    ({"choice": choice("a", "a")}, 'grammar.choice is ["a", "a"]; it must be texts of at least 1 character, none of'),
    ({"choice": choice("")}, 'grammar.choice is [""]; '),
    (
        {"lark": "start: %json {}"},
        "grammar.lark is one with %json; it must be a grammar in Lark's notation ",
    ),
    ({"lark": '%llguidance {"a": 1}\nstart: "a"'}, "grammar.lark is one with %llguidance; "),
    ({"lark": "start: a|@main"}, "grammar.lark is one with @main; "),
)
def test_what_is_wrong_is_refused_before_it_is_compiled(kind: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        read_grammar(asked(**kind))
    assert str(caught.value).startswith(sentence)


def model_with(**info: Any) -> TextModel:
    grammars = {"num_grammar_slots": 4, "matcher_id": byte_matcher().matcher_id, "max_grammar_bytes": MAX_GRAMMAR_BYTES}
    worker = FakeWorker(num_device_blocks=4)
    described = replace(worker.info, **{**grammars, **info})
    return TextModel(ServedModel(described, 64, 4), Tokenizer(worker.tokenizer_files()))


DEEP = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string", "pattern": "(?=a)"}}}}


@each_row(
    (
        {"regex": "["},
        "grammar.regex is [; it must be a regular expression that outputs can follow: ",
        "unclosed character",
    ),
    ({"regex": r"\bfoo"}, "grammar.regex is \\bfoo; ", "lookarounds"),
    ({"lark": "start: b"}, "grammar.lark is start: b; it must be a grammar in Lark's notation that outputs", "at 1(8)"),
    (
        {"json_schema": '{"$ref": "#"}'},
        'grammar.json_schema is {"$ref": "#"}; it must be a JSON schema that',
        "no text",
    ),
    (
        {"json_schema": json.dumps(DEEP)},
        "grammar.json_schema is a schema that cannot be held at #/properties/a/items; ",
        "?=a",
    ),
    ({"json_schema": '{"properties": {"a": {"type": "x"}}}'}, "grammar.json_schema is ", "at #/properties/a; "),
    (
        {"json_schema": json.dumps({"minLength": 3, "maxLength": 2, "type": "string"})},
        "grammar.json_schema is {",
        "minLength",
    ),
    ({"json_schema": json.dumps({"oneOf": [{}, {}]})}, "grammar.json_schema is {", "oneOf"),
)
async def test_what_does_not_compile_is_refused_in_the_parsers_words(kind: Any, begin: str, words: str) -> None:
    checks = GrammarChecks(CompilerHere)
    with pytest.raises(InvalidFieldError) as caught:
        await checks.check(asked(**kind), model_with())
    assert str(caught.value).startswith(begin)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    await checks.check(asked(regex="a"), model_with())
    counts = {sample.name: sample.value for family in checks.meter.families() for sample in family.samples}
    assert counts["octavo_grammar_compile_seconds_count"] == 2
    assert counts["octavo_grammars_refused_total"] == 1


async def test_where_no_executor_has_grammars_or_another_matcher_a_sentence_says_so() -> None:
    checks, grammar = GrammarChecks(CompilerHere), asked(regex="a")
    with pytest.raises(InvalidFieldError, match=r"^grammar\.regex is set; it must be unset: no executor of"):
        await checks.check(grammar, model_with(num_grammar_slots=0))
    with pytest.raises(
        UnavailableError, match="the executors check grammars with other, this scheduler with llguidance-"
    ):
        await checks.check(grammar, model_with(matcher_id="other"))
    with pytest.raises(InvalidFieldError, match="grammars need an end-of-sequence token"):
        await checks.check(grammar, model_with(eos_token_ids=()))


class HangingCompiler(CompilerHere):
    """One that hangs at some grammars, until `go_on` is set."""

    go_on = threading.Event()

    def verdict(self, asked: AskedGrammar) -> Verdict:
        """See `Compiler`."""
        if b"quick" not in asked.frame:
            self.go_on.wait(10)
        return Grammar(asked.frame)


async def test_who_waits_for_a_compile_waits_neither_long_nor_in_a_long_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "LIMIT_S", 0.3)
    monkeypatch.setattr(grammar_checks, "MAX_WAITING", 2)
    checks, model = GrammarChecks(HangingCompiler), model_with()
    await checks.check(asked(regex="quick"), model)
    waiting = [asyncio.create_task(checks.check(asked(regex=text), model)) for text in ("slow", "quick2", "quick4")]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="the queue of grammars to compile is full"):
        await checks.check(asked(regex="quick3"), model)
    await checks.check(asked(regex="quick"), model)  # it is remembered
    for task in waiting:
        with pytest.raises(UnavailableError, match=r"was not compiled within 0\.3 s"):
            await task
    HangingCompiler.go_on.set()


async def test_who_has_many_grammars_compiled_displaces_its_own_and_others_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_WAITING", 4)
    HangingCompiler.go_on.clear()
    checks, model = GrammarChecks(HangingCompiler), model_with()
    await checks.check(asked(regex="quick"), model, "red")
    ended: list[str] = []

    async def ask(text: str, tenant: str) -> None:
        await checks.check(asked(regex=text), model, tenant)
        ended.append(text)

    texts = ["slow", *(f"quick{number}" for number in range(4))]
    red = [asyncio.create_task(ask(text, "red")) for text in texts]
    await asyncio.sleep(0)
    equal = [asyncio.create_task(ask("quick of blue", "blue")) for _ in range(9)]  # one place for all
    equal.append(asyncio.create_task(ask("slow", "blue")))  # it runs already
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match=r"of tenant 'red' is full, and the request was displaced"):
        await red[-1]
    with pytest.raises(QueueFullError, match="the queue of grammars to compile is full"):
        await checks.check(asked(regex="quick9"), model, "red")
    HangingCompiler.go_on.set()
    await asyncio.gather(*red[:-1], *equal)
    assert sorted(ended[:2]) == ["slow", "slow"]
    assert ended.index("quick of blue") < ended.index("quick1"), "the turns of tenants come round"
    assert checks.meter.times.num_observed == 6, "equal grammars are compiled once"


async def test_a_burst_of_grammars_waits_until_the_compiler_has_started() -> None:
    checks, model = GrammarChecks(CompilerProcess), model_with()
    texts = [f"a{number % 80}" for number in range(160)]
    await asyncio.gather(*(checks.check(asked(regex=text), model) for text in texts))
    assert checks.meter.times.num_observed == 80


class KilledCompiler(CompilerProcess):
    """One that somebody kills in front of its next grammars."""

    num_kills = 0

    def _ask(self, *frames: bytes) -> Iterator[bytes]:
        if len(frames) == 1 and self.num_kills:
            KilledCompiler.num_kills -= 1
            assert self._process is not None
            self._process.kill()
        return super()._ask(*frames)


async def test_that_the_compiler_was_killed_says_nothing_of_a_grammar() -> None:
    checks, model, good = GrammarChecks(KilledCompiler), model_with(), asked(regex="a+")
    KilledCompiler.num_kills = 2
    with pytest.raises(UnavailableError, match="the process that compiles grammars ended with code -9; send the"):
        await checks.check(good, model)
    KilledCompiler.num_kills = 1
    await checks.check(good, model)
    assert KilledCompiler.num_kills == 0, "nothing was remembered"


async def test_a_grammar_that_takes_too_long_ends_its_process_and_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes many seconds, and its compile cannot be stopped."""
    monkeypatch.setattr(grammar_checks, "LIMIT_S", PATIENCE_S)  # a busy machine gives it its CPU time late
    checks, model = GrammarChecks(CompilerProcess), model_with()
    hostile = asked(regex="a?" * 40_000)
    for _ in range(2):  # the second time it is remembered
        begun_at_s = time.process_time()
        with pytest.raises(InvalidFieldError, match=r"it takes more than 0\.7 s to compile; make it smaller"):
            await checks.check(hostile, model)
        assert time.process_time() - begun_at_s < 2
    assert checks.meter.num_refused == 1
    await checks.check(asked(regex="a+"), model)
    with pytest.raises(InvalidFieldError, match="unclosed character"):
        await checks.check(asked(regex="["), model)
    with pytest.raises(InvalidFieldError, match="grammars need an end-of-sequence token"):
        await checks.check(asked(regex="a"), model_with(eos_token_ids=()))


async def test_a_grammar_that_needs_too_much_memory_ends_its_process_and_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler, "LIMIT_BYTES", 24 * 2**20)  # serves a small one
    checks, model = GrammarChecks(CompilerProcess), model_with()
    for _ in range(2):  # the second time it is remembered
        with pytest.raises(InvalidFieldError, match=r"that outputs can follow: it needs more than 1024 MiB of memory"):
            await checks.check(asked(regex="a?" * 6000), model)
    assert checks.meter.times.num_observed == 1
    await checks.check(asked(regex="a+"), model)


class StandingCompiler(CompilerProcess):
    """Its process waits for ever in place of a verdict."""

    command = (
        *(sys.executable, "-P", "-c"),
        "import threading; from scheduler_svc.front.grammars import compiler; compiler.STANDS_STILL_S = 0.2; "
        "compiler.verdicts = lambda *_: iter(threading.Event().wait, None); compiler.main()",
    )


async def test_a_process_that_stands_still_ends_and_nobody_else_waits_for_it() -> None:
    checks = GrammarChecks(StandingCompiler)
    with pytest.raises(UnavailableError, match=f"ended with code -{signal.SIGALRM.value}; send the request again"):
        await checks.check(asked(regex="a+"), model_with())


async def test_what_clients_send_is_read_in_the_process_of_the_compiler() -> None:
    checks, model = GrammarChecks(CompilerProcess), model_with()
    await checks.check(asked(regex="a+"), model)
    own_s = []
    for attempt in range(3):
        properties: dict[str, object] = {f"{attempt}{number}": {"pattern": "[a]{3}"} for number in range(8000)}
        schema = json.dumps({"properties": {**properties, "last": {"not": {}}}})
        begun_at_s = time.process_time()
        with pytest.raises(InvalidFieldError, match='"not" at #/properties/last; it must be one without it'):
            await checks.check(asked(json_schema=schema), model)
        own_s.append(time.process_time() - begun_at_s)
    assert min(own_s) < 0.2, "to send takes milliseconds, to read half a second"


async def test_what_is_remembered_has_a_limit_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, model = GrammarChecks(CompilerHere), model_with()
    grammars = [await checks.check(asked(regex=text * 100), model) for text in "ab"]
    assert [await checks.check(asked(regex=text * 100), model) for text in "ab"] == grammars
    assert checks.meter.times.num_observed == 2
    monkeypatch.setattr(grammar_checks, "MAX_REMEMBERED_BYTES", 2 * len(grammars[0].body))
    await checks.check(asked(regex="c" * 100), model)
    await checks.check(asked(regex="b" * 100), model)
    assert checks.meter.times.num_observed == 3, "the newest stay"
    await checks.check(asked(regex="a" * 100), model)
    assert checks.meter.times.num_observed == 4


async def test_a_large_schema_that_is_wrong_is_refused_in_time() -> None:
    names = [f"k{index}" for index in range(1500)]
    inner = {"type": "object", "properties": {name: {"enum": [name, f"{name}x"]} for name in names}}
    wrong = {
        "$defs": {"a": inner},
        "properties": {"a": {"$ref": "#/$defs/a"}, "b": {"type": "string", "pattern": "(?=a)"}},
    }
    begun_at_s = time.process_time()
    with pytest.raises(InvalidFieldError, match="look-around"):
        await GrammarChecks(CompilerHere).check(asked(json_schema=json.dumps(wrong)), model_with())
    assert time.process_time() - begun_at_s < 3
