"""Sliding windows: blocks that fell out are freed and given away; what a sequence needs is the window."""

from dataclasses import replace

import numpy as np

from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.blocks.prefix_cache import PrefixCache
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.limits import CoreLimits, PreemptionMode
from scheduler_svc.core.step.batch import Batch
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping
from tests.support.driving import Bench, chunks, group, max_tokens, small_limits
from tests.support.each_row import each_row
from tests.support.toy_executor import hashed_next_token


def window_limits(
    *,
    window: int = 6,
    blocks: int = 6,
    budget: int = 4,
    max_num_seqs: int = 4,
    host_blocks: int = 0,
    mode: PreemptionMode | None = None,
) -> CoreLimits:
    """Return limits under which a sequence may have all the blocks, and needs 3 of them."""
    return small_limits(
        sliding_window=window,
        blocks=blocks,
        budget=budget,
        max_model_len=24,
        max_num_seqs=max_num_seqs,
        host_blocks=host_blocks,
        preemption_mode=mode,
        prefix_caching=True,
    )


@each_row((9, 0), (10, 0), (11, 1), (14, 1), (15, 2))
def test_a_block_is_freed_when_the_next_token_sees_none_of_it(position: int, num_freed: int) -> None:
    """With a window of 8 the token at position 11 sees 4 to 11: block 0, positions 0 to 3, is out."""
    bench = Bench(window_limits(window=8, budget=16))
    bench.add(0, 1)
    while int(bench.planner.table.num_scheduled_tokens[0]) <= position:
        bench.step()

    assert int(bench.planner.blocks.groups[0].first_blocks[0]) == num_freed


@each_row((8, False, [0, 2, 0, 0]), (0, True, [0, 0, 0, 0]))
def test_the_windows_of_the_named_slots_slide(window: int, is_cached: bool, first_blocks: list[int]) -> None:
    """With a window of 8 the token at position 15 sees 8 to 15: blocks 0 and 1 are out, at position 10 none is."""
    limits = replace(window_limits(window=window, blocks=16), prefix_caching=is_cached)
    batch = Batch(limits, BlockManager(limits), FcfsPolicy())
    for slot, position in enumerate([15, 15, 10]):
        batch.table.block_tables[slot, :4] = batch.blocks.allocator.allocate(4)
        batch.table.num_blocks[slot], batch.table.num_scheduled_tokens[slot] = 4, position

    batch.slide_windows(np.array([False, True, True, False]))

    assert batch.blocks.groups[0].first_blocks.tolist() == first_blocks
    assert batch.blocks.allocator.ref_counts[:12].tolist() == [1] * 4 + [0] * sum(first_blocks) + [1] * (
        8 - sum(first_blocks)
    )


def test_a_prompt_frees_its_blocks_while_it_is_computed() -> None:
    bench = Bench(window_limits())
    bench.add(0, 20, max_tokens(2))
    used, first_blocks = [], []

    for _ in range(5):
        bench.step()
        used.append(6 - bench.num_free_blocks)
        first_blocks.append(int(bench.planner.blocks.groups[0].first_blocks[0]))

    assert max(used) == 3
    assert first_blocks == [0, 0, 0, 1, 2], "the token at position 12 sees 7 to 12"
    bench.run()
    assert bench.outputs["a"] == [120, 121]


def test_two_prompts_longer_than_the_pool_run_at_once() -> None:
    bench = Bench(window_limits(max_num_seqs=2))
    bench.add(0, 20, max_tokens(3))
    bench.add(1, 20, max_tokens(3))

    bench.run()

    assert sum(bench.planner.preemption.num_preemptions.values()) == 0
    assert bench.outputs == {"a": [120, 121, 122], "b": [220, 221, 222]}


@each_row(1, 2, 3)
def test_swapping_moves_only_what_is_in_the_window(depth: int) -> None:
    bench = Bench(window_limits(budget=15, max_num_seqs=3, host_blocks=8, mode=PreemptionMode.SWAP))
    for arrival in range(3):
        bench.add(arrival, 4 + arrival, max_tokens(12))

    steps = bench.run(depth)

    moved = [len(step.blocks_to_swap_out) for step in steps if len(step.blocks_to_swap_out)]
    assert moved
    assert max(moved) <= 3
    assert bench.outputs["a"] == list(range(104, 116))
    assert bench.outputs["c"] == list(range(306, 318))


def test_forks_share_the_blocks_of_the_window() -> None:
    bench = Bench(window_limits(budget=8))
    bench.add(0, 14, max_tokens(8), num_sequences=2)

    bench.run()

    assert bench.outputs["a0"] == list(range(114, 122))
    assert bench.outputs["a1"] == list(range(115, 131, 2))
    assert bench.num_free_blocks == 6


def test_a_prefix_is_found_wherever_its_last_window_is() -> None:
    """With a window of 6 the token behind three blocks of 4 sees positions 7 to 12: blocks 1 and 2."""
    bench = Bench(window_limits(blocks=8))
    bench.add(0, 14, max_tokens(1))
    bench.run()
    cache = bench.planner.blocks.prefix_cache
    assert cache is not None
    assert len(cache) == 3

    bench.add(0, 14, max_tokens(1))
    [admission] = bench.schedule().delta.admissions

    assert admission.num_computed_tokens == 12
    assert admission.block_ids[0] == 0, "it is out of the window, and another one stands in"
    assert bench.planner.blocks.allocator.ref_counts.sum() == len(admission.block_ids) - 1
    bench.process()
    bench.run()


@each_row(({0, 1, 2, 3, 4, 5}, 6), ({0, 1, 2, 4, 5}, 6), ({0, 1, 2, 4}, 3), ({0, 2, 4}, 1), ({1, 2, 3}, 4), ({1, 3}, 0))
def test_blocks_that_nobody_sees_may_be_gone(registered: set[int], longest: int) -> None:
    """The token behind a block sees two blocks, or one if there is but one."""
    cache, names = PrefixCache(8), [bytes([name]) for name in range(6)]
    cache.register([names[block] for block in registered], sorted(registered))

    assert cache.ends(names, lambda end: max(0, end - 2)).nonzero()[0][-1] == longest


def test_a_group_whose_windows_fit_nowhere_is_never_taken() -> None:
    planner = Bench(window_limits(max_num_seqs=4)).planner

    assert planner.admissions.can_ever_admit(group(0, 9, num_sequences=4))  # 3 blocks, and 3 copies
    assert not planner.admissions.can_ever_admit(group(0, 12, num_sequences=4))  # 3 blocks, and 4 new ones


def test_a_prefill_without_room_preempts_the_last_group() -> None:
    """Chunks take blocks as they go; a, in the middle of its prompt, takes them from b."""
    bench = Bench(window_limits(budget=4, max_num_seqs=4))
    bench.add(1, 4, max_tokens(16))
    bench.add(2, 4, max_tokens(16))
    bench.step()
    bench.step()
    bench.queue.add(group(0, 20, max_tokens(1)))

    steps = bench.run()

    assert any(len(step.delta.appended_blocks) and chunks(step) for step in steps)
    assert bench.outputs["a"] == [120]
    assert bench.outputs["c"] == list(range(304, 320))


def test_beams_give_back_what_fell_out_of_the_window() -> None:
    limits = small_limits(max_num_seqs=4, budget=8, max_model_len=200, blocks=16, sliding_window=8, vocab_size=13)
    bench = Bench(limits, next_token=hashed_next_token(13))
    search = BeamSearchParams(2, early_stopping=EarlyStopping.NEVER)
    bench.add(0, [1, 2, 3, 4, 5], max_tokens(180), beam_search=search)
    num_steps = 0
    while bench.try_schedule() is not None:
        bench.process()
        check_integrity(bench.planner)
        num_steps += 1
    assert num_steps > 180
    assert bench.failures == []
    assert bench.num_free_blocks == 16
