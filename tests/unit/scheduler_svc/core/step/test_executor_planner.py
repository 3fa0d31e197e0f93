"""What a core decides in each step: the budget, chunks, slots, and blocks of prompts and outputs."""

from octavo_shared.step_wire.step import INT32_MAX, SAMPLING_ROW
from tests.support.driving import Bench, admitted, chunks, delivered, group, max_tokens, only_admission, small_limits
from tests.support.each_row import each_row


def test_decodes_come_before_prefill_chunks() -> None:
    bench = Bench(small_limits(budget=4))
    bench.add(0, 3)
    bench.step()
    bench.add(1, 8)

    bench.schedule()

    layout = bench.planner.in_flight[-1].layout
    assert list(zip(layout.slots.tolist(), layout.lengths.tolist(), strict=True)) == [(0, 1), (1, 3)]


def test_prompt_longer_than_the_budget_is_chunked() -> None:
    bench = Bench(small_limits(budget=4))
    bench.add(0, 10)

    sent, tokens = [], []
    for _ in range(3):
        sent.append(chunks(bench.schedule()))
        tokens.append(delivered(bench.process()))

    assert sent == [{0: 4}, {0: 4}, {0: 2}]
    assert tokens == [{}, {}, {"a": 110}]


def test_running_prefills_come_before_admissions() -> None:
    bench = Bench(small_limits(budget=4))
    bench.add(0, 6)
    bench.add(1, 6)
    bench.step()

    step = bench.schedule()

    assert chunks(step) == {0: 2, 1: 2}
    assert admitted(step) == [200]


def test_a_full_budget_admits_nobody() -> None:
    bench = Bench(small_limits(budget=4))
    bench.add(0, 9)
    bench.add(1, 1)

    assert admitted(bench.schedule()) == [100]
    assert admitted(bench.schedule()) == []
    assert admitted(bench.schedule()) == [200]


def test_a_prompt_may_begin_with_what_is_left_of_the_budget() -> None:
    bench = Bench(small_limits(budget=5))
    bench.add(0, 4)
    bench.add(1, 4)

    assert chunks(bench.schedule()) == {0: 4, 1: 1}


def test_requests_are_admitted_by_arrival_whatever_the_order_of_add() -> None:
    bench = Bench(small_limits(max_num_seqs=1))
    bench.add(1, 2)
    bench.add(0, 2)

    bench.schedule()

    assert (bench.running, bench.waiting) == ("a", "b")


def test_a_small_request_does_not_pass_a_large_head() -> None:
    bench = Bench(small_limits(blocks=6))
    bench.add(0, 12)
    bench.add(1, 16)
    bench.add(2, 1)

    bench.schedule()

    assert bench.waiting == "bc"


def test_no_more_than_max_num_seqs_run() -> None:
    bench = Bench(small_limits(max_num_seqs=2))
    for arrival in range(3):
        bench.add(arrival, 1)

    bench.schedule()

    assert (bench.running, bench.waiting) == ("ab", "c")
    assert len(bench.planner.groups) == 2


def test_nothing_is_scheduled_without_work() -> None:
    bench = Bench(small_limits())

    assert bench.try_schedule() is None
    assert bench.planner.last_scheduled_step_id == 0


def test_step_ids_count_from_one_without_gaps_and_carry_the_epoch() -> None:
    bench = Bench(small_limits(), epoch=7)
    bench.add(0, 2)

    steps = [bench.schedule() for _ in range(3)]

    assert [(step.epoch, step.step_id) for step in steps] == [(7, 1), (7, 2), (7, 3)]


@each_row((23, True), (24, False))
def test_a_prompt_needs_room_for_one_token_more(num_tokens: int, fits: bool) -> None:
    planner = Bench(small_limits(max_model_len=24)).planner

    assert planner.admissions.can_ever_admit(group(0, num_tokens)) is fits


def test_a_group_needs_as_many_slots_as_it_has_sequences() -> None:
    planner = Bench(small_limits(max_num_seqs=3)).planner

    assert planner.admissions.can_ever_admit(group(0, 2, num_sequences=3))
    assert not planner.admissions.can_ever_admit(group(0, 2, num_sequences=4))


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


def test_tokens_count_as_computed_when_they_are_acknowledged() -> None:
    bench = Bench(small_limits(budget=4))
    bench.add(0, 6)
    bench.schedule()
    bench.schedule()
    seen = [int(bench.planner.batch.num_computed_tokens[0])]
    for _ in range(2):
        bench.process()
        seen.append(int(bench.planner.batch.num_computed_tokens[0]))

    assert seen == [0, 4, 6]


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


@each_row(1, 2, 3)
def test_tokens_are_sampled_before_their_predecessors_are_known(depth: int) -> None:
    bench = Bench(small_limits())
    bench.add(0, 3, max_tokens(6))
    for _ in range(depth):
        bench.schedule()

    assert len(bench.planner.in_flight) == depth
    bench.run(depth)
    assert bench.outputs == {"a": [103, 104, 105, 106, 107, 108]}


def test_no_step_runs_ahead_of_max_tokens() -> None:
    bench = Bench(small_limits())
    bench.add(0, 3, max_tokens(2))
    bench.schedule()
    bench.schedule()

    assert bench.try_schedule() is None


def test_a_sequence_at_its_limit_is_held_back_while_others_go_on() -> None:
    bench = Bench(small_limits())
    bench.add(0, 3, max_tokens(1))
    bench.add(1, 3)
    bench.schedule()

    step = bench.schedule()

    assert step.delta.deactivated_slots.tolist() == [0]
    assert delivered(bench.process()) == {"a": 103, "b": 203}
    assert delivered(bench.process()) == {"b": 204}


def test_a_steady_decode_step_changes_nothing_in_the_table() -> None:
    bench = Bench(small_limits())
    bench.add(0, 1)
    bench.step()
    bench.step()

    delta = bench.schedule().delta

    changes = (delta.released_slots, delta.activated_slots, delta.deactivated_slots, delta.appended_blocks)
    assert [len(change) for change in changes] == [0, 0, 0, 0]
    assert not delta.admissions


def test_the_sampling_row_goes_to_the_executor() -> None:
    bench = Bench(small_limits())
    bench.add(0, 2)

    bench.schedule()

    assert bench.executor.table.sampling[0].dtype == SAMPLING_ROW
    assert bench.executor.table.sampling[0].item() == group(0, 2).sampling.as_tuple()


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
