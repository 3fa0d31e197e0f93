"""Preemption by SWAP: when it is chosen, what moves, and the way back."""

from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.sequence import SequenceStatus
from tests.support.driving import Bench, admitted, chunks, max_tokens, names, only_admission, small_limits
from tests.support.each_row import each_row

SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE


def bench_with_victim(
    mode: PreemptionMode | None = None, host_blocks: int = 8, num_sequences: int = 1, num_tokens: int = 4
) -> Bench:
    """Two prompts of 12 tokens, for whose next tokens there are not enough blocks: b will be preempted."""
    blocks = 6 if num_sequences == 1 else 8
    bench = Bench(small_limits(blocks=blocks, budget=24, host_blocks=host_blocks, preemption_mode=mode))
    bench.add(0, 12, max_tokens(num_tokens))
    bench.add(1, 12, max_tokens(num_tokens), num_sequences=num_sequences)
    bench.step()
    return bench


# Which mode --------------------------------------------------------------------------------------


@each_row(
    (None, 1, RECOMPUTE),
    (None, 2, SWAP),
    (SWAP, 1, SWAP),
    (SWAP, 2, SWAP),
    (RECOMPUTE, 1, RECOMPUTE),
    (RECOMPUTE, 2, RECOMPUTE),
)
def test_one_sequence_is_recomputed_and_several_are_swapped_unless_a_mode_is_forced(
    mode: PreemptionMode | None, num_sequences: int, expected: PreemptionMode
) -> None:
    bench = bench_with_victim(mode, num_sequences=num_sequences)

    step = bench.schedule()

    counts = bench.planner.preemption.num_preemptions
    assert (counts[expected], sum(counts.values())) == (1, 1)
    assert (len(step.blocks_to_swap_out) > 0) is (expected is SWAP)


def test_only_live_sequences_count_for_the_mode() -> None:
    bench = bench_with_victim(num_sequences=2, num_tokens=6)
    _, b = bench.planner.batch.running
    bench.planner.finish(b.sequences[1])

    bench.run()

    assert bench.planner.preemption.num_preemptions == {RECOMPUTE: 1, SWAP: 0}


@each_row((0, RECOMPUTE), (2, RECOMPUTE), (3, SWAP))
def test_a_host_pool_that_is_too_full_falls_back_to_recompute(host_blocks: int, expected: PreemptionMode) -> None:
    bench = bench_with_victim(SWAP, host_blocks)

    bench.schedule()

    assert bench.planner.preemption.num_preemptions[expected] == 1
    bench.run()
    assert bench.outputs["b"] == [212, 213, 214, 215]


def test_a_group_that_has_not_caught_up_is_recomputed_even_if_swap_is_forced() -> None:
    bench = Bench(small_limits(blocks=6, budget=4, host_blocks=8, preemption_mode=SWAP))
    bench.add(0, 4)
    bench.step()
    bench.add(1, 16)
    bench.step()
    while bench.running == "ab":
        step = bench.schedule()
        bench.process()

    assert len(step.blocks_to_swap_out) == 0


# What moves --------------------------------------------------------------------------------------


def test_the_blocks_go_to_the_host_and_the_slot_is_left() -> None:
    bench = bench_with_victim(SWAP)
    (_, b) = bench.planner.batch.running
    blocks = bench.blocks_of(b.sequences[0])

    step = bench.schedule()

    assert step.blocks_to_swap_out.tolist() == [[block, host] for host, block in enumerate(sorted(blocks))]
    assert step.delta.released_slots.tolist() == [1]
    assert b.sequences[0].status is SequenceStatus.SWAPPED
    assert bench.waiting == ""


def test_the_freed_device_blocks_are_used_in_the_same_step() -> None:
    bench = bench_with_victim(SWAP)

    step = bench.schedule()

    ((slot, block),) = step.delta.appended_blocks.tolist()
    assert slot == 0
    assert block in step.blocks_to_swap_out[:, 0]


def test_shared_blocks_of_a_group_move_once_and_come_back_once() -> None:
    bench = bench_with_victim(num_sequences=2)

    steps = [bench.schedule()]
    host = bench.planner.swapped.host
    assert (len(steps[0].blocks_to_swap_out), host.num_used_blocks) == (3, 3)
    assert host.ref_counts[:3].tolist() == [2, 2, 2]
    bench.process()
    steps += bench.run()

    (back,) = [step for step in steps if len(step.blocks_to_swap_in)]
    assert len(back.blocks_to_swap_in) == 3
    assert bench.outputs["b0"] == [212, 213, 214, 215]
    assert bench.outputs["b1"] == [213, 215, 217, 219]


def test_a_shared_partial_block_is_copied_on_the_way_back() -> None:
    bench = Bench(small_limits(blocks=7, budget=24, host_blocks=8))
    bench.add(0, 12, max_tokens(4))
    bench.add(1, 10, max_tokens(3), num_sequences=2)
    bench.step()
    steps = bench.run()

    (out,) = [step for step in steps if len(step.blocks_to_swap_out)]
    (back,) = [step for step in steps if len(step.blocks_to_swap_in)]
    assert len(out.blocks_to_swap_out) == 3
    sources, targets = back.blocks_to_swap_in.T.tolist()
    assert (len(set(sources)), len(set(targets))) == (3, 4)
    assert len(back.blocks_to_copy) == 0
    assert (bench.outputs["b0"], bench.outputs["b1"]) == ([210, 211, 212], [211, 213, 215])


# The way back ------------------------------------------------------------------------------------


def test_a_swapped_group_goes_on_without_computing_anything_again() -> None:
    bench = bench_with_victim(SWAP)

    steps = bench.run()

    (back,) = [step for step in steps if len(step.blocks_to_swap_in)]
    assert only_admission(back).num_computed_tokens == 12
    assert list(chunks(back).values()) == [1]
    assert bench.outputs["b"] == [212, 213, 214, 215]


def test_swapped_groups_come_back_before_newcomers_are_admitted() -> None:
    bench = bench_with_victim(SWAP)
    bench.schedule()
    bench.process()
    bench.add(2, 1, max_tokens(1))

    order = [name for step in bench.run() for name in admitted(step)]

    assert order == [200, 300]


def test_swapped_groups_come_back_in_order() -> None:
    bench = Bench(small_limits(blocks=9, budget=36, host_blocks=9, preemption_mode=SWAP))
    for arrival in range(3):
        bench.add(arrival, 12, max_tokens(6 if arrival else 8))
    while len(bench.planner.swapped) < 2:
        bench.step()

    order = [name for step in bench.run() for name in admitted(step)]

    assert order == [200, 300]


def test_swap_in_leaves_the_watermark_to_what_runs() -> None:
    bench = Bench(small_limits(blocks=8, watermark=0.25, host_blocks=8, preemption_mode=SWAP, budget=24))
    a = bench.add(0, 3)
    bench.add(1, 2, max_tokens(9))
    c = bench.add(2, 12, max_tokens(8))
    while not len(bench.planner.swapped):
        bench.step()

    bench.planner.abort(a)
    waiting = bench.schedule()
    assert (bench.planner.swapped.num_blocks_to_swap_in(c), bench.num_free_blocks) == ([5], 6)
    bench.process()

    assert len(waiting.blocks_to_swap_in) == 0
    while bench.running != "c":
        back = bench.schedule()
        bench.process()
    assert len(back.blocks_to_swap_in) == 4
    assert len(bench.outputs["b"]) == 9


def test_a_swapped_group_that_the_empty_pool_cannot_hold_fails_with_numbers() -> None:
    bench = Bench(small_limits(blocks=8, budget=24, host_blocks=12, max_num_seqs=6))
    bench.add(0, 1, max_tokens(10))
    b = bench.add(1, 8, max_tokens(12), num_sequences=4)
    while bench.try_schedule() is not None:
        bench.process()

    (failure,) = bench.failures
    assert failure.group is b
    assert "the request needs 10 blocks, but the whole KV cache has only 8 blocks of 4 tokens" in failure.message
    assert bench.planner.preemption.num_preemptions[SWAP] == 1
    assert len(bench.outputs["a"]) == 10
    assert (bench.num_free_blocks, bench.planner.swapped.host.num_free_blocks) == (8, 12)


# Ends while swapped ------------------------------------------------------------------------------


def test_abort_of_a_swapped_group_frees_both_pools() -> None:
    bench = bench_with_victim(SWAP)
    bench.step()
    (b,) = bench.planner.swapped

    bench.planner.abort(b)

    assert bench.planner.swapped.host.num_free_blocks == 8
    bench.run()
    assert bench.num_free_blocks == 6
    assert bench.outputs["b"] == [212]


def test_finish_of_the_only_sequence_of_a_swapped_group_ends_it() -> None:
    bench = bench_with_victim(SWAP)
    bench.step()
    (b,) = bench.planner.swapped

    bench.planner.finish(b.sequences[0])

    assert len(bench.planner.groups) == 1
    assert bench.planner.swapped.host.num_free_blocks == 8


def test_evacuate_takes_swapped_groups_along() -> None:
    bench = bench_with_victim(SWAP)
    bench.step()

    a, b = bench.planner.evacuate()

    assert b.sequences[0].status is SequenceStatus.WAITING
    assert b.sequences[0].token_ids.tolist() == [*range(200, 212), 212]
    assert (a.request_id, b.request_id) == ("a", "b")


def test_the_swapped_group_of_a_tenant_that_had_less_does_not_wait_for_a_larger_one() -> None:
    """In step 2 the forks of a need two blocks, and b and c give up their five; b needs all of them again, c two."""
    bench = Bench(small_limits(blocks=7, budget=32, host_blocks=20, preemption_mode=SWAP))
    bench.add(0, 8, max_tokens(6), num_sequences=2, tenant="red")
    bench.add(1, 16, max_tokens(4), tenant="red")
    bench.add(2, 4, max_tokens(3), tenant="blue")
    bench.step()
    bench.step()
    assert (bench.running, names(bench.planner.swapped)) == ("a", "bc")

    bench.step()

    assert (bench.running, names(bench.planner.swapped)) == ("ac", "b")
    bench.run()
