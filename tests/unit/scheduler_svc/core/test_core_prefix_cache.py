"""The prefix cache through the core: who finds what, when, and for how long."""

from scheduler_svc.request.parameters import BeamSearchParams
from tests.support.driving import Bench, admitted, chunks, max_tokens, only_admission, small_limits
from tests.support.each_row import each_row
from tests.support.toy_executor import hashed_next_token

COMMON = list(range(500, 508))  # two blocks


def bench_with_cache(prompt: list[int] | None = None, *, blocks: int = 12, cache_salt: int = 0) -> Bench:
    """A request with this prompt has run and ended; its full blocks are cached."""
    bench = Bench(small_limits(blocks=blocks, prefix_caching=True))
    bench.add(0, COMMON if prompt is None else prompt, max_tokens(1), cache_salt=cache_salt)
    bench.run()
    return bench


def num_found(bench: Bench, arrival: int, prompt: list[int], cache_salt: int = 0) -> int:
    """Admit a request; return how many tokens it found."""
    added = bench.add(arrival, prompt, max_tokens(1), cache_salt=cache_salt)
    admission = only_admission(bench.schedule())
    bench.process()
    assert added.num_cached_tokens == admission.num_computed_tokens
    return admission.num_computed_tokens


# Hit or miss -------------------------------------------------------------------------------------


def test_a_prefix_that_was_computed_is_not_computed_again() -> None:
    bench = bench_with_cache()
    bench.add(1, [*COMMON, 1, 2, 3])

    step = bench.schedule()

    assert only_admission(step).num_computed_tokens == 8
    assert list(chunks(step).values()) == [3]


@each_row(
    ([*COMMON, 1], 8),
    (COMMON, 4),
    (COMMON[:7], 4),
    (COMMON[:5], 4),
    (COMMON[:4], 0),
    ([*COMMON[:4], 9, *COMMON[5:], 1], 4),
    ([9, *COMMON[1:], 1], 0),
)
def test_full_blocks_of_the_longest_common_prefix_are_found_and_one_token_at_least_is_computed(
    prompt: list[int], num_tokens: int
) -> None:
    assert num_found(bench_with_cache(), 1, prompt) == num_tokens


def test_the_same_block_under_another_prefix_is_a_miss() -> None:
    bench = bench_with_cache([*[7] * 4, *COMMON[4:]])

    assert num_found(bench, 1, [*COMMON, 1]) == 0


def test_salts_do_not_share() -> None:
    bench = bench_with_cache(cache_salt=1)

    assert num_found(bench, 1, [*COMMON, 1], cache_salt=2) == 0
    assert num_found(bench, 2, [*COMMON, 1], cache_salt=1) == 8


def test_generated_tokens_are_found_too() -> None:
    bench = Bench(small_limits(blocks=12, prefix_caching=True))
    bench.add(0, [10, 11], max_tokens(8))
    bench.run()  # computes 10 to 18

    assert num_found(bench, 1, list(range(10, 20))) == 8


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    bench = Bench(small_limits(blocks=6, budget=24, prefix_caching=True))
    bench.add(0, 12)
    b = bench.add(1, 12)
    bench.step()
    bench.step()
    (a,) = bench.planner.batch.running
    bench.planner.finish(a.sequences[0])

    step = bench.schedule()

    assert only_admission(step).num_computed_tokens == 8
    assert b.num_cached_tokens == 0


def test_nothing_is_found_with_the_cache_off() -> None:
    bench = Bench(small_limits(blocks=12, prefix_caching=False))
    bench.add(0, COMMON, max_tokens(1))
    bench.run()

    assert num_found(bench, 1, [*COMMON, 1]) == 0
    assert bench.planner.blocks.prefix_cache is None


# When a block is registered ----------------------------------------------------------------------


def test_a_block_is_registered_when_its_step_is_acknowledged() -> None:
    bench = Bench(small_limits(prefix_caching=True))
    bench.add(0, COMMON)
    cache = bench.planner.blocks.prefix_cache
    assert cache is not None

    bench.schedule()
    before = len(cache)
    bench.process()

    assert (before, len(cache)) == (0, 2)


def test_a_running_prompt_is_shared_as_far_as_it_is_acknowledged() -> None:
    bench = Bench(small_limits(blocks=12, budget=4, prefix_caching=True))
    a = bench.add(0, [*COMMON, *range(600, 610)])
    bench.step()
    bench.step()
    assert bench.running == "a"

    bench.add(1, [*COMMON, 1])
    for _ in range(4):
        bench.step()

    b = bench.planner.batch.running[1]
    assert b.num_cached_tokens == 8
    assert bench.blocks_of(a.sequences[0])[:2] == bench.blocks_of(b.sequences[0])[:2]


def test_a_request_waits_for_a_prefix_that_a_step_in_flight_computes() -> None:
    bench = Bench(small_limits(blocks=12, prefix_caching=True))
    bench.add(0, [*COMMON, 1])
    bench.schedule()
    b = bench.add(1, [*COMMON, 2])

    waiting = bench.schedule()
    bench.process()
    found = bench.schedule()

    assert admitted(waiting) == []
    assert only_admission(found).num_computed_tokens == 8
    assert b.num_cached_tokens == 8


def test_who_waits_for_a_prefix_lets_others_pass() -> None:
    bench = Bench(small_limits(blocks=12, prefix_caching=True))
    bench.add(0, [*COMMON, 1])
    bench.schedule()
    bench.add(1, [*COMMON, 2])
    bench.add(2, 3)

    assert admitted(bench.schedule()) == [300]


def test_who_waits_for_a_prefix_that_was_aborted_computes_it() -> None:
    bench = Bench(small_limits(blocks=12, prefix_caching=True))
    a = bench.add(0, [*COMMON, 1])
    bench.schedule()
    bench.add(1, [*COMMON, 2])
    bench.planner.abort(a)

    assert only_admission(bench.schedule()).num_computed_tokens == 0


def test_nobody_waits_for_a_block_of_which_he_would_compute_the_last_token_anyway() -> None:
    bench = Bench(small_limits(blocks=12, prefix_caching=True))
    bench.add(0, COMMON[:4])
    bench.schedule()
    bench.add(1, COMMON[:4])

    assert only_admission(bench.schedule()).num_computed_tokens == 0


def test_of_two_that_computed_the_same_block_one_is_registered() -> None:
    bench = Bench(small_limits(blocks=12, prefix_caching=True))
    bench.add(0, COMMON[:4])
    bench.schedule()
    bench.add(1, COMMON[:4])
    bench.schedule()
    bench.process()
    bench.process()

    cache = bench.planner.blocks.prefix_cache
    assert cache is not None
    assert len(cache) == 1


# How long it stays -------------------------------------------------------------------------------


def test_cached_blocks_count_as_free() -> None:
    bench = bench_with_cache(blocks=8)

    assert bench.num_free_blocks == 8
    assert bench.planner.blocks.allocator.num_cached_blocks == 2


def test_unused_blocks_are_taken_before_cached_ones() -> None:
    bench = bench_with_cache(blocks=8)
    bench.add(1, 24 - 1, max_tokens(1))
    bench.run()

    assert num_found(bench, 2, [*COMMON, 1]) == 8


def test_the_tail_of_a_prefix_is_evicted_first() -> None:
    bench = bench_with_cache(blocks=7)
    bench.add(1, 23, max_tokens(1))  # 6 blocks: one of the two cached ones
    bench.run()

    assert bench.planner.blocks.allocator.num_cached_blocks == 6
    assert num_found(bench, 2, [*COMMON, 1]) == 4


def test_the_prefix_that_was_unused_for_longest_is_evicted_first() -> None:
    first, second = list(range(600, 608)), list(range(700, 708))
    bench = Bench(small_limits(blocks=8, prefix_caching=True))
    for arrival, prompt in enumerate([first, second, first]):
        bench.add(arrival, [*prompt, arrival], max_tokens(1))
        bench.run()

    bench.add(3, 23, max_tokens(1))  # 6 blocks: 4 that hold nothing, 2 of the second prefix
    bench.run()

    cache = bench.planner.blocks.prefix_cache
    assert cache is not None
    assert num_found(bench, 4, [*first, 1]) == 8


def test_found_blocks_are_not_evicted_for_the_new_ones_of_the_same_admission() -> None:
    bench = bench_with_cache(blocks=6)
    bench.add(1, [*COMMON, *range(600, 615)], max_tokens(1))  # all 6 blocks, 2 of them found

    step = bench.schedule()

    assert only_admission(step).num_computed_tokens == 8
    assert len(set(only_admission(step).block_ids.tolist())) == 6
    bench.process()


def test_a_cached_block_that_is_found_again_is_not_free_any_more() -> None:
    bench = bench_with_cache(blocks=8)
    bench.add(1, [*COMMON, 1])

    bench.schedule()

    assert bench.num_free_blocks == 5
    assert bench.planner.blocks.allocator.num_cached_blocks == 0


# Groups ------------------------------------------------------------------------------------------


def test_a_group_finds_the_prefix_once_and_its_forks_share_it() -> None:
    bench = bench_with_cache()
    bench.add(1, [*COMMON, 1], max_tokens(3), num_sequences=3)

    steps = bench.run()

    assert [admission.num_computed_tokens for step in steps for admission in step.delta.admissions] == [8]
    assert bench.outputs["b2"] == [4, 7, 10]


def test_what_a_beam_search_found_is_found_again() -> None:
    limits = small_limits(vocab_size=300, prefix_caching=True)
    bench = Bench(limits, hashed_next_token(limits.vocab_size))
    search = bench.add(0, 4, max_tokens(6), beam_search=BeamSearchParams(beam_width=2))
    bench.run()
    assert search.beams is not None
    (best,) = search.beams.finished_hypotheses()

    follow_up = bench.add(1, [*range(100, 104), *best.token_ids.tolist()], max_tokens(1))
    bench.run()

    assert follow_up.num_cached_tokens == 8
