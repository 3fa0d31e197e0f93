"""Who uses which block, for pools whose blocks are known by hand."""

from octavo.admin.v1 import admin_pb2
from scheduler_svc.admin.block_map import MAX_HOLDERS, block_states, describe_block, encoder_states, num_blocks
from scheduler_svc.core.integrity import check_integrity
from tests.support.driving import Bench, max_tokens, small_limits

FREE, CACHED = admin_pb2.BLOCK_STATE_FREE, admin_pb2.BLOCK_STATE_CACHED
USED, SHARED = admin_pb2.BLOCK_STATE_USED, admin_pb2.BLOCK_STATE_SHARED


def states(bench: Bench) -> list[int]:
    return [int(state) for state in block_states(bench.planner.blocks.allocator)]


def test_an_empty_pool_is_free() -> None:
    assert states(Bench(small_limits())) == [FREE] * 8


def test_used_blocks_name_who_has_them() -> None:
    bench = Bench(small_limits())
    a = bench.add(0, 6)
    bench.step()
    blocks = bench.blocks_of(a.sequences[0])
    assert [index for index, state in enumerate(states(bench)) if state == USED] == sorted(blocks)
    described = describe_block(bench.planner, blocks[1])
    assert (described.state, described.num_references, described.is_registered) == (USED, 1, False)
    (holder,) = described.holders
    assert (holder.request_id, holder.output_index, holder.logical_block) == ("a", 0, 1)
    assert not describe_block(bench.planner, states(bench).index(FREE)).holders


def test_outputs_of_one_prompt_share_its_blocks_and_each_copies_the_last_one() -> None:
    bench = Bench(small_limits(blocks=12))
    a = bench.add(0, 6, max_tokens(4), num_sequences=3)
    bench.step()
    bench.step()  # each output writes its first token, and gets a block of its own for it
    tables = [bench.blocks_of(sequence) for sequence in a.sequences]
    shared = {table[0] for table in tables}
    assert len(shared) == 1
    described = describe_block(bench.planner, shared.pop())
    assert (described.state, described.num_references) == (SHARED, 3)
    assert [holder.output_index for holder in described.holders] == [0, 1, 2]
    last = {table[1] for table in tables}
    assert len(last) == 3
    assert {states(bench)[block] for block in last} == {USED}


def test_a_prefix_that_nobody_uses_is_cached_and_one_that_two_requests_use_is_shared() -> None:
    bench = Bench(small_limits(prefix_caching=True, blocks=16, max_model_len=48, budget=48))
    prompt = [*range(100, 110)]
    bench.add(0, prompt, max_tokens(1))
    bench.run()
    assert states(bench).count(CACHED) == 2
    cached = states(bench).index(CACHED)
    assert describe_block(bench.planner, cached).is_registered
    for arrival in (1, 2):
        bench.add(arrival, prompt, max_tokens(9))
        bench.step()
    assert states(bench)[cached] == SHARED
    assert [holder.request_id for holder in describe_block(bench.planner, cached).holders] == ["b", "c"]
    check_integrity(bench.planner)


def test_the_counts_of_the_pool_agree_with_the_map() -> None:
    bench = Bench(small_limits(prefix_caching=True, blocks=16))
    bench.add(0, 9, max_tokens(1))
    bench.run()
    bench.add(1, 9, max_tokens(5), num_sequences=2)
    bench.step()
    pool, counted = bench.planner.blocks.allocator, states(bench)
    assert counted.count(FREE) + counted.count(CACHED) == pool.num_free_blocks
    assert counted.count(CACHED) == pool.num_cached_blocks > 0
    assert counted.count(USED) + counted.count(SHARED) == pool.num_used_blocks
    assert counted.count(SHARED) == pool.num_shared_blocks > 0


def test_under_a_sliding_window_the_place_in_the_sequence_counts_what_fell_out() -> None:
    bench = Bench(small_limits(sliding_window=4, blocks=8))
    a = bench.add(0, 14, max_tokens(4))
    while not int(bench.planner.blocks.groups[0].first_blocks[a.sequences[0].slot]):
        bench.step()
    first = int(bench.planner.blocks.groups[0].first_blocks[a.sequences[0].slot])
    block = int(bench.planner.blocks.groups[0].held(a.sequences[0].slot)[0])
    (holder,) = describe_block(bench.planner, block).holders
    assert holder.logical_block == first > 0


def test_a_block_that_very_many_use_names_the_first_ones() -> None:
    num = MAX_HOLDERS + 5
    bench = Bench(small_limits(max_num_seqs=128, blocks=512, budget=512))
    a = bench.add(0, 6, max_tokens(3), num_sequences=num)
    bench.step()
    bench.step()
    described = describe_block(bench.planner, bench.blocks_of(a.sequences[0])[0])
    assert (described.num_references, len(described.holders)) == (num, MAX_HOLDERS)


def test_blocks_of_the_encoder_are_counted_on_behind_those_of_the_device_pool() -> None:
    bench = Bench(small_limits(prefix_caching=True, max_encoder_tokens=12, encoder_blocks=6))
    bench.add(0, [7], max_tokens(8), num_sequences=2, encoder=[1] * 6)
    bench.step()
    bench.step()
    bench.add(1, [7], max_tokens(3), encoder=[2] * 3)
    bench.step()
    assert [*encoder_states(bench.planner)].count(SHARED) == 2
    first, second, third = (describe_block(bench.planner, 8 + block) for block in range(3))
    assert [(one.state, one.num_references, one.is_of_encoder) for one in (first, third)] == [
        (SHARED, 2, True),
        (USED, 1, True),
    ]
    assert [(holder.request_id, holder.output_index, holder.logical_block) for holder in second.holders] == [
        ("a", 0, 1),
        ("a", 1, 1),
    ]
    assert (num_blocks(bench.planner), describe_block(bench.planner, 0).is_of_encoder) == (14, False)
    bench.run()
    assert [*encoder_states(bench.planner)] == [CACHED] * 3 + [FREE] * 3
    assert describe_block(bench.planner, 8).is_registered
    assert encoder_states(Bench(small_limits()).planner) == b""
