"""What becomes of groups whose rows have a flag: they end wherever they are, and the others get what is theirs."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from octavo_shared.errors import ExecutorFaultError
from octavo_shared.step_wire.step import RowFlag, SamplingRow, StepResult
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.request.parameters import BeamSearchParams
from tests.support.driving import Bench, delivered, group, small_limits
from tests.support.each_row import each_row

NAN = np.float32(np.nan)


def flagging_limits(**numbers: int) -> CoreLimits:
    return replace(small_limits(**numbers), flags_rows=True)  # type: ignore[arg-type]


def flag(bench: Bench, *rows: int, result: int = 0) -> None:
    """Put a flag on some rows of a result that waits; what else they have means nothing then."""
    flagged = bench.results[result]
    flags = np.zeros(len(flagged.sampled_token_ids), np.uint8)
    flags[list(rows)] = RowFlag.NOT_FINITE
    bench.results[result] = replace(flagged, row_flags=flags)


def failures(updates: StepUpdates) -> dict[str, str]:
    return {failure.group.request_id: failure.message for failure in updates.failures}


def test_a_flagged_row_ends_its_group_and_the_next_step_goes_on_without_it() -> None:
    bench = Bench(flagging_limits())
    bench.add(0, 3)
    bench.add(1, 3)
    bench.step()
    bench.schedule()
    bench.schedule()
    flag(bench, 1)

    updates = bench.process()

    assert delivered(updates) == {"a": 104}
    assert failures(updates) == {"b": "output 0 are not finite at token 1"}
    assert bench.running == "a"
    flag(bench, 1)  # that of the step behind it means nothing any more
    later = bench.process()
    assert (delivered(later), failures(later)) == ({"a": 105}, {})
    bench.planner.abort(bench.planner.batch.running[0])
    assert bench.num_free_blocks == bench.limits.num_blocks


def test_of_several_outputs_the_first_that_fails_ends_all_and_the_others_have_their_tokens() -> None:
    bench = Bench(flagging_limits())
    bench.add(0, 3, num_sequences=3)
    bench.step()
    bench.schedule()
    flag(bench, 1, 2)

    updates = bench.process()

    assert len(delivered(updates)) == 1
    assert failures(updates) == {"a": "output 1 are not finite at token 1"}
    assert bench.running == ""
    assert bench.num_free_blocks == bench.limits.num_blocks


def test_a_preempted_group_ends_by_a_flag_that_was_in_flight() -> None:
    bench = Bench(flagging_limits(blocks=6, budget=24))
    bench.add(0, 12)
    bench.add(1, 12)
    bench.schedule()
    bench.schedule()  # preempts b, whose first token is on its way
    flag(bench, 1)

    updates = bench.process()

    assert delivered(updates) == {"a": 112}
    assert failures(updates) == {"b": "output 0 are not finite at token 0"}
    assert (bench.running, bench.waiting) == ("a", "")


def test_a_beam_ends_its_search_and_the_sequence_beside_it_goes_on() -> None:
    bench = Bench(flagging_limits(vocab_size=1000))
    bench.add(0, [1, 2, 3], beam_search=BeamSearchParams(beam_width=2))
    bench.add(1, 3)
    bench.step()
    bench.schedule()
    before = bench.results[0]
    assert before.candidate_logprobs is not None
    half = len(before.candidate_logprobs) // 2
    bench.results[0] = replace(before, candidate_logprobs=np.append(before.candidate_logprobs[:half], [NAN] * half))
    layout = bench.planner.in_flight[0].layout
    assert layout.num_candidates is not None
    flag(bench, int(layout.num_candidates.nonzero()[0][1]))

    updates = bench.process()

    assert delivered(updates) == {"b": 204}
    assert failures(updates) == {"a": "a beam are not finite at token 1"}
    assert not updates.advanced_searches
    assert bench.running == "b"


def test_a_search_that_is_over_without_an_output_has_failed() -> None:
    """All its candidates are impossible, and the executor flags nothing."""
    bench = Bench(flagging_limits(vocab_size=1000))
    bench.add(0, [1, 2, 3], beam_search=BeamSearchParams(beam_width=2))
    bench.step()
    bench.schedule()
    before = bench.results[0]
    assert before.candidate_logprobs is not None
    bench.results[0] = replace(before, candidate_logprobs=np.full_like(before.candidate_logprobs, -np.inf))

    updates = bench.process()

    assert failures(updates) == {"a": "a beam are not finite at token 1"}
    assert not updates.finished_searches
    assert bench.num_free_blocks == bench.limits.num_blocks


def test_a_prompt_ends_its_group_and_says_where() -> None:
    bench = Bench(flagging_limits())
    asking = group(0, [1, 2, 3, 4])
    asking.num_prompt_logprobs = 1
    bench.queue.add(asking)
    bench.planner.schedule(0.0)
    result = StepResult(
        1,
        1,
        np.array([7], np.int32),
        prompt_logprobs=np.array([-1, NAN, NAN], np.float32),
        prompt_alternative_token_ids=np.array([5, 6, 7], np.int32),
        prompt_alternative_logprobs=np.array([-1, NAN, NAN], np.float32),
    )

    updates = bench.planner.process(result)

    assert failures(updates) == {"a": "the prompt are not finite at token 2"}
    assert not updates.prompt_logprobs
    assert not updates.sequences
    assert bench.running == ""


STRICT: dict[str, tuple[Callable[[StepResult], StepResult], str]] = {
    "too many": (lambda r: replace(r, row_flags=np.zeros(2, np.uint8)), "2 row flags for 1 rows"),
    "too few": (lambda r: replace(r, row_flags=np.zeros(0, np.uint8)), "0 row flags for 1 rows"),
    "one of grammars": (lambda r: replace(r, row_flags=np.array([1], np.uint8)), "the row flag 1, which was not"),
    "an unknown one": (lambda r: replace(r, row_flags=np.array([200], np.uint8)), "the row flag 200, which was not"),
    "no number without a flag": (
        lambda r: replace(r, logprobs=np.array([NAN])),
        "lacks the requested log-probabilities",
    ),
    "no token of the vocabulary": (
        lambda r: replace(r, row_flags=np.array([4], np.uint8), sampled_token_ids=np.array([-1], np.int32)),
        "token ids outside",
    ),
}


@each_row(*STRICT)
def test_flags_are_checked_strictly(fault: str) -> None:
    change, message = STRICT[fault]
    bench = Bench(flagging_limits())
    asking = group(0, [1, 2, 3])
    asking.sampling = SamplingRow(num_logprobs=0)
    bench.queue.add(asking)
    bench.planner.schedule(0.0)
    right = StepResult(1, 1, np.array([7], np.int32), logprobs=np.array([-1], np.float32))

    with pytest.raises(ExecutorFaultError, match=message):
        bench.planner.process(change(right))

    assert delivered(bench.planner.process(right)) == {"a": 7}


def test_of_an_executor_that_did_not_agree_flags_and_nan_are_faults() -> None:
    bench = Bench(small_limits())
    bench.add(0, 3)
    bench.schedule()
    flag(bench, 0)

    with pytest.raises(ExecutorFaultError, match="1 row flags for 1 rows"):
        bench.process()
