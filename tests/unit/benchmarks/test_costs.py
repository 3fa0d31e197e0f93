"""The harness of costs: its turns, its arithmetic, and every scenario at its smallest."""

import math
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.costs import __main__ as command
from benchmarks.costs import delay_proxy, model
from benchmarks.costs.clock import Clock
from benchmarks.costs.harness import (
    MIN_PAIRS_OF_INTERVAL,
    SCENARIOS,
    Figures,
    Groups,
    Line,
    Scenario,
    Size,
    Way,
    median_interval,
    run_scenario,
    table,
)
from tests.numerics.tiny_models import save_tiny_model
from tests.support.tokenizers import byte_level_backend

FAKE_ENGINE = Path(__file__).parent / "end_to_end" / "fake_engine.py"
# What a scenario could not measure if it looked at the wrong process, or if metrics became dear.
BOUNDS = {"CPU of the engine a step, µs": (100, math.inf), "share, %": (0.01, 15)}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Size:
    """The smallest size, with a model of a few thousand weights, and with engines that only answer."""
    backend = byte_level_backend()
    save_tiny_model(tmp_path, vocab_size=backend.get_vocab_size())
    backend.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(model, "adapter_command", lambda adapter: [sys.executable, str(FAKE_ENGINE), ""])
    return Size(is_smallest=True, model=tmp_path)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "gguf"])  # that needs llama.cpp
async def test_every_scenario_has_figures_at_its_smallest(name: str, tiny: Size) -> None:
    lines = await run_scenario(SCENARIOS[name], tiny, num_pairs=1)
    assert lines
    for line in lines:
        low, high = BOUNDS.get(line.figure, (-math.inf, math.inf))
        assert all(math.isfinite(value) and low <= value <= high for value in line.values), line


async def test_a_stack_that_gives_other_tokens_is_not_compared(tiny: Size, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {model.BARE: "", model.WHOLE: "keeps its tokens"}
    monkeypatch.setattr(model, "adapter_command", lambda name: [sys.executable, str(FAKE_ENGINE), ways[name]])
    with pytest.raises(RuntimeError, match="gave other tokens"):
        await run_scenario(SCENARIOS["stack"], tiny, num_pairs=1)


async def test_ways_take_turns_and_the_other_one_begins_next() -> None:
    turns: list[str] = []

    def way(name: str, beside: str = "") -> Way:
        async def measure() -> Figures:
            turns.append(name)
            return {"a step, µs": 2.0 * len(turns)}

        return Way(name, measure, beside)

    async def groups(_: Size) -> Groups:
        yield [way("without"), way("with", "without")]
        yield [way("other")]

    scenario = Scenario("made up", "", groups, 3)
    lines = await run_scenario(scenario, Size(), 3)
    assert turns == ["without", "with", "with", "without", "without", "with", "other", "other", "other"]
    assert lines[0] == Line("made up", "without", "a step, µs", [2, 8, 10], "", [])
    assert lines[1] == Line("made up", "with", "a step, µs", [4, 6, 12], "without", [2, 8, 10])
    assert table(lines[:2]).splitlines()[2:] == [
        "| made up | without | a step, µs | 8.00 (2.00 to 10.0) |  |",
        "| made up | with | a step, µs | 6.00 (4.00 to 12.0) | 1.20 (0.750 to 2.00) of without |",
    ]
    assert [line.way for line in await run_scenario(scenario, Size(), 1, only="oth")] == ["other"]


@pytest.mark.parametrize(
    ("number", "interval"),
    [(1, (1, 1, 1)), (MIN_PAIRS_OF_INTERVAL, (3.5, 1, 6)), (9, (5, 2, 8)), (12, (6.5, 3, 10)), (25, (13, 8, 18))],
)
def test_the_interval_of_a_median_is_that_of_the_binomial_tables(
    number: int, interval: tuple[float, float, float]
) -> None:
    assert median_interval([*range(number, 0, -1)]) == interval


def test_a_clock_adds_up_calls_and_their_time_without_its_own() -> None:
    clock = Clock()
    busy, nothing = clock.timed("busy", lambda: sum(range(100_000))), clock.timed("nothing", lambda: None)
    began_ns = time.thread_time_ns()
    for _ in range(10):
        busy()
    assert clock.calls["busy"] == 10
    assert 0.5 * (time.thread_time_ns() - began_ns) < clock.elapsed_ns["busy"] <= time.thread_time_ns() - began_ns
    nothing()
    assert clock.elapsed_ns["nothing"] < clock.elapsed_ns["busy"] / 10


def test_the_proxy_delays_both_ways() -> None:
    with socket.create_server(("127.0.0.1", 0)) as target, socket.create_server(("127.0.0.1", 0)) as listener:
        forwarding = (listener, target.getsockname(), 0.02)
        threading.Thread(target=delay_proxy.serve, args=forwarding, daemon=True).start()
        with socket.create_connection(listener.getsockname()) as client:
            server, _ = target.accept()
            with server:
                for sender, receiver in ((client, server), (server, client)):
                    began_s = time.perf_counter()
                    sender.sendall(b"step")
                    assert receiver.recv(100) == b"step"
                    assert time.perf_counter() - began_s >= 0.02
        listener.shutdown(socket.SHUT_RDWR)


def test_the_command_tells_what_there_is_and_prints_where_figures_are_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main(["--list"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SCENARIOS)
    command.main(["prefix", "--smallest", "--json", str(tmp_path / "figures.json")])
    printed = capsys.readouterr().out
    assert "| prefix | 2 executors, a prefix of 444 | largest over mean running | 1.07 |  |" in printed
    assert "`python -m benchmarks.costs prefix --smallest --json" in printed
    assert "largest over mean" in (tmp_path / "figures.json").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        command.main(["prefixes"])
    assert "there is no scenario prefixes" in capsys.readouterr().err
