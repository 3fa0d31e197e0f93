"""Start times: the sentence, and a run that is too short to say anything."""

import pytest

from benchmarks.start_times import Gaps, Result, gaps_of, seconds_to_serve, summary
from tests.support.processes import running_service


def test_the_sentence_has_the_medians() -> None:
    gaps = [Gaps(until_process_s=0.1, longest_s=longest, after_start_s=longest - 0.1) for longest in (1.0, 0.9, 5.0)]
    result = Result(machine="A CPU", num_streams=200, num_fronts=2, starts_s={"scheduler": [0.5, 0.6, 9.0]}, gaps=gaps)
    assert summary(result) == (
        "scheduler 0.60 s. A killed core under 200 streams through 2 fronts: all have a token 1.00 s after it, 0.90 s "
        "after the start of the next one; medians of 3 rounds. A CPU."
    )


@pytest.mark.slow
async def test_streams_rest_while_the_next_core_starts() -> None:
    async with running_service("executor_svc.fake", "--step-ms", "5", "--log-level", "warning") as executor:
        flags = ("--executor", executor.address, "--log-level", "warning")
        assert await seconds_to_serve("scheduler_svc", *flags) > 0
        async with running_service("scheduler_svc", *flags, "--fronts", "1") as scheduler:
            [gaps] = await gaps_of(scheduler, num_streams=3, num_rounds=1)
    assert 0 < gaps.until_process_s < gaps.longest_s
    assert gaps.after_start_s == pytest.approx(gaps.longest_s - gaps.until_process_s)
