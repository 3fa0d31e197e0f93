"""The benchmark of the dispatcher runs, at small sizes, and measures what it says."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import fleet
from benchmarks.fleet import NUM_SLOTS, full_fleet, measure_burst


def test_a_burst_is_dispatched_as_far_as_the_steps_of_the_cores_can_admit_it() -> None:
    cost = measure_burst(2, 100)
    budget = fleet.MAX_NUM_BATCHED_TOKENS // fleet.PROMPT_TOKENS
    assert (cost.num_dispatched, cost.num_admitted) == (2 * budget, 2 * budget)
    assert 0 < cost.us_per_dispatch < cost.us_per_admission


def test_a_full_fleet_has_no_slot_left_and_the_rest_waits() -> None:
    bench = full_fleet(2, 10, num_tenants=5)
    bench.fill()
    assert [core.batch.num_free_slots for core in bench.planners] == [0, 0]
    assert len(bench.queue) == 10
    assert [int(core.batch.is_decoding.sum()) for core in bench.planners] == [NUM_SLOTS, NUM_SLOTS]


def test_the_command_prints_tables_and_writes_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NUM_SLOTS": 4, "NUMS_WAITING": (3,), "NUMS_TENANTS": (2,), "NUM_WIDE_SLOTS": 8}.items():
        monkeypatch.setattr(fleet, name, value)
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["fleet", "--cores", "1,2", "--prompts", "10", "--json", str(path)])
    fleet.main()

    figures = json.loads(path.read_text())
    assert [cost["num_planners"] for cost in figures["burst"]] == [1, 2]
    assert [cost["number"] for cost in figures["full"]] == [1, 2, 3, 2, 1, 4]
    assert "to dispatch and to admit" in capsys.readouterr().out
