"""Who gets which blocks at admission."""

import numpy as np

from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.sequence import SequenceGroup
from tests.support.driving import group, names_of, small_limits
from tests.support.each_row import each_row


def manager_of(blocks: int = 8, *, watermark: float = 0.0, prefix_caching: bool = False) -> BlockManager:
    limits = small_limits(blocks=blocks, watermark=watermark, prefix_caching=prefix_caching, max_model_len=4 * blocks)
    return BlockManager(limits, prefix_key=b"key")


def with_output(created: SequenceGroup, *outputs: list[int]) -> SequenceGroup:
    """Give each sequence of a group the tokens of a former run."""
    for sequence, output in zip(created.sequences, outputs, strict=True):
        sequence.token_ids = np.append(created.prompt_token_ids, np.array(output, np.int32))
    return created


# Groups ------------------------------------------------------------------------------------------


@each_row((7, 2 + 2), (8, 2 + 3), (9, 3 + 2))
def test_a_new_group_needs_its_prompt_and_the_blocks_of_its_first_fork(num_prompt_tokens: int, num_needed: int) -> None:
    plan = manager_of().plan_admission(group(0, num_prompt_tokens, num_sequences=3))

    assert (plan.scarcest.num_needed, len(plan.sequences)) == (num_needed, 1)


@each_row(
    (8, ([1], [2]), 2),
    (7, ([1], [2]), 1),
    (6, ([1, 1, 1], [1, 1, 2]), 2),
    (6, ([1, 1], [1, 1]), 1),  # one token at least is computed of each
    (6, ([1, 1, 1], [1, 1, 1, 1]), 2),
)
def test_full_blocks_that_all_sequences_have_in_common_are_counted_once(
    num_prompt_tokens: int, outputs: tuple[list[int], list[int]], num_shared: int
) -> None:
    returned = with_output(group(0, num_prompt_tokens, num_sequences=2), *outputs)
    manager = manager_of()

    (lead,), (other,) = manager.allocate(manager.plan_admission(returned)).tables

    assert lead[:num_shared].tolist() == other[:num_shared].tolist()
    assert not set(lead[num_shared:].tolist()) & set(other[num_shared:].tolist())
    assert manager.allocator.ref_counts[lead[:num_shared]].tolist() == [2] * num_shared


# The cache ---------------------------------------------------------------------------------------


def with_cached_prefix(token_ids: list[int], blocks: int = 8) -> BlockManager:
    """Return a manager whose pool caches the full blocks of `token_ids`."""
    manager = manager_of(blocks, prefix_caching=True)
    former = group(0, token_ids)
    plan = manager.plan_admission(former)
    ((block_ids,),) = manager.allocate(plan).tables
    manager.register(former.sequences[0], former.prompt_token_ids, [block_ids], first=0)
    manager.allocator.free(block_ids)
    return manager


def test_sequences_of_a_group_find_more_than_they_share() -> None:
    manager = with_cached_prefix([1, 2, 3, 4, 5, 6, 7, 8])
    returned = with_output(group(1, [1, 2, 3], num_sequences=2), [4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 10])

    plan = manager.plan_admission(returned)
    (lead,), (other,) = manager.allocate(plan).tables

    assert [blocks.num_cached for blocks in plan.sequences] == [2, 2]
    assert plan.scarcest.num_needed == 4
    assert lead[:2].tolist() == other[:2].tolist()


def test_hashes_are_made_again_for_another_block_size() -> None:
    moved = group(0, 8)
    (sequence,) = moved.sequences
    manager_of(prefix_caching=True).hash_blocks(sequence)

    elsewhere = BlockManager(small_limits(block_size=2, blocks=12, prefix_caching=True), prefix_key=b"key")

    assert elsewhere.hash_blocks(sequence) == names_of(elsewhere, moved.prompt_token_ids)
    assert len(sequence.block_hashes) == 4
