"""Adapters from end to end, with fake executors: who may name them, what they change, and what becomes of loads."""

import asyncio
import hashlib
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.admin.v1 import admin_service_pb2 as admin_pb
from octavo.admin_client import AdminClient, NotFoundError
from octavo.client import Client
from octavo.errors import InvalidRequestError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.output_messages import event_from_proto
from octavo_shared.errors import ModelLoadError
from scheduler_svc.core.step import slotted_things
from scheduler_svc.engine.weights import PauseMode
from tests.contract.test_continuation import continued, cut_behind, joined, run
from tests.support.stack import Answer, Stack, collect, running_stack, token_request, until
from tests.support.step_logs import check_replay

pytestmark = pytest.mark.timeout(60)

# What a client is told of source `a`, whose content was `one`: not what it is now.
CHANGED = (
    "the executor cannot load the adapter: a has another content now; its SHA-256 is not "
    f"{hashlib.sha256(b'one').hexdigest()}, which was asked for"
)


@dataclass
class Files:
    """What executors find at sources."""

    content: dict[str, bytes] = field(default_factory=lambda: {"a": b"one", "b": b"two", "c": b"three"})

    def read(self, source: str) -> bytes:
        """Return the content of a source. Raises ModelLoadError: it is not there."""
        if source not in self.content:
            raise ModelLoadError(f"{source} is not there")
        return self.content[source]

    def worker(self, num_adapter_slots: int = 2, **settings: Any) -> FakeWorker:
        """Return a worker that reads them."""
        return FakeWorker(num_adapter_slots=num_adapter_slots, read_adapter=self.read, adapter_load_steps=1, **settings)


async def load(stack: Stack, name: str, source: str = "", *, in_place: bool = False) -> str:
    """Load an adapter; return its digest."""
    request = admin_pb.LoadAdapterRequest(name=name, source=source or name, in_place=in_place)
    return (await stack.admin.LoadAdapter(request)).adapter.digest


def num_cached(answer: Answer) -> int:
    """Return how many tokens of the prompt were cached."""
    assert answer.finished is not None
    return answer.finished.usage.num_cached_tokens


async def refusal_of(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code(), refused.value.details() or ""


def asking(
    name: str, max_tokens: int = 6, *, num_prompt_tokens: int = 40, tenant: str = "", **params: Any
) -> pb.GenerateRequest:
    """Return a request with the same prompt for all names."""
    request = token_request(num_prompt_tokens, max_tokens, **params)
    request.lora_adapter, request.tenant = name, tenant
    return request


async def test_nobody_looks_for_the_end_of_a_load_in_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker(num_adapter_slots=2, read_adapter=Files().read, adapter_load_steps=20)
    async with running_stack(worker) as stack:
        [planner] = stack.engine.fleet.planners
        loading = asyncio.ensure_future(load(stack, "a"))
        await until(lambda: planner.poll_due_s is not None)
        await stack.engine.weights.pause(PauseMode.KEEP)
        asked = Mock(wraps=stack.engine.schedule)
        monkeypatch.setattr(stack.engine, "schedule", asked)
        await asyncio.sleep(0.2)
        assert planner.poll_due_s is not None
        assert asked.call_count < 5
        await stack.engine.weights.resume()
        await loading


@pytest.mark.parametrize("fronts", [0, 1])
async def test_equal_prompts_with_two_adapters_have_two_answers_and_share_no_block(fronts: int) -> None:
    files = Files()
    async with running_stack(files.worker(), fronts=fronts) as stack:
        assert await load(stack, "first", "a") == hashlib.sha256(b"one").hexdigest()
        await load(stack, "second", "b")
        answers = [await collect(stack, asking(name)) for name in ("", "first", "second", "first", "")]
        cached = [num_cached(answer) > 0 for answer in answers]
        assert cached == [False, False, False, True, True]
        texts = [tuple(answer.token_ids) for answer in answers]
        assert len(set(texts)) == 3
        assert texts[0] == texts[4]
        assert texts[1] == texts[3]


async def test_a_name_that_is_loaded_again_with_another_content_meets_no_old_block_and_running_requests_go_on() -> None:
    files = Files()
    async with running_stack(files.worker(step_ms=2)) as stack:
        await load(stack, "it", "a")
        alone = await collect(stack, asking("it", 60))
        running = asyncio.create_task(collect(stack, asking("it", 60)))
        await until(lambda: stack.num_groups_on(stack.executor))
        files.content["a"] = b"another"
        with pytest.raises(grpc.aio.AioRpcError, match="the adapter 'it' is loaded already"):
            await load(stack, "it", "a")
        assert await load(stack, "it", "a", in_place=True) == hashlib.sha256(b"another").hexdigest()
        anew = await collect(stack, asking("it", 60))
        assert num_cached(anew) == 0
        assert tuple((await running).token_ids) == tuple(alone.token_ids) != tuple(anew.token_ids)


async def test_an_unloaded_adapter_serves_those_that_run_and_is_unknown_to_others_who_learn_what_there_is() -> None:
    async with running_stack(Files().worker(step_ms=2)) as stack:
        code, words = await refusal_of(collect(stack, asking("x")))
        assert (code, words) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "lora_adapter is x; it must be unset: no adapter is loaded",
        )
        await load(stack, "a")
        await load(stack, "b")
        running = asyncio.create_task(collect(stack, asking("a", 60)))
        await until(lambda: stack.num_groups_on(stack.executor))
        await stack.admin.UnloadAdapter(admin_pb.UnloadAdapterRequest(name="a"))
        _, words = await refusal_of(collect(stack, asking("a")))
        assert words == "lora_adapter is a; it must be one of the loaded adapters: b"
        assert len((await running).token_ids) == 60
        code, _ = await refusal_of(stack.admin.UnloadAdapter(admin_pb.UnloadAdapterRequest(name="a")))
        assert code is grpc.StatusCode.NOT_FOUND
        listed = await stack.admin.ListAdapters(admin_pb.ListAdaptersRequest())
        assert [(adapter.name, adapter.source) for adapter in listed.adapters] == [("b", "b")]


async def test_pythons_clients_load_use_list_and_unload_adapters() -> None:
    async with (
        running_stack(Files().worker()) as stack,
        AdminClient(stack.service.other_addresses["admin"]) as operator,
        Client(stack.address) as client,
    ):
        loaded = await operator.load_adapter("poet", "a")
        assert await operator.list_adapters() == [loaded]
        plain, adapted = [(await client.generate([1] * 20, max_tokens=6, lora_adapter=name)) for name in ("", "poet")]
        assert plain.outputs[0].token_ids != adapted.outputs[0].token_ids
        with pytest.raises(InvalidRequestError, match="in_place"):
            await operator.load_adapter("poet", "a")
        await operator.load_adapter("poet", "b", in_place=True)
        await operator.unload_adapter("poet")
        with pytest.raises(NotFoundError):
            await operator.unload_adapter("poet")


@pytest.mark.parametrize("fronts", [0, 1])
async def test_an_adapters_tokens_are_limited_and_counted_over_all_tenants(fronts: int, tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('["*"]\n[adapters.a]\ntokens_per_minute = 60\n')
    async with running_stack(Files().worker(), fronts=fronts, tenants_file=file) as stack:
        for name in "ab":
            await load(stack, name)
        for name in ("a", "b", "b", ""):
            await collect(stack, asking(name, tenant="red"))
        code, words = await refusal_of(collect(stack, asking("a", tenant="blue")))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert words.startswith("adapter 'a' has 14 of its 60 tokens a minute left, and the request needs at least 40")
        meter = stack.engine.meter
        assert meter.num_requests_with == {"a": 1, "b": 2}
        assert meter.num_output_tokens_with == {"a": 6, "b": 12}


async def test_an_adapter_that_is_not_there_has_no_name_and_the_executors_words_are_told() -> None:
    async with running_stack(Files().worker()) as stack:
        code, words = await refusal_of(stack.admin.LoadAdapter(admin_pb.LoadAdapterRequest(name="x", source="none")))
        assert (code, words) == (grpc.StatusCode.INTERNAL, "the executor cannot load the adapter: none is not there")
        assert not (await stack.admin.ListAdapters(admin_pb.ListAdaptersRequest())).adapters
    async with running_stack(FakeWorker()) as stack:
        code, words = await refusal_of(stack.admin.LoadAdapter(admin_pb.LoadAdapterRequest(name="x", source="a")))
        assert (code, words) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "no executor has slots for adapters (--lora and --lora-dir of executors)",
        )


async def test_more_adapters_than_slots_wait_for_each_other() -> None:
    async with running_stack(Files().worker(1, step_ms=1)) as stack:
        for name in "abc":
            await load(stack, name)
        alone = [tuple((await collect(stack, asking(name, 20))).token_ids) for name in "abc"]
        together = await asyncio.gather(*(collect(stack, asking(name, 20)) for name in "cabacb"))
        assert [tuple(answer.token_ids) for answer in together] == [alone["abc".index(name)] for name in "cabacb"]


async def test_requests_whose_executor_is_lost_go_on_at_another_one_that_loads_their_adapter() -> None:
    files = Files()
    workers = [files.worker(step_ms=2) for _ in range(2)]
    async with running_stack(*workers, loses_soon=True) as stack:
        await load(stack, "a")
        alone = await collect(stack, asking("a", 60))
        running = asyncio.create_task(collect(stack, asking("a", 60)))
        await until(lambda: any(stack.num_groups_on(executor) for executor in stack.executors))
        lost = next(executor for executor in stack.executors if stack.num_groups_on(executor))
        await lost.kill()
        assert tuple((await running).token_ids) == tuple(alone.token_ids)


async def test_an_executor_that_finds_another_content_than_the_fleets_computes_nothing_with_it() -> None:
    files = Files()
    async with running_stack(files.worker(1)) as stack:
        await load(stack, "a")
        await load(stack, "b")  # it takes the slot
        files.content["a"] = b"another"
        code, words = await refusal_of(collect(stack, asking("a")))
        assert code is grpc.StatusCode.INTERNAL
        assert words == CHANGED


async def test_the_log_of_loads_and_of_a_lost_executor_decides_every_step_again(tmp_path: Path) -> None:
    workers = [Files().worker(1, step_ms=1) for _ in range(2)]
    async with running_stack(*workers, loses_soon=True, step_log=tmp_path) as stack:
        for name in "ab":
            await load(stack, name)
        running = [asyncio.create_task(collect(stack, asking(name, 40))) for name in ("a", "b", "", "a")]
        await until(lambda: any(stack.num_groups_on(executor) for executor in stack.executors))
        await next(executor for executor in stack.executors if stack.num_groups_on(executor)).kill()
        await asyncio.gather(*running)
    assert check_replay(tmp_path).counts.num_steps > 40


@pytest.mark.parametrize("fronts", [0, 1])
async def test_an_answer_goes_on_elsewhere_with_the_content_that_began_it_if_its_name_has_stood_for_that(
    fronts: int,
) -> None:
    """Whatever the name stands for since; and no client chooses what is read, or whose quota it uses."""
    files = Files()
    request = asking("it", 20)
    request.include_prompt_token_ids = request.include_provenance = True
    async with running_stack(files.worker(), fronts=fronts) as first:
        await load(first, "it", "a")
        whole = await run(first, request)
    begun = cut_behind(whole, 5)
    asked = continued(request, whole.accepted, begun)
    assert asked.continuation.adapter_digest == hashlib.sha256(b"one").hexdigest()
    async with running_stack(files.worker(1), fronts=fronts) as stack:
        await load(stack, "other", "b")
        for name, source in (("it", "a"), ("other", "a"), ("it", "b"), ("it", "c")):
            forged = pb.GenerateRequest()
            forged.CopyFrom(asked)
            forged.lora_adapter, forged.continuation.adapter_source = name, source
            code, words = await refusal_of(run(stack, forged))
            assert (code, words) == (
                grpc.StatusCode.UNAVAILABLE,
                f"the adapter {name} with the SHA-256 7692c3ad3540…, which began the answer, is not loaded; load it",
            )
        await load(stack, "it", "a")
        asked.continuation.adapter_source = "no such source"
        for replacement in ("", "b"):  # the name is another content's then
            if replacement:
                await load(stack, "it", replacement, in_place=True)
            rest = await run(stack, asked)
            assert list(rest.finished.outputs[0].token_ids or []) == list(whole.finished.outputs[0].token_ids or [])
            assert {span.adapter_source for span in rest.finished.outputs[0].provenance} == {"a"}, "not the client's"
            await until(lambda: not stack.engine.requests)
            answer = cut_behind(whole, 5)
            for event in rest.events[:-1]:
                answer.take(event_from_proto(event))
            assert joined(answer, 0) == joined(cut_behind(whole, len(whole.events)), 0)
        nothing_told = pb.GenerateRequest()
        nothing_told.CopyFrom(asked)
        nothing_told.continuation.ClearField("adapter_source")
        nothing_told.continuation.ClearField("adapter_digest")
        code, words = await refusal_of(run(stack, nothing_told))
        assert (code, words[:45]) == (grpc.StatusCode.INVALID_ARGUMENT, "continuation.adapter_digest is empty; it must")
        await collect(stack, asking("it"))  # takes the slot
        files.content["a"] = b"another"
        _, words = await refusal_of(run(stack, asked))
        assert words == CHANGED
        await load(stack, "it", "a", in_place=True)
        files.content["d"] = b"one"
        await load(stack, "fourth", "d")
        await collect(stack, asking("other"))
        assert (await run(stack, asked)).finished.outputs, "the source that is loaded now is the one that is read"


@pytest.mark.parametrize("by", ["admin", "offer"])
async def test_in_a_pause_loads_are_refused_or_wait_and_a_caller_that_leaves_takes_its_request_along(by: str) -> None:
    async with running_stack(Files().worker(step_ms=2)) as stack:
        engine = stack.engine
        if by == "admin":
            engine.schedule = lambda *_: None  # type: ignore[method-assign]  # the pause comes behind the call
            call = asyncio.create_task(load(stack, "a"))
            await until(lambda: engine.requests)
            call.cancel()
            await until(lambda: not engine.requests)
            vars(engine).pop("schedule")
        await engine.weights.pause(PauseMode.KEEP)
        code, words = await refusal_of(load(stack, "a"))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert words == "the fleet is paused, and a load computes a token; resume the fleet first, then load"
        assert not engine.requests
        if by == "offer":
            engine.adapters.note_offered(["a"])
            await until(lambda: engine.requests)
        await engine.weights.resume()
        if by == "offer":
            await until(lambda: [one.name for one in engine.adapters.all] == ["a"])
        else:
            await load(stack, "a")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fake", "name is fake; it must be another name than the model's, which requests without adapters use"),
        ("a\n", "name is a\\n; it must be 1 to 256 characters long, without line breaks and control characters"),
        ("a\0", "name is a\\x00; it must be 1 to 256 characters long, without line breaks and control characters"),
        (
            "\u202ea",
            "name is \\u202ea; it must be 1 to 256 characters long, without line breaks and control characters",
        ),
    ],
)
async def test_names_that_would_mislead_are_refused(name: str, words: str, caplog: pytest.LogCaptureFixture) -> None:
    async with running_stack(Files({name: b"one"}).worker(adapter_names=(name,))) as stack:
        await until(lambda: "event=adapter_not_served" in caplog.text)
        assert await refusal_of(load(stack, name)) == (grpc.StatusCode.INVALID_ARGUMENT, words)
        assert not stack.engine.adapters.all


@pytest.mark.parametrize("has_begun", [True, False])
async def test_what_a_front_has_goes_on_with_its_content_at_an_engine_that_knows_no_name(has_begun: bool) -> None:
    """Also a request that no executor has begun."""
    files = Files()
    async with running_stack(files.worker(step_ms=2), fronts=1) as stack:
        await load(stack, "it", "a")
        alone = await collect(stack, asking("it", 60))
        if not has_begun:
            stack.engine.fleet.add = lambda group: None  # type: ignore[method-assign]
        running = asyncio.create_task(collect(stack, asking("it", 60)))
        await until(lambda: stack.num_groups_on(stack.executor) if has_begun else stack.engine.requests)
        await asyncio.sleep(0.02)  # its front is told
        vars(stack.engine.fleet).pop("add", None)
        stack.engine.adapters.unload("it")
        [session] = stack.link.sessions
        session.end(ConnectionError("the test cuts it"))  # type: ignore[arg-type]
        assert tuple((await running).token_ids) == tuple(alone.token_ids)


async def test_names_that_executors_have_are_served_until_an_operator_unloads_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = Files().worker(adapter_names=("a", "none", "b"))
    async with running_stack(worker, loses_soon=True) as stack:
        await until(lambda: [one.name for one in stack.engine.adapters.all] == ["a", "b"])
        assert (
            "event=adapter_not_served adapter=none cause='the executor cannot load the adapter: none is" in caplog.text
        )
        assert (await collect(stack, asking("a"))).finished is not None
        await stack.admin.UnloadAdapter(admin_pb.UnloadAdapterRequest(name="a"))
        await stack.executor.kill()
        await until(lambda: not stack.engine.fleet.planners)
        worker.info = replace(worker.info, adapter_names=("a", "c"))
        await stack.executor.start()
        await until(lambda: [one.name for one in stack.engine.adapters.all] == ["b", "c"])


async def test_what_one_executor_cannot_load_another_one_does_and_the_first_one_is_asked_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slotted_things, "RETRY_FAILED_AFTER_S", 0.3)
    lacking, having = Files({"a": b"another", "c": b"three"}), Files({"a": b"one", "b": b"two"})
    names = ("b", "c")  # whichever executor is asked first, it lacks one of them
    async with running_stack(lacking.worker(adapter_names=names), having.worker(), loses_soon=True) as stack:
        await until(lambda: [one.name for one in stack.engine.adapters.all] == ["b", "c"])
        digest = await load(stack, "a")
        answers = await asyncio.gather(*(collect(stack, asking("a")) for _ in range(6)))
        assert len({tuple(answer.token_ids) for answer in answers}) == 1
        await stack.executors[hashlib.sha256(b"one").hexdigest() == digest].kill()
        await until(lambda: len(stack.engine.fleet.planners) == 1)
        code, words = await refusal_of(collect(stack, asking("a")))
        assert (code, "a has another content now" in words) == (grpc.StatusCode.INTERNAL, True)
        for files in (lacking, having):
            files.content["a"] = b"one" if hashlib.sha256(b"one").hexdigest() == digest else b"another"
        await asyncio.sleep(0.3)
        assert (await collect(stack, asking("a"))).token_ids == answers[0].token_ids
