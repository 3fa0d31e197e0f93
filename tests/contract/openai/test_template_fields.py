"""How much to think and to say: every door gives it to the chat template, or says that it does not read that."""

from tests.contract.openai.api import HELLO, Json, running_api
from tests.support.echo_worker import EchoWorker

_TURNS = "{% for message in messages %}{{ message['role'] + message['content'] }}{% endfor %}"
_READS = "SAY:{{ reasoning_effort }} {{ verbosity }} {{ enable_thinking }}"

# By path: the body, what the template reads, and the fields that one which reads nothing leaves unread.
DOORS: dict[str, tuple[Json, str, str]] = {
    "/v1/chat/completions": (
        {"messages": HELLO, "reasoning_effort": "high", "verbosity": "low", "store": True},
        "high low True",
        "store, reasoning_effort, verbosity",
    ),
    "/v1/responses": (
        {"input": "x", "reasoning": {"effort": "none"}, "text": {"verbosity": "low"}, "store": True},
        "none low False",
        "store, reasoning.effort, text.verbosity",
    ),
    "/v1/messages": (
        {"messages": HELLO, "max_tokens": 99, "output_config": {"effort": "high"}},
        "high  False",
        "output_config.effort",
    ),
}


async def test_effort_and_verbosity_reach_the_template_or_are_named_at_every_door() -> None:
    async with running_api(EchoWorker(_TURNS + _READS)) as reading, running_api(EchoWorker(_TURNS)) as other:
        for path, (body, said, unread) in DOORS.items():
            answer = await reading.send("POST", path, json={"model": "fake", **body})
            assert answer.status == 200, answer.text
            assert f'"{said}"' in answer.text, (path, answer.text)
            told = ["store"] if "store" in body else []
            assert answer.headers.get("x-octavo-ignored-fields") == (", ".join(told) or None), path

            answer = await other.send("POST", path, json={"model": "fake", **body})
            assert answer.status == 200, answer.text
            assert answer.headers["x-octavo-ignored-fields"] == unread, path
        asked = {"model": "fake", "prompt": "x", "reasoning_effort": "low", "verbosity": None, "store": False}
        answer = await other.send("POST", "/v1/completions", json=asked)
        assert answer.headers["x-octavo-ignored-fields"] == "reasoning_effort", answer.text


async def test_a_budget_of_thinking_reaches_the_template_as_an_effort() -> None:
    async with running_api(EchoWorker(_TURNS + _READS)) as api:
        for budget, effort, said in (
            (1024, None, "low"),
            (2048, None, "medium"),
            (4096, None, "high"),
            (1, "max", "max"),
        ):
            body: Json = {"model": "fake", "messages": HELLO, "max_tokens": 99}
            body |= {"thinking": {"type": "enabled", "budget_tokens": budget}, "output_config": {"effort": effort}}
            answer = await api.send("POST", "/v1/messages", json=body)
            assert f'"{said}  True"' in answer.text, answer.text
