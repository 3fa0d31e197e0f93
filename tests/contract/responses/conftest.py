from collections.abc import AsyncIterator

import pytest

from tests.contract.openai.api import Api, running_api
from tests.support.echo_worker import EchoWorker


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    """A model that says what it is told to say, one byte a token."""
    async with running_api(EchoWorker()) as running:
        yield running
