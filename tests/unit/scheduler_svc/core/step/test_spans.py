"""Rows that get several tokens in a step: what is believed of them, where they end, what goes back."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from octavo_shared.errors import ExecutorFaultError
from octavo_shared.step_wire.step import RowFlag, SamplingRow, StepResult
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions
from tests.support.driving import Bench, group, max_tokens, small_limits
from tests.support.each_row import each_row


def counts(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return np.array(values, np.uint8)


def tokens(number: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.arange(50, 50 + number, dtype=np.int32)


def decoding_bench(*, num_groups: int = 1, conditions: StopConditions | None = None) -> Bench:
    """Return a core whose groups have prompts of 3 tokens, one output token, and an allowance of 4 in step 2."""
    bench = Bench(small_limits(max_allowance=4, blocks=32))
    for arrival in range(num_groups):
        bench.add(arrival, 3, conditions)
    bench.step()
    return bench


def answer(
    number: int, token_counts: "np.ndarray[tuple[int], np.dtype[np.uint8]] | None", **more: object
) -> StepResult:
    return StepResult(1, 2, tokens(number), token_counts=token_counts, **more)  # type: ignore[arg-type]


# To the step of one row that may get four tokens.
FAULTS = {
    "a count above the allowance": (answer(5, counts(5)), "step 2 has 5 tokens for a row that may get 4"),
    "counts of more rows": (answer(2, counts(1, 1)), "step 2 has 2 token counts for 1 rows"),
    "no token and no flag": (answer(0, counts(0)), "a row without tokens and without a flag, or with both"),
    "tokens and a flag": (
        answer(1, counts(1), row_flags=counts(RowFlag.NOT_FINITE)),
        "a row without tokens and without a flag, or with both",
    ),
    "fewer tokens than counted": (answer(2, counts(3)), "step 2 has 2 sampled tokens where its counts add up to 3"),
    "more tokens than counted": (answer(4, counts(3)), "step 2 has 4 sampled tokens where its counts add up to 3"),
    "several tokens and no counts": (answer(4, None), "step 2 has 4 sampled tokens for 1 rows"),
    "another number of log-probabilities": (
        answer(3, counts(3), logprobs=np.zeros(2, np.float32)),
        "step 2 has 2 log-probabilities where its counts add up to 3",
    ),
    "a token of no vocabulary": (
        StepResult(1, 2, np.array([50, 100_000], np.int32), token_counts=counts(2)),
        "outside 0 to 99999",
    ),
}


@each_row(*FAULTS)
def test_counts_that_cannot_be_are_a_fault_of_the_executor_and_nothing_is_taken(fault: str) -> None:
    result, message = FAULTS[fault]
    bench = decoding_bench()
    bench.planner.limits = replace(bench.planner.limits, flags_rows=True)
    bench.schedule()
    before = bench.planner.table.num_known_tokens.tolist()

    with pytest.raises(ExecutorFaultError, match=message):
        bench.planner.process(result)

    assert bench.planner.table.num_known_tokens.tolist() == before
    bench.process()


@each_row(
    (3, 6, ""), (2, 4, ""), (2, 5, "step 2 has 5 alternatives instead of 4"), (2, 6, "6 alternatives instead of 4")
)
def test_each_token_of_a_span_has_its_alternatives(num_tokens: int, num_alternatives: int, fault: str) -> None:
    bench = Bench(small_limits(max_allowance=4, blocks=32))
    asking = group(0, 3)
    asking.sampling = SamplingRow(num_logprobs=2)
    bench.queue.add(asking)
    for step_id, number, width in ((1, 1, 2), (2, num_tokens, num_alternatives)):
        in_flight = bench.planner.schedule(0.0).in_flight
        assert in_flight is not None
        result = StepResult(
            *(1, step_id, tokens(number), np.full(number, -1.0, np.float32)),
            alternative_token_ids=tokens(width),
            alternative_logprobs=-np.arange(width, dtype=np.float32),
            token_counts=None if in_flight.layout.allowances is None else counts(number),
        )
        if step_id == 2 and fault:
            with pytest.raises(ExecutorFaultError, match=fault):
                bench.planner.process(result)
            return
        updates = bench.planner.process(result)
    assert updates.token_ids == tokens(num_tokens).tolist()
    found = [updates.alternatives[place].token_ids for place in range(num_tokens)]
    assert found == tokens(num_alternatives).reshape(-1, 2).tolist()


@each_row(
    (StopConditions(stop_token_ids=frozenset({51})), [50, 51], FinishReason.STOP),
    (StopConditions(stop_token_ids=frozenset({52})), [50, 51, 52], FinishReason.STOP),
    (StopConditions(max_tokens=20), [50, 51, 52, 53], None),
)
def test_a_stop_inside_a_span_ends_the_sequence_there_and_the_rest_is_cut(
    conditions: StopConditions, delivered: list[int], reason: FinishReason | None
) -> None:
    bench = decoding_bench(num_groups=2, conditions=conditions)
    bench.schedule()

    updates = bench.planner.process(StepResult(1, 2, np.tile(tokens(4), 2), token_counts=counts(4, 4)))

    assert updates.token_ids == delivered * 2
    assert updates.counts == [len(delivered)] * 2
    assert updates.finished == ({} if reason is None else {0: reason, 1: reason})
    assert bench.running == ("" if reason else "ab")


def test_no_allowance_reaches_beyond_the_limit_of_a_sequence_whatever_is_in_flight() -> None:
    bench = decoding_bench(conditions=max_tokens(8))

    # One token is there: 4, 3 and then none may come; what does not come makes room again.
    num_reserved = [bench.schedule().delta.allowances.tolist() for _ in range(2)]
    assert num_reserved == [[[0, 4]], [[0, 3]]]
    assert bench.try_schedule() is None
    bench.run(num_steps_in_flight=3)

    assert bench.outputs["a"] == list(range(103, 111))


def test_blocks_of_drafts_that_did_not_come_stay_with_the_slot() -> None:
    bench = decoding_bench()
    bench.schedule()
    num_blocks = int(bench.planner.table.num_blocks[0])

    bench.planner.process(answer(1, counts(1)))

    assert num_blocks == 2
    assert bench.planner.table.num_blocks[0] == num_blocks
    assert bench.planner.table.num_tokens[0] == 5
    assert bench.planner.table.num_open_tokens[0] == 0


def test_one_token_a_step_for_those_that_say_so() -> None:
    drafted, plain = (Bench(small_limits(max_allowance=most, max_num_seqs=3, blocks=64)) for most in (4, 1))
    for arrival in range(9):  # each slot is used again
        for bench in (drafted, plain):
            bench.add(arrival, 3, max_tokens(9), speculate=arrival % 2 == 0)
    most_of = defaultdict[SequenceGroup, int](int)
    while drafted.try_schedule() is not None:
        for slot in drafted.planner.table.active.nonzero()[0].tolist():
            group = drafted.planner.batch.sequence_in_slot[slot].group
            most_of[group] = max(most_of[group], int(drafted.planner.table.allowance[slot]))
        drafted.process()
    plain.run()

    assert drafted.outputs == plain.outputs
    assert {group.arrival: most for group, most in most_of.items()} == {n: 1 if n % 2 else 4 for n in range(9)}
    assert all((group.num_draft_tokens > 0) is group.speculate for group in most_of)


def test_nobody_makes_room_for_drafts() -> None:
    bench = Bench(small_limits(max_allowance=4, blocks=4, max_model_len=16))
    for arrival in range(2):
        bench.add(arrival, 3, max_tokens(4))
    bench.run()

    assert not any(bench.planner.preemption.num_preemptions.values())
    assert all(len(output) == 4 for output in bench.outputs.values())


def test_beams_have_no_allowance_and_no_token_beside_spans() -> None:
    bench = Bench(small_limits(max_allowance=4, blocks=32))
    bench.add(0, 3, max_tokens(9))
    bench.add(1, 3, max_tokens(5), beam_search=BeamSearchParams(beam_width=2))
    bench.run(num_steps_in_flight=2)

    assert bench.outputs["a"] == list(range(103, 112))
