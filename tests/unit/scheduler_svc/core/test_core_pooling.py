"""Texts to be pooled, on one planner: what a step takes of them, whom they pass, and what becomes of them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_shared.errors import ExecutorFaultError
from octavo_shared.step_wire.step import PoolingOutput, PoolingTask, RowFlag, Step, StepResult
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.limits import CoreLimits, PreemptionMode, PrefillMode
from scheduler_svc.core.sequence import SequenceGroup
from tests.support.driving import Bench, group, max_tokens, small_limits
from tests.support.each_row import each_row
from tests.support.toy_executor import values_of

EMBED, SCORE = PoolingTask.EMBED, PoolingTask.SCORE


def limits(budget: int = 16, **changes: Any) -> CoreLimits:
    """Return limits of an executor that generates and pools."""
    bounds = small_limits(budget=budget)
    return replace(bounds, pooling_tasks=(EMBED,), embedding_size=3, num_scores=1, flags_rows=True, **changes)


def encoder(budget: int = 16) -> CoreLimits:
    """Return limits of an executor without a cache."""
    return replace(limits(budget), num_blocks=0, prefix_caching=True, pooling_tasks=(EMBED, SCORE))


def text(arrival: int, num_tokens: int, task: PoolingTask = EMBED, **fields: object) -> SequenceGroup:
    """Return a text."""
    made = group(arrival, num_tokens, max_tokens(0), **fields)  # type: ignore[arg-type]
    made.pooling = task
    return made


def bench_with(bounds: CoreLimits, *groups: SequenceGroup) -> Bench:
    """Return a planner for whom these wait."""
    bench = Bench(bounds)
    for waiting in groups:
        bench.planner.queue.add(waiting)
    return bench


def pooled_lengths(step: Step) -> list[int]:
    """Return how long the texts of a step are."""
    return [len(one.token_ids) for one in step.pooling_inputs]


def test_many_texts_share_a_step_whole_and_the_first_that_does_not_fit_waits_with_those_behind_it() -> None:
    bench = bench_with(encoder(), text(0, 5), text(1, 4, SCORE), text(2, 8), text(3, 1))
    step = bench.schedule()
    assert pooled_lengths(step) == [5, 4]
    assert [one.number for one in step.pooling_inputs] == [0, 1]
    assert not step.delta.admissions
    assert pooled_lengths(bench.schedule()) == [8, 1]
    updates = bench.process()
    assert [(one.arrival, values.tolist()) for one, values in updates.pooled] == [
        (0, values_of(list(range(100, 105)), b"", EMBED).tolist()),
        (1, values_of(list(range(200, 204)), b"", SCORE).tolist()),
    ]
    assert len(bench.planner.groups) == 2
    assert not updates.pooled[0][0].live_sequences
    bench.process()
    assert not bench.planner.groups


WHY = (
    (limits(), text(0, 17), "the text has 17 tokens; a step computes it whole, and has 16 (--max-num-batched-tokens"),
    (limits(99), text(0, 25), "the text has 25 tokens; the model takes 24 (max_model_len)"),
    (limits(), text(0, 3, SCORE), "the model gives no scores; it gives vectors and generates"),
    (small_limits(), text(0, 3), "the model gives no vectors; it generates"),
    (encoder(), group(0, 3), "the model generates nothing; it gives vectors and scores"),
    (limits(max_admitted_bytes=100), text(0, 9), "the text and its answer take up to"),
)


@each_row(*WHY)
def test_what_is_never_computed_is_told_with_the_numbers(
    bounds: CoreLimits, waiting: SequenceGroup, words: str
) -> None:
    admissions = Bench(bounds).planner.admissions
    assert not admissions.can_ever_admit(waiting)
    assert admissions.why_never(waiting).startswith(words)


def test_a_text_as_long_as_the_model_takes_is_computed() -> None:
    bench = bench_with(limits(24), text(0, 24))
    assert pooled_lengths(bench.schedule()) == [24]


def test_texts_take_what_decodes_leave_and_one_that_does_not_fit_has_every_other_step_at_most() -> None:
    bench = bench_with(limits(budget=8), *(group(arrival, 2) for arrival in range(4)))
    bench.step()
    for arrival in range(10, 14):
        bench.planner.queue.add(text(arrival, 8))
    seen = []
    for _ in range(8):
        step = bench.schedule()
        seen.append((bench.planner.in_flight[-1].layout.num_decodes, pooled_lengths(step)))
        bench.process()
    assert seen == [(4, []), (0, [8])] * 4
    bench.planner.queue.add(text(20, 3))
    step = bench.schedule()
    assert (bench.planner.in_flight[-1].layout.num_decodes, pooled_lengths(step)) == (4, [3])


def test_a_text_waits_for_no_long_prompt_that_takes_all_of_every_step() -> None:
    bench = bench_with(limits(budget=4), group(0, 20), text(1, 4))
    chunks = []
    for _ in range(4):
        step = bench.schedule()
        chunks.append((step.delta.prefill_chunks[:, 1].tolist(), pooled_lengths(step)))
        bench.process()
    assert chunks == [([4], []), ([], [4]), ([4], []), ([4], [])]


def test_with_prefills_first_texts_go_before_decodes_and_take_turns_with_them() -> None:
    bench = bench_with(limits(budget=8, prefill_mode=PrefillMode.FIRST), group(0, 2))
    bench.schedule()
    bench.process()
    for arrival in range(1, 12):
        bench.planner.queue.add(text(arrival, 8))
    seen = []
    for _ in range(6):
        step = bench.schedule()
        seen.append((bench.planner.in_flight[-1].layout.num_decodes, len(step.pooling_inputs)))
        bench.process()
    assert seen == [(0, 1)] * 4 + [(1, 0)] + [(0, 1)]


def test_a_text_is_neither_preempted_nor_given_away() -> None:
    bench = bench_with(replace(limits(), num_blocks=6), group(0, 10), group(1, 10))
    bench.step()
    bench.step()
    bench.planner.queue.add(text(2, 1))
    bench.schedule()
    assert [one.arrival for one in bench.planner.movable] == [0, 1]
    bench.schedule()
    assert [one.arrival for one in bench.planner.batch.running] == [0, 2]
    assert [one.arrival for one, _ in bench.process().pooled] == [2]


def test_a_swapped_group_comes_back_beside_texts_as_if_nobody_ran() -> None:
    bench = bench_with(
        replace(limits(), num_blocks=6, watermark=0.5, num_host_blocks=8, preemption_mode=PreemptionMode.SWAP),
        group(0, 3, max_tokens(20)),
        group(1, 3, max_tokens(20)),
    )
    for _ in range(11):
        bench.step()
    assert len(bench.planner.swapped) == 1
    bench.planner.queue.add(text(2, 1))
    bench.schedule()
    bench.planner.abort(bench.planner.batch.running[0])
    assert len(bench.schedule().blocks_to_swap_in), "the watermark is for those that grow"


def test_the_answer_of_one_whose_client_left_is_dropped_and_a_lost_executor_gives_the_others_back() -> None:
    bench = bench_with(encoder(), text(0, 5), text(1, 4), text(2, 3))
    bench.schedule()
    left, *others = bench.planner.batch.running
    bench.planner.abort(left)
    check_integrity(bench.planner)
    assert bench.planner.groups_in_flight == {None, *others}
    assert [one.arrival for one in bench.planner.evacuate()] == [1, 2]
    assert all(one.sequences[0].status.value == "waiting" for one in others)


def test_a_flag_ends_one_text_and_no_other() -> None:
    bench = bench_with(encoder(), text(0, 5), text(1, 4, SCORE))
    step = bench.schedule()
    result = answer(step)
    bad = PoolingOutput(1, np.array([np.nan], np.float32), RowFlag.NOT_FINITE)
    updates = bench.planner.process(replace(result, pooling_outputs=(result.pooling_outputs[0], bad)))
    assert [one.arrival for one, _ in updates.pooled] == [0]
    [failure] = updates.failures
    assert (failure.group.arrival, failure.flag, failure.message) == (1, RowFlag.NOT_FINITE, "the scores of the text")
    assert not bench.planner.groups


def answer(step: Step) -> StepResult:
    """Return what an executor answers to a step with texts alone."""
    outputs = tuple(
        PoolingOutput(one.number, values_of(one.token_ids.tolist(), b"", one.task)) for one in step.pooling_inputs
    )
    return StepResult(step.epoch, step.step_id, np.empty(0, np.int32), pooling_outputs=outputs)


WRONG = (
    lambda outputs: (),
    lambda outputs: outputs[::-1],
    lambda outputs: (*outputs, PoolingOutput(2, np.zeros(3, np.float32))),
    lambda outputs: (PoolingOutput(0, np.zeros(4, np.float32)), outputs[1]),
    lambda outputs: (PoolingOutput(0, np.array([1, np.nan, 2], np.float32)), outputs[1]),
    lambda outputs: (replace(outputs[0], flag=RowFlag.GRAMMAR_LIMIT), outputs[1]),
)


@each_row(*WRONG)
def test_answers_that_do_not_fit_the_texts_are_refused_whole(change: object) -> None:
    bench = bench_with(encoder(), text(0, 5), text(1, 4))
    result = answer(bench.schedule())
    with pytest.raises(ExecutorFaultError):
        bench.planner.process(replace(result, pooling_outputs=change(result.pooling_outputs)))  # type: ignore[operator]
    assert len(bench.planner.batch.running) == 2


def test_answers_that_nobody_asked_for_are_refused() -> None:
    bench = bench_with(limits(), group(0, 2))
    step = bench.schedule()
    result = StepResult(step.epoch, step.step_id, np.array([5], np.int32))
    with pytest.raises(ExecutorFaultError):
        bench.planner.process(replace(result, pooling_outputs=(PoolingOutput(0, np.zeros(3, np.float32)),)))


def test_a_text_that_runs_alone_has_its_step_for_itself_until_its_answer() -> None:
    bench = bench_with(limits(), group(0, 2))
    bench.schedule()
    bench.process()
    alone = text(1, 3)
    alone.runs_alone = True
    bench.planner.queue.add(alone)
    bench.schedule()  # beside the other one, since a planner without a fleet gives nobody a step of its own
    assert bench.planner.solo is alone
    assert bench.try_schedule() is None, "its answer is awaited first"


@given(
    texts=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 16)), min_size=2, max_size=40),
    depth=st.integers(1, 3),
)
def test_each_is_answered_once_within_the_budget_and_tenants_get_their_shares(
    texts: list[tuple[str, int]], depth: int
) -> None:
    groups = [text(arrival, length, tenant=tenant) for arrival, (tenant, length) in enumerate(texts)]
    bench = bench_with(encoder(), *groups)
    answered: list[int] = []
    waiting = {tenant: sum(length for one, length in texts if one == tenant) for tenant in "ab"}
    given_of = dict.fromkeys("ab", 0)
    while len(bench.queue) or bench.planner.groups:
        while len(bench.planner.in_flight) < depth and len(bench.queue):
            step = bench.schedule()
            assert 0 < sum(pooled_lengths(step)) <= 16
            for one in bench.planner.in_flight[-1].pooling_groups:
                given_of[one.tenant] += one.num_prompt_tokens
                waiting[one.tenant] -= one.num_prompt_tokens
            if all(waiting.values()):  # both wait, so that neither is more than a text or two ahead
                assert abs(given_of["a"] - given_of["b"]) <= 2 * 16
        answered += [one.arrival for one, _ in bench.process().pooled]
    assert sorted(answered) == list(range(len(texts)))
