"""Engines take turns in processes of their own; what fails, is slow or was disturbed is dealt with and written down."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.end_to_end import session
from benchmarks.end_to_end.adapters.interface import Options
from benchmarks.end_to_end.engine_process import EngineError, EngineProcess, Load, LoadMeter, cpu_seconds, process_tree
from benchmarks.end_to_end.engines import EngineSpec
from benchmarks.end_to_end.limits import Sample
from benchmarks.end_to_end.result import Model
from benchmarks.end_to_end.session import Findings, Plan, Session
from benchmarks.end_to_end.workloads import Request, Shape, Workload

FAKE = Path(__file__).with_name("fake_engine.py")
OPTIONS = Options("model", "float32", 2, [0, 1], 64)
MODEL = Model(name="m", num_parameters=1, vocab_size=200, prefill_flops=1, head_flops=1, attention_flops=1)
WORKLOADS = (Workload("W1", "", (Shape(3, 4),), "decode"), Workload("W2", "", (Shape(3, 4),) * 2))


def fake(way: str) -> list[str]:
    return [sys.executable, str(FAKE), way]


@pytest.mark.parametrize(
    ("way", "sentence"),
    [
        ("breaks at the start", "it ended: the model is broken"),
        ("says an error", "RuntimeError: out of memory"),
        ("is short", r"it made 7 tokens in lengths other than those asked for, 8 together"),
        ("hangs", r"it did not answer within 0.2 s: it printed nothing"),
    ],
)
def test_an_engine_that_fails_is_told_in_a_sentence(
    way: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.end_to_end.engine_process._STOP_S", 0.01)
    with EngineProcess(fake(way), tmp_path / "log") as process, pytest.raises(EngineError, match=sentence):
        process.start(OPTIONS, 20.0)
        process.generate([Request([3], 4)] * 2, 0.2 if way == "hangs" else 20.0)
    assert process_tree(process.pid) == [process.pid]
    assert cpu_seconds([process.pid]) == 0.0, "it has been waited for"


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Shares of other work, one for each run; when they are used up there is none."""
    shares: list[float] = []
    monkeypatch.setattr(session, "sample_limits", lambda _: Sample(50.0, 500.0, None))
    monkeypatch.setattr(LoadMeter, "stop", lambda _: Load(1.0, 0.0, 0.0, shares.pop(0) if shares else 0.0))
    monkeypatch.setattr(session, "why_missing", lambda spec, _: "no file" if spec.product == "absent" else None)
    monkeypatch.setattr(session, "weight_bytes", lambda *_: 10)
    yield shares
    assert not shares


def measured(
    ways: dict[str, str], folder: Path, *, num_rounds: int = 2, num_repeats: int = 0, **piece: Any
) -> tuple[Findings, str]:
    specs = [EngineSpec(name, "f", "float32", "") for name in ways]
    said: list[str] = []
    plan = Plan(
        *(specs, folder, 200, WORKLOADS, num_rounds, num_repeats, 2, folder),
        command=lambda spec: fake(ways[spec.product]),
        **piece,
    )
    made = Session(plan, MODEL, said.append)
    saved: list[int] = []
    made.measure(lambda findings: saved.append(len(findings.runs)))
    assert max(saved, default=0) == len(made.findings.runs)
    return made.findings, "\n".join(said)


@pytest.mark.usefixtures("quiet")
def test_engines_take_turns_at_each_workload_and_another_one_begins_in_each_round(tmp_path: Path) -> None:
    findings, _ = measured({"a": "", "b": ""}, tmp_path)
    turns = [(run.round, run.workload, run.engine[0]) for run in findings.runs]
    first, second = ("b", "a"), ("a", "b")
    order = [(1, first), (2, second)]
    assert turns == [(number, w.name, engine) for w in WORKLOADS for number, names in order for engine in names]
    assert [run.output_tokens for run in findings.runs] == [4] * 4 + [8] * 4
    assert [engine.settings for engine in findings.engines] == [{"threads": "2"}] * 2
    assert len(findings.samples) == 2


@pytest.mark.usefixtures("quiet")
def test_what_is_missing_breaks_or_is_slow_is_written_down_and_the_others_go_on(tmp_path: Path) -> None:
    ways = {"a": "", "absent": "", "broken": "breaks at the start", "dying": "dies later", "slow": "is slow"}
    ways["Octavo"] = "is slow"
    findings, said = measured(ways, tmp_path)
    rounds = {name: [run.round for run in findings.runs if run.engine == f"{name} f"] for name in ways}
    assert rounds == {
        "a": [1, 2, 1, 2],
        "absent": [],
        "broken": [],
        "dying": [1],
        "slow": [1, 1],
        "Octavo": [1, 2, 1, 2],
    }
    assert findings.missing["absent f"] == "no file"
    assert findings.missing["broken f"] == "it ended: the model is broken"
    assert findings.missing["dying f"].startswith("failed at W1: it ended")
    assert "absent f is left out: no file" in said


@pytest.mark.usefixtures("quiet")
def test_a_piece_measures_what_the_result_lacks_until_its_time_is_up(tmp_path: Path) -> None:
    has = frozenset({("a f", "W1"), ("b f", "W1"), ("b f", "W2")})
    findings, _ = measured({"a": "", "b": ""}, tmp_path, measured=has)
    assert [(run.workload, run.engine) for run in findings.runs] == [("W2", "a f")] * 2
    findings, _ = measured({"a": "", "b": ""}, tmp_path, most_minutes=0)
    assert (findings.engines, findings.runs) == ([], [])


def test_a_run_that_others_disturb_is_repeated_and_the_least_disturbed_one_counts(
    tmp_path: Path, quiet: list[float]
) -> None:
    quiet += [0.3, 0.01, 0.4, 0.2, 0.5]
    findings, said = measured({"a": ""}, tmp_path, num_rounds=1, num_repeats=2)
    assert [(run.foreign_share, run.is_spoiled) for run in findings.runs] == [(0.01, False), (0.2, True)]
    assert "others took 20% of the machine" in said


def test_the_load_of_an_engine_includes_what_it_starts() -> None:
    import os

    meter = LoadMeter(os.getpid(), [1])
    end = cpu_seconds([os.getpid()]) + 0.05
    while cpu_seconds([os.getpid()]) < end:
        sum(range(10_000))
    load = meter.stop()
    assert load.engine_s >= 0.04
    assert 0.0 <= load.foreign_share <= 1.1
