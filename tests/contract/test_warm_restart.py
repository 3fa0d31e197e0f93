"""A scheduler that starts again finds what its executors have cached, and nobody else does.

The fake executor compares every slot of its cache with the history of the token that reads it, so a wrong name would
fail the step.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from executor_svc.fake.worker import FakeWorker
from executor_svc.service.servicer import ExecutionServicer
from octavo.execution.v1 import capability_pb2, execution_service_pb2_grpc, step_pb2
from octavo.execution.v1 import execution_service_pb2 as pb
from tests.support.stack import ExecutorProcess, Stack, collect, running_scheduler, token_request, until
from tests.support.step_logs import check_replay

NUM_PROMPT_TOKENS = 40


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "prefix.key"
    path.write_bytes(bytes(range(32)))
    return path


@asynccontextmanager
async def executor(**options: Any) -> AsyncIterator[ExecutorProcess]:
    process = ExecutorProcess(FakeWorker(**options))
    await process.start()
    try:
        yield process
    finally:
        await process.kill()


async def num_cached(stack: Stack, num_prompt_tokens: int = NUM_PROMPT_TOKENS, **fields: Any) -> int:
    """Run a request; return how much of its prompt was cached."""
    answer = await collect(stack, token_request(num_prompt_tokens, 6, temperature=0.0, **fields))
    assert answer.finished is not None
    return answer.finished.usage.num_cached_tokens


@pytest.mark.parametrize(
    "options",
    [{}, {"has_states": True, "num_device_states": 8, "block_size_tokens": 8}],
    ids=["blocks", "saved states too"],
)
async def test_a_scheduler_of_the_same_name_and_key_finds_what_was_cached(
    options: dict[str, Any], key_file: Path
) -> None:
    async with executor(**options) as one:
        async with running_scheduler(one, scheduler_id="one", prefix_key_file=key_file) as first:
            assert await num_cached(first) == 0
            cached = await num_cached(first)
            assert cached > 0
        async with running_scheduler(one, scheduler_id="one", prefix_key_file=key_file) as second:
            assert await num_cached(second) == cached
            assert await num_cached(second, first_id=50) == 0


@pytest.mark.parametrize("tokens", ["plain", "masked"])
async def test_with_a_step_log_too_and_the_log_replays(tokens: str, key_file: Path, tmp_path: Path) -> None:
    own: dict[str, Any] = {"scheduler_id": "one", "prefix_key_file": key_file}
    own |= {"step_log": tmp_path / "log", "step_log_tokens": tokens}
    async with executor() as one:
        async with running_scheduler(one, **own) as first:
            await num_cached(first)
        async with running_scheduler(one, **own) as second:
            assert await num_cached(second) > 0
    assert check_replay(tmp_path / "log").counts.num_logs == 2


@pytest.mark.parametrize("change", ["name", "key", "no key"])
async def test_another_name_or_key_finds_nothing(change: str, key_file: Path, tmp_path: Path) -> None:
    other_key = tmp_path / "other.key"
    other_key.write_bytes(bytes(range(1, 33)))
    own: dict[str, Any] = {"scheduler_id": "one", "prefix_key_file": key_file}
    others: dict[str, dict[str, Any]] = {
        "name": {"scheduler_id": "two"},
        "key": {"prefix_key_file": other_key},
        "no key": {"prefix_key_file": None},
    }
    async with executor() as one:
        async with running_scheduler(one, **own) as first:
            await num_cached(first)
        async with running_scheduler(one, **(own | others[change])) as second:
            assert await num_cached(second) == 0
        async with running_scheduler(one, **own) as third:
            assert await num_cached(third) == 0, "the names are gone with the one before"


async def test_what_was_written_over_is_not_found(key_file: Path) -> None:
    async with executor(num_device_blocks=8) as one:
        own: dict[str, Any] = {"scheduler_id": "one", "prefix_key_file": key_file}
        async with running_scheduler(one, **own) as first:
            await num_cached(first)
            for first_id in (45, 55, 65):
                await num_cached(first, 100, first_id=first_id)
        async with running_scheduler(one, **own) as second:
            core = second.driver.planner
            assert core is not None
            assert core.blocks.allocator.num_cached_blocks > 0
            for first_id in (33, 45, 55, 65):
                await num_cached(second, 100, first_id=first_id)
            core.blocks.allocator.check_integrity()


# What the executor does for it -----------------------------------------------------------------------

NAMED = capability_pb2.CAPABILITY_NAMED_BLOCKS


def attach_request(**fields: Any) -> pb.AttachRequest:
    return pb.AttachRequest(
        **{
            "scheduler_id": "one",
            "lease_ms": 10_000,
            "min_wire_version": 2,
            "max_wire_version": 2,
            "capabilities": [NAMED],
            "keep": True,
            "key_fingerprint": bytes(16),
            **fields,
        }
    )


def empty_step(epoch: int, **fields: Any) -> step_pb2.ExecuteModelRequest:
    """Return the first step of an epoch, which names a block."""
    names = step_pb2.RegisteredBlocks(block_ids=[3], names=b"n" * 16)
    return step_pb2.ExecuteModelRequest(
        epoch=epoch, step_id=1, **{"feature_bits": 1 << NAMED, "registered_blocks": names, **fields}
    )


@asynccontextmanager
async def named_executor() -> AsyncIterator["execution_service_pb2_grpc.ExecutionServiceAsyncStub"]:
    """Run an executor of which a block has a name."""
    async with executor() as one, grpc.aio.insecure_channel(one.address) as channel:
        stub = execution_service_pb2_grpc.ExecutionServiceStub(channel)
        attached = await stub.Attach(attach_request())
        assert attached.num_kept_names == 0
        await stub.ExecuteModel(empty_step(attached.epoch))
        yield stub


async def test_steps_wait_until_the_names_were_listed() -> None:
    async with named_executor() as stub:
        attached = await stub.Attach(attach_request())
        assert attached.num_kept_names == 1
        plain = {"feature_bits": 0, "registered_blocks": None}
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ExecuteModel(empty_step(attached.epoch, **plain))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        page = await stub.ListRegisteredBlocks(pb.ListRegisteredBlocksRequest(epoch=attached.epoch))
        assert (list(page.blocks.block_ids), page.blocks.names, page.next_page_token) == ([3], b"n" * 16, 0)
        await stub.ExecuteModel(empty_step(attached.epoch, **plain))


async def test_who_gives_the_names_up_clears_them() -> None:
    async with named_executor() as stub:
        epoch = (await stub.Attach(attach_request())).epoch
        await stub.ListRegisteredBlocks(pb.ListRegisteredBlocksRequest(epoch=epoch, give_up=True))
        await stub.ExecuteModel(empty_step(epoch, feature_bits=0, registered_blocks=None))
        assert (await stub.Attach(attach_request())).num_kept_names == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"keep": False},
        {"key_fingerprint": b"x" * 16},
        {"keep": False, "capabilities": []},
        {"keep": False, "max_wire_version": 1, "min_wire_version": 1},
    ],
    ids=["not asked for", "another key", "not agreed on", "version 1"],
)
async def test_an_attachment_that_does_not_keep_names_clears_them(fields: dict[str, Any]) -> None:
    async with named_executor() as stub:
        assert (await stub.Attach(attach_request(**fields))).num_kept_names == 0
        assert (await stub.Attach(attach_request())).num_kept_names == 0


async def test_a_step_that_fails_half_way_leaves_no_name() -> None:
    async with named_executor() as stub:
        epoch = (await stub.Attach(attach_request())).epoch
        await stub.ListRegisteredBlocks(pb.ListRegisteredBlocksRequest(epoch=epoch))
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.ExecuteModel(empty_step(epoch, table_digest=1))
        assert (await stub.Attach(attach_request())).num_kept_names == 0


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (step_pb2.RegisteredBlocks(block_ids=[1, 2], names=bytes(16)), "registered_blocks has 16 bytes of names"),
        (step_pb2.RegisteredBlocks(block_ids=[1, 1], names=bytes(32)), "unknown or duplicate blocks"),
        (step_pb2.RegisteredBlocks(block_ids=[10**6], names=bytes(16)), "unknown or duplicate blocks"),
    ],
)
async def test_an_executor_that_lists_nonsense_is_given_up(
    page: step_pb2.RegisteredBlocks, words: str, monkeypatch: pytest.MonkeyPatch, key_file: Path
) -> None:
    async def list_nonsense(*_: object) -> pb.ListRegisteredBlocksResponse:
        return pb.ListRegisteredBlocksResponse(blocks=page)

    monkeypatch.setattr(ExecutionServicer, "ListRegisteredBlocks", list_nonsense)
    own: dict[str, Any] = {"scheduler_id": "one", "prefix_key_file": key_file}
    async with executor() as one:
        async with running_scheduler(one, **own) as first:
            await num_cached(first)
        async with running_scheduler(one, ready=False, **own) as second:
            await until(lambda: words in second.engine.last_trouble)
