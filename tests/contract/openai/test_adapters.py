"""An adapter's name in place of the model's, in every API over HTTP."""

from pathlib import Path

import pytest

from octavo.admin.v1 import admin_service_pb2 as admin_pb
from tests.contract.openai.api import Json, running_api
from tests.contract.test_adapters import Files


async def test_an_adapters_name_is_a_models_name_and_is_listed_with_its_parent() -> None:
    async with running_api(Files().worker()) as api:
        await api.stack.admin.LoadAdapter(admin_pb.LoadAdapterRequest(name="poet", source="a"))
        plain, adapted = await api.complete(temperature=0), await api.complete(temperature=0, model="poet")
        assert plain.json["choices"][0]["text"] != adapted.json["choices"][0]["text"]
        chat = await api.chat(model="poet")
        message = {"model": "poet", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
        asked = {"model": "poet", "max_output_tokens": 4, "input": "a"}
        answers = [
            await api.send("POST", "/v1/messages", json=message),
            await api.send("POST", "/v1/responses", json=asked),
        ]
        assert [answer.status for answer in (chat, *answers)] == [200] * 3
        assert [answer.json["model"] for answer in (plain, adapted, chat, *answers)] == ["fake", *["poet"] * 4]
        streams = [
            await api.send("POST", "/v1/completions", json={"model": "poet", "prompt": "a", "stream": True}),
            await api.send("POST", "/v1/chat/completions", json={**message, "stream": True}),
            await api.send("POST", "/v1/messages", json={**message, "stream": True}),
            await api.send("POST", "/v1/responses", json={**asked, "stream": True}),
        ]
        assert [(stream.text.count('"poet"') > 0, '"model":"fake"' in stream.text) for stream in streams] == [
            (True, False)
        ] * 4
        listed = (await api.get("/v1/models")).json["data"]
        assert [(entry["id"], entry.get("parent")) for entry in listed] == [("fake", None), ("poet", "fake")]
        assert (await api.get("/v1/models/poet")).json["parent"] == "fake"
        anthropics = {"anthropic-version": "2023-06-01"}
        listed = (await api.get("/v1/models", headers=anthropics)).json["data"]
        assert [entry["id"] for entry in listed] == ["fake", "poet"]
        assert (await api.get("/v1/models/poet", headers=anthropics)).json == listed[1]
        unknown = await api.complete(model="other")
        assert (unknown.status, unknown.error["message"]) == (404, 'model is "other"; it must be "fake" or "poet"')


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

# Path, body, status, and what the error says; in this order, on a server with the adapter `poet`.
REFUSED: list[tuple[str, Json, int, str]] = [
    (LOAD, {"lora_name": "poet", "lora_path": "a"}, 400, "load it in place (load_inplace)"),
    (LOAD, {"lora_name": "x", "lora_path": "none"}, 404, "none is not there"),
    (LOAD, {"lora_name": "x"}, 400, "lora_path is absent; it must be set"),
    (LOAD, {"lora_name": "x" * 300, "lora_path": "a"}, 400, "; it must be 1 to 256 characters long"),
    (LOAD, {"lora_name": "x", "lora_path": "a", "model": "other"}, 404, 'model is "other"'),
    (UNLOAD, {"lora_name": "x"}, 404, "no adapter has the name 'x'"),
]


@pytest.mark.parametrize("fronts", [0, 1])
async def test_operators_load_and_unload_adapters_as_in_vllm(fronts: int) -> None:
    files = Files()
    async with running_api(files.worker(), trainer_api="on", fronts=fronts) as api:

        async def post(path: str, **body: object) -> tuple[int, str]:
            answer = await api.send("POST", path, json=body)
            return answer.status, answer.text

        added = 200, "Success: LoRA adapter 'poet' added successfully."
        assert await post(LOAD, lora_name="poet", lora_path="a", model="fake") == added
        text = (await api.complete(temperature=0, model="poet")).json["choices"][0]["text"]
        for path, body, status, words in REFUSED:
            answer = await api.send("POST", path, json=body)
            assert (answer.status, words in answer.error["message"]) == (status, True), answer.text
        files.content["a"] = b"another"
        assert await post(LOAD, lora_name="poet", lora_path="a", load_inplace=True) == added
        assert (await api.complete(temperature=0, model="poet")).json["choices"][0]["text"] != text
        removed = 200, "Success: LoRA adapter 'poet' removed successfully."
        assert await post(f"{UNLOAD}?model=fake", lora_name="poet", lora_int_id=1) == removed


async def test_the_routes_are_off_by_default_and_for_operators_only(tmp_path: Path) -> None:
    body = {"lora_name": "poet", "lora_path": "a"}
    async with running_api(Files().worker()) as api:
        assert (await api.send("POST", LOAD, json=body)).status == 404
    tokens = tmp_path / "tokens"
    tokens.write_text("blue the-right-token-of-blue\n* the-right-token-of-all\n")
    tokens.chmod(0o600)
    async with running_api(Files().worker(), trainer_api="on", tokens_file=tokens) as api:
        for token, status in (("blue", 403), ("all", 200)):
            headers = {"Authorization": f"Bearer the-right-token-of-{token}"}
            assert (await api.send("POST", LOAD, json=body, headers=headers)).status == status
