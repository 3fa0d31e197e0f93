"""The fake's cache when blocks move: swap out, swap in, copy, in this order; and a sliding window.

Blocks have 4 slots.
"""

import numpy as np
import pytest

from executor_svc.config import FakeConfig
from octavo_shared.errors import InvalidStepError, StepFailedError
from octavo_shared.process.config import load_config
from octavo_shared.step_wire.step import Fork, SamplingRow, TableDelta, pairs
from tests.support.each_row import each_row
from tests.support.fake_runs import Moves, Run, admission, continuation, small_worker


def swapping_run() -> Run:
    return Run(small_worker(num_host_blocks=4))


def released(slot: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array([slot], np.int32)


def test_a_swapped_sequence_keeps_its_history() -> None:
    run = Run(small_worker(num_host_blocks=2))
    run.prefill(admission("abcd", (0,)))
    run.release(0, {"blocks_to_swap_out": pairs((0, 1))})
    run.prefill(admission("wxyz", (0,), slot=1))
    run.release(1)
    again = admission("abcdef", (3, 4), generation=2, computed=4)
    assert run.prefill(again, moves={"blocks_to_swap_in": pairs((1, 3))}) == continuation("abcdef", 1)


def test_a_swap_of_the_wrong_block_is_found() -> None:
    run = Run(small_worker(num_host_blocks=2))
    run.prefill(admission("abcd", (0,)))
    run.release(0, {"blocks_to_swap_out": pairs((0, 1))})
    with pytest.raises(StepFailedError, match="slot 0 reads position 0 from block 3, which is unwritten"):
        run.prefill(admission("abcdef", (3, 4), generation=2, computed=4), moves={"blocks_to_swap_in": pairs((0, 3))})


@each_row(
    ({"blocks_to_copy": pairs((0, 16))}, "moves device block 16; there are 16 device blocks"),
    ({"blocks_to_swap_out": pairs((0, 0))}, "moves host block 0; there are 0 host blocks"),
    ({"blocks_to_swap_in": pairs((-1, 0))}, "moves host block -1"),
)
def test_moves_of_unknown_blocks_write_nothing(moves: Moves, message: str) -> None:
    run = Run()
    with pytest.raises(InvalidStepError, match=message):
        run.prefill(admission("abc", (0,)), moves=moves)
    assert not run.worker.table.live.any()


def test_a_block_that_is_swapped_out_may_be_written_in_the_same_step() -> None:
    run = swapping_run()
    run.prefill(admission("abcd", (0,)))

    run.step(
        TableDelta(
            released_slots=released(0), admissions=(admission("wxyz", (0,), slot=1),), prefill_chunks=pairs((1, 4))
        ),
        {"blocks_to_swap_out": pairs((0, 2))},
    )

    run.release(1)
    again = admission("abcdef", (0, 1), generation=2, computed=4)
    assert run.prefill(again, moves={"blocks_to_swap_in": pairs((2, 0))}) == continuation("abcdef", 1)


def test_a_block_that_is_swapped_in_may_be_copied_in_the_same_step() -> None:
    run = swapping_run()
    run.prefill(admission("abcd", (0,)))
    run.release(0, {"blocks_to_swap_out": pairs((0, 3))})
    both = (admission("abcdef", (5, 6), generation=2, computed=4), admission("abcdXY", (7, 8), slot=1, computed=4))

    result = run.step(
        TableDelta(admissions=both, prefill_chunks=pairs((0, 2), (1, 2))),
        {"blocks_to_swap_in": pairs((3, 5)), "blocks_to_copy": pairs((5, 7))},
    )

    assert result.sampled_token_ids.tolist() == continuation("abcdef", 1) + continuation("abcdXY", 1)


def test_a_block_is_swapped_out_before_a_copy_overwrites_it() -> None:
    run = swapping_run()
    both = (admission("abcd", (0,)), admission("wxyz", (1,), slot=1))
    run.step(TableDelta(admissions=both, prefill_chunks=pairs((0, 4), (1, 4))))

    run.step(
        TableDelta(released_slots=np.array([0, 1], np.int32)),
        {"blocks_to_swap_out": pairs((0, 2)), "blocks_to_copy": pairs((1, 0))},
    )

    swapped = admission("abcdef", (3, 4), generation=2, computed=4)
    copied = admission("wxyzuv", (0, 5), slot=1, generation=2, computed=4)
    assert run.prefill(swapped, moves={"blocks_to_swap_in": pairs((2, 3))}) == continuation("abcdef", 1)
    assert run.prefill(copied)[-1:] == continuation("wxyzuv", 1)


def test_a_block_is_read_from_the_host_after_it_was_swapped_out_twice() -> None:
    run = swapping_run()
    run.prefill(admission("abcd", (0,)))
    run.release(0, {"blocks_to_swap_out": pairs((0, 1))})
    run.prefill(admission("wxyz", (0,), slot=1))
    run.release(1, {"blocks_to_swap_out": pairs((0, 1))})

    again = admission("abcdef", (0, 2), generation=2, computed=4)
    with pytest.raises(
        StepFailedError, match=(r"slot 0 reads position 0 from block 0, .* written with a different history")
    ):
        run.prefill(again, moves={"blocks_to_swap_in": pairs((1, 0))})


def test_decodes_go_on_after_a_swap_where_they_stopped() -> None:
    run = swapping_run()
    tokens = run.prefill(admission("abcdef", (0, 1))) + run.decode() + run.decode()
    known = "abcdef" + bytes(tokens).decode()
    run.release(0, {"blocks_to_swap_out": pairs((0, 3), (1, 2))})
    run.prefill(admission("wxyzwxyz", (0, 1), slot=1))
    run.release(1)

    # Of 9 tokens the last one was sampled and never fed: 8 are in the cache.
    again = admission(known, (5, 4, 6), generation=2, computed=8)
    tokens += run.prefill(again, moves={"blocks_to_swap_in": pairs((3, 5), (2, 4))}) + run.decode()

    assert tokens == continuation("abcdef", 5)


def test_forked_sequences_that_share_blocks_are_swapped_once_and_share_again() -> None:
    run = swapping_run()
    rows = [SamplingRow(temperature=1.0, seed=3, output_index=index) for index in range(2)]
    prompt = admission("abcd", (0,), sampling=rows[0])
    first = run.step(
        TableDelta(admissions=(prompt,), prefill_chunks=pairs((0, 4)), forks=(Fork(0, 1, 1, rows[1]),))
    ).sampled_token_ids
    run.step(TableDelta(released_slots=np.array([0, 1], np.int32)), {"blocks_to_swap_out": pairs((0, 1))})

    texts = ["abcd" + chr(token) for token in first.tolist()]
    both = tuple(
        admission(text, (9, 10 + slot), slot=slot, generation=2, computed=4, sampling=rows[slot])
        for slot, text in enumerate(texts)
    )
    second = run.step(
        TableDelta(admissions=both, prefill_chunks=pairs((0, 1), (1, 1))), {"blocks_to_swap_in": pairs((1, 9))}
    )

    expected = [continuation("abcd", 2, sampling=row) for row in rows]
    assert [list(tokens) for tokens in zip(first.tolist(), second.sampled_token_ids.tolist(), strict=True)] == expected


# A sliding window of 6 tokens: the token at position 12 sees the positions 7 to 12.


def windowed_run() -> Run:
    """Return a run in which slot 0 has 12 tokens in the blocks 0 to 2; its next token needs a block."""
    run = Run(small_worker(sliding_window_tokens=6))
    run.prefill(admission("abcdefghijkl", (0, 1, 2)))
    return run


def test_blocks_that_fell_out_of_the_window_may_be_given_away() -> None:
    run = windowed_run()
    run.step(TableDelta(deactivated_slots=released(0)))

    run.prefill(admission("wxyz", (0,), slot=1))
    run.release(1)
    tokens = run.step(TableDelta(activated_slots=released(0), appended_blocks=pairs((0, 0)))).sampled_token_ids

    assert tokens.tolist() == continuation("abcdefghijkl", 2)[1:]


def test_a_block_is_checked_from_where_the_window_begins() -> None:
    run = windowed_run()
    run.step(TableDelta(deactivated_slots=released(0)))

    run.prefill(admission("wxy", (1,), slot=1))  # positions 4 to 6 of slot 0 are gone
    run.release(1)
    run.step(TableDelta(activated_slots=released(0), appended_blocks=pairs((0, 3))))

    run.step(TableDelta(deactivated_slots=released(0)))
    run.prefill(admission("wxyz", (1,), slot=1, generation=2))  # and 7 too, which position 12 saw and 13 does not
    run.release(1)
    run.step(TableDelta(activated_slots=released(0)))
    assert run.worker.table.num_tokens[0] == 15


def test_a_block_that_the_window_still_reaches_is_missed() -> None:
    run = windowed_run()
    run.step(TableDelta(deactivated_slots=released(0)))
    run.prefill(admission("wxyz", (1,), slot=1))
    run.release(1)

    with pytest.raises(StepFailedError, match=r"slot 0 reads position 7 from block 1, .* a different history"):
        run.step(TableDelta(activated_slots=released(0), appended_blocks=pairs((0, 3))))


def test_a_chunk_reads_from_the_window_of_its_first_token() -> None:
    run = Run(small_worker(sliding_window_tokens=6))
    text = "abcdefghijklmnop"
    run.prefill(admission(text, (0, 1, 2, 3)), num_tokens=12)
    run.release(0)

    # Positions 12 to 15 are computed; 12 sees from 7 on: any block stands in for the first one.
    assert run.prefill(admission(text, (9, 1, 2, 4), slot=1, computed=12)) == continuation(text, 1)
    run.release(1)
    with pytest.raises(StepFailedError, match="slot 2 reads position 7 from block 9, which is unwritten there"):
        run.prefill(admission(text, (9, 9, 2, 4), slot=2, computed=12))


def test_a_window_of_one_token_reads_only_what_it_writes() -> None:
    run = Run(small_worker(sliding_window_tokens=1))
    run.prefill(admission("abcdefgh", (9, 3), computed=4))

    assert len(run.decode((0, 4))) == 1


def test_the_window_is_reported_and_configured() -> None:
    config = load_config(FakeConfig, ["--sliding-window-tokens", "6"], {})

    assert config.sliding_window_tokens == 6
    assert small_worker(sliding_window_tokens=6).info.sliding_window_tokens == 6
    assert small_worker().info.sliding_window_tokens == 0
