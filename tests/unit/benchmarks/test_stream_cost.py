"""What a token costs on one stream: a run that is too short to say anything, and the sentence."""

import pytest

from benchmarks.stream_cost import Result, Round, main, measure, summary


@pytest.mark.slow  # processes under load
async def test_a_short_run_counts_all_tokens() -> None:
    said: list[str] = []
    result = await measure(num_requests=8, num_tokens=5, num_rounds=2, step_ms=1.0, say=said.append)
    assert len(result.rounds) == len(said) == 2
    assert all(each.request_us > 0 and each.tokens_per_delta >= 1 for each in result.rounds)


def test_the_sentence_has_the_medians() -> None:
    rounds = [Round(request_us=100 * n, token_us=n, tokens_per_delta=1) for n in (1, 2, 9)]
    result = Result(machine="A CPU", num_requests=1024, num_tokens=65, step_ms=20, rounds=rounds)
    assert summary(result) == (
        "1024 requests on one stream: 2.00 µs of the scheduler's CPU a token, 200 µs a request, 1.00 tokens a delta; "
        "median of 3 rounds. A CPU."
    )


def test_one_token_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tokens", "1"])
    assert "--tokens is 1; it must be at least 2" in capsys.readouterr().err
