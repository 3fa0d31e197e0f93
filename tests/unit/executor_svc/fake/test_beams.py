"""Beams on the fake worker: candidates instead of tokens, forks that share and copy blocks.

Blocks have 4 slots.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from executor_svc.fake.tokenizer import EOS_TOKEN_ID, VOCAB_SIZE
from octavo_shared.errors import InvalidStepError, StepFailedError
from octavo_shared.step_wire.step import UNKNOWN_TOKEN, Fork, SamplingRow, StepResult, TableDelta, pairs
from tests.support.fake_runs import Run, admission, continuation, small_worker

BEAM = SamplingRow(num_candidates=4)


@dataclass(frozen=True)
class Candidates:
    """The candidates of one beam row, likeliest first."""

    token_ids: list[int]
    logprobs: list[float]


def candidates_of(result: StepResult, num_candidates: int = 4) -> list[Candidates]:
    assert result.candidate_token_ids is not None
    assert result.candidate_logprobs is not None
    token_ids = result.candidate_token_ids.reshape(-1, num_candidates).tolist()
    logprobs = result.candidate_logprobs.reshape(-1, num_candidates).tolist()
    return [Candidates(*row) for row in zip(token_ids, logprobs, strict=True)]


def candidates_after(
    text: str, *, salt: int = 0, sampling: SamplingRow = BEAM, eos_probability: float = 0
) -> Candidates:
    """Return the candidates after a text, from a worker of its own."""
    run = Run(small_worker(eos_probability=eos_probability))
    entry = admission(text, tuple(range(-(-len(text) // 4))), salt=salt, sampling=sampling)
    result = run.step(TableDelta(admissions=(entry,), prefill_chunks=pairs((0, len(text)))))
    return candidates_of(result, sampling.num_candidates)[0]


def slots(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(values, np.int32)


def test_a_beam_row_answers_candidates_and_samples_nothing() -> None:
    run = Run()
    result = run.step(TableDelta(admissions=(admission("abc", (0,), sampling=BEAM),), prefill_chunks=pairs((0, 3))))

    assert result.sampled_token_ids.tolist() == [UNKNOWN_TOKEN]
    assert result.logprobs is None
    assert len(candidates_of(result)[0].token_ids) == 4
    assert run.step(TableDelta()).sampled_token_ids.tolist() == []


def test_the_first_candidate_is_the_greedy_token() -> None:
    assert candidates_after("abc").token_ids[0] == continuation("abc", 1)[0]
    assert candidates_after("abc", eos_probability=1.0).token_ids[0] == EOS_TOKEN_ID


def test_candidates_depend_on_the_history_and_its_salt_alone() -> None:
    other_row = SamplingRow(temperature=1.0, seed=9, output_index=3, num_candidates=4, num_logprobs=0)

    assert candidates_after("abc", sampling=other_row) == candidates_after("abc")
    assert candidates_after("abc", salt=1) != candidates_after("abc")
    assert candidates_after("bbc") != candidates_after("abc")


def test_rows_of_different_widths_come_one_after_the_other() -> None:
    run = Run()
    wide = admission("wxyz", (1,), slot=1, sampling=SamplingRow(num_candidates=7))
    sampled = admission("mnop", (2,), slot=2, sampling=SamplingRow(num_logprobs=0))
    delta = TableDelta(
        admissions=(admission("abc", (0,), sampling=BEAM), wide, sampled),
        prefill_chunks=pairs((1, 4), (2, 4), (0, 3)),
    )

    result = run.step(delta)

    expected = [candidates_after("wxyz", sampling=SamplingRow(num_candidates=7)), candidates_after("abc")]
    assert result.candidate_token_ids is not None
    assert result.candidate_logprobs is not None
    assert result.candidate_token_ids.tolist() == [*expected[0].token_ids, *expected[1].token_ids]
    assert result.candidate_logprobs.tolist() == [*expected[0].logprobs, *expected[1].logprobs]
    assert result.sampled_token_ids.tolist() == [UNKNOWN_TOKEN, *continuation("mnop", 1), UNKNOWN_TOKEN]
    assert result.logprobs is not None
    assert np.isnan(result.logprobs).tolist() == [True, False, True]


def test_all_tokens_can_be_candidates_and_no_more() -> None:
    everything = SamplingRow(num_candidates=VOCAB_SIZE)
    run = Run()

    assert sorted(candidates_after("abc", sampling=everything).token_ids) == list(range(VOCAB_SIZE))
    too_many = admission("abc", (0,), sampling=SamplingRow(num_candidates=VOCAB_SIZE + 1))
    with pytest.raises(InvalidStepError, match="slot 0 asks for 260 candidates; the vocabulary has 259 tokens"):
        run.prefill(too_many)
    assert not run.worker.table.live.any()
    run.prefill(admission("abc", (0,), sampling=everything))
    with pytest.raises(InvalidStepError, match="slot 1 asks for 260 candidates"):
        run.step(TableDelta(beam_forks=(Fork(0, 1, 1, too_many.sampling),)))


def fork_into_two(run: Run, *, copy: bool) -> tuple[StepResult, list[str]]:
    """Prefill "abcdef" as a beam, then go on with its two likeliest tokens in the slots 0 and 1."""
    prompt = admission("abcdef", (0, 1), sampling=BEAM)
    first = run.step(TableDelta(admissions=(prompt,), prefill_chunks=pairs((0, 6))))
    tokens = candidates_of(first)[0].token_ids[:2]
    delta = TableDelta(
        beam_forks=(Fork(0, 1, 1, BEAM),),
        appended_tokens=pairs(*enumerate(tokens)),
        replaced_blocks=pairs((1, 1, 5)) if copy else np.empty((0, 3), np.int32),
        activated_slots=slots(0, 1),
    )
    result = run.step(delta, {"blocks_to_copy": pairs((1, 5))} if copy else None)
    return result, ["abcdef" + chr(token) for token in tokens]


def test_forked_beams_share_full_blocks_and_copy_the_last_one() -> None:
    result, texts = fork_into_two(Run(), copy=True)

    assert candidates_of(result) == [candidates_after(text) for text in texts]


def test_forked_beams_that_write_one_block_are_found() -> None:
    with pytest.raises(StepFailedError, match="writes position 6 into block 1, where another sequence writes"):
        fork_into_two(Run(), copy=False)


def test_a_pruned_beams_slot_and_block_go_to_the_survivors_child_in_one_step() -> None:
    run = Run()
    result, texts = fork_into_two(run, copy=True)
    tokens = candidates_of(result)[1].token_ids[:2]
    delta = TableDelta(
        released_slots=slots(0),
        beam_forks=(Fork(1, 0, 2, BEAM),),
        appended_tokens=pairs((0, tokens[0]), (1, tokens[1])),
        replaced_blocks=pairs((0, 1, 1)),  # the copy goes into the block that the pruned beam had
        activated_slots=slots(0, 1),
    )

    final = run.step(delta, {"blocks_to_copy": pairs((5, 1))})

    assert candidates_of(final) == [candidates_after(texts[1] + chr(token)) for token in tokens]


def test_a_child_that_rests_keeps_what_its_parent_had() -> None:
    run = Run()
    prompt = admission("abcdef", (0, 1), sampling=BEAM)
    first = run.step(TableDelta(admissions=(prompt,), prefill_chunks=pairs((0, 6))))
    tokens = candidates_of(first)[0].token_ids
    run.step(TableDelta(beam_forks=(Fork(0, 3, 1, BEAM),)))
    run.step(TableDelta(appended_tokens=pairs((0, tokens[0])), activated_slots=slots(0)))

    late = run.step(
        TableDelta(appended_tokens=pairs((3, tokens[1])), replaced_blocks=pairs((3, 1, 6)), activated_slots=slots(3)),
        {"blocks_to_copy": pairs((1, 6))},
    )

    assert candidates_of(late) == [candidates_after("abcdef" + chr(tokens[1]))]


def test_swapped_beams_go_on_where_they_stopped() -> None:
    run = Run(small_worker(num_host_blocks=4))
    result, texts = fork_into_two(run, copy=True)
    run.step(TableDelta(released_slots=slots(0, 1)), {"blocks_to_swap_out": pairs((0, 0), (1, 1), (5, 2))})
    run.prefill(admission("wxyzwxyz", (0, 1), slot=2))
    run.release(2)

    texts = [text + chr(row.token_ids[0]) for text, row in zip(texts, candidates_of(result), strict=True)]
    both = tuple(
        admission(text, (8, 9 + slot), slot=slot, generation=2, computed=7, sampling=BEAM)
        for slot, text in enumerate(texts)
    )
    again = run.step(
        TableDelta(admissions=both, prefill_chunks=pairs((0, 1), (1, 1))),
        {"blocks_to_swap_in": pairs((0, 8), (1, 9), (2, 10))},
    )

    assert candidates_of(again) == [candidates_after(text) for text in texts]
