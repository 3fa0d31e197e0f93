"""A scheduler that starts again finds what its executors have cached, and nobody else does.

The fake executor compares every slot of its cache with the history of the token that reads it, so a wrong name would
fail the step.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from executor_svc.fake.worker import FakeWorker
from tests.support.stack import ExecutorProcess, Stack, collect, running_scheduler, token_request

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


async def test_a_scheduler_of_the_same_name_and_key_finds_what_was_cached(key_file: Path) -> None:
    async with executor() as one:
        async with running_scheduler(one, scheduler_id="one", prefix_key_file=key_file) as first:
            assert await num_cached(first) == 0
            cached = await num_cached(first)
            assert cached > 0
        async with running_scheduler(one, scheduler_id="one", prefix_key_file=key_file) as second:
            assert await num_cached(second) == cached
            assert await num_cached(second, first_id=50) == 0


@pytest.mark.parametrize("change", ["name", "key", "no key"])
async def test_another_name_or_key_finds_nothing(change: str, key_file: Path, tmp_path: Path) -> None:
    other_key = tmp_path / "other.key"
    other_key.write_bytes(bytes(range(1, 33)))
    own: dict[str, Any] = {"scheduler_id": "one", "prefix_key_file": key_file}
    others = {
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
            core = second.driver.core
            assert core is not None
            assert core.blocks.allocator.num_cached_blocks > 0
            for first_id in (33, 45, 55, 65):
                await num_cached(second, 100, first_id=first_id)
            core.blocks.allocator.check_integrity()
