"""One browser for all tests of the page, and one event loop for it, for the scheduler and for the tests.

It ends with the package: other tests count the children of this process.
"""

from collections.abc import AsyncIterator

import pytest_asyncio
from playwright.async_api import Browser

from tests.page.browser import running_browser


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as running:
        yield running
