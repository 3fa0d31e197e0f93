"""Random fleets are recorded and replayed: every step is decided again, from the start and from each snapshot.

The workloads are those of `test_fleet.py`: executors that come, go and stall, preemptions, swaps, beams, forks, stop
strings, aborts, tenants.
"""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.step_log.log_files import files_in
from tests.property.test_fleet import FleetWorkload, Run, fleet_workloads
from tests.support.step_logs import check_replay, recording


def check(workload: FleetWorkload, num_steps_in_flight: int, calls_per_file: int, *, masks_tokens: bool) -> None:
    if masks_tokens:  # these executors make beams of equal score all the time, whose order masks change
        workload = replace(workload, requests=[replace(r, beam_search=None) for r in workload.requests])
    workload = replace(workload, kinds=[replace(kind, names_blocks=True) for kind in workload.kinds])
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "log")
        with recording(directory, masks_tokens=masks_tokens, calls_per_file=calls_per_file) as make:
            Run(workload, num_steps_in_flight, make).play()
        check_replay(directory)
        # Each file by itself begins with its snapshot.
        for path in files_in(directory)[1:]:
            alone = Path(folder, "alone")
            alone.mkdir()
            shutil.copy(path, alone)
            check_replay(alone)
            shutil.rmtree(alone)


@settings(max_examples=5)
@given(fleet_workloads(), st.integers(1, 3), st.integers(7, 60))
def test_a_recorded_fleet_decides_every_step_again(workload: FleetWorkload, depth: int, calls_per_file: int) -> None:
    check(workload, depth, calls_per_file, masks_tokens=False)


@settings(max_examples=5)
@given(fleet_workloads(), st.integers(1, 3), st.integers(7, 60))
def test_with_masked_tokens_too(workload: FleetWorkload, depth: int, calls_per_file: int) -> None:
    check(workload, depth, calls_per_file, masks_tokens=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(settings.get_profile("thorough"), max_examples=60)
@given(fleet_workloads(), st.integers(1, 3), st.integers(7, 200), st.booleans())
def test_hundreds_of_recorded_fleets_decide_again(
    workload: FleetWorkload, depth: int, calls_per_file: int, masks_tokens: bool
) -> None:
    check(workload, depth, calls_per_file, masks_tokens=masks_tokens)
