"""What each way of asking costs: the arithmetic of pairs, the table, and a run that is too short to say anything."""

import os

import pytest

from benchmarks.front_cost import (
    MIN_PAIRS,
    NATIVE,
    WAYS,
    Result,
    Turn,
    comparison,
    cpu_us,
    main,
    measure,
    median_interval,
)


@pytest.mark.parametrize(
    ("number", "interval"),
    [(MIN_PAIRS, (3.5, 1, 6)), (9, (5, 2, 8)), (10, (5.5, 2, 9)), (12, (6.5, 3, 10)), (25, (13, 8, 18))],
)
def test_the_interval_of_a_median_is_that_of_the_binomial_tables(
    number: int, interval: tuple[float, float, float]
) -> None:
    assert median_interval([*range(number, 0, -1)]) == interval


def turn(request_us: float, message_us: float) -> Turn:
    return Turn(request_us=request_us, message_us=message_us, messages_per_token=0.5)


def test_the_table_has_differences_and_ratios_of_pairs() -> None:
    pairs = [
        {
            NATIVE: turn(1000 * n, 100),
            "one stream": turn(500 * n, 25),
            "completions": turn(3000 * n, 90 + n),
            "chat": turn(500 * n, 50),
        }
        for n in range(1, MIN_PAIRS + 1)
    ]
    table = comparison(Result(machine="A CPU", pairs=pairs))
    assert table.splitlines() == [
        "| | native | other | difference (95 %) | ratio (95 %) |",
        "|---|---:|---:|---:|---:|",
        "| a streamed message, one stream | 100 µs | 25 µs | -75 µs (-75 to -75) | 0.25 (0.25 to 0.25) |",
        "| a request, one stream | 3.50 ms | 1.75 ms | -1.75 ms (-3.00 to -0.50) | 0.50 (0.50 to 0.50) |",
        "| a streamed message, completions | 100 µs | 94 µs | -6 µs (-9 to -4) | 0.94 (0.91 to 0.96) |",
        "| a request, completions | 3.50 ms | 10.50 ms | +7.00 ms (+2.00 to +12.00) | 3.00 (3.00 to 3.00) |",
        "| a streamed message, chat | 100 µs | 50 µs | -50 µs (-50 to -50) | 0.50 (0.50 to 0.50) |",
        "| a request, chat | 3.50 ms | 1.75 ms | -1.75 ms (-3.00 to -0.50) | 0.50 (0.50 to 0.50) |",
        "",
        "Messages per token: native 0.50, one stream 0.50, completions 0.50, chat 0.50. 6 pairs. A CPU.",
    ]


def test_too_few_pairs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--pairs", "5"])
    assert "--pairs is 5; it must be at least 6" in capsys.readouterr().err


def test_the_time_of_a_process_grows_while_it_computes() -> None:
    before_us = cpu_us(os.getpid())
    while cpu_us(os.getpid()) < before_us + 1000:
        pass


@pytest.mark.slow
async def test_every_way_is_measured() -> None:
    said: list[str] = []
    result = await measure(1, num_short=10, num_long=10, say=said.append)
    [turns] = result.pairs
    assert turns.keys() == set(WAYS)
    assert all(turn.request_us > 100 for turn in turns.values())
    assert turns[NATIVE].messages_per_token > 0.5
    assert len(said) == 1
