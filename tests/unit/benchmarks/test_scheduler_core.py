"""The benchmark of the core at small sizes: it measures what it says, and its own assertions hold."""

import json
from pathlib import Path

import pytest

from benchmarks import scheduler_core
from benchmarks.scheduler_core import BLOCK_SIZE, Spread, measure_admission, measure_decode


@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize("num_sequences", [1, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 5])
def test_decode_steps_are_measured_with_and_without_eviction(num_sequences: int, evicts: bool) -> None:
    cost = measure_decode(num_sequences, num_steps=20, evicts=evicts)

    assert (cost.num_sequences, cost.evicts) == (num_sequences, evicts)
    assert 0 < cost.schedule_us.median < cost.total_us.median <= cost.total_us.p99


def test_admission_is_measured_cold_and_warm() -> None:
    costs = measure_admission(num_prompts=4, num_prompt_tokens=40)

    assert [cost.wave for cost in costs] == ["cold", "warm"]
    assert all(cost.us_per_prompt == pytest.approx(40 * cost.us_per_prompt_token) for cost in costs)


def test_a_spread_is_a_median_and_a_p99() -> None:
    assert str(Spread.of([1.0] * 50 + [2.0] * 50 + [1000.0])) == "2 (2)"


def test_the_command_prints_three_tables_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    arguments = ["scheduler_core", "--sequences", "16,32", "--steps", "4", "--prompts", "2", "--json", str(path)]
    monkeypatch.setattr("sys.argv", arguments)

    scheduler_core.main()

    figures = json.loads(path.read_text())
    assert [(cost["num_sequences"], cost["evicts"]) for cost in figures["decode"]] == [
        (16, False),
        (32, False),
        (16, True),
        (32, True),
    ]
    assert len(figures["admission"]) == 2
    assert capsys.readouterr().out.count("CPU µs") == 3
