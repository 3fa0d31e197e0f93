"""What `schedule` and `process` cost with 1, 4, 16 and 64 of what can be many: in lines of Python, never in time.

A line counts each time it runs, rounds of loops and comprehensions too, so that a loop shows that calls nobody. Steady
steps cost the same however many sequences there are; what must look at each one may do so once.
"""

import sys
from collections.abc import Callable
from types import FrameType

from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.waiting.policy import PriorityPolicy
from scheduler_svc.request.parameters import BeamSearchParams
from tests.support.collection import no_collection
from tests.support.driving import Bench, max_tokens, small_limits
from tests.support.each_row import each_row
from tests.support.toy_executor import hashed_next_token

SIZES = (1, 4, 16, 64)

TraceFunction = Callable[[FrameType, str, object], "TraceFunction | None"]


class LineCounter:
    """Counts the lines of Python that run while it is entered."""

    num_lines = 0

    def __enter__(self) -> "LineCounter":
        self._former = sys.gettrace()
        sys.settrace(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._former)

    def _count(self, _frame: FrameType, event: str, _argument: object) -> TraceFunction:
        self.num_lines += event == "line"
        return self._count


def roomy_bench(max_num_seqs: int = 65, blocks: int = 640, host_blocks: int = 0) -> Bench:
    limits = small_limits(
        max_num_seqs=max_num_seqs,
        budget=4096,
        max_model_len=32,
        vocab_size=300,
        blocks=blocks,
        host_blocks=host_blocks,
        prefix_caching=True,
        preemption_mode=PreemptionMode.SWAP,
    )
    return Bench(limits, hashed_next_token(limits.vocab_size), policy=PriorityPolicy())


def cost_of_step(bench: Bench) -> int:
    """Run a step; return the lines of `schedule` and `process`."""
    counter = LineCounter()
    with no_collection(), counter:
        step = bench.planner.schedule(now_s=0.0).step
    assert step is not None
    result = bench.executor.execute(step)
    with no_collection(), counter:
        bench.planner.process(result)
    return counter.num_lines


# Benches before the step that counts ------------------------------------------------------------------


def running_groups(number: int) -> Bench:
    bench = roomy_bench()
    for arrival in range(number):
        bench.add(arrival, 6)
    return after_steps(bench, 2)  # the next step opens a block for each


def outputs_of_a_request(number: int) -> Bench:
    bench = roomy_bench()
    bench.add(0, 6, num_sequences=number)
    return after_steps(bench, 2)


def groups_of_four_outputs(number: int) -> Bench:
    """One more waits for a slot, so that somebody asks how many are free."""
    bench = roomy_bench(max_num_seqs=4 * number, blocks=1024)
    for arrival in range(number):
        bench.add(arrival, 5, num_sequences=4)
    bench.add(number, 5)
    return after_steps(bench, 2)


def waiting_groups(number: int) -> Bench:
    bench = roomy_bench(max_num_seqs=1)
    for arrival in range(number + 1):
        bench.add(arrival, 5)
    return after_steps(bench, 2)


def outputs_of_a_swapped_request(number: int) -> Bench:
    """It lacks one block to come back."""
    bench = roomy_bench(blocks=6 + 2 * number, host_blocks=200)
    bench.add(0, 21)
    bench.add(1, 7, num_sequences=number, priority=1)
    after_steps(bench, 4)
    assert len(bench.planner.swapped) == 1
    return bench


def tenants_that_run(number: int) -> Bench:
    bench = roomy_bench()
    for arrival in range(number):
        bench.add(arrival, 5, tenant=str(arrival))
    return after_steps(bench, 2)


def groups_that_end(number: int) -> Bench:
    bench = roomy_bench()
    for arrival in range(number):
        bench.add(arrival, 6, max_tokens(3))
    return after_steps(bench, 2)


def outputs_that_end(number: int, num_prompt_tokens: int = 10) -> Bench:
    bench = roomy_bench()
    bench.add(0, num_prompt_tokens, max_tokens(3), num_sequences=number)
    return after_steps(bench, 2)


def live_beams(number: int) -> Bench:
    bench = roomy_bench()
    bench.add(0, 6, beam_search=BeamSearchParams(number))
    return after_steps(bench, 3)


def after_steps(bench: Bench, num_steps: int) -> Bench:
    for _ in range(num_steps):
        bench.step()
    return bench


@each_row(running_groups, outputs_of_a_request, groups_of_four_outputs, waiting_groups)
def test_a_steady_step_costs_the_same_however_many_there_are(many: Callable[[int], Bench]) -> None:
    costs = [cost_of_step(many(number)) for number in SIZES]

    assert max(costs) <= 1.02 * costs[0], costs


@each_row(tenants_that_run, groups_that_end, outputs_that_end, outputs_of_a_swapped_request, live_beams)
def test_a_step_that_looks_at_each_one_looks_once(many: Callable[[int], Bench]) -> None:
    """Each one more costs what each one before did; looking at all of them for each would cost four times as much."""
    costs = [cost_of_step(many(number)) for number in SIZES]

    each_of_16, each_of_64 = (costs[2] - costs[1]) / (16 - 4), (costs[3] - costs[2]) / (64 - 16)
    assert each_of_64 <= 1.5 * each_of_16, costs


def test_an_output_that_ends_does_not_hash_the_prompt_again() -> None:
    short, long = (cost_of_step(outputs_that_end(16, num_prompt_tokens)) for num_prompt_tokens in (10, 26))

    assert long <= 1.02 * short
