"""The calls of trainers over HTTP: pauses, new weights, sleep, tokens in and out; in the order of their clients."""

import asyncio
import hashlib
import io
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scheduler_svc.front.openai import trainer_routes
from tests.contract.openai.api import Api, Json, running_api
from tests.contract.test_weights import NEW, NEW_DIGEST, weights, worker

__all__ = ["weights"]

OCTETS = {"Content-Type": "application/octet-stream"}


async def post(api: Api, path: str, **body: object) -> Json:
    answer = await api.send("POST", path, json=body)
    assert answer.status == 200, answer.text
    return answer.json


async def get(api: Api, path: str) -> Json:
    return (await api.get(path)).json


async def generate(api: Api, num_tokens: int = 8) -> Json:
    params = {"max_tokens": num_tokens, "temperature": 0, "logprobs": 1, "detokenize": False}
    return await post(api, "/inference/v1/generate", model="fake", token_ids=[40, 41, 42], sampling_params=params)


@pytest.mark.parametrize("fronts", [0, 1])
async def test_prime_rl_updates_from_a_folder_and_trl_samples_ids(weights: Path, fronts: int) -> None:
    async with (
        running_api(worker(), weights_dirs=[weights], trainer_api="on", fronts=fronts) as api,
        running_api(worker(weights / "new"), trainer_api="on") as fresh,
    ):
        old = await generate(api)
        assert await get(api, "/get_world_size") == {"world_size": 1}
        for mode, clears, told in (
            ("keep", "false", 3),
            ("keep", "true", 4),
            ("wait", "false", 2),
            ("abort", "true", 1),
        ):
            await post(api, f"/pause?mode={mode}&clear_cache={clears}")
            assert api.stack.engine.weights.mode is not None
            assert api.stack.engine.weights.mode.value == ["", "abort", "wait", "keep", "recompute"][told]
        assert await get(api, "/is_paused") == {"is_paused": True}
        assert await post(api, "/update_weights", weight_dir=str(weights / "new")) == {"weight_version": NEW_DIGEST}
        await post(api, "/resume")
        new, wanted = await generate(api), await generate(fresh)
        assert new["choices"] == wanted["choices"] != old["choices"]
        completion = await api.complete(
            prompt=[40, 41, 42],
            max_tokens=8,
            temperature=0,
            n=1,
            return_token_ids=True,
            logprobs=0,
            return_tokens_as_token_ids=True,
        )
        choice, own = completion.json["choices"][0], new["choices"][0]
        assert choice["token_ids"] == own["token_ids"]
        assert choice["logprobs"]["token_logprobs"] == [entry["logprob"] for entry in own["logprobs"]["content"]]
        assert [list(top.values()) for top in choice["logprobs"]["top_logprobs"]] == [
            [logprob] for logprob in choice["logprobs"]["token_logprobs"]
        ]
        assert await get(api, "/server_info?config_format=json") == {
            "vllm_config": {"model_config": {"dtype": "torch.float32"}, "weight_transfer_config": None}
        }
        assert (await get(api, "/weight_info"))["weight_version"] == NEW_DIGEST
        data = (await get(api, "/v1/models"))["data"]
        assert data[0]["max_model_len"] > 0


async def test_weights_come_as_one_body_or_in_several_and_sleeping_waits(weights: Path) -> None:
    async with running_api(worker(), worker(), weights_dirs=[weights], trainer_api="on") as api:
        await post(api, "/pause?mode=keep")
        whole = await api.send("POST", "/update_weights", data=io.BytesIO(NEW), headers=OCTETS)
        assert whole.json == {"weight_version": NEW_DIGEST}
        await post(api, "/init_weight_transfer_engine", init_info={})
        await post(api, "/start_weight_update", is_checkpoint_format=True)
        content = struct.pack("<Q", 2) + b"{}" + b"x" * 3_000_000
        for part in (content, b"another file"):
            assert (await api.send("POST", "/update_weights", data=io.BytesIO(part), headers=OCTETS)).status == 200
        assert (await get(api, "/weight_info"))["weight_version"] == NEW_DIGEST
        finished = await post(api, "/finish_weight_update")
        assert finished == {"weight_version": hashlib.sha256(content + b"another file").hexdigest()}
        await post(api, "/resume")
        await post(api, "/sleep?level=1")
        assert await get(api, "/is_sleeping") == {"is_sleeping": True}
        await post(api, "/wake_up")
        await post(api, "/reset_prefix_cache")
        assert len((await generate(api))["choices"][0]["token_ids"]) == 8


# Path, body, and what the error says.
REFUSED: list[tuple[str, Json, str]] = [
    ("/pause?mode=later", {}, "mode is later; it must be abort, wait or keep"),
    ("/init_weight_transfer_engine", {"init_info": {"master_address": "x"}}, "NCCL"),
    ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format is false"),
    ("/update_weights", {"update_info": {"names": ["x"]}}, "weights over NCCL or CUDA IPC are not supported"),
    ("/sleep?level=3", {}, "level is 3; it must be 1 or 2"),
    ("/wake_up?tags=weights&tags=cache", {}, "tags is cache; it must be weights or kv_cache, or both"),
    ("/update_weights", {"update_info": {"weight_dir": 5}}, "update_info.weight_dir is 5; it must be a text"),
    ("/inference/v1/generate", {"sampling_params": [1]}, "sampling_params is [1]; it must be an object"),
    ("/inference/v1/generate", {"sampling_params": ""}, 'sampling_params is ""; it must be an object'),
    ("/inference/v1/generate", {"model": "fake", "token_ids": [1], "stream": True}, "stream is true"),
    ("/inference/v1/generate", {"model": "fake", "sampling_params": {"max_tokens": 1}}, "prompt"),
]


async def test_what_cannot_be_done_is_refused_by_name(weights: Path) -> None:
    async with running_api(worker(), weights_dirs=[weights], trainer_api="on") as api:
        not_paused = await api.send("POST", "/update_weights", json={"weight_dir": "new"})
        assert (not_paused.status, "the fleet is not paused" in not_paused.text) == (409, True)
        await post(api, "/pause")
        for folder in ("missing", "\0"):
            missing = (await api.send("POST", "/update_weights", json={"weight_dir": folder})).error
            assert (missing["param"], missing["message"].split(" is ")[0]) == ("weight_dir", "weight_dir")
        for path, body, words in REFUSED:
            answer = await api.send("POST", path, json=body)
            assert (answer.status, words in answer.error["message"]) == (400, True), json.dumps(answer.json)


@pytest.mark.parametrize("fronts", [0, 1])
async def test_an_update_is_finished_only_if_it_is_open_or_a_folder_ended_it(weights: Path, fronts: int) -> None:
    async with running_api(worker(), weights_dirs=[weights], trainer_api="on", fronts=fronts) as api:
        await post(api, "/pause")
        await post(api, "/start_weight_update")
        await post(api, "/update_weights", weight_dir="new")
        assert await post(api, "/finish_weight_update") == {"weight_version": NEW_DIGEST}
        await post(api, "/start_weight_update")
        await post(api, "/resume")
        answer = await api.send("POST", "/finish_weight_update")
        assert (answer.status, "begin again with /start_weight_update" in answer.text) == (409, True)


@pytest.mark.parametrize("fronts", [0, 1])
async def test_a_body_that_stalls_cancels_its_update(
    weights: Path, fronts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_routes, "BODY_TIMEOUT_S", 0.3)

    async def stalling() -> AsyncIterator[bytes]:
        yield b"abc"
        await asyncio.sleep(5)

    async with running_api(worker(), weights_dirs=[weights], trainer_api="on", fronts=fronts) as api:
        await post(api, "/pause")
        await post(api, "/start_weight_update")
        answer = await api.send("POST", "/update_weights", data=stalling(), headers=OCTETS)
        assert (answer.status, "the update is cancelled" in answer.error["message"]) == (408, True)
        assert (await api.send("POST", "/finish_weight_update")).status == 409


@pytest.mark.parametrize("level", [1, 2])
async def test_verl_wakes_weights_first_and_nothing_is_computed_before_the_cache(weights: Path, level: int) -> None:
    async with running_api(worker(), weights_dirs=[weights], trainer_api="on") as api:
        await post(api, f"/sleep?level={level}")
        await post(api, "/wake_up?tags=weights")
        asked = asyncio.ensure_future(generate(api))
        await asyncio.sleep(0.1)
        assert (await get(api, "/is_paused"), asked.done()) == ({"is_paused": True}, False)
        await post(api, "/update_weights", weight_dir="new")
        await post(api, "/wake_up?tags=kv_cache")
        await asked
        assert await get(api, "/is_paused") == {"is_paused": False}


async def test_generate_returns_alternatives_and_equal_choices_without_the_name_of_the_model() -> None:
    async with running_api(trainer_api="on") as api:
        params = {"max_tokens": 2, "temperature": 0, "logprobs": 2, "n": 2}
        answer = await post(api, "/inference/v1/generate", token_ids=[40, 41], sampling_params=params)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        for entry in answer["choices"][1]["logprobs"]["content"]:
            assert len(entry["top_logprobs"]) == 2
            assert entry["top_logprobs"][0]["token"] == entry["token"]
