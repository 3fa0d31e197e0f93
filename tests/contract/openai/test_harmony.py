"""A model that writes OpenAI's harmony, as gpt-oss does, at every door: its answers, and its answers sent back."""

from tests.contract.anthropic.messages import streamed, whole
from tests.contract.openai.api import Api, Json, running_api
from tests.contract.openai.test_tools import ask, told
from tests.contract.responses.answers import comparable, events_of, put_together
from tests.support.echo_worker import THIRD_TOKEN, EchoWorker
from tests.support.family_templates import GPT_OSS

# What the user says ends with a token, as the echo worker needs it.
TEMPLATE = GPT_OSS.replace("<|message|>' + m.content + '<|end|>'", "<|message|>' + m.content + '<|im_end|>'")

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
ARGUMENTS = '{"city":"Zürich 🦊"}'
CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
SAID = f"{THOUGHT}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}"
ANSWER = f"{THOUGHT}<|channel|>final<|message|>Yes."
JSON_ANSWER = f'{THOUGHT}<|channel|>final<|message|>{{"a": 1}}'
SCHEMA: Json = {"type": "object"}


async def test_answers_of_chats() -> None:
    for marker in (THIRD_TOKEN, "<|call|>", "<|channel|>"):  # the others are written byte by byte
        async with running_api(EchoWorker(TEMPLATE, marker)) as api:
            for answer in await ask(api, SAID):
                assert told(answer) == ("I look.", [("get_weather", ARGUMENTS)], "tool_calls")
                assert answer.choices[0].message.model_extra == {"reasoning_content": "Hm.", "reasoning": "Hm."}
            for answer in await ask(api, ANSWER) + await ask(api, ANSWER, tools=None, tool_choice="none"):
                assert told(answer) == ("Yes.", [], "stop")
            for answer in await ask(api, CALL, tool_choice="none"):  # nobody offered it
                assert told(answer) == ("", [], "stop")
                assert answer.choices[0].message.model_extra == {"reasoning_content": ARGUMENTS, "reasoning": ARGUMENTS}


async def test_what_a_grammar_holds() -> None:
    held = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    async with running_api(EchoWorker(TEMPLATE)) as api:
        for answer in await ask(api, SAID, tool_choice="required"):
            assert told(answer) == ("I look.", [("get_weather", ARGUMENTS)], "tool_calls")
        for answer in await ask(api, JSON_ANSWER, response_format=held):
            assert told(answer) == ('{"a": 1}', [], "stop")


async def respond(api: Api, said: str, **fields: object) -> Json:
    """Return an answer of the Responses API, which is the same in a stream."""
    tools = [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]
    body = {"model": "fake", "input": [{"role": "user", "content": f"SAY:{said}"}], "tools": tools, **fields}
    answer = (await api.send("POST", "/v1/responses", json=body)).json
    stream = await api.send("POST", "/v1/responses", json={**body, "stream": True})
    other = put_together(events_of(stream))
    assert [item["type"] for item in answer["output"]] == [item["type"] for item in other["output"]]
    assert comparable(answer)["usage"] == comparable(other)["usage"]
    return answer


async def test_answers_of_the_other_doors_may_be_sent_back() -> None:
    async with running_api(EchoWorker(TEMPLATE, "<|call|>")) as api:
        output = (await respond(api, SAID))["output"]
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
        assert output[2]["arguments"] == ARGUMENTS
        result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "sunny"}
        again = await respond(api, "", input=[*output, result, {"role": "user", "content": f"SAY:{ANSWER}"}])
        assert again["output"][1]["content"][0]["text"] == "Yes."

        tools = [{"name": "get_weather", "input_schema": SCHEMA}]
        asked: Json = {"tools": tools, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        user = {"role": "user", "content": f"SAY:{SAID}"}
        message = await whole(api, **asked, messages=[user])
        for one in (message, await streamed(api, **asked, messages=[user])):
            assert [block["type"] for block in one["content"]] == ["thinking", "text", "tool_use"]
            assert one["content"][2]["input"] == {"city": "Zürich 🦊"}
        assert message["stop_reason"] == "tool_use"
        result = {"type": "tool_result", "tool_use_id": message["content"][2]["id"], "content": "sunny"}
        said = {"type": "text", "text": f"SAY:{ANSWER}"}
        turns = [
            user,
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": [result, said]},
        ]
        again = await whole(api, **asked, messages=turns)
        assert [block["type"] for block in again["content"]] == ["thinking", "text"]


async def test_an_effort_that_the_model_does_not_know_is_refused_by_its_name_at_every_door() -> None:
    bodies: dict[str, Json] = {
        "reasoning_effort": {"reasoning_effort": "minimal"},
        "reasoning.effort": {"reasoning": {"effort": "minimal"}},
        "output_config.effort": {"output_config": {"effort": "minimal"}, "max_tokens": 9},
    }
    paths = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
    async with running_api(EchoWorker(TEMPLATE)) as api:
        for path, (name, body) in zip(paths, bodies.items(), strict=True):
            said = [{"role": "user", "content": f"SAY:{ANSWER}"}]
            body |= {"model": "fake", "input" if "responses" in path else "messages": said}
            refused = await api.send("POST", path, json=body)
            assert refused.status == 400, path
            rule = "one of low, medium, high, or unset: the model knows no others"
            assert f'{name} is "minimal"; it must be {rule}' in refused.json["error"]["message"]
