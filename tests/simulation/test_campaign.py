import json
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler_svc.request.life import EndedRequest, EventKind, LifeEvent, RequestTimes
from tests.simulation.__main__ import main
from tests.simulation.campaign import FinishedRun, Limits, Run, run_all
from tests.simulation.plan import MODES
from tests.simulation.rare_lives import RARE_LIVES, Life, word_of
from tests.simulation.sometimes import RARE
from tests.simulation.summary import print_summary
from tests.support.run_file import OtherCodeError, RunFile

RUNS = [Run(seed, mode) for seed in range(60) for mode in MODES]


def _run(run: Run) -> FinishedRun:
    broken = "at 1 s: r1 ended twice" if run.seed == 3 else ""
    return FinishedRun(run.seed, run.mode, broken, "digest", 300, 10, 60.0, 0.1, {"fault: kill_executor": 10})


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_all_runs_are_made_once(num_jobs: int) -> None:
    finished = list(run_all(RUNS, num_jobs, Limits(), _run))

    assert sorted((each.seed, each.mode) for each in finished) == sorted((run.seed, run.mode) for run in RUNS)


def test_a_campaign_ends_with_the_first_failure_if_it_is_to() -> None:
    assert [each.broken for each in run_all(RUNS, 1, Limits(stops_at_first=True), _run)][-1]
    assert not list(run_all(RUNS, 1, Limits(ends_at_s=0.0), _run))


def test_an_error_of_a_process_ends_the_campaign() -> None:
    def fails(run: Run) -> FinishedRun:
        raise ValueError(f"no seed {run.seed}")

    with pytest.raises(ValueError, match="no seed"):
        list(run_all(RUNS, 2, Limits(), fails))


def test_a_later_piece_finds_what_an_earlier_one_left(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    first = RunFile(path, FinishedRun, "tests/simulation")
    for run in RUNS[:5]:
        first.add(_run(run))
    first.close()

    second = RunFile(path, FinishedRun, "tests/simulation")
    second.close()

    assert second.finished == [_run(run) for run in RUNS[:5]]


def test_runs_of_other_code_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({"code": "other"}) + "\n")

    with pytest.raises(OtherCodeError, match="has runs of the code other, and this is"):
        RunFile(path, FinishedRun, "tests/simulation")


def test_a_summary_shows_failures_and_what_never_was(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    print_summary(Console(width=200), [_run(run) for run in RUNS])

    text = capsys.readouterr().out
    assert "BROKEN seed 3, safety, at 1 s: r1 ended twice" in text
    assert "python -m tests.simulation --seed 3 --mode safety" in text
    assert text.count("NEVER") == len(RARE)
    assert "3,000" in text  # steps a second


@pytest.mark.parametrize("words", [["--seeds", "5:5"], ["--seed-list", "1,x"], ["--plan", "/dev/null"], []])
def test_arguments_that_make_no_sense_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)


@pytest.mark.slow  # test_determinism.py has runs that are repeated
def test_one_seed_has_one_digest(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for _ in range(2):
        assert main(["--seed", "0", "--mode", "safety"]) == 0
        printed.append(capsys.readouterr().out)

    assert printed[0] == printed[1]
    assert "digest " in printed[0]


def test_there_are_many_rare_things() -> None:
    assert len(RARE) >= 40
    assert all(RARE.values())


_ENDED = EndedRequest("r1", "", 0, 4, 4, 0, 0, 0, RequestTimes(0.0), (), 0.0, None, "ABORTED", "it was aborted")


def _word(*kinds: EventKind, first_token_at_s: float | None = None) -> str:
    events = tuple(LifeEvent(kind, float(at_s)) for at_s, kind in enumerate(kinds))
    times = RequestTimes(0.0, first_token_at_s=first_token_at_s)
    return word_of(replace(_ENDED, events=events, times=times), has_left=False, is_late=False)


def test_a_life_is_a_word() -> None:
    kinds = (EventKind.ADMITTED, EventKind.SWAPPED_OUT, EventKind.EXECUTOR_LOST, EventKind.ADMITTED)

    assert _word() == "C"
    assert _word(*kinds, first_token_at_s=0.5) == "ATOLAC"


@pytest.mark.parametrize(
    ("word", "kind", "names"),
    [
        ("ATF", "plain", []),
        ("ATOLAF", "beams", ["lost, finished", "lost while swapped out", "beams lost"]),
        ("ATOILAF", "plain", ["lost, finished"]),
        ("ALALAF", "plain", ["lost, finished", "lost before its first token"]),
        ("C", "plain", ["aborted while it waited"]),
        ("ATLC", "plain", ["aborted after a loss"]),
        ("ATOC", "plain", ["aborted while swapped out"]),
    ],
)  # fmt: skip
def test_what_a_life_shows(word: str, kind: str, names: list[str]) -> None:
    life = Life(replace(_ENDED, error_message=""), kind, word)

    assert [rare.name for rare in RARE_LIVES if rare.is_seen(life)] == names
