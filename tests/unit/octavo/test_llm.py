"""What the offline API asks for, against a stand-in scheduler; its life is in tests/e2e/test_llm_lifecycle.py."""

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.commands.up import up
from octavo.errors import InvalidRequestError, LocalServiceError
from octavo.local import LocalOptions, LocalServices
from octavo.outputs import ChatMessage, RequestOutput
from tests.unit.octavo.stand_in import StandIn


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


async def ask(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, question: Callable[[LLM], list[RequestOutput]]
) -> list[RequestOutput]:
    """Ask an LLM whose scheduler is the stand-in; in a thread, as the stand-in needs this one."""

    def from_options(*_: object, **__: Any) -> RunningServices:
        return RunningServices(stand_in.address)

    def run() -> list[RequestOutput]:
        with LLM("some/model", progress=False) as llm:
            return question(llm)

    monkeypatch.setattr(LocalServices, "from_options", from_options)
    return await asyncio.to_thread(run)


def test_every_option_of_the_services_is_one_of_the_command_line_and_of_the_offline_api() -> None:
    options = {field.name for field in fields(LocalOptions)}
    assert {param.name for param in up.params} == options | {"verbose"}
    only_of_a_server = {"listen", "admin_listen", "openai", "max_waiting_requests"}
    assert options - only_of_a_server <= inspect.signature(LLM).parameters.keys()


def test_the_options_of_the_offline_api_reach_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: dict[str, Any] = {
        "model": "some/model",
        "dtype": "float32",
        "quantization": "int8",
        "attention_backend": "torch",
        "device": "cpu",
        "tp": 2,
        "kv_cache_gib": 2.0,
        "host_cache_gib": 0.25,
        "max_model_len": 64,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 3,
    }

    def from_options(options: LocalOptions, **_: object) -> LocalServices:
        assert options == LocalOptions(**wanted)
        raise LocalServiceError("as asked")

    monkeypatch.setattr(LocalServices, "from_options", from_options)
    with pytest.raises(LocalServiceError, match="as asked"):
        LLM(**wanted, progress=False)


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


async def test_of_several_prompts_the_wrong_one_is_named(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await ask(stand_in, monkeypatch, lambda llm: llm.generate(["ok", "refuse"], progress=False))
    assert str(caught.value) == "prompts[1]: sampling_params.top_p is 2; it must be at most 1"
    assert caught.value.field == "sampling_params.top_p"


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
            *llm.generate(["a", "b"], priority=2, tenant="red", cache_salt="secret", progress=False),
            *llm.chat(hello, priority=2, tenant="red", cache_salt="secret", progress=False),
        ],
    )
    sent = [(request.priority, request.tenant, request.cache_salt) for request in stand_in.requests]
    assert sent == [(2, "red", "secret")] * 3
