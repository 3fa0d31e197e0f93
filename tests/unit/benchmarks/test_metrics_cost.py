"""Metrics and log lines are cheap, measured beside the same work without them."""

import json
from pathlib import Path

import pytest

from benchmarks import metrics_cost
from benchmarks.metrics_cost import Cost, measure_end, measure_steps
from scheduler_svc.telemetry.meter import Meter


def test_metrics_add_little_to_a_step() -> None:
    without_us, with_us, side = measure_steps(64, num_steps=60)

    # About a hundredth; the rest is room for other load on the machine.
    assert with_us < 1.15 * without_us
    assert measure_end(side) < 1000


def test_work_for_every_token_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = Meter.tokens_delivered

    def observe_each(meter: Meter, num_tokens: int, last_tokens_at_s: list[float], now_s: float) -> None:
        for _ in range(20):
            for last_s in last_tokens_at_s:
                deliver(meter, 1, [last_s], now_s)

    monkeypatch.setattr(Meter, "tokens_delivered", observe_each)
    without_us, with_us, _ = measure_steps(64, num_steps=60)

    assert with_us > 1.15 * without_us


def test_what_a_step_gets_on_top_is_its_own_and_its_share_of_the_ends() -> None:
    cost = Cost(num_sequences=200, without_us=1000.0, with_us=1004.0, end_us=6.0, scrape_us=1.0, service_us=2000.0)

    assert cost.added_us == pytest.approx(10.0)
    assert cost.share == pytest.approx(0.005)


@pytest.mark.slow  # processes under load
def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    arguments = ["metrics_cost", "--sequences", "4,8", "--steps", "4", "--json", str(path)]
    monkeypatch.setattr("sys.argv", arguments)

    metrics_cost.main()

    assert [cost["num_sequences"] for cost in json.loads(path.read_text())["costs"]] == [4, 8]
    assert "CPU µs" in capsys.readouterr().out
