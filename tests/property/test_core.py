"""The core of an executor, whatever happens to it: outputs never depend on how they were scheduled.

Each example plays one workload (`tests/support/workloads.py`) three times, with 1, 2 and 3 steps in
flight, and compares every output with the one that the plainest loop makes of the prompt alone.
"""

from itertools import product

import pytest
from hypothesis import given, settings

from scheduler_svc.core.limits import CoreLimits, PreemptionMode
from scheduler_svc.request.parameters import StopConditions
from tests.support.each_row import each_row
from tests.support.workloads import VOCAB_SIZE, Request, Workload, play, workloads


def check_outputs_at_every_depth(workload: Workload) -> None:
    """Equal to the output alone at each depth, hence equal among the depths."""
    for num_steps_in_flight in (1, 2, 4):
        play(workload, num_steps_in_flight)


@pytest.mark.timeout(300)
@given(workloads())
def test_every_output_is_the_one_computed_alone_at_every_depth(workload: Workload) -> None:
    check_outputs_at_every_depth(workload)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(settings.get_profile("thorough"))
@given(workloads())
def test_every_output_is_the_one_computed_alone_over_thousands_of_workloads(workload: Workload) -> None:
    check_outputs_at_every_depth(workload)


@each_row(*product([1, 2, 4], PreemptionMode))
def test_a_pool_far_too_small_for_all_preempts_and_changes_no_output(
    num_steps_in_flight: int, mode: PreemptionMode
) -> None:
    bounds = CoreLimits(
        max_num_seqs=4,
        max_num_batched_tokens=9,
        max_model_len=20,
        vocab_size=VOCAB_SIZE,
        block_size=2,
        num_blocks=10,
        watermark=0.0,
        num_host_blocks=40,
        preemption_mode=mode,
    )
    requests = [Request([i, i + 1], StopConditions(max_tokens=15)) for i in range(6)]

    driver = play(Workload(bounds, requests), num_steps_in_flight)

    assert driver.num_preemptions[mode] > 6
