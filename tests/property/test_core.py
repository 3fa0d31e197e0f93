"""The core of an executor, whatever happens to it: outputs never depend on how they were scheduled.

Each example plays one workload (`tests/support/workloads.py`) three times, with 1, 2 and 3 steps in
flight, and compares every output with the one that the plainest loop makes of the prompt alone.
"""

from itertools import product

import pytest
from hypothesis import given, settings

from scheduler_svc.core.limits import CoreLimits, PoolLimits, PreemptionMode
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions
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


@each_row(*product([1, 2, 4], PreemptionMode, [(), (PoolLimits(10, 4, 40),), (PoolLimits(16, 4, 40),)]))
def test_a_pool_far_too_small_for_all_preempts_and_changes_no_output(
    num_steps_in_flight: int, mode: PreemptionMode, more_groups: tuple[PoolLimits, ...]
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
        more_groups=more_groups,
    )
    requests = [Request([i, i + 1], StopConditions(max_tokens=15)) for i in range(6)]

    driver = play(Workload(bounds, requests), num_steps_in_flight)

    assert driver.num_preemptions[mode] > 6


@each_row(*product([1, 2, 4], [None, *PreemptionMode], [0, 3], [2, 5]))
def test_several_tokens_a_step_change_no_output_whatever_comes_between_a_step_and_its_result(
    num_steps_in_flight: int, mode: PreemptionMode | None, sliding_window: int, max_allowance: int
) -> None:
    """Preemptions, swaps, forks, beams, ends, clients that leave and a lost executor, while counts are not known."""
    bounds = CoreLimits(
        max_num_seqs=4,
        max_num_batched_tokens=14,
        max_model_len=24,
        vocab_size=VOCAB_SIZE,
        block_size=2,
        num_blocks=16,
        eos_token_ids=(3,),
        watermark=0.0,
        num_host_blocks=40,
        preemption_mode=mode,
        sliding_window=sliding_window,
        max_allowance=max_allowance,
        max_sample_rows=14,
    )
    requests = [
        Request(
            [i, i + 1],
            StopConditions(max_tokens=15, ignore_eos=i % 2 == 0),
            arrival_round=i,
            abort_round=9 if i == 5 else None,
            stop_string_at=5 if i == 4 else None,
            stop_found_late=2,
            num_sequences=1 + (i % 3 == 1),
        )
        for i in range(6)
    ]
    requests.append(Request([5, 5], StopConditions(max_tokens=9), 7, beam_search=BeamSearchParams(beam_width=2)))

    for evacuate_round in (None, 8) if max_allowance > 2 else (None,):
        driver = play(Workload(bounds, requests, evacuate_round, [False, False, True]), num_steps_in_flight)
        assert driver.num_spans > 3
