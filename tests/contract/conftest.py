from collections.abc import AsyncIterator

import pytest

from tests.contract.execution_harness import Executor


@pytest.fixture
async def loading_executor() -> AsyncIterator[Executor]:
    executor = Executor()
    await executor.start()
    yield executor
    await executor.stop()


@pytest.fixture
async def executor(loading_executor: Executor) -> Executor:
    await loading_executor.load()
    return loading_executor
