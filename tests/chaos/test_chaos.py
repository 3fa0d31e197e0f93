"""The short form of `make chaos`: each row once, and that its verdicts can be bad."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.__main__ import main, pieces_of, total_of
from tests.chaos.asking import Answer, Ask, compare
from tests.chaos.result import Result
from tests.chaos.rows import ROWS, Row
from tests.chaos.scale import SHORT
from tests.chaos.table import in_words, table_of
from tests.support.run_file import RunFile

SHORT_ROWS = {row.name: row for row in ROWS if row.pieces(SHORT)}

ASK = Ask(stream=3, turn=1, num_tokens=3)
UNDISTURBED = Answer([1, 2, 3], [-0.5, -1.0, -1.5], "abc", is_finished=True)


async def check(row: Row, pieces: list[str]) -> None:
    """Run pieces of a row; times and sizes are left to `make chaos`, as the machine may be busy."""
    results = [result async for result in row.play(pieces, SHORT)]
    assert [result.piece for result in results] == pieces
    for result in results:
        assert result.wrong == []
        assert result.num_equal == result.num_asked > 0
        assert result.counts


async def test_streams_of_an_executor_that_is_told_to_end_go_on() -> None:
    await check(SHORT_ROWS["drain"], ["round 1"])


async def test_a_kill_after_a_step_was_sent_changes_no_answer() -> None:
    [piece] = [each for each in SHORT_ROWS["steps"].pieces(SHORT) if each.startswith("AFTER_SEND")]
    await check(SHORT_ROWS["steps"], [piece])


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT_ROWS)
async def test_the_short_form_of_each_row(name: str) -> None:
    await check(SHORT_ROWS[name], SHORT_ROWS[name].pieces(SHORT))


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (replace(UNDISTURBED, error="UnavailableError: gone"), "num_lost", "UnavailableError: gone"),
        (replace(UNDISTURBED, is_finished=False), "num_lost", "it ended after 3 of 3 tokens"),
        (replace(UNDISTURBED, tokens=[1, 2]), "num_lost", "it ended after 2 of 3 tokens"),
        (replace(UNDISTURBED, tokens=[1, 2, 2, 3]), "num_repeated", "4 tokens came, and there are 3"),
        (replace(UNDISTURBED, tokens=[1, 5, 3]), "num_changed", "token 1 is 5, and was 2"),
        (replace(UNDISTURBED, logprobs=[-0.5, -1.0, -1.25]), "num_changed", "log-probabilities differ"),
        (replace(UNDISTURBED, text="abd"), "num_changed", "the text differs"),
    ],
)
def test_an_answer_that_differs_is_lost_repeated_or_changed(answer: Answer, kind: str, words: str) -> None:
    result = Result("drain", "round 1")
    compare(result, ASK, answer, UNDISTURBED)
    assert (getattr(result, kind), result.num_equal, result.is_kept) == (1, 0, False)
    assert result.wrong == [f"stream 3, request 1: {words}"]


def test_an_equal_answer_counts_as_equal() -> None:
    result = Result("drain", "round 1")
    compare(result, ASK, replace(UNDISTURBED), UNDISTURBED)
    assert (result.num_asked, result.num_equal, result.is_kept) == (1, 1, True)


def test_a_refusal_before_a_request_was_accepted_is_told() -> None:
    result = Result("clients", "grpc, the only one")
    for _ in range(2):
        compare(result, ASK, replace(UNDISTURBED, refusals=["no executor is attached"]), UNDISTURBED)
    assert (result.num_equal, result.refusals) == (2, {"no executor is attached": 2})
    assert in_words(result).endswith("refused before they were accepted, and sent again: 2 times")


def test_what_a_file_has_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, row = tmp_path / "chaos.jsonl", SHORT_ROWS["steps"]
    file = RunFile(path, Result, "tests/chaos")
    for piece in row.pieces(SHORT):
        file.add(Result(row.name, piece, num_asked=2, num_equal=2, counts={"SIGKILL": 2}))
    file.close()
    assert main(["--short", "--only", "steps", "--resume", str(path)]) == 0
    assert "| 6 of 6 equal; 6 SIGKILL |" in capsys.readouterr().out


def test_a_text_chooses_pieces_and_the_row_is_complete_with_them() -> None:
    row = SHORT_ROWS["clients"]
    [piece] = pieces_of(row, SHORT, "for long")
    assert piece == "openai, core and executor for long"
    finished = [Result(row.name, piece, num_asked=2, num_equal=2)]
    assert total_of(row, SHORT, finished, "for long")[1]
    assert not total_of(row, SHORT, finished)[1]


def test_a_row_without_all_its_pieces_is_not_reached() -> None:
    row = SHORT_ROWS["steps"]
    first, *_ = row.pieces(SHORT)
    result, is_complete = total_of(row, SHORT, [Result(row.name, first, num_asked=2, num_equal=2)])
    assert not is_complete
    assert table_of([(row, result, is_complete)]).endswith("| so far |")
    result.missed.append("it was empty after 3.00 s")
    assert table_of([(row, result, True)]).endswith("| **no** |")
