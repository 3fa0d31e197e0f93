"""How much a step may carry: the known tokens of what it admits, cached ones included."""

from dataclasses import replace

from scheduler_svc.core.limits import PreemptionMode
from tests.support.driving import Bench, max_tokens, small_limits


def bench_with(max_admitted_tokens: int) -> Bench:
    limits = small_limits(blocks=40, prefix_caching=True, max_num_seqs=4, host_blocks=8)
    return Bench(replace(limits, max_admitted_tokens=max_admitted_tokens))


def test_prefix_hits_do_not_make_a_step_larger_than_its_message() -> None:
    bench = bench_with(40)
    prompt = list(range(500, 516))
    bench.add(0, [*prompt, 1], max_tokens(1))
    bench.run()
    for arrival in (1, 2, 3):
        bench.add(arrival, [*prompt, arrival], max_tokens(4))

    admitted = [len(step.delta.admissions) for step in (bench.schedule(), bench.schedule())]
    assert admitted == [2, 1], "17 known tokens each, of which the budget counts one"
    bench.run()
    assert all(len(bench.outputs[name]) == 4 for name in ("b", "c", "d"))


def test_a_group_with_more_has_a_step_for_itself() -> None:
    bench = bench_with(8)
    bench.add(0, 12, max_tokens(2))
    bench.add(1, 2, max_tokens(2))
    assert [admission.num_prompt_tokens for admission in bench.schedule().delta.admissions] == [12]
    assert [admission.num_prompt_tokens for admission in bench.schedule().delta.admissions] == [2]


def test_groups_come_back_from_the_host_pool_one_by_one_if_they_are_long() -> None:
    limits = small_limits(blocks=10, max_num_seqs=6, budget=32, host_blocks=20, preemption_mode=PreemptionMode.SWAP)
    bench = Bench(replace(limits, max_admitted_tokens=16))
    for arrival in range(3):
        bench.add(arrival, 8, max_tokens(12))
    num_swapped_in: list[int] = []
    while (step := bench.try_schedule()) is not None:
        if len(step.blocks_to_swap_in):
            num_swapped_in.append(sum(len(admission.token_ids) for admission in step.delta.admissions))
        bench.process()
    assert num_swapped_in, "nothing was swapped"
    assert all(len(bench.outputs[name]) == 12 for name in ("a", "b", "c"))
