"""Beam searches in the batch: slots, forks, blocks and preemption. The search itself: `test_beam_search.py`."""

from itertools import product

from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping, StopConditions
from tests.support.driving import Bench, max_tokens, small_limits, with_logprobs
from tests.support.each_row import each_row
from tests.support.toy_executor import hashed_next_token, search_alone

VOCAB_SIZE = 13
WIDTH_3 = BeamSearchParams(beam_width=3, num_outputs=2)


def bench_of(max_num_seqs: int = 4, blocks: int = 24, block_size: int = 4, max_model_len: int = 24) -> Bench:
    """Return a bench with a vocabulary of 13 tokens."""
    limits = small_limits(
        vocab_size=VOCAB_SIZE,
        max_num_seqs=max_num_seqs,
        blocks=blocks,
        block_size=block_size,
        max_model_len=max_model_len,
    )
    return Bench(limits, hashed_next_token(VOCAB_SIZE))


def hypotheses(group: SequenceGroup) -> list[tuple[list[int], float]]:
    """Return the tokens and scores of what a search found."""
    assert group.beams is not None
    return [(found.token_ids.tolist(), found.score) for found in group.beams.finished_hypotheses()]


def expected(bench: Bench, group: SequenceGroup) -> list[tuple[list[int], float]]:
    """Return what the plainest loop finds."""
    assert group.beam_search is not None
    alone = search_alone(group.prompt_token_ids.tolist(), group.beam_search, group.stop_conditions, bench.limits)
    return [(found.token_ids.tolist(), found.score) for found in alone]


# One step after the other ------------------------------------------------------------------------


@each_row(*product([1, 2, 3], EarlyStopping))
def test_a_search_finds_what_it_would_find_alone(depth: int, early_stopping: EarlyStopping) -> None:
    bench = bench_of(max_num_seqs=8)
    params = BeamSearchParams(beam_width=4, num_outputs=3, early_stopping=early_stopping)
    stop = StopConditions(max_tokens=10, stop_token_ids=frozenset({5}))
    groups = [bench.add(arrival, [arrival, 2, 3, 4 + arrival], stop, beam_search=params) for arrival in range(3)]

    bench.run(depth)

    for group in groups:
        assert hypotheses(group) == expected(bench, group)


def test_eos_ends_hypotheses_unless_it_is_ignored() -> None:
    limits = small_limits(vocab_size=VOCAB_SIZE, blocks=24, eos_token_ids=tuple(range(6)))
    bench = Bench(limits, hashed_next_token(VOCAB_SIZE))
    ends = bench.add(0, [1, 2, 3], max_tokens(9), beam_search=WIDTH_3)
    bench.run()
    goes_on = bench.add(1, [1, 2, 3], StopConditions(9, ignore_eos=True), beam_search=WIDTH_3)
    bench.run()

    assert hypotheses(ends) == expected(bench, ends)
    assert all(token_ids[-1] < 6 for token_ids, _ in hypotheses(ends))
    assert [len(token_ids) for token_ids, _ in hypotheses(goes_on)] == [9, 9]


# Beside others -----------------------------------------------------------------------------------


def test_a_search_waits_for_its_candidates_while_others_go_on() -> None:
    bench = bench_of()
    bench.add(0, [1, 2, 3], beam_search=BeamSearchParams(beam_width=2))
    bench.add(1, [4, 5, 6])
    bench.schedule()

    ahead = bench.schedule()

    assert ahead.delta.beam_forks == ()
    assert bench.planner.in_flight[-1].layout.slots.tolist() == [1]
    bench.process()
    assert len(bench.schedule().delta.beam_forks) == 1


def test_the_logprobs_of_a_mixed_step_are_those_of_the_sampled_rows() -> None:
    bench = bench_of()
    bench.add(0, [1, 2, 3], beam_search=BeamSearchParams(beam_width=2))
    bench.add(1, [4, 5, 6])
    bench.schedule()
    bench.results[0] = with_logprobs(bench.results[0], [float("nan"), -2.5])

    updates = bench.process()

    assert [sequence.group.request_id for sequence in updates.sequences] == ["b"]
    assert updates.logprobs == [-2.5]


def test_tokens_of_beams_are_charged() -> None:
    bench = bench_of()
    charged: list[int] = []
    bench.queue.charge = lambda tenant, num_tokens: charged.append(num_tokens)  # type: ignore[method-assign]
    bench.add(0, [1, 2, 3], beam_search=WIDTH_3)

    bench.step()
    bench.step()

    assert sum(charged) == 3 + 3


# Preempted, aborted, lost ------------------------------------------------------------------------


@each_row(*product([1, 2, 3], PreemptionMode))
def test_a_preempted_search_finds_the_same(depth: int, mode: PreemptionMode) -> None:
    limits = small_limits(
        vocab_size=VOCAB_SIZE, max_num_seqs=8, block_size=2, blocks=14, host_blocks=40, preemption_mode=mode
    )
    bench = Bench(limits, hashed_next_token(VOCAB_SIZE))
    groups = [
        bench.add(arrival, [arrival, 2, 3], max_tokens(9), beam_search=BeamSearchParams(beam_width=2, num_outputs=2))
        for arrival in range(4)
    ]

    bench.run(depth)

    assert bench.planner.preemption.num_preemptions[mode] > 0
    for group in groups:
        assert hypotheses(group) == expected(bench, group)


def test_a_search_that_waits_for_candidates_is_not_preempted() -> None:
    """Its candidates would be lost. The first who lack blocks get what there is, the others are held back."""
    bench = bench_of(blocks=5, max_model_len=20)
    bench.add(0, [1, 2, 3, 4], max_tokens(6))
    bench.add(1, [1, 2, 3, 4], max_tokens(6))
    c = bench.add(2, [1, 2, 3, 4, 5], max_tokens(6), beam_search=BeamSearchParams(beam_width=2))
    bench.schedule()

    held = bench.schedule()  # a and b want a block each, one is free, and c is in flight

    assert held.delta.appended_blocks[:, 0].tolist() == [0]
    assert bench.planner.in_flight[-1].layout.slots.tolist() == [0]
    assert c.num_preemptions == 0
    bench.run(2)
    assert hypotheses(c) == expected(bench, c)


def test_a_search_that_lacks_blocks_waits_for_one_in_flight_that_cannot_be_preempted() -> None:
    bench = bench_of(blocks=9, block_size=1, max_model_len=9, max_num_seqs=6)
    a = bench.add(0, [0, 7], max_tokens(3), beam_search=WIDTH_3)  # all its first three beams live on
    bench.step()
    bench.schedule()
    b = bench.add(1, [1, 3], max_tokens(2), beam_search=BeamSearchParams(beam_width=2))
    bench.schedule()
    bench.process()  # a is ready and wants 3 blocks, 2 are free; b is in flight

    assert bench.try_schedule() is None
    assert (bench.running, b.num_preemptions) == ("ab", 0)
    bench.run(2)
    assert hypotheses(a) == expected(bench, a)
    assert hypotheses(b) == expected(bench, b)


def test_abort_of_a_search_that_is_ready_frees_the_blocks_of_its_forks() -> None:
    bench = bench_of()
    a = bench.add(0, [1, 2, 3, 4, 5], beam_search=WIDTH_3)
    bench.step()

    bench.planner.abort(a)

    assert bench.num_free_blocks == 24
    bench.run()
