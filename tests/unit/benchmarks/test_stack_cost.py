"""What the stack costs: the arithmetic of pairs, turns of two processes, the command.

That the bare loop does the stack's work is in tests/contract/test_stack_cost.py.
"""

import sys
from pathlib import Path

import pytest

from benchmarks import stack_cost
from benchmarks.end_to_end.engine_process import EngineProcess
from benchmarks.end_to_end.process_load import Load, LoadMeter
from benchmarks.end_to_end.workloads import Request, Shape, Workload
from benchmarks.stack_cost import BARE, STACK, Pair, Plan, Result, Row, comparison, main, measure_row
from tests.numerics.tiny_models import save_tiny_model

FAKE = Path(__file__).parent / "end_to_end" / "fake_engine.py"
VOCAB_SIZE = 256


def pair(stack: float, bare: float, foreign_share: float = 0.0, num_unequal: int = 0) -> Pair:
    return Pair(stack_tokens_per_s=stack, bare_tokens_per_s=bare, foreign_share=foreign_share, num_unequal=num_unequal)


def row(*pairs: Pair, number_format: str = "none", num_threads: int = 2) -> Row:
    return Row(number_format=number_format, num_threads=num_threads, num_cores=2, pairs=list(pairs))


def test_the_stack_costs_the_share_of_the_loop_that_it_loses_in_the_median_of_undisturbed_pairs() -> None:
    pairs = [pair(90, 100), pair(1, 100, 0.06), pair(160, 200), pair(285, 300, 0.05)]
    made = Result(
        machine="A CPU",
        workload="W2",
        rows=[row(*pairs), row(pair(101, 100, 0.5), number_format="int8-a8", num_threads=1)],
    )
    table, machine, star = comparison(made).split("\n\n")
    assert table.splitlines()[2:] == [
        "| float32 | 2 on 2 cores | 200 | 160 | 0.900 | 10.0 % (5.0 to 20.0) |",
        "| int8-a8 | 1 on 2 cores | 100 | 101 | 1.010 | -1.0 %* |",
    ]
    assert machine.startswith("A CPU. ")
    assert star == "A star: other work disturbed all pairs."


def test_unequal_tokens_are_told() -> None:
    made = Result(machine="A CPU", workload="W2", rows=[row(pair(90, 100, num_unequal=2), pair(90, 100))])
    assert "**2 requests got other tokens from the stack than from the loop.**" in comparison(made)


def fake_command(ways: dict[str, str], adapter: str) -> list[str]:
    return [sys.executable, str(FAKE), ways.get(adapter, "")]


def plan(folder: Path, ways: dict[str, str], num_pairs: int, num_repeats: int = 0) -> Plan:
    workload = Workload("tiny", "", (Shape(3, 4), Shape(5, 2)))
    return Plan(
        folder, VOCAB_SIZE, workload, num_pairs, num_repeats, folder, lambda adapter: fake_command(ways, adapter)
    )


def test_both_ways_take_turns_with_the_same_prompts_and_the_other_one_begins_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[tuple[str, list[Request]]] = []
    generate = EngineProcess.generate

    def noted(process: EngineProcess, requests: list[Request], timeout_s: float) -> object:
        turns.append((process._log_path.name.partition("-")[0], requests))
        return generate(process, requests, timeout_s)

    monkeypatch.setattr(EngineProcess, "generate", noted)
    monkeypatch.setattr(LoadMeter, "stop", lambda _: Load(1.0, 0.0, 0.0, 0.0))
    made = measure_row(plan(tmp_path, {STACK: "is slow"}, num_pairs=3), "none", 1, 2)

    assert made.pairs == [pair(1.5, 3.0)] * 3
    measured = turns[-6:]
    assert [name for name, _ in measured] == [BARE, STACK, STACK, BARE, BARE, STACK]
    prompts = [requests for _, requests in measured]
    assert prompts[::2] == prompts[1::2]
    assert prompts[0] != prompts[2] != prompts[4]


@pytest.mark.parametrize(("way", "num_unequal"), [("", 0), ("errs once", 1), ("keeps its tokens", 2)])
def test_the_tokens_of_both_ways_are_compared(way: str, num_unequal: int, tmp_path: Path) -> None:
    made = measure_row(plan(tmp_path, {STACK: way}, num_pairs=1), "none", 1, 2)
    assert made.pairs[0].num_unequal == num_unequal


def test_a_disturbed_pair_is_repeated_and_the_least_disturbed_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([0.0, 0.3, 0.2, 0.04, 0.01, 0.02, 0.4, 0.0, 0.1, 0.3, 0.5, 0.0])
    monkeypatch.setattr(LoadMeter, "stop", lambda _: Load(1.0, 0.0, 0.0, next(shares)))
    made = measure_row(plan(tmp_path, {}, num_pairs=2, num_repeats=2), "none", 1, 2)
    assert [one.foreign_share for one in made.pairs] == [0.02, 0.3]
    assert list(shares) == []


@pytest.mark.parametrize("way", ["", "dies later"])
def test_the_command_prints_the_table_and_writes_json_or_says_what_failed(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_model(tmp_path, vocab_size=VOCAB_SIZE)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(stack_cost, "adapter_command", lambda adapter: fake_command({STACK: way}, adapter))
    path = tmp_path / "cost.json"
    code = main(["--quick", "--pairs", "2", "--threads", "1", "--model", str(tmp_path), "--json", str(path)])
    printed = capsys.readouterr().out
    if way:
        assert code == 1
        assert "the benchmark ends here: it ended: it printed nothing" in printed
    else:
        assert code == 0
        assert "int8-a8" in printed
        made = Result.model_validate_json(path.read_text(encoding="utf-8"))
        assert [(one.number_format, one.num_threads, len(one.pairs)) for one in made.rows] == [("int8-a8", 1, 2)]
        assert [one.ratio for one in made.rows] == [1.0]
