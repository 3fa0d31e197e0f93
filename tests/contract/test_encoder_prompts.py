"""Models with an encoder from end to end, with fake executors: what it reads, who is refused, what a loss changes."""

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo import LLM
from octavo.admin.v1 import admin_pb2 as admin
from octavo.admin.v1 import admin_service_pb2 as admin_pb
from octavo.client import Client
from octavo.commands import command_line
from octavo.errors import InvalidRequestError, OverloadedError, ResourceExhaustedError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.outputs import FailedRequest, Finished
from octavo_shared.errors import ExecutorFaultError
from octavo_shared.step_wire.step import Step
from octavo_shared.step_wire.token_rules import MAX_BANNED_TOKENS
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.executors.client import ExecutorRefusedError
from scheduler_svc.executors.serving_limits import PlannerSettings, largest_rules_bytes, serving_limits
from scheduler_svc.step_log import writer
from scheduler_svc.step_log.log_files import files_in
from scheduler_svc.step_log.recording_fleet import RecordingFleet
from tests.contract.openai.api import running_api
from tests.contract.test_continuation import go_on_everywhere, run
from tests.support.stack import ExecutorProcess, Stack, running_stack, until
from tests.support.step_logs import check_replay
from tests.unit.octavo.local.test_llm import ask
from tests.unit.octavo.test_cli import run as run_command

pytestmark = pytest.mark.timeout(60)

RECOMPUTE, SWAP = PreemptionMode
TEXT = "a text that is longer than two blocks of the encoder"


class Worker(FakeWorker):
    """Counts what its encoder computes."""

    def __init__(self, **settings: Any) -> None:
        sizes = {"block_size_tokens": 8, "max_encoder_tokens": 60, "num_encoder_blocks": 24, "max_model_len": 128}
        super().__init__(**{**sizes, **settings})
        self.num_encoded = 0

    def execute(self, step: Step, *args: Any, **keywords: Any) -> Any:
        self.num_encoded += len(step.encoder_inputs)
        return super().execute(step, *args, **keywords)


def request_of(text: str, max_tokens: int = 12, **params: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(text=text)
    request.sampling_params.max_tokens = max_tokens
    request.sampling_params.temperature = 0
    for name, value in params.items():
        setattr(request.sampling_params, name, value)
    return request


@pytest.mark.parametrize("fronts", [0, 1])
async def test_a_plain_prompt_is_the_encoders_and_equal_ones_are_encoded_once(fronts: int) -> None:
    worker = Worker()
    async with running_stack(worker, fronts=fronts) as stack, Client(stack.address) as client:
        assert (await client.get_model()).max_encoder_tokens == 60
        first, again, other = [
            await client.generate(text, temperature=0, max_tokens=8) for text in (TEXT, TEXT, TEXT[:-1])
        ]
        ids = [*TEXT.encode()]
        with_start = await client.generate([0], temperature=0, max_tokens=8, encoder_prompt=TEXT)
        with_text = await client.generate("now: ", temperature=0, max_tokens=8, encoder_prompt=ids)
        assert first.outputs[0].token_ids == again.outputs[0].token_ids == with_start.outputs[0].token_ids
        assert first.outputs[0].token_ids not in (other.outputs[0].token_ids, with_text.outputs[0].token_ids)
        assert worker.num_encoded == 2
        shown = await stack.admin.GetBlockMap(admin_pb.GetBlockMapRequest())
        [executor] = (await stack.admin.GetSchedulerState(admin_pb.GetSchedulerStateRequest())).executors
        cached, first_block = shown.encoder_states.count(admin.BLOCK_STATE_CACHED), len(shown.states)
        assert (executor.num_encoder_blocks, executor.num_cached_encoder_blocks) == (24, cached) == (24, 14)
        block = await stack.admin.GetBlock(admin_pb.GetBlockRequest(block=first_block))
        assert (block.is_of_encoder, block.is_registered, block.state) == (True, True, admin.BLOCK_STATE_CACHED)
        assert stack.engine.meter.num_encoder_tokens_of == {"computed": 2 * len(TEXT) - 1, "found": 3 * len(TEXT)}


async def test_what_no_encoder_can_read_is_refused_in_a_sentence() -> None:
    async with running_stack(Worker()) as stack, Client(stack.address) as client:
        with pytest.raises(InvalidRequestError, match="text is 61 tokens; it must be at most 60 tokens long: a step"):
            await client.generate("x" * 61)
        for given, words in (
            ({"prompt": [5] * 200}, "token_ids is 200 tokens; it must be at most 60 tokens long for the encoder"),
            (
                {"prompt": [0], "encoder_prompt": [5] * 200},
                "encoder_prompt.token_ids is 200 tokens; it must be at most",
            ),
        ):
            with pytest.raises(InvalidRequestError, match=words):
                await client.generate(**given)  # type: ignore[arg-type]
        with pytest.raises(
            InvalidRequestError, match=r"encoder_prompt.token_ids is empty; it must be at least 1 token"
        ):
            await client.generate("x", encoder_prompt=[])
        with pytest.raises(InvalidRequestError, match="prompt_logprobs is 0; it must be unset without encoder_prompt"):
            await client.generate("x", prompt_logprobs=0)
        with pytest.raises(InvalidRequestError, match="encoder_prompt is a conversation"):
            await client.generate("x", encoder_prompt=[{"role": "user", "content": "x"}])  # type: ignore[list-item]
    async with running_stack(FakeWorker()) as stack, Client(stack.address) as client:
        for encoder_prompt in ("y", [1, 2, 3]):
            with pytest.raises(
                InvalidRequestError, match="encoder_prompt is set; it must be unset: this model has no encoder"
            ):
                await client.generate("x", encoder_prompt=encoder_prompt)
    async with running_stack(Worker(max_model_len=24)) as stack, Client(stack.address) as client:
        assert len((await client.tokenize("x" * 60)).token_ids) == 60
        with pytest.raises(InvalidRequestError, match="text is 61 tokens; it must be at most 60 tokens long: a step"):
            await client.tokenize("x" * 61)
    async with running_api(Worker()) as api:
        answer = await api.complete(prompt=[120, 121], echo=True, return_token_ids=True, max_tokens=1)
        assert answer.json["choices"][0]["text"].startswith("xy")
        assert answer.json["choices"][0]["prompt_token_ids"] == [120, 121]
        answer = await api.complete(prompt="x", echo=True, logprobs=1)
        assert answer.json["error"]["message"].startswith("logprobs is 1; it must be unset with echo: the prompt is")


NO_ENCODER = "it must be unset: this model has no encoder; give what it says in the prompt"
TOO_LONG = "is 61 tokens; it must be at most 60 tokens long: a step encodes it whole"
LONG = "y" * 61
# A prompt and an encoder's, and the sentence with the field and with the words of the command line.
REFUSALS = [
    (Worker, "x", LONG, TOO_LONG, "encoder_prompt.text", "--encoder-prompt"),
    (Worker, LONG, None, TOO_LONG, "text", "the prompt"),
    (FakeWorker, "x", "y", f"is set; {NO_ENCODER}", "encoder_prompt", "--encoder-prompt"),
]


async def ask_llm(stack: Stack, monkeypatch: pytest.MonkeyPatch, question: Callable[[LLM], Any]) -> Any:
    """Ask an LLM whose scheduler is that of a stack."""
    monkeypatch.setattr("octavo.models.names.fetch_from_hub", lambda name, progress: None)
    return await ask(stack, monkeypatch, question)


@pytest.mark.parametrize(("kind", "prompt", "encoder_prompt", "sentence", "field", "flag"), REFUSALS)
async def test_every_door_refuses_in_the_same_sentence(
    kind: type[FakeWorker],
    prompt: str,
    encoder_prompt: str | None,
    sentence: str,
    field: str,
    flag: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts, encoder_prompts = [prompt], None if encoder_prompt is None else [encoder_prompt]
    flags = [] if encoder_prompt is None else ["--encoder-prompt", encoder_prompt]
    async with running_stack(kind()) as stack, Client(stack.address) as client:
        [(_, failed)] = [each async for each in client.stream_many(prompts, encoder_prompts=encoder_prompts)]
        assert isinstance(failed, FailedRequest)
        assert str(failed.error) == f"{field} {sentence}"
        with pytest.raises(InvalidRequestError) as raised:
            await ask_llm(stack, monkeypatch, lambda llm: llm.generate(prompts, encoder_prompts=encoder_prompts))
        assert str(raised.value) == f"{field} {sentence}"
        ended = await run_command("generate", *prompts, *flags, "--raw", "--address", stack.address)
        assert (ended.status, ended.stdout, ended.stderr) == (1, "", f"octavo: {flag} {sentence}\n")


async def test_every_door_gives_the_encoder_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    asked: dict[str, Any] = {"prompts": ["now: ", "now: ", "now: "], "encoder_prompts": [TEXT, TEXT[:-1], None]}
    async with running_stack(worker) as stack, Client(stack.address) as client:
        each = [
            await client.generate(prompt, encoder_prompt=given, **params)
            for prompt, given in zip(asked["prompts"], asked["encoder_prompts"], strict=True)
        ]
        num_encoded = worker.num_encoded
        counts = [(answer.usage.num_prompt_tokens, answer.usage.num_encoder_tokens) for answer in each]
        assert counts == [(6, len(TEXT)), (6, len(TEXT) - 1), (1, 5)]
        expected = [answer.outputs[0].token_ids for answer in each]
        many = client.stream_many(**asked, **params)
        ends = {index: event async for index, event in many if isinstance(event, Finished)}
        assert [ends[index].outputs[0].token_ids for index in range(3)] == expected
        assert ends[0].usage.num_encoder_tokens == len(TEXT)
        answers = await ask_llm(stack, monkeypatch, lambda llm: llm.generate(**asked, **params, progress=False))
        assert [answer.outputs[0].token_ids for answer in answers] == expected
        flags = ["--temperature", "0", "--max-tokens", "8", "--json", "--raw", "--address", stack.address]
        said = json.loads((await run_command("generate", "now: ", "--encoder-prompt", TEXT, *flags)).stdout)
        assert tuple(said["outputs"][0]["token_ids"]) == expected[0]
        assert said["usage"]["num_encoder_tokens"] == len(TEXT)
        assert worker.num_encoded == num_encoded  # each found what the first had computed


@pytest.mark.parametrize(
    ("turn", "max_tokens", "said"),
    [
        ("hello", 4, "octavo: stopped at 4 tokens; /set max_tokens N allows more\n"),
        ("hello", 400, "only 127 of --max-tokens 400 fit: the decoder's prompt and answer together have at most 128"),
        ("x" * 61, 4, "octavo: the prompt is 80 tokens; it must be at most 60 tokens long: a step encodes it whole\n"),
    ],
)
async def test_the_encoder_reads_a_chat_by_its_template(turn: str, max_tokens: int, said: str) -> None:
    worker = Worker()
    async with running_stack(worker) as stack:
        flags = ["--temperature", "0", "--max-tokens", str(max_tokens), "--address", stack.address]
        ended = await run_command("chat", *flags, stdin=f"{turn}\n")
    assert said in ended.stderr
    assert (ended.status, bool(ended.stdout), worker.num_encoded) == (
        (0, True, 1) if turn == "hello" else (1, False, 0)
    )


@pytest.mark.parametrize("starts", [(), (259,), (0, -1), (0,) * 128])
def test_an_executor_whose_decoder_cannot_begin_is_refused(starts: tuple[int, ...]) -> None:
    info = Worker().info
    assert serving_limits(info, PlannerSettings()).max_encoder_tokens == 60
    with pytest.raises(ExecutorFaultError, match="with which its decoder begins; there must be 1 to 127, of ids 0 to"):
        serving_limits(replace(info, decoder_start_token_ids=starts), PlannerSettings())


def test_an_executor_with_an_encoder_and_adapter_slots_is_refused() -> None:
    with pytest.raises(ExecutorRefusedError, match="has an encoder, and it offers 2 slots for adapters; models with"):
        serving_limits(Worker(num_adapter_slots=2).info, PlannerSettings())


def test_tokens_that_an_executor_bans_are_few_and_known_and_have_room_in_a_step() -> None:
    info = Worker().info
    for banned in ((info.vocab_size,), (0,) * (info.vocab_size), (0,) * (MAX_BANNED_TOKENS + 1)):
        announced = replace(info, banned_token_ids=banned, vocab_size=max(info.vocab_size, len(banned)))
        with pytest.raises(ExecutorFaultError, match="there may be"):
            serving_limits(announced, PlannerSettings())
    some = replace(info, banned_token_ids=tuple(range(100)))
    assert largest_rules_bytes(some) >= largest_rules_bytes(info) + 2 * len(some.banned_token_ids)


REQUESTS = [
    request_of(TEXT, 60),
    request_of(TEXT[::-1], 60, temperature=0.8, seed=3, n=3),
    request_of(TEXT, 40, beam_width=3, n=2),
    request_of(TEXT[:20], 60),
    request_of(TEXT[:30], 60, temperature=1.0, seed=4, best_of=3),
]


async def tokens_of(stack: Stack, request: pb.GenerateRequest) -> list[list[int]]:
    ran = await run(stack, request)
    return [list(output.token_ids) for output in ran.finished.outputs]


@pytest.mark.parametrize(("num_host_blocks", "wanted"), [(0, [RECOMPUTE]), (40, [RECOMPUTE, SWAP])])
async def test_preemptions_and_a_loss_change_no_token_and_the_log_replays(
    tmp_path: Path, num_host_blocks: int, wanted: list[PreemptionMode], capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_stack(Worker()) as stack:
        alone = [await tokens_of(stack, request) for request in REQUESTS]
    small = {"num_device_blocks": 24, "num_encoder_blocks": 16, "num_host_blocks": num_host_blocks}
    workers = [Worker(**small) for _ in range(2)]
    async with running_stack(*workers, step_log=tmp_path, loses_soon=True, max_num_batched_tokens=64) as stack:
        async with stack.together(len(REQUESTS)):
            answers = asyncio.gather(*(tokens_of(stack, request) for request in REQUESTS))
        first = stack.executors[0]
        await until(lambda: (core := stack.driver_of(first).planner) and core.last_processed_step_id > 5)
        await first.kill()
        assert await answers == alone
        assert any(stack.engine.fleet.num_preemptions[mode] for mode in wanted)
    assert check_replay(tmp_path).counts.num_steps > 30
    assert await asyncio.to_thread(command_line.run, ["replay", str(tmp_path), "--at", "2:3"]) == 0
    assert capsys.readouterr().out.count("\n16 blocks of 8 tokens of the encoder of 127.0.0.1:") == 2
    executor = ExecutorProcess(Worker(**small))
    await executor.start()
    assert await asyncio.to_thread(command_line.run, ["replay", str(tmp_path), "--executor", executor.address]) == 0
    await executor.kill()


async def test_a_cut_answer_goes_on() -> None:
    async with running_stack(Worker(max_model_len=40)) as stack:
        await go_on_everywhere(stack, request_of(TEXT))
        given = request_of("now: ")
        given.encoder_prompt.text = TEXT
        await go_on_everywhere(stack, given)


async def test_an_executor_that_failed_is_probed_with_an_input() -> None:
    worker = Worker()
    async with running_stack(worker, loses_soon=True) as stack:
        for _ in range(3):
            stack.driver._breaker.fail(stack.driver.instance_id, "it failed", 0.0)
        assert not stack.driver._breaker.is_closed
        await stack.executor.kill()
        await stack.executor.start()
        await until(lambda: worker.num_encoded)
        await stack.attached()
        assert len((await tokens_of(stack, REQUESTS[0]))[0]) == 60


async def test_requests_that_move_to_another_executor_have_their_input_encoded_there() -> None:
    async with running_stack(Worker()) as stack:
        alone = [await tokens_of(stack, request) for request in REQUESTS]
    workers = [Worker(step_ms=2, max_transfers=4) for _ in range(2)]
    async with running_stack(*workers) as stack:
        answers = [asyncio.create_task(tokens_of(stack, request)) for request in REQUESTS]
        first = stack.executors[0]
        await until(lambda: stack.num_groups_on(first) and workers[0].num_encoded)
        num_before = workers[1].num_encoded
        await stack.admin.DrainExecutor(admin_pb.DrainExecutorRequest(executor=first.address))
        await until(lambda: not stack.num_groups_on(first))
        assert await asyncio.gather(*answers) == alone
        assert workers[1].num_encoded > num_before


@pytest.mark.parametrize(
    "asked", [{"prompt": TEXT}, {"prompt": [7, 8, 9]}, {"messages": [{"role": "user", "content": "hello"}]}]
)
async def test_a_prompt_of_openais_api_is_the_encoders(asked: dict[str, Any]) -> None:
    worker = Worker()
    async with running_api(worker) as api:
        call = api.chat if "messages" in asked else api.complete
        answers = [await call(max_tokens=8, temperature=0, ignore_eos=True, **asked) for _ in range(2)]
        assert worker.num_encoded == 1  # the second one found its output
        first, second = (answer.json["choices"] for answer in answers)
        assert first == second
        # The decoder's start token is one of them, and of a chat the template adds some.
        num_tokens = {"prompt": len(asked.get("prompt", "")) + 1}.get(next(iter(asked)))
        assert num_tokens in (None, answers[0].json["usage"]["prompt_tokens"])
        [model] = (await api.get("/v1/models")).json["data"]
        assert model["max_encoder_tokens"] == 60


async def test_what_the_encoder_reads_counts_against_quotas_and_the_queue(tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text('[""]\ntokens_per_minute = 100\n')
    worker = Worker(step_ms=1)
    settings: dict[str, Any] = {"tenants_file": tmp_path / "tenants.toml", "max_num_seqs": 1, "max_waiting_tokens": 50}
    async with running_stack(worker, **settings) as stack, Client(stack.address) as client:
        first = asyncio.create_task(client.generate(TEXT[:40], max_tokens=30, ignore_eos=True))
        await until(lambda: worker.num_encoded)
        async with stack.together(1):
            second = asyncio.create_task(client.generate(TEXT[:40], max_tokens=1))
            await until(lambda: stack.engine.waiting.num_prompt_tokens == 41)
        with pytest.raises((OverloadedError, ResourceExhaustedError), match="tokens a minute"):
            await client.generate(TEXT[:40], max_tokens=1)
        await asyncio.gather(first, second)


@pytest.mark.parametrize("num_host_blocks", [0, 40])
async def test_a_log_that_begins_with_a_snapshot_is_run_again(tmp_path: Path, num_host_blocks: int) -> None:
    """In small files, each of which is replayed, and run on an executor that has encoded nothing."""
    small = {"num_device_blocks": 24, "num_encoder_blocks": 40, "num_host_blocks": num_host_blocks}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "FLUSH_INTERVAL_S", 0.01)  # it is then that a file is found to be full
        async with running_stack(Worker(**small), step_log=tmp_path / "log", max_num_batched_tokens=64) as stack:
            assert stack.engine.step_log is not None
            stack.engine.step_log._file_bytes = 2000
            await asyncio.gather(*(tokens_of(stack, request) for request in REQUESTS))
            assert isinstance(stack.engine.fleet, RecordingFleet)
            stack.engine.fleet._begin_file()
            stack.engine.step_log._file_bytes = 2**23
            await asyncio.gather(*(tokens_of(stack, request) for request in REQUESTS))  # whose inputs are found
    files = files_in(tmp_path / "log")
    assert len(files) > 4
    for first in (1, len(files) // 2, len(files) - 1):
        executor = ExecutorProcess(Worker(**small))
        await executor.start()
        folder = tmp_path / str(first)
        folder.mkdir()
        for path in files[first:]:
            shutil.copy(path, folder)
        if check_replay(folder).counts.num_steps:
            replay = ["replay", str(folder), "--executor", executor.address]
            assert await asyncio.to_thread(command_line.run, replay) == 0
        await executor.kill()
