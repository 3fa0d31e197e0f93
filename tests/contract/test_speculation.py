"""What callers and operators have of speculation: at every door one token a step on demand; what is shown of it."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from operator import itemgetter
from pathlib import Path

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo import Client
from octavo.admin_client import AdminClient
from octavo.commands.command_line import run
from octavo.commands.explain import explain_request
from octavo.top.overview import overview_lines
from octavo.top.polling import Poller
from octavo.top.rates import RateMeter
from octavo.values.outputs import Finished
from tests.contract.anthropic.messages import HEADERS, user
from tests.contract.openai.api import Api, Json, running_api
from tests.contract.test_batch import batch, choices, line, write
from tests.contract.test_bench import ended, started
from tests.support.stack import running_stack

NUM_TOKENS = 40
# Sends a request with some fields; returns what must be the same whatever they are.
Door = Callable[[Api, Json], Awaitable[object]]


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    """A model whose executor drafts."""
    async with running_api(FakeWorker(max_allowance=4), speculate="on") as running:
        yield running


async def call(api: Api, fields: Json) -> object:
    async with Client(api.stack.address) as client:
        output = await client.generate("hello", max_tokens=NUM_TOKENS, temperature=0, **fields)
    return output.outputs[0].text


async def one_stream(api: Api, fields: Json) -> object:
    async with Client(api.stack.address) as client:
        running = client.stream_many(["hello"], max_tokens=NUM_TOKENS, temperature=0, **fields)
        events = [event async for _, event in running]
    assert isinstance(events[-1], Finished)
    return events[-1].outputs[0].text


def http(path: str, answer_of: Callable[[Json], object], length: str = "max_tokens", **prompt: object) -> Door:
    async def ask(api: Api, fields: Json) -> object:
        body = {"model": "fake", length: NUM_TOKENS, "temperature": 0, **prompt, **fields}
        answer = await api.send("POST", path, json=body, headers=HEADERS)
        assert answer.status == 200, answer.text
        return answer_of(answer.json)

    return ask


async def generate(api: Api, fields: Json) -> object:
    flags = ["--address", api.stack.address, "--max-tokens", str(NUM_TOKENS), *flags_of(fields)]
    assert await asyncio.to_thread(run, ["generate", "hello", *flags]) == 0
    return None


def flags_of(fields: Json) -> list[str]:
    return [] if fields.get("speculate", True) else ["--no-speculate"]


async def measure(api: Api, fields: Json) -> object:
    load = ("--num-requests", "2", "--input-len", "4", "--output-len", str(NUM_TOKENS))
    async with started(*load, *flags_of(fields), "--address", api.stack.address) as process:
        assert (await ended(process)).status == 0
    return None


async def batches(api: Api, fields: Json) -> object:
    with tempfile.TemporaryDirectory() as directory:
        body = {"prompt": "hello", "max_tokens": NUM_TOKENS, "temperature": 0, **fields}
        requests, answers = write(Path(directory) / "requests.jsonl", [line("a", **body)]), Path(directory) / "answers"
        assert await batch(api, requests, answers) == 0
        return choices(answers)


DOORS = {
    "Generate": call,
    "StreamRequests": one_stream,
    "completions": http("/v1/completions", itemgetter("choices"), prompt="hello"),
    "chat": http("/v1/chat/completions", itemgetter("choices"), messages=[user("hello")]),
    "Responses": http("/v1/responses", lambda a: a["output"][0]["content"], "max_output_tokens", input="hello"),
    "Messages": http("/v1/messages", itemgetter("content"), messages=[user("hello")]),
    "octavo generate": generate,
    "octavo batch": batches,
    "octavo bench": measure,
}


@pytest.mark.parametrize("door", DOORS)
async def test_a_request_gets_one_token_a_step_if_it_says_so_and_the_same_tokens(door: str, api: Api) -> None:
    known, answers = api.stack.engine.ended, []
    for speculate, fields in ((True, {}), (True, {"speculate": True}), (False, {"speculate": False})):
        before = len(known)
        answers.append(await DOORS[door](api, fields))
        of_door = [request for request in known.newest(len(known) - before) if request.num_output_tokens > 1]
        assert of_door
        assert all((request.num_draft_tokens > 0) is speculate for request in of_door)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(
    ("speculate", "is_invariant", "told"),
    [
        ("off", True, (False, False)),
        ("auto", False, (False, False)),
        ("auto", True, (True, False)),
        ("on", False, (True, True)),
    ],
)
async def test_people_see_whether_it_speculates_and_what_came_of_it(
    speculate: str, is_invariant: bool, told: tuple[bool, bool], capsys: pytest.CaptureFixture[str]
) -> None:
    worker = FakeWorker(max_allowance=4, is_invariant=is_invariant)
    async with running_stack(worker, speculate=speculate) as stack:
        admin = AdminClient(stack.service.other_addresses["admin"])
        async with Client(stack.address) as client, admin:
            model = await client.get_model()
            poller, meter = Poller(admin), RateMeter()
            meter.add(await poller.take())
            await client.generate("hello", max_tokens=NUM_TOKENS, request_id="a")
            shown = meter.add(await poller.take())
        await explain_request(AdminClient(stack.service.other_addresses["admin"]), "a")
        [request] = stack.engine.ended.values()
        num_drafts, num_right = stack.engine.meter.num_drafts, stack.engine.meter.num_accepted_drafts
    assert (model.speculates, model.speculation_may_change_outputs) == told
    assert ("of the output came as drafts" in capsys.readouterr().out) == model.speculates
    lines = [line.plain for line in overview_lines(shown, "a:1", 120) if line.plain.startswith("drafts")]
    assert bool(lines) == model.speculates
    if model.speculates:
        [executor] = shown.answers.state.executors
        assert (executor.num_draft_tokens, executor.num_accepted_draft_tokens) == (num_drafts, num_right)
        assert 0 < request.num_draft_tokens == num_right < num_drafts
        assert lines[0].endswith(f"   {NUM_TOKENS / (NUM_TOKENS - num_right):.1f} tokens a step of a sequence")
