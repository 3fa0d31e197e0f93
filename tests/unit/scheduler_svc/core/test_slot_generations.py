"""The generation of a slot counts its uses, for ever: after the largest int32 it begins again."""

import pytest

from scheduler_svc.core.sequence import Sequence
from shared.step import INT32_MAX
from tests.support.driving import Bench, max_tokens, small_limits


def worn_bench() -> Bench:
    """A core and an executor whose only slot has one use left before its generation begins again."""
    bench = Bench(small_limits(max_num_seqs=1))
    for table in (bench.core.table, bench.executor.table):
        table.generation[:] = INT32_MAX - 1
    return bench


@pytest.mark.parametrize("num_steps_in_flight", [1, 2, 3])
def test_requests_before_and_after_the_largest_generation_get_their_tokens(num_steps_in_flight: int) -> None:
    bench = worn_bench()
    sequences: list[Sequence] = [bench.add(arrival, 4, max_tokens(3)).sequences[0] for arrival in range(3)]

    bench.run(num_steps_in_flight)

    assert [sequence.generation for sequence in sequences] == [INT32_MAX, 0, 1]
    assert bench.outputs == {"a": [104, 105, 106], "b": [204, 205, 206], "c": [304, 305, 306]}


def test_a_token_of_the_largest_generation_does_not_go_to_its_successor() -> None:
    bench = worn_bench()
    left = bench.add(0, 4)
    bench.schedule()
    bench.core.abort(left)
    bench.add(1, 4, max_tokens(2))
    bench.schedule()

    assert bench.process().token_ids == []
    bench.run()
    assert bench.outputs == {"b": [204, 205]}
