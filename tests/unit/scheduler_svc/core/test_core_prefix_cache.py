"""The prefix cache through the core: who finds what, when, and for how long."""

from scheduler_svc.request.parameters import BeamSearchParams
from tests.support.driving import Bench, admitted, max_tokens, only_admission, small_limits
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


def test_who_waits_for_a_prefix_that_was_aborted_computes_it() -> None:
    bench = Bench(small_limits(blocks=12, prefix_caching=True))
    a = bench.add(0, [*COMMON, 1])
    bench.schedule()
    bench.add(1, [*COMMON, 2])
    bench.planner.abort(a)

    assert only_admission(bench.schedule()).num_computed_tokens == 0


# Groups ------------------------------------------------------------------------------------------


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
