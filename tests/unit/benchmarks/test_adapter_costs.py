"""The benchmark of adapters at its smallest, and its targets."""

from pathlib import Path

import pytest

from benchmarks.adapters import BESIDE, CPU, STEP, WITH, main, target_of
from benchmarks.costs.harness import Line
from tests.numerics.tiny_models import save_tiny_model


def test_every_way_has_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny_model(tmp_path)
    main(["--smallest", "--model", str(tmp_path)])
    lines = [line for line in capsys.readouterr().out.splitlines() if "| float32" in line]
    assert [line.split(" | ")[:2] for line in lines] == [
        [f"| {scenario}", f"float32, {way}"]
        for scenario in ("batch", "stream")
        for way in ("without slots", "beside slots", "with adapters")
        for _ in (STEP, CPU)
    ]


@pytest.mark.parametrize(
    ("way", "figure", "values", "said"),
    [
        (f"float32, {WITH}", CPU, [11.0, 11.1, 20.0], "ratio ≤ 1.11: met"),
        (f"float32, {WITH}", CPU, [11.0, 11.2, 20.0], "ratio ≤ 1.11: missed"),
        (f"float32, {BESIDE}", CPU, [10.3, 10.1, 10.2], "ratio ≤ 1.02: met"),
        (f"float32, {WITH}", STEP, [11.0, 11.2, 20.0], ""),
        (f"int4, {WITH}", CPU, [11.0, 11.2, 20.0], ""),
    ],
)
def test_a_target_is_of_cpu_time_over_weights_in_float32(way: str, figure: str, values: list[float], said: str) -> None:
    assert target_of(Line("stream", way, figure, values, "float32, without slots", [10.0] * 3)) == said
