"""An executor with a script: what agents and tools are tested with."""

from pathlib import Path

import pytest

from executor_svc.config import FakeConfig
from executor_svc.fake.__main__ import make_worker
from executor_svc.fake.scripted_worker import Script
from octavo_shared.errors import ModelLoadError
from tests.contract.openai.api import Json, running_api

CALL = '<tool_call>{"name": "read", "arguments": {"path": "ü"}}</tool_call>'
SCRIPT = f"""{{"when": "what is in ü", "say": {CALL.replace('"', chr(92) + '"').join('""')}}}

{{"when": "tool\\n42", "say": "It is 42 🦊."}}
{{"say": "Pardon?"}}
"""
TOOLS = [{"type": "function", "function": {"name": "read"}}]


async def test_a_script_plays_an_agents_model(tmp_path: Path) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text(SCRIPT)
    config = FakeConfig(script=str(path), max_model_len=262_144, num_device_blocks=20_000)
    async with running_api(make_worker(config)) as api:
        turns: list[Json] = [{"role": "system", "content": "word " * 50_000}, {"role": "user", "content": "hello"}]
        [choice] = (await api.chat(messages=turns, tools=TOOLS)).json["choices"]
        assert choice["message"]["content"] == "Pardon?"
        turns += [choice["message"], {"role": "user", "content": "what is in ü?"}]
        [choice] = (await api.chat(messages=turns, tools=TOOLS)).json["choices"]
        [call] = choice["message"]["tool_calls"]
        assert (call["function"], choice["finish_reason"]) == (
            {"name": "read", "arguments": '{"path": "ü"}'},
            "tool_calls",
        )
        turns += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "42"}]
        [choice] = (await api.chat(messages=turns, tools=TOOLS)).json["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("It is 42 🦊.", "stop")


async def test_a_script_gives_way_to_a_grammar(tmp_path: Path) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text('{"say": "no, never"}')
    async with running_api(make_worker(FakeConfig(script=str(path)))) as api:
        for choices, said in ((["yes"], "yes"), (["no", "no, never"], "no, never")):
            answer = await api.complete(structured_outputs={"choice": choices})
            assert answer.json["choices"][0]["text"] == said


@pytest.mark.parametrize("line", ["{", "[]", '{"when": "a"}', '{"when": 1, "say": ""}', "1"])
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text(f'{{"say": ""}}\n{line}\n')
    with pytest.raises(ModelLoadError, match=r"script\.jsonl:2 must be a JSON object"):
        Script.read(str(path))
