"""Long prefills, and the two ways in which prompts and decodes share steps."""

from scheduler_svc.core.limits import MAX_PREFILL_STEPS, PrefillMode
from tests.support.driving import Bench, admitted, chunks, max_tokens, small_limits
from tests.support.each_row import each_row

# Long prefills -----------------------------------------------------------------------------------


def long_prompts_bench(max_long_prefills: int = 1, budget: int = 16) -> Bench:
    """A scaled-down server of prompts of 32k tokens: more than 8 tokens are long."""
    return Bench(
        small_limits(
            max_model_len=128,
            budget=budget,
            blocks=96,
            max_num_seqs=6,
            long_prefill_threshold=8,
            max_long_prefills=max_long_prefills,
        )
    )


def test_prefills_that_end_in_the_step_come_first() -> None:
    bench = long_prompts_bench(max_long_prefills=2, budget=10)
    bench.add(0, 24)
    bench.add(1, 12)

    assert [chunks(bench.schedule()) for _ in range(2)] == [{0: 8, 1: 2}, {1: 8, 0: 2}]


def test_a_short_prompt_passes_a_second_long_one() -> None:
    bench = long_prompts_bench()
    bench.add(0, 100)
    bench.add(1, 100)
    bench.add(2, 6)

    step = bench.schedule()

    assert chunks(step) == {0: 8, 1: 6}
    assert (bench.running, bench.waiting) == ("ac", "b")


def test_a_second_long_prefill_starts_in_the_step_of_the_last_chunk_of_the_first_one() -> None:
    bench = long_prompts_bench()
    bench.add(0, 20)
    bench.add(1, 20)

    assert [admitted(bench.schedule()) for _ in range(3)] == [[100], [], [200]]


@each_row(1, 2, 3)
def test_a_long_prompt_never_makes_decodes_wait(depth: int) -> None:
    bench = long_prompts_bench()
    for arrival in range(3):
        bench.add(arrival, 2, max_tokens(14))
    bench.step()
    bench.add(3, 100, max_tokens(1))

    steps = bench.run(depth)

    assert all(chunks(step) == {3: 8} for step in steps[:12])
    assert [step.delta.deactivated_slots.tolist() for step in steps[:12]] == [[]] * 12
    assert [len(bench.outputs[name]) for name in "abcd"] == [14, 14, 14, 1]


def test_only_tokens_that_are_not_cached_make_a_prompt_long() -> None:
    common = list(range(500, 516))
    bench = Bench(small_limits(blocks=24, long_prefill_threshold=8, prefix_caching=True, budget=24))
    bench.add(0, common, max_tokens(1))
    bench.run()
    bench.add(1, 12)
    bench.add(2, [*common, 1, 2, 3])

    assert list(chunks(bench.schedule()).values()) == [8, 3]


# Prefill first -----------------------------------------------------------------------------------


def test_prefill_first_lets_decodes_run_after_so_many_steps_of_prefills() -> None:
    """However many prompts come, `a` gets a token in every fifth step."""
    bench = Bench(small_limits(budget=8, blocks=20, max_num_seqs=8, prefill_mode=PrefillMode.FIRST))
    bench.add(0, 3)
    bench.step()
    for arrival in range(1, 8):
        bench.add(arrival, 16, max_tokens(1))

    steps = [bench.schedule() for _ in range(10)]

    per_step = [sent.layout.num_decodes for sent in bench.planner.in_flight]
    assert MAX_PREFILL_STEPS == 4
    assert [num_decodes > 0 for num_decodes in per_step] == [False, False, False, False, True] * 2
    assert [len(chunks(step)) for step in steps] == [1, 1, 1, 1, 0] * 2


def test_prefill_first_goes_on_with_prefills_when_nobody_is_left_who_decodes() -> None:
    bench = Bench(small_limits(budget=4, prefill_mode=PrefillMode.FIRST))
    a = bench.add(0, 3)
    bench.step()
    bench.add(1, 20)
    for _ in range(MAX_PREFILL_STEPS):
        bench.step()

    bench.planner.abort(a)

    assert chunks(bench.schedule()) == {1: 4}


def test_prefill_first_swaps_in_when_no_prompt_is_computed() -> None:
    bench = Bench(small_limits(blocks=8, budget=24, host_blocks=8, prefill_mode=PrefillMode.FIRST))
    bench.add(0, 12, max_tokens(4))
    bench.add(1, 12, max_tokens(4), num_sequences=2)

    steps = bench.run()

    assert [len(step.blocks_to_swap_in) for step in steps if len(step.blocks_to_swap_in)] == [3]
    assert bench.outputs["b1"] == [213, 215, 217, 219]
