"""What the offline API asks for, against a stand-in scheduler; its life is in tests/e2e/test_llm_lifecycle.py."""

import asyncio
import os
import select
import signal
from collections.abc import Callable
from typing import Any, TypeVar

import numpy
import pytest
import torch
from google.protobuf.json_format import MessageToDict

from octavo import LLM, Client, SamplingParams
from octavo.errors import InvalidRequestError, LocalServiceError, RequestAbortedError
from octavo.local.services import LocalServices
from octavo.values.outputs import ChatMessage, FailedRequest
from tests.support.each_row import each_row
from tests.support.patience import PATIENCE_S
from tests.support.stack import Stack
from tests.unit.octavo.stand_in import StandIn

Answer = TypeVar("Answer")


class RunningServices(LocalServices):
    """Services that somebody else started at an address."""

    def __init__(self, address: str) -> None:
        super().__init__([], [])
        self._address = address

    async def start(self) -> None:
        pass

    async def wait_for_failure(self) -> LocalServiceError:
        await asyncio.Event().wait()
        raise AssertionError("they do not fail")


async def ask(stand_in: StandIn | Stack, monkeypatch: pytest.MonkeyPatch, question: Callable[[LLM], Answer]) -> Answer:
    """Ask an LLM whose scheduler is the stand-in; in a thread, as the stand-in needs this one."""

    def from_options(*_: object, **__: Any) -> RunningServices:
        return RunningServices(stand_in.address)

    def run() -> Answer:
        with LLM("some/model", progress=False) as llm:
            return question(llm)

    monkeypatch.setattr(LocalServices, "from_options", from_options)
    return await asyncio.to_thread(run)


def error_in_fork(call: Callable[[], object]) -> str:
    """Return the error of a call in a forked copy of this process; "": none in time."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            call()
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        has_ended = select.select([pipe], [], [], PATIENCE_S)[0]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return pipe.read().decode() if has_ended else ""


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_a_forked_copy_is_refused_at_once(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def question(llm: LLM) -> str:
        assert len(llm.generate(["a"], progress=False)) == 1
        return error_in_fork(lambda: llm.generate(["a"], progress=False))

    assert "this LLM belongs to the process that made it" in await ask(stand_in, monkeypatch, question)
    async with Client(stand_in.address) as client:
        await client.generate("a")
        said = error_in_fork(lambda: client.generate("a").send(None))
    assert "this Client belongs to the process that made it" in said


async def test_each_prompt_has_all_its_outputs(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(n=2), SamplingParams(n=2, beam_width=4, early_stopping=True), SamplingParams()]
    outputs = await ask(stand_in, monkeypatch, lambda llm: llm.generate(["a", "b", "c"], params, progress=False))

    assert [[output.output_index for output in each.outputs] for each in outputs] == [[0, 1], [0, 1], [0]]
    assert [output.beam_score for output in outputs[1].outputs] == [-0.5, -1.5]
    assert {request.text: request.sampling_params.beam_width for request in stand_in.requests} == {
        "a": 0,
        "b": 4,
        "c": 0,
    }


async def test_a_refused_prompt_does_not_take_the_answers_of_the_others(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = await ask(
        stand_in, monkeypatch, lambda llm: llm.generate(["ok", "refuse", "aborted", "fine"], progress=False)
    )
    assert [output.prompt for output in outputs] == ["ok", "refuse", "aborted", "fine"]
    assert [type(output.error) for output in outputs] == [
        type(None),
        InvalidRequestError,
        RequestAbortedError,
        type(None),
    ]
    assert [outputs[index].outputs[0].text for index in (0, 3)] == ["The sky is blue"] * 2
    refused = outputs[1]
    assert isinstance(refused, FailedRequest)
    with pytest.raises(InvalidRequestError) as caught:
        print(refused.outputs[0].text)
    assert str(caught.value) == "prompts[1]: sampling_params.top_p is 2; it must be at most 1"
    assert caught.value.field == "sampling_params.top_p"


async def test_if_no_prompt_is_answered_the_first_error_is_raised(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompts\[0\]: sampling_params\.top_p is 2"):
        await ask(stand_in, monkeypatch, lambda llm: llm.generate(["refuse", "aborted"], progress=False))


async def test_a_full_queue_is_waited_out(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(wait_s: float) -> None:
        waits.extend([wait_s] if wait_s else [])

    fail = stand_in._fail_if_asked
    monkeypatch.setattr(
        stand_in, "_fail_if_asked", lambda wish, context: fail("full" if wish == "b" and not waits else wish, context)
    )
    monkeypatch.setattr("octavo.calls.request_stream.asyncio.sleep", sleep)
    outputs = await ask(stand_in, monkeypatch, lambda llm: llm.generate(["a", "b"], progress=False))
    assert [output.error for output in outputs] == [None, None]
    assert waits == [2.5]


async def test_a_single_prompt_needs_no_place(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match=r"^sampling_params\.top_p is 2"):
        await ask(stand_in, monkeypatch, lambda llm: llm.generate("refuse", progress=False))


async def test_priority_tenant_and_salt_hold_for_all_prompts(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = [ChatMessage(role="user", content="Hello")]
    await ask(
        stand_in,
        monkeypatch,
        lambda llm: [
            *llm.generate(["a", "b"], priority=2, tenant="red", cache_salt="secret", speculate=False, progress=False),
            *llm.chat(hello, priority=2, tenant="red", cache_salt="secret", speculate=False, progress=False),
        ],
    )
    sent = [(each.priority, each.tenant, each.cache_salt, each.HasField("speculate")) for each in stand_in.requests]
    assert sent == [(2, "red", "secret", True)] * 3


async def test_an_encoder_reads_what_stands_beside_its_prompt(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    several: list[Any] = ["two", numpy.array([6])]
    await ask(
        stand_in,
        monkeypatch,
        lambda llm: [
            llm.generate("a", encoder_prompts="one", progress=False),
            llm.generate([[7]], encoder_prompts=[4, 5], progress=False),
            llm.generate(["b", "c"], encoder_prompts=several, progress=False),
            llm.generate("d", progress=False),
        ],
    )
    sent = {each.text or each.token_ids.ids[0]: each.encoder_prompt for each in stand_in.requests}
    assert {key: each.text or list(each.token_ids.ids) for key, each in sent.items()} == {
        "a": "one",
        7: [4, 5],
        "b": "two",
        "c": [6],
        "d": [],
    }


async def test_a_scheduler_that_stops_is_the_cause_and_not_the_lost_connection(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait_for_failure(_: LocalServices) -> LocalServiceError:
        while not stand_in.requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # the end of a process is seen after that of its connections
        return LocalServiceError("the scheduler stopped")

    monkeypatch.setattr(RunningServices, "wait_for_failure", wait_for_failure)
    with pytest.raises(LocalServiceError, match="the scheduler stopped"):
        await ask(stand_in, monkeypatch, lambda llm: llm.generate(["lost", "lost"], progress=False))


async def test_sampling_params_are_keywords_too_and_win(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    base = SamplingParams(temperature=0.5, top_k=4)
    await ask(
        stand_in,
        monkeypatch,
        lambda llm: [
            *llm.generate("a", temperature=0, max_tokens=3, progress=False),
            *llm.generate(["b", "c"], [base, SamplingParams()], temperature=0.25, progress=False),
            *llm.chat([{"role": "user", "content": "d"}], base, top_k=8, progress=False),
        ],
    )
    sent = {
        request.text or request.messages.messages[0].content: MessageToDict(request.sampling_params)
        for request in stand_in.requests
    }
    assert sent == {  # b and c run at once, in either order
        "a": {"temperature": 0.0, "maxTokens": 3},
        "b": {"temperature": 0.25, "topK": 4},
        "c": {"temperature": 0.25},
        "d": {"temperature": 0.5, "topK": 8},
    }


@each_row(
    ("a", ["a"]),
    ([], []),
    ([1, 2], [[1, 2]]),
    ([[1, 2], [3]], [[1, 2], [3]]),
    ((text for text in ("a", "b")), ["a", "b"]),
    (numpy.array([1, 2]), [[1, 2]]),
    (numpy.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    ([numpy.array([1], dtype=numpy.uint8), numpy.array([2, 3])], [[1], [2, 3]]),
    ([numpy.int64(1), numpy.int32(2)], [[1, 2]]),
    (torch.tensor([[1, 2]]), [[1, 2]]),
    (numpy.array(["a", "b"]), ["a", "b"]),
)
async def test_texts_lists_and_arrays_are_prompts(
    prompts: Any, sent: list[object], *, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.requests.clear()
    await ask(stand_in, monkeypatch, lambda llm: llm.generate(prompts, progress=False))
    arrived = [request.text or list(request.token_ids.ids) for request in stand_in.requests]
    assert sorted(arrived, key=str) == sent


HELLO = {"role": "user", "content": "Hello"}


async def test_text_parts_of_a_message_are_joined(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [{"type": "text", "text": "Look:"}, {"type": "text", "text": "a cat"}]
    # As OpenAI's client gives a message back: what is not there is None.
    answer = {"role": "assistant", "content": "Hm", "tool_calls": None, "refusal": None}
    conversation: Any = [{"role": "user", "content": parts}, answer, HELLO]
    await ask(stand_in, monkeypatch, lambda llm: llm.chat(conversation, progress=False))
    [request] = stand_in.requests
    assert [turn.content for turn in request.messages.messages] == ["Look:\na cat", "Hm", "Hello"]


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
WRONG_CALLS: list[tuple[Callable[[Any], object], str]] = [
    (
        lambda llm: llm.generate("x", {"temperature": 0}),
        "sampling_params is a dict; give SamplingParams(temperature=0), or",
    ),
    (
        lambda llm: llm.generate("x", [{"n": 2}]),
        "sampling_params[0] is a dict; give SamplingParams(temperature=0), or the",
    ),
    (
        lambda llm: llm.generate("x", 0.5),
        "sampling_params is a float; give SamplingParams(temperature=0), or the fields",
    ),
    (lambda llm: llm.generate("x", temprature=0), "generate() has no argument 'temprature'; did you mean temperature?"),
    (lambda llm: llm.chat([HELLO], colour=0), "chat() has no argument 'colour'"),
    (lambda llm: llm.generate("x", temperature="hot"), "sampling_params.temperature is 'hot'; it must be a number"),
    (
        lambda llm: llm.generate("x", logit_bias=[1]),
        "sampling_params.logit_bias is [1]; it must be a dict from token ids",
    ),
    (
        lambda llm: llm.generate("x", choice="yes"),
        "sampling_params.choice is 'yes'; it must be a list of strings",
    ),
    (lambda llm: llm.generate("x", priority="high"), "priority is 'high'; it must be a whole number from -2^31 to"),
    (
        lambda llm: llm.generate(["a", "b"], [SamplingParams()]),
        "the list sampling_params has 1 for 2 prompts; give one for all, or",
    ),
    (
        lambda llm: llm.generate(["a", "b"], encoder_prompts=["x"]),
        "encoder_prompts has 1 for 2 prompts; give one for each, or none: then the encoder reads prompts",
    ),
    (
        lambda llm: llm.generate(["a", "b"], encoder_prompts=["x", b"y"]),
        "encoder_prompts[1] is bytes; it must be text, a list of token ids",
    ),
    (lambda llm: llm.generate("a", encoder_prompts=7), "encoder_prompts is 7; it must be a text, a list of texts, or"),
    (lambda llm: llm.generate("a", encoder_prompts=[HELLO]), "encoder_prompts[0] is a message; "),
    (lambda llm: llm.generate(b"x"), "prompts is bytes; it must be a text, a list of texts, or lists of token ids; de"),
    (lambda llm: llm.generate(["a", b"x"]), "prompts[1] is bytes; it must be text, a list of token ids, or a conversa"),
    (lambda llm: llm.generate(None), "prompts is None; it must be a text, a list of texts, or lists of token ids"),
    (lambda llm: llm.generate(7), "prompts is 7; it must be a text, a list of texts, or lists of token ids"),
    (
        lambda llm: llm.generate({"prompt": "x"}),
        "prompts is a dict; it must be a text, a list of texts, or lists of tok",
    ),
    (
        lambda llm: llm.generate(["a", None]),
        "prompts[1] is None; it must be text, a list of token ids, or a conversation",
    ),
    (lambda llm: llm.generate([1, 2.5]), "prompts[1] is 2.5; a token id is a whole number from 0 to 2,147,483,647"),
    (lambda llm: llm.generate([[1], [2**31]]), "prompts[1][0] is 2147483648; a token id is a whole number from 0 to"),
    (lambda llm: llm.generate([["a"]]), "prompts is a list of texts; it takes one prompt: it must be text"),
    (lambda llm: llm.generate("a\ud800"), "prompts has the lone surrogate U+D800 at 1, which is not valid Unicode"),
    (lambda llm: llm.generate([HELLO]), "prompts[0] is a message; `chat` answers conversations, `generate` takes text"),
    (
        lambda llm: llm.generate([[HELLO]]),
        "prompts[0] is a conversation; `chat` answers conversations, `generate` takes",
    ),
    (
        lambda llm: llm.chat("hi"),
        "conversations is a str; `generate` completes text, and a conversation is a list such as",
    ),
    (
        lambda llm: llm.chat(["hi"]),
        "conversations[0] is a str; `generate` completes text, and a conversation is a list",
    ),
    (
        lambda llm: llm.chat(HELLO),
        "conversations is a dict; a conversation is a list such as [{'role': 'user', 'content'",
    ),
    (
        lambda llm: llm.chat([[HELLO], []]),
        "conversations[1] is empty; a conversation is a list such as [{'role': 'user'",
    ),
    (
        lambda llm: llm.chat([{"role": "user"}]),
        "conversations[0] has no 'content'; a message is {'role': ..., 'content'",
    ),
    (
        lambda llm: llm.chat([[HELLO], [HELLO, {"role": 1, "content": ""}]]),
        "conversations[1][1]['role'] is 1; it must be",
    ),
    (
        lambda llm: llm.chat([{"role": "user", "content": None}]),
        "conversations[0]['content'] is None; it must be text,",
    ),
    (
        lambda llm: llm.chat([HELLO | {"content": [IMAGE]}]),
        "conversations[0]['content'][0] is of the type 'image_url'; on",
    ),
    (
        lambda llm: llm.chat([HELLO | {"tool_calls": [1]}]),
        "conversations[0] has 'tool_calls', which Octavo does not supp",
    ),
]


@each_row(*WRONG_CALLS)
async def test_a_wrong_call_is_one_sentence_before_anything_is_sent(
    call: Callable[[Any], Any], sentence: str, *, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((InvalidRequestError, TypeError)) as caught:
        await ask(stand_in, monkeypatch, call)
    assert str(caught.value).startswith(sentence)
    assert stand_in.requests == []


async def test_the_tokenizer_is_the_schedulers(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def use(llm: LLM) -> list[object]:
        tokenizer = llm.get_tokenizer()
        ids = tokenizer.encode("Hi")
        return [
            ids,
            tokenizer.encode("Hi", add_special_tokens=False),
            tokenizer.decode(ids),
            tokenizer.decode(ids, skip_special_tokens=True),
            tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]),
        ]

    assert await ask(stand_in, monkeypatch, use) == [[72, 105], [72, 105], "Hi", "Hi", [72, 105]]
    assert [request.add_special_tokens for request in stand_in.tokenize_requests] == [True, False, False]
    assert [request.skip_special_tokens for request in stand_in.detokenize_requests] == [False, True]
