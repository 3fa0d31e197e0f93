"""Each target runs some cases of a fixed seed; the driver finds planted faults; what was found stays mended."""

import pytest

from octavo.admin.v1 import admin_service_pb2 as admin
from octavo.generation.v1 import generation_service_pb2 as generation
from tests.fuzz.answers import SchedulerAnswers
from tests.fuzz.calls import Calls
from tests.fuzz.driver import fuzz, main
from tests.fuzz.planted import Crashing, Hanging, Planted
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

# One of these takes as long as ten of the others.
FEW = {
    "front-messages": 10,
    "core-answers": 30,
    "executor-answers": 30,
    "scheduler-answers": 20,
    "scheduler-messages": 30,
}


@pytest.mark.parametrize("make", TARGETS[:-1], ids=lambda make: make.name)  # the last one: test_hostile_logs.py
def test_some_cases_of_each_target_end_as_they_may(make: type[Target]) -> None:
    failures = []
    fuzz(make(), range(1, 1 + FEW.get(make.name, 100)), 60.0, lambda seed, text: failures.append((seed, text)))
    assert [failure for failure in failures if failure[1]] == []


@pytest.mark.parametrize("make", [each for each in TARGETS if issubclass(each, Calls)], ids=lambda make: make.name)
def test_cases_are_calls_that_a_service_takes_until_they_are_spoiled(make: type[Calls]) -> None:
    target, refused = make(), []
    for case in target.corpus():
        target.one(case)
        if target.said and not case[0].endswith(b"DrainExecutor"):
            refused.append((case[0], target.said))
    target.close()
    assert refused == []


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Planted, "KeyError: 'planted'\n\nthe smallest input:   b'A'"),
        (Crashing, "seed 3: the process ended with 9"),
        (Hanging, "seed 3: it hangs"),
    ],
)
def test_a_planted_fault_is_told_with_its_seed(
    make: type[Target], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fuzz.driver.GRACE_S", 0.1)
    monkeypatch.setattr("tests.fuzz.driver.SHRINK_S", 0.1)
    assert main(["--cases", "4", "--seed", "3"], [make]) == 1
    assert told in (printed := capsys.readouterr().out)
    assert "seed 3" in printed


STREAM = "/octavo.generation.v1.GenerationService/StreamRequests"
GENERATE = "/octavo.generation.v1.GenerationService/Generate"
ONE_TOKEN = generation.OutputDelta(token_ids=[1], alternative_token_ids=[1, 2], alternative_logprobs=[0.5])
FOUND: dict[str, tuple[str, bytes]] = {
    "a request that nobody sent": (
        STREAM,
        generation.StreamRequestsResponse(accepted=[generation.RequestAccepted(number=99)]).SerializeToString(),
    ),
    "columns of several lengths": (
        STREAM,
        generation.StreamRequestsResponse(
            deltas=generation.RequestDeltas(numbers=[1, 1], token_counts=[1], token_ids=[1])
        ).SerializeToString(),
    ),
    "alternatives that do not pair": (
        GENERATE,
        generation.GenerateResponse(delta=ONE_TOKEN).SerializeToString(),
    ),
    "alternatives of no token": (
        GENERATE,
        generation.GenerateResponse(
            delta=generation.OutputDelta(alternative_token_ids=[1], alternative_logprobs=[0.5])
        ).SerializeToString(),
    ),
    "a page without requests, and another one behind it": (
        "/octavo.admin.v1.AdminService/ListRequests",
        admin.ListRequestsResponse(next_page_token="1").SerializeToString(),
    ),
    **{
        f"bytes that are no answer to {path.rpartition('/')[2]}": (path, b"\xff")
        for path in (
            GENERATE,
            STREAM,
            "/octavo.generation.v1.GenerationService/GetModel",
            "/octavo.generation.v1.GenerationService/Tokenize",
            "/octavo.admin.v1.AdminService/ListRequests",
        )
    },
}


def test_what_was_found_stays_mended() -> None:
    target, broken = SchedulerAnswers(), []
    target.corpus()
    for name, (path, content) in FOUND.items():
        try:
            target.one((path.encode(), content))
        except Exception as error:
            broken.append((name, repr(error)))
    target.close()
    assert broken == []
