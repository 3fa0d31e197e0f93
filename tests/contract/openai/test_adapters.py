"""An adapter's name in place of the model's, in every API over HTTP."""

from octavo.admin.v1 import admin_service_pb2 as admin_pb
from tests.contract.openai.api import running_api
from tests.contract.test_adapters import Files


async def test_an_adapters_name_is_a_models_name_and_is_listed_with_its_parent() -> None:
    async with running_api(Files().worker()) as api:
        await api.stack.admin.LoadAdapter(admin_pb.LoadAdapterRequest(name="poet", source="a"))
        plain, adapted = await api.complete(temperature=0), await api.complete(temperature=0, model="poet")
        assert plain.json["choices"][0]["text"] != adapted.json["choices"][0]["text"]
        chat = await api.chat(model="poet")
        message = {"model": "poet", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
        answers = [
            await api.send("POST", "/v1/messages", json=message),
            await api.send("POST", "/v1/responses", json={"model": "poet", "input": "a", "max_output_tokens": 4}),
        ]
        assert [answer.status for answer in (chat, *answers)] == [200] * 3
        listed = (await api.get("/v1/models")).json["data"]
        assert [(entry["id"], entry.get("parent")) for entry in listed] == [("fake", None), ("poet", "fake")]
        assert (await api.get("/v1/models/poet")).json["parent"] == "fake"
        anthropics = {"anthropic-version": "2023-06-01"}
        listed = (await api.get("/v1/models", headers=anthropics)).json["data"]
        assert [entry["id"] for entry in listed] == ["fake", "poet"]
        assert (await api.get("/v1/models/poet", headers=anthropics)).json == listed[1]
        unknown = await api.complete(model="other")
        assert (unknown.status, unknown.error["message"]) == (404, 'model is "other"; it must be "fake" or "poet"')
