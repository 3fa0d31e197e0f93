"""A load with and without speculation, against a target whose outputs and times are known."""

import asyncio
from dataclasses import replace
from types import TracebackType
from typing import Self

import pytest

from octavo.bench.comparison import Side, compare
from octavo.bench.config import BenchError, Outputs
from octavo.bench.record import RequestRecord, TargetInfo
from octavo.bench.session import run_bench
from octavo.errors import UnavailableError
from tests.support.each_row import each_row
from tests.unit.octavo.bench.records import record
from tests.unit.octavo.bench.settings import bench_config

NOTHING_ELSE = Outputs(None, with_samples=False, plot=None)


class Planted:
    """Answers every request with the tokens 7, 8, 9, but those with speculation as `planted` says, by index."""

    def __init__(self, planted: dict[int, list[int] | None]) -> None:
        self.planted = planted
        self.speculates = True
        self.sent: list[tuple[int, bool | None]] = []
        self.num_running = self.most_running = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def describe(self) -> TargetInfo:
        return TargetInfo("octavo", "here", "tiny", vocab_size=1000, speculates=self.speculates)

    async def send(self, record: RequestRecord) -> None:
        index, speculate = record.planned.index, record.planned.speculate
        self.sent.append((index, speculate))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0.001)
        self.num_running -= 1
        tokens = self.planted.get(index, [7, 8, 9]) if speculate else [7, 8, 9]
        if tokens is None:
            raise UnavailableError("planted")
        record.add_event(record.sent_s + 0.1, len(tokens))
        if record.token_ids is not None:
            record.token_ids += tokens


def run(planted: dict[int, list[int] | None], concurrency: int = 1) -> list[tuple[int, bool | None]]:
    """Compare 5 requests, and return what was sent, without the first request, which tries the server."""
    target = Planted(planted)
    config = bench_config(num_requests=5, concurrency=concurrency, compares_speculation=True)
    assert run_bench(config, target, NOTHING_ELSE)
    assert target.most_running == concurrency
    return target.sent[1:]


@each_row(
    (1, [(0, 0), (0, 1), (1, 1), (1, 0), (2, 0), (2, 1), (3, 1), (3, 0), (4, 0), (4, 1)]),
    (2, [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (3, 1), (2, 0), (3, 0), (4, 0), (4, 1)]),
)
def test_each_request_is_sent_on_both_sides_in_alternating_order(
    concurrency: int, order: list[tuple[int, bool]], *, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run({}, concurrency) == order
    printed = capsys.readouterr().out
    assert "with speculation and without" in printed
    assert "equal: all 5 pairs equal, token for token (15 tokens)" in printed


@each_row(
    ({3: [7, 9, 9]}, "1 of 5 pairs differ, first in request 4: at place 2 it has token 8 without speculation, and"),
    ({1: [7, 8]}, "in request 2: at place 3 it has token 9 without speculation, and the end of the output with it"),
    ({2: [7, 8, 9, 1], 4: [1]}, "2 of 5 pairs differ, first in request 3: at place 4 it has the end of the output"),
)
def test_outputs_that_differ_are_told_and_end_the_command(
    planted: dict[int, list[int] | None], what: str, *, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BenchError) as refused:
        run(planted)
    assert what in str(refused.value)
    assert "NOT EQUAL: outputs of" in capsys.readouterr().out


def test_a_pair_counts_if_both_were_answered(capsys: pytest.CaptureFixture[str]) -> None:
    run({0: None, 3: None})
    assert "all 3 pairs equal" in capsys.readouterr().out
    with pytest.raises(BenchError, match="no request succeeded both with speculation and without: planted"):
        run(dict.fromkeys(range(5)))


def test_a_server_that_does_not_speculate_is_not_compared_with_itself() -> None:
    target = Planted({})
    target.speculates = False
    with pytest.raises(BenchError, match="tiny at here does not speculate: its scheduler has --speculate off"):
        run_bench(bench_config(compares_speculation=True), target, NOTHING_ELSE)
    assert target.sent == []


def test_speeds_of_a_side_are_of_its_own_time() -> None:
    def of(made: RequestRecord, *, speculate: bool) -> RequestRecord:
        made.planned = replace(made.planned, speculate=speculate)
        made.token_ids = list(range(made.num_output_tokens))
        return made

    slow, fast = record((1.0, 1), (1.5, 1), (3.0, 2)), record((4.0, 1), (4.5, 3), sent_s=3.5)
    found = compare([of(slow, speculate=False), of(fast, speculate=True)])
    assert found is not None
    assert found.without == Side(4 / 3.0, 3 / 2.0, 4 / 3)
    assert found.with_speculation == Side(4.0, 3 / 0.5, 2.0)
    assert found.differences == ()
