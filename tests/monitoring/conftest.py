"""One run of both tiers for all that looks at their metrics."""

import asyncio

import pytest

from tests.monitoring.live import Scrapes, scrape_all


@pytest.fixture(scope="session")
def scrapes(tmp_path_factory: pytest.TempPathFactory) -> Scrapes:
    return asyncio.run(scrape_all(tmp_path_factory.mktemp("tls")))
