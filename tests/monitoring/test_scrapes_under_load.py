"""Prometheus may ask as often as it likes: no request and no scrape is lost, and every page adds up."""

import asyncio

import pytest

from tests.monitoring.live import scrape, value_of
from tests.support.stack import collect, running_stack, token_request

NUM_SCRAPERS = 8
NUM_CLIENTS = 16
NUM_TOKENS = 20


@pytest.mark.parametrize("num_scrapes", [200, pytest.param(1000, marks=pytest.mark.slow)])
async def test_scrapes_under_load_lose_no_request_and_no_scrape(num_scrapes: int) -> None:
    async with running_stack(metrics_listen="127.0.0.1:0") as stack:
        address = stack.service.other_addresses["metrics"]
        pages: list[str] = []
        num_finished = 0

        async def ask() -> None:
            while len(pages) < num_scrapes:
                pages.append(await scrape(address))

        async def generate(first_id: int) -> None:
            nonlocal num_finished
            while len(pages) < num_scrapes:
                answer = await collect(stack, token_request(20, NUM_TOKENS, first_id=first_id))
                assert len(answer.token_ids) == NUM_TOKENS
                num_finished += 1

        await asyncio.gather(
            *(ask() for _ in range(NUM_SCRAPERS)), *(generate(number) for number in range(NUM_CLIENTS))
        )
        last = await scrape(address)

    assert len(pages) >= num_scrapes
    assert num_finished >= NUM_CLIENTS
    assert value_of(last, "octavo_requests_finished_total", finish_reason="length") == num_finished
    assert value_of(last, "octavo_output_tokens_total") == NUM_TOKENS * num_finished
    for page in pages[:: num_scrapes // 50]:
        num_first_tokens = value_of(page, "octavo_time_to_first_token_seconds_count")
        num_gaps = value_of(page, "octavo_inter_token_latency_seconds_count")
        assert value_of(page, "octavo_output_tokens_total") == num_first_tokens + num_gaps  # never half a step
