"""What the fake worker finds wrong, and what its tokens depend on.

Block moves are in `test_moves.py`, beams in `test_beams.py`. Blocks have 4 slots.
"""

import codecs
import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from executor_svc.fake.cache import BASE, SALT_BASE, Histories
from executor_svc.fake.tokenizer import EOS_TOKEN_ID, IM_START_TOKEN_ID, VOCAB_SIZE
from executor_svc.fake.worker import FakeWorker
from octavo_shared.errors import InvalidStepError, StepFailedError
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import Admission, Fork, SamplingRow, Step, TableDelta, pairs
from tests.support.each_row import each_row
from tests.support.fake_runs import Run, admission, continuation, small_worker


def test_hashes_follow_their_definition() -> None:
    table = BatchTable(max_num_seqs=1, max_model_len=8, block_size=4, num_device_blocks=2)
    histories = Histories(table, np.uint64(1))
    delta = TableDelta(admissions=(admission("abcde", (0, 1), salt=7),), prefill_chunks=pairs((0, 5)))
    histories.follow(table, delta, table.apply(delta))
    expected = SALT_BASE * 15
    for position, byte in enumerate(b"abcde"):
        expected = (expected * BASE + byte + 1) % 2**64
        assert int(histories.by_position[0, position]) == expected


def test_a_sequence_over_several_blocks_runs() -> None:
    run = Run()
    tokens = run.prefill(admission("abcdef", (3, 1)))
    tokens += run.decode() + run.decode() + run.decode((0, 9))
    assert len(tokens) == 4


def test_chunks_give_the_same_tokens_as_one_prefill() -> None:
    run = Run()
    assert run.prefill(admission("abcdefg", (0, 1)), num_tokens=3) == []
    tokens = run.step(TableDelta(prefill_chunks=pairs((0, 4)))).sampled_token_ids.tolist()
    assert tokens == continuation("abcdefg", 1)


def test_a_preempted_sequence_goes_on_with_the_same_tokens() -> None:
    tokens = continuation("abcdef", 8)
    so_far = "abcdef" + bytes(tokens[:3]).decode("latin-1")
    assert all(token < 128 for token in tokens[:3])
    assert Run().prefill(admission(so_far, (5, 4, 3)))[0] == tokens[3]


def test_the_other_rows_of_a_batch_change_nothing() -> None:
    run = Run()
    both = (admission("abc", (0,)), admission("wxyz", (1,), slot=1))
    result = run.step(TableDelta(admissions=both, prefill_chunks=pairs((0, 3), (1, 4))))
    assert result.sampled_token_ids.tolist() == continuation("abc", 1) + continuation("wxyz", 1)


def test_a_prefix_hit_on_written_blocks_runs() -> None:
    run = Run()
    run.prefill(admission("abcdefgh", (0, 1, 3)))
    tokens = run.prefill(admission("abcdxy", (0, 2), slot=1, computed=4))
    assert tokens[-1] == continuation("abcdxy", 1)[0]


def test_an_unwritten_block_is_named() -> None:
    with pytest.raises(StepFailedError, match="slot 0 reads position 0 from block 5, which is unwritten there"):
        Run().prefill(admission("abcdef", (5, 6), computed=4))


def test_a_skipped_position_is_named() -> None:
    run = Run()
    run.prefill(admission("abcdef", (5, 6)), num_tokens=3)
    run.release(0)
    with pytest.raises(StepFailedError, match="slot 0 reads position 3 from block 5, which is unwritten there"):
        run.prefill(admission("abcdef", (5, 6), generation=2, computed=4))


def test_the_block_of_another_sequence_is_named() -> None:
    run = Run()
    run.prefill(admission("abcd", (0, 2)))
    with pytest.raises(
        StepFailedError, match=("slot 1 reads position 2 from block 0, which was written with a different")
    ):
        run.prefill(admission("abXdef", (0, 1), slot=1, computed=4))


def test_a_block_that_was_given_to_another_sequence_is_stale() -> None:
    run = Run()
    run.prefill(admission("abcdef", (0, 1)))
    with pytest.raises(StepFailedError, match="slot 0 reads position 0 from block 0"):
        run.prefill(admission("mnop", (0,), slot=1))


def test_blocks_in_the_wrong_order_are_found() -> None:
    run = Run()
    run.prefill(admission("abcdefghij", (0, 1, 2)))
    with pytest.raises(StepFailedError, match="slot 1 reads position 0 from block 1"):
        run.prefill(admission("abcdefghij", (1, 0, 3), slot=1, computed=8))


def test_a_prefix_of_another_salt_is_found() -> None:
    run = Run()
    run.prefill(admission("abcdef", (0, 1), salt=1))
    with pytest.raises(StepFailedError, match="written with a different history"):
        run.prefill(admission("abcdef", (0, 2), slot=1, computed=4, salt=2))


def test_the_same_salt_shares_blocks() -> None:
    run = Run()
    run.prefill(admission("abcdef", (0, 1), salt=1))
    assert run.prefill(admission("abcdef", (0, 2), slot=1, computed=4, salt=1))


def test_two_rows_cannot_write_different_histories_into_one_place() -> None:
    both = (admission("abc", (0,)), admission("abX", (0,), slot=1))
    with pytest.raises(StepFailedError, match="slot 0 writes position 2 into block 0"):
        Run().step(TableDelta(admissions=both, prefill_chunks=pairs((0, 3), (1, 3))))


def test_a_fork_that_shares_its_last_block_for_writing_is_found() -> None:
    run = Run()
    sampling = SamplingRow(temperature=1.0, seed=3)
    fork = Fork(0, 1, 1, SamplingRow(temperature=1.0, seed=3, output_index=1))
    run.step(
        TableDelta(admissions=(admission("abc", (0,), sampling=sampling),), prefill_chunks=pairs((0, 3)), forks=(fork,))
    )
    with pytest.raises(StepFailedError, match="writes position 3 into block 0"):
        run.decode()


def test_a_fork_whose_last_block_is_copied_runs() -> None:
    run = Run()
    sampling = SamplingRow(temperature=1.0, seed=3)
    fork = Fork(0, 1, 1, SamplingRow(temperature=1.0, seed=3, output_index=1))
    first = run.step(
        TableDelta(admissions=(admission("abc", (0,), sampling=sampling),), prefill_chunks=pairs((0, 3)), forks=(fork,))
    )
    second = run.step(TableDelta(replaced_blocks=pairs((1, 0, 7))), {"blocks_to_copy": pairs((0, 7))})
    assert len(set(first.sampled_token_ids.tolist())) == 2
    assert len(second.sampled_token_ids) == 2


def test_tokens_of_the_scheduler_enter_the_history() -> None:
    run = Run()
    run.prefill(admission("abc", (0,)))
    run.step(TableDelta(deactivated_slots=np.array([0], np.int32)))
    sampled = bytes(run.worker.table.tokens_of(0)[3:].tolist()).decode()
    chosen = TableDelta(
        appended_tokens=pairs((0, ord("x"))), appended_blocks=pairs((0, 1)), prefill_chunks=pairs((0, 2))
    )
    assert run.step(chosen).sampled_token_ids.tolist() == continuation(f"abc{sampled}x", 1)


def test_token_ids_outside_the_vocabulary_write_nothing() -> None:
    run = Run()
    wrong = Admission(0, 1, np.array([97, VOCAB_SIZE], np.int32), 2, 0, np.array([0], np.int32), SamplingRow())
    with pytest.raises(InvalidStepError, match="token id 259; ids are 0 to 258"):
        run.prefill(wrong)
    assert not run.worker.table.live.any()


def test_a_step_beyond_the_token_budget_fails() -> None:
    run = Run(small_worker(max_num_batched_tokens=5))
    with pytest.raises(StepFailedError, match="step 1 computes 6 tokens; the limit is 5"):
        run.prefill(admission("abcdef", (0, 1)))


def test_the_right_digest_is_answered_and_a_wrong_one_named() -> None:
    truth = BatchTable(4, 32, 4, 16)
    delta = TableDelta(admissions=(admission("abc", (0,)),), prefill_chunks=pairs((0, 3)))
    truth.apply(delta)
    worker = small_worker()
    assert worker.execute(Step(1, 1, delta, table_digest=truth.digest())).table_digest == truth.digest()
    with pytest.raises(StepFailedError, match=f"the scheduler's {5:016x}"):
        worker.execute(Step(1, 2, TableDelta(), table_digest=5))


def test_reset_empties_the_table_and_keeps_the_cache() -> None:
    run = Run()
    run.prefill(admission("abcdef", (0, 1)))
    run.worker.reset()
    assert not run.worker.table.live.any()
    assert run.prefill(admission("abcdef", (0, 2), computed=4)) == continuation("abcdef", 1)


def test_greedy_tokens_ignore_seed_and_output_index() -> None:
    assert continuation("abc", 9, sampling=SamplingRow(seed=9, output_index=2)) == continuation("abc", 9)


@each_row(SamplingRow(1.0, seed=2), SamplingRow(1.0, seed=1, output_index=1))
def test_sampled_tokens_depend_on_seed_and_output_index(other: SamplingRow) -> None:
    one = SamplingRow(1.0, seed=1)
    assert continuation("abc", 9, sampling=one) == continuation("abc", 9, sampling=one)
    assert continuation("abc", 9, sampling=one) != continuation("abc", 9, sampling=other)


def test_tokens_depend_on_salt_and_on_the_first_token() -> None:
    texts = {tuple(continuation(prompt, 9, salt=salt)) for prompt in ("abc", "bbc") for salt in (0, 1)}
    assert len(texts) == 4


def test_output_is_valid_text_with_characters_of_several_bytes() -> None:
    run = Run(small_worker(max_num_seqs=128, num_device_blocks=8 * 128))
    prompts = [
        admission(f"{slot:04}", tuple(range(8 * slot, 8 * slot + 8)), slot=slot, salt=slot) for slot in range(128)
    ]
    run.step(TableDelta(admissions=tuple(prompts), prefill_chunks=pairs(*[(slot, 4) for slot in range(128)])))
    for _ in range(20):
        run.decode()
    outputs = [bytes(run.worker.table.tokens_of(slot)[4:].tolist()) for slot in range(128)]
    # The last character may be unfinished: up to three bytes of it.
    texts = [codecs.getincrementaldecoder("utf-8")().decode(output) for output in outputs]
    assert all(len(text.encode()) >= len(output) - 3 for text, output in zip(texts, outputs, strict=True))
    assert {len(character.encode()) for text in texts for character in text} == {1, 2, 3, 4}


def test_eos_comes_with_its_probability() -> None:
    assert EOS_TOKEN_ID not in continuation("abc", 60)
    assert continuation("abc", 3, eos_probability=1.0) == [EOS_TOKEN_ID] * 3


def test_only_rows_that_ask_get_logprobs() -> None:
    run = Run()
    both = (admission("abc", (0,)), admission("wxyz", (1,), slot=1, sampling=SamplingRow(num_logprobs=0)))
    logprobs = run.step(TableDelta(admissions=both, prefill_chunks=pairs((0, 3), (1, 4)))).logprobs
    assert logprobs is not None
    assert np.isnan(logprobs[0])
    assert -10 < logprobs[1] <= 0
    assert run.step(TableDelta(released_slots=np.array([1], np.int32))).logprobs is None


def test_the_latency_model_counts_steps_and_tokens() -> None:
    slept: list[float] = []
    worker = FakeWorker(block_size_tokens=4, step_ms=1e6, token_us=1e9, sleep=slept.append)
    Run(worker).prefill(admission("abc", (0,)))
    assert slept == [pytest.approx(1000 + 3 * 1000, abs=5)]


def test_the_tokenizer_round_trips_any_text() -> None:
    files = {file.name: file.content for file in small_worker().tokenizer_files()}
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    text = "Hello, wörld!\n\t 你好 😀 \x00"
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_single_tokens() -> None:
    files = {file.name: file.content for file in small_worker().tokenizer_files()}
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.encode("<|im_start|>a<|im_end|>").ids == [IM_START_TOKEN_ID, ord("a"), EOS_TOKEN_ID]
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<|im_end|>"
