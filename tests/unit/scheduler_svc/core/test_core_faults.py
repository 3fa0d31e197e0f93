"""A result that no correct executor sends is refused, and nothing of it is taken."""

from dataclasses import replace

import numpy as np
import pytest

from octavo_shared.errors import ExecutorFaultError
from octavo_shared.step_wire.step import SamplingRow, StepResult
from scheduler_svc.request.parameters import BeamSearchParams
from tests.support.driving import Bench, delivered, group, small_limits
from tests.support.each_row import each_row

TOKEN, MILLION = np.array([7], np.int32), np.zeros(10**6, np.int32)
FAULTS = {
    "an older step": (StepResult(1, 0, np.array([7], np.int32)), "epoch 1 step 0 came instead of 1 1"),
    "a later step": (StepResult(1, 2, np.array([7], np.int32)), "epoch 1 step 2 came instead of 1 1"),
    "another epoch": (StepResult(2, 1, np.array([7], np.int32)), "epoch 2 step 1 came instead of 1 1"),
    "too few tokens": (StepResult(1, 1, np.array([], np.int32)), "0 sampled tokens for 1 rows"),
    "too many tokens": (StepResult(1, 1, np.array([7, 7], np.int32)), "2 sampled tokens for 1 rows"),
    "a negative token": (StepResult(1, 1, np.array([-1], np.int32)), "token ids outside 0 to 99999"),
    "a token beyond the vocabulary": (StepResult(1, 1, np.array([100_000], np.int32)), "outside 0 to 99999"),
    "a million tokens": (StepResult(1, 1, MILLION), "1000000 sampled tokens for 1 rows"),
    "candidates that nobody asked for": (
        StepResult(1, 1, TOKEN, candidate_token_ids=MILLION, candidate_logprobs=MILLION.astype(np.float32)),
        "1000000 beam candidates, but none were requested",
    ),
    "alternatives that nobody asked for": (
        StepResult(1, 1, TOKEN, alternative_token_ids=MILLION, alternative_logprobs=MILLION.astype(np.float32)),
        "1000000 alternatives, but none were requested",
    ),
    "log-probabilities of a prompt that nobody asked for": (
        StepResult(1, 1, TOKEN, prompt_logprobs=MILLION.astype(np.float32)),
        "1000000 log-probabilities of prompts, but none were requested",
    ),
    "alternatives of a prompt that nobody asked for": (
        StepResult(1, 1, TOKEN, prompt_alternative_token_ids=MILLION),
        "1000000 alternatives of prompts, but none were requested",
    ),
}


@each_row(*FAULTS)
def test_wrong_result_is_refused_and_the_right_one_still_counts(fault: str) -> None:
    result, message = FAULTS[fault]
    bench = Bench(small_limits())
    bench.add(0, 3)
    bench.schedule()

    with pytest.raises(ExecutorFaultError, match=message):
        bench.planner.process(result)

    assert bench.planner.last_processed_step_id == 0
    assert delivered(bench.process()) == {"a": 103}


def test_result_without_a_step_in_flight_is_refused() -> None:
    bench = Bench(small_limits())

    with pytest.raises(ExecutorFaultError, match="no step is in flight"):
        bench.planner.process(StepResult(1, 1, np.array([7], np.int32)))


def test_result_after_evacuation_is_refused() -> None:
    bench = Bench(small_limits())
    bench.add(0, 3)
    bench.schedule()
    bench.planner.evacuate()

    with pytest.raises(ExecutorFaultError, match="no step is in flight"):
        bench.planner.process(bench.results[0])


# Beams -------------------------------------------------------------------------------------------

TOKENS, LOGPROBS = np.array([3, 1, 2, 0], np.int32), np.array([-0.5, -1.0, -1.5, -2.0], np.float32)
BEAM_FAULTS = {
    "no candidates": (None, None, "0 beam candidates instead of 4"),
    "candidates without log-probabilities": (TOKENS, None, "4 beam candidates instead of 4"),
    "too few candidates": (TOKENS[:3], LOGPROBS[:3], "3 beam candidates instead of 4"),
    "fewer log-probabilities than candidates": (TOKENS, LOGPROBS[:3], "4 beam candidates instead of 4"),
    "a negative candidate": (TOKENS - 1, LOGPROBS, "candidates outside 0 to 12"),
    "a candidate beyond the vocabulary": (TOKENS + 10, LOGPROBS, "candidates outside 0 to 12"),
    "a log-probability that is not a number": (TOKENS, LOGPROBS * np.nan, "not a number"),
}


@each_row(*BEAM_FAULTS)
def test_wrong_candidates_are_refused_and_the_right_ones_still_count(fault: str) -> None:
    token_ids, logprobs, message = BEAM_FAULTS[fault]
    bench = Bench(small_limits(vocab_size=13))
    a = bench.add(0, [1, 2, 3], beam_search=BeamSearchParams(beam_width=2))
    bench.schedule()
    wrong = replace(bench.results[0], candidate_token_ids=token_ids, candidate_logprobs=logprobs)

    with pytest.raises(ExecutorFaultError, match=message):
        bench.planner.process(wrong)

    bench.process()
    assert a.beams is not None
    assert len(a.beams.live) == 2


def test_a_token_in_a_beam_row_is_nobody_s() -> None:
    """The row holds no token; whatever stands there is not looked at."""
    bench = Bench(small_limits(vocab_size=13))
    bench.add(0, [1, 2, 3], beam_search=BeamSearchParams(beam_width=2))
    bench.schedule()
    bench.results[0] = replace(bench.results[0], sampled_token_ids=np.array([99], np.int32))

    assert delivered(bench.process()) == {}


def test_a_sampled_token_beside_beams_is_still_checked() -> None:
    bench = Bench(small_limits(vocab_size=1000))
    bench.add(0, [1, 2, 3], beam_search=BeamSearchParams(beam_width=2))
    bench.add(1, 3)
    bench.schedule()
    wrong = replace(bench.results[0], sampled_token_ids=np.array([-1, 1000], np.int32))

    with pytest.raises(ExecutorFaultError, match="token ids outside 0 to 999"):
        bench.planner.process(wrong)


# Alternatives and prompts ------------------------------------------------------------------------

IDS, VALUES = np.array([3, 1], np.int32), np.array([-0.5, -1.0], np.float32)
RIGHT = StepResult(
    1,
    1,
    np.array([7], np.int32),
    logprobs=np.array([-2.0], np.float32),
    alternative_token_ids=IDS,
    alternative_logprobs=VALUES,
    prompt_logprobs=VALUES,
    prompt_alternative_token_ids=IDS,
    prompt_alternative_logprobs=VALUES,
)
LOGPROB_FAULTS: dict[str, tuple[dict[str, object], str]] = {
    "no alternatives": ({"alternative_token_ids": None, "alternative_logprobs": None}, "0 alternatives instead of 2"),
    "too few alternatives": ({"alternative_token_ids": IDS[:1]}, "1 alternatives instead of 2"),
    "an alternative beyond the vocabulary": ({"alternative_token_ids": IDS + 10}, "alternatives outside 0 to 12"),
    "an alternative that is no number": ({"alternative_logprobs": VALUES * np.nan}, "alternatives whose log-prob"),
    "no log-probabilities of the prompt": ({"prompt_logprobs": None}, "0 log-probabilities of prompts instead of 2"),
    "too many": ({"prompt_logprobs": np.zeros(3, np.float32)}, "3 log-probabilities of prompts instead of 2"),
    "a prompt's that is no number": ({"prompt_logprobs": VALUES * np.nan}, "2 log-probabilities of prompts"),
    "too few of the prompt's": ({"prompt_alternative_logprobs": VALUES[:1]}, "2 alternatives of prompts instead of 2"),
}


@each_row(*LOGPROB_FAULTS)
def test_wrong_logprobs_are_refused_and_the_right_ones_still_count(fault: str) -> None:
    changes, message = LOGPROB_FAULTS[fault]
    bench = Bench(small_limits(vocab_size=13))
    asking = group(0, [1, 2, 3])
    asking.sampling, asking.num_prompt_logprobs = SamplingRow(num_logprobs=2), 1
    bench.queue.add(asking)
    assert bench.planner.schedule(0.0).step is not None

    with pytest.raises(ExecutorFaultError, match=message):
        bench.planner.process(replace(RIGHT, **changes))  # type: ignore[arg-type]

    updates = bench.planner.process(RIGHT)
    assert updates.alternatives[0].token_ids == [3, 1]
    assert [prompt.logprobs for prompt in updates.prompt_logprobs] == [[-0.5, -1.0]]
    assert not asking.lacks_prompt_logprobs
