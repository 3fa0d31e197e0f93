"""Preemption by SWAP: when it is chosen, what moves, and the way back."""

from scheduler_svc.core.limits import PreemptionMode
from tests.support.driving import Bench, max_tokens, names, small_limits
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
