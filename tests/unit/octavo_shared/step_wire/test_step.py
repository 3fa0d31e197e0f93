"""A step that cannot be run in the fixed order is not even made."""

import numpy as np
import pytest

from octavo_shared.errors import InvalidStepError
from octavo_shared.step_wire.step import SAMPLING_ROW, SamplingRow, Step, TableDelta, pairs
from tests.support.each_row import each_row


def test_a_step_does_not_swap_out_and_in() -> None:
    with pytest.raises(InvalidStepError, match="step 3 swaps out and in"):
        Step(1, 3, TableDelta(), blocks_to_swap_out=pairs((0, 1)), blocks_to_swap_in=pairs((2, 3)))


def test_a_step_may_swap_one_way() -> None:
    assert len(Step(1, 3, TableDelta(), blocks_to_swap_out=pairs((0, 1))).blocks_to_swap_out) == 1
    assert len(Step(1, 3, TableDelta(), blocks_to_swap_in=pairs((0, 1))).blocks_to_swap_in) == 1


@each_row([(0, 1), (1, 2)], [(1, 2), (0, 1)], [(4, 4)])
def test_a_copied_block_is_not_written_in_the_same_step(copies: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidStepError, match="step 3 copies from a block that it also copies to"):
        Step(1, 3, TableDelta(), blocks_to_copy=pairs(*copies))


def test_no_two_moves_of_a_kind_have_one_destination() -> None:
    with pytest.raises(InvalidStepError, match=r"^step 3 copies to block 4 twice"):
        Step(1, 3, TableDelta(), blocks_to_copy=pairs((0, 4), (1, 5), (2, 4)))
    with pytest.raises(InvalidStepError, match=r"^step 3 swaps out to block 4 twice"):
        Step(1, 3, TableDelta(), blocks_to_swap_out=pairs((0, 4), (1, 4)))
    with pytest.raises(InvalidStepError, match=r"^step 3 swaps in to block 4 twice"):
        Step(1, 3, TableDelta(), blocks_to_swap_in=pairs((0, 4), (1, 4)))


def test_one_block_may_be_swapped_out_to_several() -> None:
    step = Step(1, 3, TableDelta(), blocks_to_swap_out=pairs((0, 1), (0, 2)))

    assert step.blocks_to_swap_out.tolist() == [[0, 1], [0, 2]]


def test_one_block_may_be_copied_to_several() -> None:
    step = Step(1, 3, TableDelta(), blocks_to_copy=pairs((0, 1), (0, 2)))

    assert step.blocks_to_copy.tolist() == [[0, 1], [0, 2]]


def test_no_pairs_is_still_a_table_of_pairs() -> None:
    assert pairs().shape == (0, 2)
    assert pairs((1, 2)).shape == (1, 2)
    assert pairs((1, 2, 3), (4, 5, 6)).shape == (2, 3)
    assert pairs((1, 2)).dtype == np.int32


def test_a_sampling_row_has_the_order_of_its_column() -> None:
    row = SamplingRow(
        temperature=0.5,
        top_k=2,
        top_p=0.25,
        min_p=0.125,
        seed=2**64 - 1,
        output_index=3,
        num_logprobs=4,
        num_candidates=5,
        typical_p=0.75,
        repetition_penalty=1.25,
        presence_penalty=-0.5,
        frequency_penalty=1.5,
        min_tokens=6,
    )

    stored = np.array([row.as_tuple()], SAMPLING_ROW)[0]

    assert {name: stored[name].item() for name in SAMPLING_ROW.names or ()} == {
        name: getattr(row, name) for name in SamplingRow.__dataclass_fields__
    }
