"""What the fake checks of the states of a hybrid: saved before a step moves blocks, loaded afterwards.

Blocks have 4 slots of tokens. States are in the device blocks 16 to 18 and in the host blocks 4 and 5.
"""

from dataclasses import replace

import numpy as np
import pytest

from executor_svc.config import FakeConfig
from executor_svc.fake.__main__ import make_worker
from octavo_shared.errors import InvalidStepError, StepFailedError
from octavo_shared.process.config import load_config
from octavo_shared.step_wire.step import Admission, Fork, SamplingRow, TableDelta, pairs
from tests.support.each_row import each_row
from tests.support.fake_runs import Moves, Run, admission, continuation, small_worker


def hybrid_run() -> Run:
    worker = small_worker(num_host_blocks=4, has_states=True, num_device_states=3, num_host_states=2)
    worker.reset(uses_groups=True)
    return Run(worker)


def saves(*triples: tuple[int, int, int]) -> Moves:
    return {"states_to_save": pairs(*triples)}


def released(*slots: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.array(slots, np.int32)


def behind(
    tokens: str,
    blocks: tuple[int, ...],
    state_block: int,
    computed: int,
    *,
    slot: int = 0,
    generation: int = 1,
    salt: int = 0,
) -> Admission:
    entered = admission(tokens, blocks, slot=slot, generation=generation, computed=computed, salt=salt)
    return replace(entered, state_block=state_block)


def run_with_a_state(text: str = "abcdefgh") -> Run:
    """Return a run in which block 16 has the state behind a text, which the blocks 0 and 1 hold; no slot is live."""
    run = hybrid_run()
    run.prefill(admission(text, (0, 1, 3), slot=3))
    run.release(3, saves((3, len(text), 16)))
    return run


def test_a_sequence_begins_with_the_saved_state_of_another_one_also_after_a_reset() -> None:
    run = run_with_a_state()
    run.worker.reset(uses_groups=True)
    tokens = run.prefill(behind("abcdefghXY", (0, 1, 4), 16, 8))
    assert tokens + run.decode() == continuation("abcdefghXY", 2)
    assert run.prefill(behind("abcdefghxy", (0, 1, 5), 16, 8, slot=1))[-1:] == continuation("abcdefghxy", 1)


def test_a_slot_is_saved_before_its_next_owner_begins_and_both_states_are_whole() -> None:
    run = run_with_a_state()
    run.prefill(admission("mnop", (6, 7)))
    entered = behind("abcdefghXY", (0, 1, 4), 16, 8, generation=2)
    delta = TableDelta(released_slots=released(0), admissions=(entered,), prefill_chunks=pairs((0, 2)))
    run.step(replace(delta), saves((0, 4, 17)))
    again = behind("mnopqr", (6, 8), 17, 4, slot=1)
    assert run.prefill(again)[-1:] == continuation("mnopqr", 1)


def test_a_state_is_saved_swapped_out_and_in_copied_and_loaded_in_this_order() -> None:
    run = hybrid_run()
    both = (admission("abcdefgh", (0, 1, 3)), admission("mnop", (6, 7), slot=1))
    run.step(TableDelta(admissions=both, prefill_chunks=pairs((0, 8), (1, 4))))
    gone = TableDelta(released_slots=released(0, 1))
    run.step(
        gone, {**saves((0, 8, 16), (1, 4, 17)), "blocks_to_swap_out": pairs((16, 5)), "blocks_to_copy": pairs((17, 16))}
    )
    both = (
        behind("abcdefghXY", (0, 1, 4), 18, 8, generation=2),
        behind("mnopqr", (6, 8), 16, 4, slot=1, generation=2),
    )
    delta = TableDelta(admissions=both, prefill_chunks=pairs((0, 2), (1, 2)))
    result = run.step(delta, {"blocks_to_swap_in": pairs((5, 17)), "blocks_to_copy": pairs((17, 18))})
    assert result.sampled_token_ids.tolist() == continuation("abcdefghXY", 1) + continuation("mnopqr", 1)


def test_a_fork_has_the_loaded_state_of_its_parent() -> None:
    run = run_with_a_state()
    rows = [SamplingRow(temperature=1.0, seed=3, output_index=index) for index in range(2)]
    entered = replace(behind("abcdefghXY", (0, 1, 4), 16, 8), sampling=rows[0])
    delta = TableDelta(admissions=(entered,), prefill_chunks=pairs((0, 2)), forks=(Fork(0, 1, 1, rows[1]),))
    first = run.step(delta).sampled_token_ids.tolist()
    delta = TableDelta(replaced_blocks=pairs((1, 2, 9)))
    second = run.step(delta, {**saves((0, 10, 17), (1, 10, 18)), "blocks_to_copy": pairs((4, 9))})
    found = list(zip(first, second.sampled_token_ids.tolist(), strict=True))
    assert [list(tokens) for tokens in found] == [continuation("abcdefghXY", 2, sampling=row) for row in rows]


@each_row(
    (behind("abcdefgX", (0, 1), 16, 4), "slot 0 begins behind 4 tokens, and the state in block 16 has taken 8"),
    (behind("abcdefghX", (0, 1, 4), 17, 8), "and the state in block 17 has taken 0"),
    (behind("abcdefgxX", (0, 1, 4), 16, 8), "has taken as many, but others"),
    (behind("abcdefghX", (0, 1, 4), 16, 8, salt=1), "has taken as many, but others"),
)
def test_a_state_of_other_tokens_or_another_salt_is_refused(entered: Admission, words: str) -> None:
    with pytest.raises(StepFailedError, match=words):
        run_with_a_state().prefill(entered)


def test_a_state_that_was_overwritten_is_refused() -> None:
    run = run_with_a_state()
    run.prefill(admission("mnopqrst", (6, 7, 8), slot=1))
    run.release(1, saves((1, 8, 16)))
    with pytest.raises(StepFailedError, match="the state in block 16 has taken as many, but others"):
        run.prefill(behind("abcdefghX", (0, 1, 4), 16, 8))


@each_row(
    (admission("abcdef", (0, 1), slot=1, computed=4), {}, "admits slot 1 behind 4 tokens; it needs the state"),
    (behind("abcdef", (0, 1), 16, 0, slot=1), {}, "behind 0 tokens; it begins with an empty state"),
    (behind("abcdef", (0, 1), 15, 4, slot=1), {}, "with the state in block 15; states are in blocks 16 to 18"),
    (None, saves((0, 4, 19)), "saves a state in block 19; states are in blocks 16 to 18"),
    (None, saves((0, 4, 15)), "saves a state in block 15; states are in blocks 16 to 18"),
    (None, saves((0, 4, 16), (0, 4, 17)), "saves the state of slot 0 twice"),
    (None, saves((0, 4, 16), (2, 4, 16)), "saves a state in block 16 twice"),
    (None, saves((0, 3, 16)), "saves the state of slot 0 behind 3 tokens; it has no such state"),
    (None, saves((1, 4, 16)), "saves the state of slot 1 behind 4 tokens; it has no such state"),
    (None, saves((-1, 4, 16)), "saves the state of slot -1 behind 4 tokens; it has no such state"),
    (None, {"blocks_to_copy": pairs((15, 16))}, "moves device block 15 to device block 16, which is of another"),
    (None, {"blocks_to_swap_in": pairs((6, 16))}, "moves host block 6; there are 6 host blocks"),
)
def test_what_is_no_state_and_no_block_of_one_writes_nothing(
    entered: Admission | None, moves: Moves, words: str
) -> None:
    run = hybrid_run()
    run.prefill(admission("abcd", (0, 1)))
    before = run.worker.table.digest()
    delta = TableDelta() if entered is None else TableDelta(admissions=(entered,), prefill_chunks=pairs((1, 2)))
    with pytest.raises(InvalidStepError, match=words):
        run.step(delta, moves)
    assert run.worker.table.digest() == before
    assert len(run.decode()) == 1


def test_saved_states_are_reported_and_configured() -> None:
    flags = ["--states", "--num-device-states", "3", "--num-host-states", "2"]
    group = make_worker(load_config(FakeConfig, flags, {})).info.cache_groups[-1]
    assert (group.num_device_blocks, group.num_host_blocks) == (3, 2)
