"""An agent's loop of 40 calls of tools is the same with drafts as without: calls, texts and log-probabilities."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from executor_svc.drafts.drafting import RowCost
from executor_svc.fake.tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, fake_tokenizer_files
from executor_svc.worker.torch_worker import TorchWorker
from tests.contract.openai.api import Json, running_api
from tests.numerics.real_model import RealModel
from tests.numerics.tiny_models import save_tiny_model

NUM_CALLS = 40
TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }} in <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endfor %}{% for message in messages %}<|im_start|>{{ message['role'] + '\n' + message['content'] }}
{% for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
_EDIT: Json = {
    "name": "edit",
    "description": "Replaces a line of a file.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {
            "path": {"enum": ["main.py", "notes.md"]},
            "line": {"type": "integer", "minimum": 1, "maximum": 99},
            "text": {"type": "string", "maxLength": 24},
        },
        "required": ["path", "line", "text"],
        "additionalProperties": False,
    },
}
TOOLS: Json = {
    "tools": [{"type": "function", "function": _EDIT}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


async def play(worker: TorchWorker, speculate: str) -> tuple[list[Json], int]:
    """Return the answers of a loop, and how many drafts were right: each call gets a result, and is talked about."""
    turns: list[Json] = [{"role": "user", "content": "Replace each line of main.py by one that prints its number."}]
    answers: list[Json] = []
    async with running_api(worker, speculate=speculate) as api:
        model = (await api.get("/v1/models")).json["data"][0]["id"]
        for number in range(NUM_CALLS):
            fields = {"model": model, "seed": number, "temperature": number % 2 * 0.7, "logprobs": True}
            [called] = (await api.chat(messages=turns, max_tokens=400, **TOOLS, **fields)).json["choices"]
            message = called["message"]
            [call] = message["tool_calls"]
            assert json.loads(call["function"]["arguments"])["path"] in ("main.py", "notes.md")
            turns += [
                message,
                {"role": "tool", "tool_call_id": call["id"], "content": f"{number + 1}: print({number})"},
            ]
            talk = {"role": "user", "content": f"Say line {number + 1} again."}
            [said] = (await api.chat(messages=[*turns, talk], max_tokens=20, **fields)).json["choices"]
            answers += [call["function"], called["logprobs"], said]
        return answers, api.stack.engine.meter.num_accepted_drafts


def files() -> Iterable[tuple[str, bytes]]:
    """Return those of a tokenizer whose model knows tools."""
    yield "chat_template.jinja", TEMPLATE.encode()
    yield from ((file.name, file.content) for file in fake_tokenizer_files())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("one_thread")
async def test_40_calls_of_tools_are_the_same_with_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowCost, "share", lambda *_: 0.001)
    save_tiny_model(tmp_path, vocab_size=VOCAB_SIZE, eos_token_id=EOS_TOKEN_ID, max_position_embeddings=20_000)
    for name, content in files():
        (tmp_path / name).write_bytes(content)
    worker = RealModel(tmp_path, 16, 2500, max_num_seqs=4).worker()

    alone, none = await play(worker, "off")
    drafted, num_right = await play(worker, "auto")

    assert drafted == alone
    assert num_right > 50 > none
