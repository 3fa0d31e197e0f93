"""How much a step may carry: all that it admits, tokens that are in the cache included."""

from dataclasses import replace

import numpy as np

from octavo_shared.step_wire.token_rules import TokenRules
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.step.step_size import admission_bytes
from tests.support.driving import Bench, max_tokens, small_limits


def bench_with(max_admitted_bytes: int) -> Bench:
    limits = small_limits(blocks=40, prefix_caching=True, max_num_seqs=4, host_blocks=8)
    return Bench(replace(limits, max_admitted_bytes=max_admitted_bytes))


def test_prefix_hits_do_not_make_a_step_larger_than_its_message() -> None:
    bench = bench_with(2 * admission_bytes(17, 5) + 8)
    prompt = list(range(500, 516))
    bench.add(0, [*prompt, 1], max_tokens(1))
    bench.run()
    for arrival in (1, 2, 3):
        bench.add(arrival, [*prompt, arrival], max_tokens(4))

    admitted = [len(step.delta.admissions) for step in (bench.schedule(), bench.schedule())]
    assert admitted == [2, 1], "17 known tokens each, of which the budget counts one"
    bench.run()
    assert all(len(bench.outputs[name]) == 4 for name in ("b", "c", "d"))


def test_token_rules_count() -> None:
    bench = bench_with(2 * admission_bytes(6, 2) + 8 * 2**10)
    for arrival in range(4):
        rules = (
            TokenRules(allowed_mask=b"\1" * 8 * 2**10)
            if arrival < 2
            else TokenRules(banned_token_ids=np.arange(4, dtype=np.int32))
        )
        bench.add(arrival, 6, max_tokens(1)).token_rules = rules
    assert [len(bench.schedule().delta.admissions) for _ in range(3)] == [1, 1, 2]


def test_a_group_that_has_grown_out_of_a_message_ends_with_the_numbers() -> None:
    for mode in PreemptionMode:
        limits = small_limits(blocks=8, max_num_seqs=6, budget=32, host_blocks=20, preemption_mode=mode)
        bench = Bench(replace(limits, max_admitted_bytes=2 * admission_bytes(8, 3)))
        bench.add(0, 4, max_tokens(12))
        wide = bench.add(1, 4, max_tokens(12), num_sequences=3)
        while not bench.failures:
            bench.step()
        [failure] = bench.failures
        assert failure.group is wide
        assert "computing its 3 sequences needs a message of up to" in failure.message
        assert "--max-message-bytes" in failure.message
        bench.run()
        assert len(bench.outputs["a"]) == 12


def test_groups_come_back_from_the_host_pool_one_by_one_if_they_are_long() -> None:
    limits = small_limits(blocks=10, max_num_seqs=6, budget=32, host_blocks=20, preemption_mode=PreemptionMode.SWAP)
    bench = Bench(replace(limits, max_admitted_bytes=admission_bytes(20, 6)))
    for arrival in range(3):
        bench.add(arrival, 8, max_tokens(12))
    num_swapped_in: list[int] = []
    while (step := bench.try_schedule()) is not None:
        if len(step.blocks_to_swap_in):
            num_swapped_in.append(sum(len(admission.token_ids) for admission in step.delta.admissions))
        bench.process()
    assert num_swapped_in, "nothing was swapped"
    assert all(len(bench.outputs[name]) == 12 for name in ("a", "b", "c"))
