"""Requests with one prefix spread over a fleet, and a prefix is computed again only where that is cheaper."""

from dataclasses import replace

import pytest

from benchmarks.shared_prefix import LOOPS, OpenLoop, spread


@pytest.mark.parametrize("loop", LOOPS[:2])
def test_requests_with_one_prefix_spread_over_the_executors(loop: OpenLoop) -> None:
    found = spread(loop)
    assert sum(found.num_placed) == loop.num_requests
    assert found.largest_over_mean <= 1.25, found
    assert found.num_computed <= loop.num_cores * (loop.prefix_tokens + 100) + 40 * loop.num_requests, found


def test_a_few_requests_stay_where_their_prefix_is() -> None:
    found = spread(replace(LOOPS[0], requests_per_s=1.0, num_requests=6, output_tokens=300))
    assert found.num_placed == [6, 0]
