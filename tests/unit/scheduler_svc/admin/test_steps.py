"""A logged step in one sentence and in fields; the steps are those of a real core on the toy executor."""

from collections.abc import Callable

from scheduler_svc.admin.steps import step_state, step_summary, step_text
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.request.parameters import BeamSearchParams
from scheduler_svc.telemetry.recent_steps import RecentStep
from tests.support.driving import Bench, max_tokens, small_limits
from tests.support.each_row import each_row


def log_steps(bench: Bench, num_steps: int) -> list[RecentStep]:
    """Run steps in lock-step; return them as the driver logs them."""
    logged = []
    for _ in range(num_steps):
        step = bench.schedule()
        logged.append(RecentStep(step, bench.planner.in_flight[-1].layout, result=bench.results[0]))
        bench.process()
    return logged


def texts(bench: Bench, num_steps: int) -> list[str]:
    return [step_text(logged) for logged in log_steps(bench, num_steps)]


def test_prefill_chunks_decodes_and_releases_are_counted() -> None:
    bench = Bench(small_limits(budget=4))
    bench.add(0, 5, max_tokens(2))
    assert texts(bench, 4) == [
        "1 prefill chunk of 4 tokens, 1 admission with 0 of 5 tokens already computed; 0 tokens sampled",
        "1 prefill chunk of 1 token; 1 token sampled",
        "1 decode; 1 token sampled",
        "1 slot released; 0 tokens sampled",
    ]


def test_an_admission_tells_what_the_cache_had() -> None:
    bench = Bench(small_limits(prefix_caching=True))
    prompt = list(range(100, 110))
    bench.add(0, prompt, max_tokens(1))
    bench.run()
    bench.add(1, prompt, max_tokens(1))
    (logged,) = log_steps(bench, 1)
    assert "1 prefill chunk of 2 tokens, 1 admission with 8 of 10 tokens already computed" in step_text(logged)
    (admission,) = step_state(logged).admissions
    assert (admission.num_tokens, admission.num_computed_tokens, admission.num_blocks) == (10, 8, 3)
    assert list(step_state(logged).admitted_slots) == [admission.slot]


def test_forks_and_copies_are_named() -> None:
    bench = Bench(small_limits())
    bench.add(0, 6, max_tokens(3), num_sequences=2)
    prefill, decode = log_steps(bench, 2)
    assert step_text(prefill) == (
        "1 prefill chunk of 6 tokens, 1 admission with 0 of 6 tokens already computed, 1 fork; 2 tokens sampled"
    )
    (fork,) = step_state(prefill).forks
    assert step_text(decode) == "1 block copied, 2 decodes; 2 tokens sampled"
    assert sorted(step_state(decode).decode_slots) == sorted((fork.parent_slot, fork.slot))
    (copy,) = step_state(decode).blocks_to_copy
    assert copy.source_block != copy.target_block


def test_beams_bring_candidates_and_no_tokens() -> None:
    bench = Bench(small_limits(vocab_size=50))
    bench.add(0, 6, max_tokens(4), beam_search=BeamSearchParams(2))
    prefill, second = log_steps(bench, 2)
    assert step_text(prefill).endswith("; 0 tokens sampled, 4 candidates for beams")
    assert step_text(second) == "1 block copied, 2 decodes, 1 beam fork; 0 tokens sampled, 8 candidates for beams"
    state = step_state(second)
    (fork,) = state.beam_forks
    assert sorted(state.continued_beam_slots) == sorted((fork.parent_slot, fork.slot))
    assert (state.num_sampled_tokens, state.num_candidates) == (0, 8)


def test_swapped_blocks_are_named_with_both_pools() -> None:
    bench = Bench(small_limits(blocks=6, host_blocks=8, preemption_mode=PreemptionMode.SWAP))
    bench.add(0, 8, max_tokens(9))
    bench.add(1, 8, max_tokens(9))
    logged = log_steps(bench, 14)
    (swap_out,) = (s for s in logged if "swapped out" in step_text(s))
    (swap_in,) = (s for s in logged if "swapped in" in step_text(s))
    moved_out = [(move.source_block, move.target_block) for move in step_state(swap_out).blocks_to_swap_out]
    moved_in = [(move.source_block, move.target_block) for move in step_state(swap_in).blocks_to_swap_in]
    assert step_text(swap_out).startswith(f"{len(moved_out)} blocks swapped out, 1 decode, 1 slot released")
    assert sorted(host for _, host in moved_out) == sorted(host for host, _ in moved_in)


@each_row(step_state, step_summary)
def test_a_step_in_flight_has_no_durations(show: Callable[[RecentStep], object]) -> None:
    bench = Bench(small_limits())
    bench.add(0, 3)
    step = bench.schedule()
    logged = RecentStep(step, bench.planner.in_flight[-1].layout)
    assert step_text(logged).endswith("; no result yet")
    shown = str(show(logged))
    assert "duration" not in shown
    assert "round_trip" not in shown
    assert "num_sampled" not in shown


def test_durations_are_in_microseconds() -> None:
    bench = Bench(small_limits())
    bench.add(0, 3)
    (logged,) = log_steps(bench, 1)
    logged.decided_at_s, logged.logged_at_s, logged.answered_at_s = 5.0, 5.001, 5.002
    assert step_summary(logged).round_trip_us == 2000
    assert step_state(logged).round_trip_us == 2000
