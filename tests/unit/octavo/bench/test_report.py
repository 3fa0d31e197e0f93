"""What people and programs get to read, from records with known times."""

import io
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from octavo.bench.config import BenchConfig, parse_slo
from octavo.bench.load import LoadResult, SessionResult
from octavo.bench.plot import save_plot
from octavo.bench.record import Outcome, TargetInfo, TokenUsage
from octavo.bench.report import print_report, to_json, warnings
from octavo.bench.summary import summarize
from tests.unit.octavo.bench.records import load_of, record
from tests.unit.octavo.bench.settings import bench_config

INFO = TargetInfo("octavo", "127.0.0.1:1", "tiny [model]", 1024, 1000)
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def typical_load() -> LoadResult:
    return load_of(
        record((0.25, 1), (0.3, 1), (0.5, 2), ended_s=0.6, scheduled_s=0.0, usage=TokenUsage(10, 4, 0)),
        record((1.2, 1), (1.3, 1), sent_s=1.0, ended_s=1.4, scheduled_s=0.875, usage=TokenUsage(10, 2, 0)),
        record(sent_s=1.0, ended_s=1.1, scheduled_s=1.0, error="the queue [of 8] is full"),
        record((1.9, 1), sent_s=1.5, ended_s=2.0, scheduled_s=1.5, outcome=Outcome.CANCELLED),
        end_s=2.0,
    )


def printed(config: BenchConfig, load: LoadResult, info: TargetInfo = INFO) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_report(console, config, info, summarize(load, config.slo))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def session_of(load: LoadResult) -> SessionResult:
    return SessionResult(INFO, load, datetime(2026, 1, 2, tzinfo=UTC))


def row_of(text: str, name: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.strip("│ ").startswith(name)]
    return line.replace("│", " ").split()[len(name.split()) :]


def test_the_report_has_every_number() -> None:
    text = printed(bench_config(rate=2.0, duration_s=2.0, slo=parse_slo("ttft=220ms")), typical_load())
    assert "tiny [model] at 127.0.0.1:1 (octavo gRPC)" in text
    assert "open loop, 2 requests/s (Poisson), for 2 s; prompt 16, output 4; seed 0" in text
    assert row_of(text, "TTFT") == ["225", "225", "245", "248", "250", "250"]
    assert row_of(text, "ITL") == ["87.50", "100", "100", "100", "100", "100"]
    assert row_of(text, "E2E") == ["500", "500", "580", "590", "598", "600"]
    assert row_of(text, "longest gap") == ["150", "150", "190", "195", "199", "200"]
    assert row_of(text, "sent late") == ["31.25", "0.00", "87.50", "106", "121", "125"]
    assert "2 completed, 1 failed, 1 cancelled in 2.00 s" in text
    assert row_of(text, "requests/s") == ["1.00"]
    assert row_of(text, "output tokens/s") == ["3.0"]
    assert row_of(text, "total tokens/s") == ["13.0"]
    assert "33.3%, 0.50 requests/s (ttft=220ms)" in text
    assert "the queue [of 8] is full" in text


def test_a_closed_loop_has_no_lateness() -> None:
    text = printed(bench_config(shared_prefix_len=5, num_prefixes=2), load_of(record((0.1, 1)), end_s=1.0))
    assert "closed loop, 4 at once; prompt 5 shared (of 2) + 16, output 4" in text
    assert "sent late" not in text


def test_many_different_errors_are_cut_short() -> None:
    load = load_of(*(record(ended_s=0.1, error=f"error {n}") for n in range(12)), end_s=1.0)
    text = printed(bench_config(), load)
    assert "error 7" in text
    assert "error 8" not in text
    assert "4 other messages; --json has all" in text


def warnings_of(*records: Any, api: str = "octavo", **fields: Any) -> list[str]:
    load = load_of(*records, end_s=1.0)
    values = {"lags_s": load.lags_s, "busy_share": load.busy_share, **fields}
    load = LoadResult(load.records, 0.0, 1.0, values["lags_s"], values["busy_share"], is_interrupted=False)
    return warnings(bench_config(), TargetInfo(api, "here", "tiny"), summarize(load, None))


def test_a_sender_in_time_raises_no_doubt() -> None:
    assert warnings_of(record((0.1, 1), usage=TokenUsage(10, 1, 0))) == []


def test_what_makes_the_numbers_doubtful_is_said() -> None:
    one = record((0.1, 1), usage=TokenUsage(10, 1))
    late = record((0.9, 1), sent_s=0.5, scheduled_s=0.375, usage=TokenUsage(10, 1))
    assert "were sent more than 125 ms late" in " ".join(warnings_of(late))
    assert "event loop lagged by up to 50.00 ms" in " ".join(warnings_of(one, lags_s=[0.05] * 9))
    assert "was busy 90% of the time" in " ".join(warnings_of(one, busy_share=0.9))
    assert "1 answers had no usage" in " ".join(warnings_of(record((0.1, 1))))
    cached = record((0.1, 1), usage=TokenUsage(10, 1, 5))
    assert "50% of the prompt tokens came from the server's prefix cache" in " ".join(warnings_of(cached))
    assert warnings_of(cached, api="chat") == []


def test_a_warm_up_of_a_dataset_that_filled_the_cache_is_said() -> None:
    summary = summarize(load_of(record((0.1, 1), usage=TokenUsage(10, 1, 5)), end_s=1.0), None)
    assert warnings(bench_config(dataset=Path("x")), INFO, summary) == []
    [sentence] = warnings(bench_config(dataset=Path("x"), warmup=1), INFO, summary)
    assert sentence.endswith("the warm-up sent prompts of the same dataset")


def test_the_json_has_everything() -> None:
    config = bench_config(rate=2.0, input_len="uniform:5:9", dataset=Path("x"), slo=parse_slo("ttft=220ms"))
    load = typical_load()
    report = to_json(config, session_of(load), summarize(load, config.slo), with_samples=True)
    report = json.loads(json.dumps(report, allow_nan=False))
    assert report["config"]["input_len"] == "uniform:5:9"
    assert (report["config"]["dataset"], report["config"]["slo"]) == ("x", "ttft=220ms")
    assert report["target"]["model_id"] == "tiny [model]"
    assert report["started_at"] == "2026-01-02T00:00:00+00:00"
    assert report["summary"]["ttft_s"]["p50"] == pytest.approx(0.225)
    assert report["summary"]["errors"] == [{"message": "the queue [of 8] is full", "num_requests": 1}]
    assert sum(report["timeline"]["output_tokens_per_s"]) * 0.1 == pytest.approx(7)
    first = report["samples"][0]
    assert (first["outcome"], first["ttft_s"], first["num_output_tokens"]) == ("completed", 0.25, 4)
    assert (first["event_times_s"], first["event_num_tokens"]) == ([0.25, 0.3, 0.5], [1, 1, 2])
    assert "samples" not in to_json(config, session_of(load), summarize(load, None), with_samples=False)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_plot_is_drawn_in_each_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plot{suffix}"
    save_plot(path, bench_config(slo=parse_slo("ttft=220ms,itl=1s")), session_of(typical_load()))
    content = path.read_bytes()
    assert content.startswith({".png": PNG_SIGNATURE, ".svg": b"<?xml"}[suffix])
    assert len(content) > 5_000


def test_a_name_that_the_font_lacks_an_outlier_and_failures_do_not_break_the_plot(tmp_path: Path) -> None:
    records = [record((0.01 * math.sqrt(n), 1), (0.1 * n, 1)) for n in range(1, 300)]
    load = load_of(*records, record((90.0, 1)), record(ended_s=1.0, error="full"), end_s=90.0)
    session = SessionResult(TargetInfo("chat", "here", "模型 $x_$"), load, datetime(2026, 1, 2, tzinfo=UTC))
    save_plot(tmp_path / "plot.png", bench_config(), session)
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG_SIGNATURE)


def test_a_load_without_answers_can_be_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    save_plot(path, bench_config(), session_of(load_of(record(ended_s=1.0, error="full"), end_s=1.0)))
    assert path.read_text("utf-8").count("<!-- no values -->") == 2
