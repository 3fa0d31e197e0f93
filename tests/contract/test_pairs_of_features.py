"""Every two features of a request at once, beside an event that befalls it: what must come is said, not compared.

A pair of features is a request; the pairs are dealt out over the events, and each event befalls all of its requests at
once, in an executor whose blocks are too few for them.
"""

import asyncio
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from executor_svc.fake.scripted_worker import CHAT_TEMPLATE, ScriptedWorker
from executor_svc.fake.tokenizer import EOS_TOKEN_ID
from scheduler_svc.executors.session import MAX_RESUMES_IN_A_ROW
from scheduler_svc.processes import service
from scheduler_svc.request.life import EndedRequest, EventKind
from tests.contract.openai.api import Api, Json, running_api
from tests.support.stack import until

NUM_TOKENS, MIN_TOKENS = 12, 6
PATTERN, BEGUN = "[a-d]{2}[e-h]{2,5}", "[a-d]{0,2}|[a-d]{2}[e-h]{0,5}"
ALLOWED, BANNED, BANNED_WORD, UNLIKELY = [*b"aceghikmoqs", EOS_TOKEN_ID], [*b"ae"], "cg", ord("k")
STOP_STRINGS, STOP_TOKEN_IDS = ["h", "gg", "oo"], [*b"cqz"]
TOOL = {
    "name": "go",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"to": {"enum": ["Rome", "Oslo"]}},
        "required": ["to"],
        "additionalProperties": False,
    },
}
CALL_TOKENS = 120


class Noise(ScriptedWorker):
    """A model that knows tools and reasoning, and says what the fake does."""

    def _replace_samples(self, *_: object) -> None:
        pass


@dataclass(frozen=True)
class Feature:
    """One feature: the fields that ask for it, and what must be true of each choice of an answer that has it."""

    fields: Json
    holds: Callable[["Asked", "Choice"], object] = lambda asked, choice: True
    chats: bool = False


@dataclass(frozen=True)
class Choice:
    """A choice, in one shape for both APIs."""

    token_ids: list[int]
    text: str
    reason: str
    num_alternatives: list[int] | None
    logprobs: list[float] | None
    prompt_logprobs: list[Json | None] | None
    message: Json

    @property
    def said(self) -> str:
        """The text of its tokens, special ones left out."""
        return text_of(self.token_ids)


def text_of(token_ids: Sequence[int]) -> str:
    return bytes(token_id for token_id in token_ids if token_id < 256).decode(errors="replace")


def follows(asked: "Asked", choice: Choice) -> bool:
    if {"thinking", "tools"} & {*asked.names}:
        return True  # it holds what comes behind the thoughts, which do not end, or in place of a call
    if choice.reason == "stop" and choice.token_ids[-1] == EOS_TOKEN_ID:
        return re.fullmatch(PATTERN, choice.said) is not None
    return re.fullmatch(BEGUN, choice.said) is not None


def knows_alternatives(asked: "Asked", choice: Choice) -> bool:
    assert choice.num_alternatives is not None
    assert choice.logprobs is not None
    return {*choice.num_alternatives} <= {2} and all(value <= 0 for value in choice.logprobs)


def tells_prompt(asked: "Asked", choice: Choice) -> bool:
    """One entry for each token of the prompt: its likeliest token, and the token itself, which is no likelier."""
    assert choice.prompt_logprobs is not None
    nothing, *entries = choice.prompt_logprobs
    for token_id, entry in zip(asked.prompt_token_ids[1:], entries, strict=True):
        assert entry is not None
        own, ranked = entry[str(token_id)], [one for one in entry.values() if one["rank"] == 1]
        assert len(ranked) == 1
        assert own is ranked[0] or (own["rank"] is None and own["logprob"] < ranked[0]["logprob"])
    return nothing is None


def calls(asked: "Asked", choice: Choice) -> bool:
    if choice.reason != "tool_calls":
        return choice.reason == "length" or bool(asked.ends)
    functions = [call["function"] for call in choice.message["tool_calls"]]
    return [one["name"] for one in functions] == ["go"] and json.loads(functions[0]["arguments"])["to"] in (
        "Rome",
        "Oslo",
    )


def never(*token_ids: int) -> Callable[["Asked", Choice], object]:
    return lambda asked, choice: not set(token_ids) & set(choice.token_ids)


FEATURES = {
    "grammar": Feature({"structured_outputs": {"regex": PATTERN}}, follows),
    "allowed": Feature({"allowed_token_ids": ALLOWED}, lambda asked, choice: set(choice.token_ids) <= {*ALLOWED}),
    "banned": Feature({"banned_token_ids": BANNED}, never(*BANNED)),
    "banned word": Feature({"bad_words": [BANNED_WORD]}, lambda asked, choice: BANNED_WORD not in choice.said),
    "bias": Feature({"logit_bias": {str(UNLIKELY): -100}}, never(UNLIKELY)),
    "n": Feature({"n": 3, "temperature": 1.0}),
    "best_of": Feature({"n": 2, "best_of": 4, "temperature": 1.0}),
    "copies": Feature({"n": 3, "temperature": 0.0}),
    "logprobs": Feature({"logprobs": 2}, knows_alternatives),
    "prompt logprobs": Feature({"prompt_logprobs": 1}, tells_prompt),
    "beams": Feature({"beam_width": 3, "n": 2}),
    "stop": Feature({"stop": STOP_STRINGS}),
    "stop tokens": Feature({"stop_token_ids": STOP_TOKEN_IDS}),
    "min_tokens": Feature({"min_tokens": MIN_TOKENS}),
    "ignore_eos": Feature({"ignore_eos": True, "min_tokens": MIN_TOKENS}),
    "stream": Feature({"stream": True, "stream_options": {"include_usage": True}}),
    "tools": Feature(
        {
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "bad_words": ["<th"],  # it could think for ever first
        },
        calls,
        chats=True,
    ),
    "thinking": Feature({"chat_template_kwargs": {"enable_thinking": True}}, chats=True),
}

# What no answer can have both of: a beam search has a text at its end only; the rules leave a call nothing.
REFUSED = {
    *(frozenset({"beams", other}) for other in ("grammar", "best_of", "logprobs", "prompt logprobs", "stop", "tools")),
    *(frozenset({"tools", other}) for other in ("allowed", "banned")),
    frozenset({"prompt logprobs", "stream"}),
}
# A chat has no best_of.
SENSELESS = [("best_of", "tools"), ("best_of", "thinking")]


@dataclass
class Asked:
    """A request with two features."""

    names: tuple[str, str]
    number: int
    prompt_token_ids: list[int]

    @property
    def features(self) -> list[Feature]:
        return [FEATURES[name] for name in self.names]

    @property
    def chats(self) -> bool:
        return any(feature.chats for feature in self.features)

    @property
    def id(self) -> str:
        return f"{'chatcmpl' if self.chats else 'cmpl'}-r{self.number}"

    @property
    def fields(self) -> Json:
        fields = {name: value for feature in self.features for name, value in feature.fields.items()}
        if self.chats and "logprobs" in fields:
            fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
        num_repeats = 7 if "prompt logprobs" in self.names else 2  # more than a step takes
        prompt = f"{'Of two things, both. ' * num_repeats}{self.number:03d}"  # they share a prefix that is cached
        asks = {"messages": [{"role": "user", "content": prompt}]} if self.chats else {"prompt": prompt}
        seed = {} if "beams" in self.names else {"seed": self.number}
        return {
            **asks,
            **seed,
            "n": 2,
            "max_tokens": CALL_TOKENS if "tools" in self.names else NUM_TOKENS,
            "request_id": f"r{self.number}",
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **fields,
        }

    @property
    def ends(self) -> set[str]:
        """What may end an output beside the end of the sequence."""
        return {"stop", "stop tokens"} & {*self.names}

    async def answer(self, api: Api) -> None:
        """Ask, and check what comes."""
        path = "/v1/chat/completions" if self.chats else "/v1/completions"
        answer = await api.send("POST", path, json={"model": "fake", **self.fields})
        if frozenset(self.names) in REFUSED:
            assert answer.status == 400, answer.text
            return
        assert answer.status == 200, answer.text
        self.check(joined(answer.text) if "stream" in self.names else answer.json)

    def check(self, body: Json) -> None:
        """Check all that must be true of an answer, whichever features it has."""
        assert body["id"] == self.id
        assert [choice["index"] for choice in body["choices"]] == list(range(self.fields["n"]))
        prompts = [body.get("prompt_token_ids"), *(choice.get("prompt_token_ids") for choice in body["choices"])]
        self.prompt_token_ids = next(ids for ids in prompts if ids)
        choices = [choice_of(choice, body) for choice in body["choices"]]
        for choice in choices:
            self.check_end(choice)
            assert (choice.logprobs is not None) == ("logprobs" in self.names)
            num_told = len(choice.token_ids) - (self.chats and choice.token_ids[-1] == EOS_TOKEN_ID)
            assert choice.logprobs is None or len(choice.logprobs) == num_told
            assert (choice.prompt_logprobs is not None) == ("prompt logprobs" in self.names)
            for name, feature in zip(self.names, self.features, strict=True):
                assert feature.holds(self, choice), f"{name} does not hold"
        self.check_usage(body["usage"], choices)

    def check_end(self, choice: Choice) -> None:
        """Check that an output ends where it must: not before, not behind, with this text and reason."""
        ids, guided = choice.token_ids, bool({"grammar", "tools"} & {*self.names})
        ending = set() if "ignore_eos" in self.names and not guided else {EOS_TOKEN_ID}
        if "stop tokens" in self.names:
            ending |= {*STOP_TOKEN_IDS}
        num_early = self.fields.get("min_tokens", 1) - 1
        strings = STOP_STRINGS if "stop" in self.names else []
        assert len(ids) > num_early, "it ends too early"
        assert not ending & {*ids[num_early:-1]}, "it goes on behind its end"
        assert not any(stop in text_of(ids[num_early:-1]) for stop in strings), "it goes on behind its stop string"
        told = choice.said
        found = [stop for stop in strings if told.endswith(stop)]
        if found:
            told = told.removesuffix(max(found, key=len))
        elif ids[-1] not in ending:
            assert len(ids) == self.fields["max_tokens"], "nothing ends it"
            assert choice.reason == "length"
        if found or ids[-1] in ending:
            assert choice.reason in ("stop", "tool_calls")
        if "tools" not in self.names:
            assert choice.text == told

    def check_usage(self, usage: Json, choices: list[Choice]) -> None:
        """Check that all tokens are counted: of the outputs that are told, and of those that best_of leaves out."""
        num_tokens = sum(len(choice.token_ids) for choice in choices)
        num_unseen = 2 if "best_of" in self.names else 0
        most = num_tokens + num_unseen * NUM_TOKENS
        least = most if "ignore_eos" in self.names else num_tokens + num_unseen * self.fields.get("min_tokens", 1)
        assert usage["prompt_tokens"] == len(self.prompt_token_ids)
        assert least <= usage["completion_tokens"] <= most
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        if "thinking" in self.names:
            num_thought = num_tokens - sum(choice.token_ids[-1] == EOS_TOKEN_ID for choice in choices)
            assert usage["completion_tokens_details"]["reasoning_tokens"] == num_thought


def choice_of(choice: Json, body: Json) -> Choice:
    """Return a choice of either API."""
    message, logprobs = choice.get("message", {}), choice["logprobs"]
    alternatives: list[int] | None = None
    values: list[float] | None = None
    if logprobs is not None and "content" in logprobs:
        alternatives = [len(entry["top_logprobs"]) for entry in logprobs["content"]]
        values = [entry["logprob"] for entry in logprobs["content"]]
    elif logprobs is not None:  # with the token itself, if it is none of the likeliest
        tokens = zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
        alternatives = [len(top) - (len(top) > 2 and token in top) for token, top in tokens]
        values = logprobs["token_logprobs"]
    text = choice["text"] if "text" in choice else (message.get("reasoning") or "") + (message["content"] or "")
    told = choice.get("prompt_logprobs", body.get("prompt_logprobs"))
    return Choice(choice["token_ids"], text, choice["finish_reason"], alternatives, values, told, message)


def joined(text: str) -> Json:
    """Return the answer that the events of a stream make; what it says while it waits is left out."""
    *lines, done, nothing = [line for line in text.split("\n\n") if not line.startswith(":")]
    assert (done, nothing) == ("data: [DONE]", "")
    events: list[Json] = [json.loads(line.removeprefix("data: ")) for line in lines]
    body: Json = {"id": events[0]["id"], "usage": events[-1]["usage"]}
    choices: dict[int, Json] = {}
    for event in events:
        body |= {name: event[name] for name in ("prompt_token_ids",) if name in event}
        assert event["id"] == body["id"]
        for piece in event["choices"]:
            choice = choices.setdefault(piece["index"], {"index": piece["index"], "token_ids": [], "logprobs": None})
            assert "finish_reason" not in choice, "something comes behind the end"
            choice["token_ids"] += piece.get("token_ids") or []
            choice |= {name: piece[name] for name in ("prompt_token_ids",) if name in piece}
            for name, values in (piece["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                if values is not None:
                    choice["logprobs"][name] = choice["logprobs"].get(name, []) + values
            if "text" in piece:
                choice["text"] = choice.get("text", "") + piece["text"]
            else:
                add_delta(choice.setdefault("message", {"content": ""}), piece["delta"])
            if piece["finish_reason"] is not None:
                choice["finish_reason"] = piece["finish_reason"]
    return {**body, "choices": [choices[index] for index in sorted(choices)]}


def add_delta(message: Json, delta: Json) -> None:
    for name in ("content", "reasoning"):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    for call in delta.get("tool_calls", ()):
        made = message.setdefault("tool_calls", [])
        if "id" in call:
            assert call["index"] == len(made)
            made.append({"function": {"name": call["function"]["name"], "arguments": ""}})
        made[-1]["function"]["arguments"] += call["function"]["arguments"]


def pairs() -> list[tuple[str, str]]:
    """Return all pairs that make sense."""
    found = []
    for names in itertools.combinations(FEATURES, 2):
        first, second = (FEATURES[name].fields for name in names)
        is_one = all(first[name] == second[name] for name in first.keys() & second.keys())
        if is_one and names not in SENSELESS:
            found.append(names)
    random.Random(7).shuffle(found)
    return found


async def lose(api: Api, tenants: Path) -> None:
    """The executor's process ends in the middle of outputs, and another one is there; and once more."""
    meter = api.stack.engine.meter
    for _ in range(2):
        num_before = meter.num_output_tokens
        await until(lambda: meter.num_output_tokens > num_before + 60)  # noqa: B023 -- awaited here
        await api.stack.executor.kill()
        api.stack.executor.worker = worker()
        await api.stack.executor.start()


async def cut(api: Api, tenants: Path) -> None:
    """The connection to the executor breaks again and again, with tokens between."""
    meter, num_losses = api.stack.engine.meter, api.stack.driver.num_losses
    for _ in range(MAX_RESUMES_IN_A_ROW + 1):
        num_before = meter.num_output_tokens
        api.stack.executor.break_connections()
        await until(lambda: meter.num_output_tokens > num_before + 20)  # noqa: B023 -- awaited here
    assert api.stack.driver.num_losses == num_losses


def write(tenants: Path, slots: int) -> None:
    tenants.write_text(f'["*"]\nslots = {slots}')


async def reload(api: Api, tenants: Path) -> None:
    """The operator lets the tenant have fewer slots."""
    write(tenants, 12)
    await until(lambda: api.stack.engine.tenants.of("").share.max_num_seqs == 12)


def worker() -> Noise:
    return Noise(
        lambda prompt: [],
        CHAT_TEMPLATE.replace("tool | tojson", "tool.function.name"),
        num_device_blocks=26,
        num_host_blocks=16,
        max_num_seqs=24,
        max_num_batched_tokens=96,
        max_model_len=256,
        eos_probability=0.2,
    )


EVENTS = [lose, cut, reload]


async def test_two_features_at_once_are_both_kept_whatever_befalls_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "TENANTS_INTERVAL_S", 0.05)
    tenants = tmp_path / "tenants.toml"
    write(tenants, 24)
    asked = [Asked(names, number, []) for number, names in enumerate(pairs())]
    async with running_api(worker(), tenants_file=tenants, max_waiting_requests=1000) as api:
        for place, event in enumerate(EVENTS):
            await befall(api, asked[place :: len(EVENTS)], event, tenants)
        ended = api.stack.engine.ended.values()
        assert any(map(was_preempted_in_its_prompt, ended)), "there are blocks enough for all"


async def befall(api: Api, asked: list[Asked], event: Callable[[Api, Path], Any], tenants: Path) -> None:
    """Run requests, some beside one that is given up, and let the event happen in the middle of them."""
    engine = api.stack.engine
    answers = [asyncio.create_task(one.answer(api), name=" and ".join(one.names)) for one in asked]
    left = [asyncio.create_task(Asked(one.names, 500 + one.number, []).answer(api)) for one in asked[::6]]
    known = (engine.requests, engine.ended)
    await until(
        lambda: all(
            task.done() or any(("", one.id) in where for where in known)
            for task, one in zip(answers, asked, strict=True)
        )
    )
    for task in left:
        task.cancel()
    await event(api, tenants)
    await asyncio.wait([*answers, *left])
    troubles = {task.get_name(): error for task in answers if (error := task.exception()) is not None}
    assert not troubles, troubles
    await until(lambda: not engine.requests)


def was_preempted_in_its_prompt(ended: EndedRequest) -> bool:
    times = [event.at_s for event in ended.events if event.kind is EventKind.PREEMPTED]
    return bool(times) and (ended.times.first_token_at_s or math.inf) > times[0]
