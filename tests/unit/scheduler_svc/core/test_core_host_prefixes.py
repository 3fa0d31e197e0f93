"""Named blocks on the host: they are copied ahead of their eviction, found again, and give way to preempted groups."""

from dataclasses import replace
from typing import Any

from octavo_shared.step_wire.step import Step
from scheduler_svc.core.limits import PoolLimits, PreemptionMode
from scheduler_svc.core.step.step_cost import StepCost
from tests.support.driving import Bench, max_tokens, only_admission, small_limits
from tests.support.each_row import each_row

PROMPT = 13  # three full blocks of 4 tokens, and one token to compute


def bench_of(**options: Any) -> Bench:
    """Return a core whose device pool holds two prompts, and whose host pool holds more."""
    sizes: dict[str, Any] = {"blocks": 8, "host_blocks": 16, "prefix_caching": True, "host_prefixes": True}
    return Bench(small_limits(**(sizes | options)))


def evict_all(bench: Bench) -> None:
    """Take every cached block of the device for something else."""
    for of in bench.planner.blocks.groups:
        of.allocator.free(of.allocator.allocate(of.allocator.num_blocks))
    assert bench.planner.blocks.groups[0].allocator.num_cached_blocks == 0


def serve(bench: Bench, arrival: int, prompt: int | list[int] = PROMPT) -> list[Step]:
    """Serve a request to its end, and what follows it."""
    bench.add(arrival, prompt, max_tokens(2))
    return bench.run()


def test_a_prefix_comes_back_from_the_host_after_its_eviction() -> None:
    bench = bench_of()
    first = serve(bench, 0)
    copied = [pair for step in first for pair in step.blocks_to_swap_out.tolist()]
    assert len(copied) == 3, "every full block of prompt and output that is computed"
    evict_all(bench)

    second = serve(bench, 0)

    admission = only_admission(second[0])
    assert admission.num_computed_tokens == 12
    brought = dict(second[0].blocks_to_swap_in.tolist())
    assert sorted(brought) == sorted(host for _, host in copied)
    assert admission.block_ids[:3].tolist() == [brought[host] for _, host in reversed(copied)]
    assert not any(len(step.blocks_to_swap_out) for step in second), "what is there is not copied again"
    assert len(brought) == sum(len(step.blocks_to_swap_in) for step in second) == 3


def test_a_name_is_given_when_its_copy_is_answered_and_never_before() -> None:
    bench = bench_of()
    bench.add(0, PROMPT, max_tokens(1))
    bench.step()
    step = bench.schedule()
    assert len(step.blocks_to_swap_out) == 3
    host = bench.planner.blocks.groups[0].host
    assert host.names is not None
    assert len(host.names) == 0

    bench.process()

    assert len(host.names) == host.allocator.num_cached_blocks == 3


def test_a_step_that_brings_blocks_back_copies_none() -> None:
    bench = bench_of(blocks=12)
    serve(bench, 0)
    evict_all(bench)
    bench.add(1, PROMPT, max_tokens(1))
    bench.step()  # b has ended: its blocks are to be copied
    bench.add(0, PROMPT, max_tokens(1))

    step = bench.schedule()

    assert len(step.blocks_to_swap_in) == 3
    assert not len(step.blocks_to_swap_out)


def test_a_preempted_group_takes_the_blocks_of_copies() -> None:
    bench = bench_of(blocks=8, host_blocks=4, preemption_mode=PreemptionMode.SWAP, max_model_len=32)
    serve(bench, 0)
    host = bench.planner.blocks.groups[0].host
    assert host.allocator.num_cached_blocks == 3

    bench.add(1, 12, max_tokens(18))
    bench.add(2, 12, max_tokens(18))
    bench.run()

    assert bench.planner.preemption.num_preemptions[PreemptionMode.SWAP] >= 1
    assert len(bench.outputs["b"]) == len(bench.outputs["c"]) == 18


def test_what_a_swapped_group_leaves_behind_is_a_copy() -> None:
    bench = bench_of(blocks=8, host_blocks=8, preemption_mode=PreemptionMode.SWAP, max_model_len=32)
    bench.add(0, 12, max_tokens(18))
    bench.add(1, 12, max_tokens(18))

    steps = bench.run()

    returned = next(step for step in steps if len(step.blocks_to_swap_in))
    names = bench.planner.blocks.groups[0].host.names
    assert names is not None
    whole = [host for host, _ in returned.blocks_to_swap_in.tolist() if names.hash_of(host) is not None]
    assert len(whole) >= 2


def test_a_salt_keeps_copies_apart() -> None:
    bench = bench_of()
    bench.add(0, PROMPT, max_tokens(2), cache_salt=1)
    bench.run()
    evict_all(bench)

    bench.add(0, PROMPT, max_tokens(2), cache_salt=2)

    assert only_admission(bench.run()[0]).num_computed_tokens == 0


def test_outputs_of_a_prompt_begin_behind_what_was_brought_for_the_first() -> None:
    bench = bench_of(blocks=12)
    serve(bench, 0)
    evict_all(bench)

    bench.add(0, PROMPT, max_tokens(3), num_sequences=3)
    steps = bench.run()

    assert only_admission(steps[0]).num_computed_tokens == 12
    assert sum(len(step.blocks_to_swap_in) for step in steps) == 3


def test_a_window_brings_only_what_its_next_token_sees() -> None:
    bench = bench_of(blocks=12, sliding_window=6)
    bench = Bench(replace(bench.limits, more_groups=(PoolLimits(12, 0, 16),)))
    serve(bench, 0)
    evict_all(bench)

    first = serve(bench, 0)[0]

    assert only_admission(first).num_computed_tokens == 12
    ends = [sum(of.host.allocator.num_blocks for of in bench.planner.blocks.groups[:1])]
    in_window = [host for host, _ in first.blocks_to_swap_in.tolist() if host < ends[0]]
    assert (len(in_window), len(first.blocks_to_swap_in)) == (2, 5)


# Cost --------------------------------------------------------------------------------------------


@each_row((1e-3, 1e-3, True), (1e-3, 5e-3, False), (0.0, 5e-3, True))
def test_a_prefix_on_the_host_is_computed_where_that_costs_less(token_s: float, block_s: float, brings: bool) -> None:
    """12 tokens against 3 blocks; what is not known is tried."""
    bench = bench_of()
    serve(bench, 0)
    evict_all(bench)
    cost = StepCost()
    cost.token_sums = (2.0, 0.0, 0.0, 2.0, 2.0 * token_s)
    cost.move_sums = (1.0, block_s)
    bench.planner.step_cost = cost

    step = serve(bench, 0)[0]

    assert only_admission(step).num_computed_tokens == (12 if brings else 0)
