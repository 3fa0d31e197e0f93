"""Who gets which blocks at admission."""

import numpy as np

from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.sequence import SequenceGroup
from tests.support.driving import group, small_limits
from tests.support.each_row import each_row


def manager_of(blocks: int = 8, *, watermark: float = 0.0, prefix_caching: bool = False) -> BlockManager:
    limits = small_limits(blocks=blocks, watermark=watermark, prefix_caching=prefix_caching, max_model_len=4 * blocks)
    return BlockManager(limits, prefix_key=b"key")


def with_output(created: SequenceGroup, *outputs: list[int]) -> SequenceGroup:
    """Give each sequence of a group the tokens of a former run."""
    for sequence, output in zip(created.sequences, outputs, strict=True):
        sequence.token_ids = np.append(created.prompt_token_ids, np.array(output, np.int32))
    return created


@each_row((0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3))
def test_num_blocks_for_block_boundaries(num_tokens: int, num_blocks: int) -> None:
    assert manager_of().num_blocks_for(num_tokens) == num_blocks


@each_row(1, 4, 5)
def test_a_plan_that_is_ok_hands_out_as_many_blocks_as_the_tokens_need(num_tokens: int) -> None:
    manager = manager_of()

    plan = manager.plan_admission(group(0, num_tokens))
    ((blocks,),) = manager.allocate(plan)

    assert plan.scarcest.num_needed <= plan.scarcest.num_free
    assert blocks.tolist() == list(range(manager.num_blocks_for(num_tokens)))


def test_a_plan_takes_nothing() -> None:
    manager = manager_of()

    manager.plan_admission(group(0, 12))

    assert manager.allocator.num_free_blocks == 8


def test_later_says_what_lacks() -> None:
    manager = manager_of(blocks=3)
    manager.allocator.allocate(2)

    plan = manager.plan_admission(group(0, 5))

    assert (plan.scarcest.num_needed, plan.scarcest.num_free) == (2, 1)


@each_row((7, True), (8, False))
def test_the_empty_pool_must_hold_the_group_and_its_first_fork(num_tokens: int, expected: bool) -> None:
    manager = manager_of(blocks=3)
    manager.allocator.allocate(3)  # a full pool does not matter

    assert manager.can_ever_allocate(group(0, num_tokens, num_sequences=2)) is expected


def test_watermark_keeps_blocks_back_from_admissions() -> None:
    manager = manager_of(blocks=10, watermark=0.15)
    manager.allocator.allocate(1)

    assert manager.num_watermark_blocks == 2
    assert manager.plan_admission(group(0, 7 * 4)).scarcest.num_free == 7


def test_watermark_does_not_hold_back_a_group_alone() -> None:
    assert manager_of(blocks=10, watermark=0.5).plan_admission(group(0, 40)).scarcest.num_free == 10


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

    (lead,), (other,) = manager.allocate(manager.plan_admission(returned))

    assert lead[:num_shared].tolist() == other[:num_shared].tolist()
    assert not set(lead[num_shared:].tolist()) & set(other[num_shared:].tolist())
    assert manager.allocator.ref_counts[lead[:num_shared]].tolist() == [2] * num_shared


# The cache ---------------------------------------------------------------------------------------


def with_cached_prefix(token_ids: list[int], blocks: int = 8) -> BlockManager:
    """Return a manager whose pool caches the full blocks of `token_ids`."""
    manager = manager_of(blocks, prefix_caching=True)
    former = group(0, token_ids)
    plan = manager.plan_admission(former)
    ((block_ids,),) = manager.allocate(plan)
    manager.register(former.sequences[0], former.prompt_token_ids, [block_ids], first=0)
    manager.allocator.free(block_ids)
    return manager


def test_cached_blocks_that_nobody_uses_count_as_needed() -> None:
    manager = with_cached_prefix([1, 2, 3, 4])

    plan = manager.plan_admission(group(1, [1, 2, 3, 4, 5]))

    assert plan.scarcest.num_needed == 2


def test_cached_blocks_that_somebody_uses_cost_nothing() -> None:
    manager = with_cached_prefix([1, 2, 3, 4])
    manager.allocate(manager.plan_admission(group(1, [1, 2, 3, 4, 5])))

    assert manager.plan_admission(group(2, [1, 2, 3, 4, 5])).scarcest.num_needed == 1


def test_sequences_of_a_group_find_more_than_they_share() -> None:
    manager = with_cached_prefix([1, 2, 3, 4, 5, 6, 7, 8])
    returned = with_output(group(1, [1, 2, 3], num_sequences=2), [4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 10])

    plan = manager.plan_admission(returned)
    (lead,), (other,) = manager.allocate(plan)

    assert [blocks.num_cached for blocks in plan.sequences] == [2, 2]
    assert plan.scarcest.num_needed == 4
    assert lead[:2].tolist() == other[:2].tolist()


def test_full_blocks_are_registered_once() -> None:
    manager = manager_of(prefix_caching=True)
    running = group(0, 9)
    ((blocks,),) = manager.allocate(manager.plan_admission(running))
    (sequence,) = running.sequences

    assert manager.register(sequence, running.prompt_token_ids[:7], [blocks], first=0) == 1
    assert manager.register(sequence, running.prompt_token_ids[:7], [blocks], first=1) == 1
    assert manager.register(sequence, running.prompt_token_ids, [blocks], first=1) == 2


def test_hashes_are_made_again_for_another_block_size() -> None:
    moved = group(0, 8)
    (sequence,) = moved.sequences
    manager_of(prefix_caching=True).hash_blocks(sequence)

    elsewhere = BlockManager(small_limits(block_size=2, blocks=12, prefix_caching=True), prefix_key=b"key")

    assert elsewhere.hash_blocks(sequence) == elsewhere.hash_tokens(moved.prompt_token_ids, cache_salt=0)
    assert len(sequence.block_hashes) == 4
