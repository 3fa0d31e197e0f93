"""What a core decides in each step: the budget, chunks, slots, and blocks of prompts and outputs."""

from octavo_shared.step_wire.step import INT32_MAX
from tests.support.driving import Bench, admitted, chunks, delivered, group, max_tokens, only_admission, small_limits
from tests.support.each_row import each_row


def test_prompt_longer_than_the_budget_is_chunked() -> None:
    bench = Bench(small_limits(budget=4))
    bench.add(0, 10)

    sent, tokens = [], []
    for _ in range(3):
        sent.append(chunks(bench.schedule()))
        tokens.append(delivered(bench.process()))

    assert sent == [{0: 4}, {0: 4}, {0: 2}]
    assert tokens == [{}, {}, {"a": 110}]


@each_row((23, True), (24, False))
def test_a_prompt_needs_room_for_one_token_more(num_tokens: int, fits: bool) -> None:
    planner = Bench(small_limits(max_model_len=24)).planner

    assert planner.admissions.can_ever_admit(group(0, num_tokens)) is fits


def test_what_has_outgrown_the_executor_fails_with_numbers_when_it_is_its_turn() -> None:
    bench = Bench(small_limits(max_model_len=24))
    too_long = group(0, 24)
    too_long.has_run = True
    bench.queue.add(too_long)
    bench.add(1, 2)

    step = bench.schedule()

    (failure,) = bench.failures
    assert failure.group is too_long
    assert "24 tokens" in failure.message
    assert admitted(step) == [200]
    bench.schedule()
    assert bench.failures == [failure]


@each_row((1, 1, 4), (3, 1, 2), (4, 1, 1), (5, 2, 4))
def test_block_boundary(
    num_prompt_tokens: int, num_blocks_at_admission: int, num_output_tokens_before_the_next_block: int
) -> None:
    bench = Bench(small_limits(block_size=4))
    bench.add(0, num_prompt_tokens)

    first = bench.schedule()
    num_output_tokens = len(bench.process().token_ids)
    while not len(bench.schedule().delta.appended_blocks):
        num_output_tokens += len(bench.process().token_ids)

    assert len(only_admission(first).block_ids) == num_blocks_at_admission
    assert num_output_tokens == num_output_tokens_before_the_next_block


def test_no_step_runs_ahead_of_max_tokens() -> None:
    bench = Bench(small_limits())
    bench.add(0, 3, max_tokens(2))
    bench.schedule()
    bench.schedule()

    assert bench.try_schedule() is None


def test_the_time_of_its_first_step_is_noted_once() -> None:
    bench = Bench(small_limits())
    added = bench.add(0, 2)
    assert added.first_scheduled_at_s is None

    for now_s in (5.0, 6.0):
        bench.planner.schedule(now_s)

    assert added.first_scheduled_at_s == 5.0


# The generation of a slot counts its uses, for ever: after the largest int32 it begins again. ---------


def worn_bench() -> Bench:
    """A core and an executor whose only slot has one use left before its generation begins again."""
    bench = Bench(small_limits(max_num_seqs=1))
    for table in (bench.planner.table, bench.executor.table):
        table.generation[:] = INT32_MAX - 1
    return bench


@each_row(1, 2, 4)
def test_requests_before_and_after_the_largest_generation_get_their_tokens(num_steps_in_flight: int) -> None:
    bench = worn_bench()
    sequences = [bench.add(arrival, 4, max_tokens(3)).sequences[0] for arrival in range(3)]

    bench.run(num_steps_in_flight)

    assert [sequence.generation for sequence in sequences] == [INT32_MAX, 0, 1]
    assert bench.outputs == {"a": [104, 105, 106], "b": [204, 205, 206], "c": [304, 305, 306]}


def test_a_token_of_the_largest_generation_does_not_go_to_its_successor() -> None:
    bench = worn_bench()
    left = bench.add(0, 4)
    bench.schedule()
    bench.planner.abort(left)
    bench.add(1, 4, max_tokens(2))
    bench.schedule()

    assert bench.process().token_ids == []
    bench.run()
    assert bench.outputs == {"b": [204, 205]}
