"""Groups of several outputs: one prompt, forks, and copy-on-write."""

from itertools import product

import numpy as np

from octavo_shared.step_wire.token_rules import TokenRules
from scheduler_svc.request.parameters import BeamSearchParams
from tests.support.driving import Bench, admitted, chunks, delivered, group, max_tokens, small_limits
from tests.support.each_row import each_row


def shared_blocks(bench: Bench, members: int) -> int:
    """Return how many leading blocks the first `members` slots have in common."""
    tables = [bench.planner.table.blocks_of(slot).tolist() for slot in range(members)]
    return sum(len(set(blocks)) == 1 for blocks in zip(*tables, strict=False))


# The prompt --------------------------------------------------------------------------------------


def test_the_prompt_is_computed_once_and_the_children_fork_with_its_last_chunk() -> None:
    bench = Bench(small_limits(budget=4))
    bench.add(0, 7, num_sequences=3)

    first, last = bench.schedule(), bench.schedule()

    assert (chunks(first), chunks(last)) == ({0: 4}, {0: 3})
    assert first.delta.forks == ()
    assert [(fork.parent_slot, fork.slot) for fork in last.delta.forks] == [(0, 1), (0, 2)]
    assert admitted(first) + admitted(last) == [100]


def test_every_output_gets_its_own_first_token_from_that_step() -> None:
    bench = Bench(small_limits())
    bench.add(0, 6, num_sequences=3)

    assert delivered(bench.step()) == {"a0": 106, "a1": 107, "a2": 108}


def test_children_sample_with_their_own_output_index() -> None:
    bench = Bench(small_limits())
    bench.add(0, 6, num_sequences=3)

    step = bench.schedule()

    assert step.delta.admissions[0].sampling.output_index == 0
    assert [fork.sampling.output_index for fork in step.delta.forks] == [1, 2]


def test_forks_share_all_blocks_of_the_prompt() -> None:
    bench = Bench(small_limits())
    bench.add(0, 6, num_sequences=3)

    bench.step()

    assert bench.num_free_blocks == 6
    assert shared_blocks(bench, members=3) == 2
    assert bench.planner.blocks.allocator.ref_counts[:2].tolist() == [3, 3]


def test_a_group_is_admitted_only_when_it_has_slots_for_all_its_sequences() -> None:
    bench = Bench(small_limits(max_num_seqs=4))
    bench.add(0, 2)
    bench.add(1, 2)
    bench.add(2, 2, num_sequences=3)

    bench.schedule()

    assert (bench.running, bench.waiting) == ("ab", "c")


def test_slots_of_unborn_children_are_not_given_to_others() -> None:
    bench = Bench(small_limits(max_num_seqs=3, budget=4))
    bench.add(0, 6, num_sequences=3)
    bench.add(1, 1)

    bench.schedule()
    bench.schedule()

    assert (bench.running, bench.waiting) == ("a", "b")


@each_row((8, 3, False), (7, 3, True), (8, 2, True))
def test_admission_counts_the_blocks_of_the_first_fork(num_prompt_tokens: int, num_sequences: int, fits: bool) -> None:
    """2 blocks for the prompt; then a block for each fork, or for each but one that writes in place."""
    planner = Bench(small_limits(blocks=4, max_model_len=16)).planner

    assert planner.admissions.can_ever_admit(group(0, num_prompt_tokens, num_sequences=num_sequences)) is fits


# Copy-on-write -----------------------------------------------------------------------------------


@each_row(2, 3, 4)
def test_of_n_sharers_all_but_one_get_a_copy_at_their_next_append(num_sequences: int) -> None:
    bench = Bench(small_limits())
    bench.add(0, 6, num_sequences=num_sequences)
    bench.step()

    step = bench.schedule()

    assert step.blocks_to_copy[:, 0].tolist() == [1] * (num_sequences - 1)
    assert len(set(step.blocks_to_copy[:, 1].tolist())) == num_sequences - 1
    assert len(step.delta.replaced_blocks) == num_sequences - 1
    assert shared_blocks(bench, num_sequences) == 1


def test_the_copies_replace_the_last_block_in_the_tables_of_their_writers() -> None:
    bench = Bench(small_limits())
    a = bench.add(0, 6, num_sequences=2)
    bench.step()

    step = bench.schedule()

    ((source, copy),) = step.blocks_to_copy.tolist()
    assert step.delta.replaced_blocks.tolist() == [[0, 1, copy]]
    assert [bench.blocks_of(sequence)[1] for sequence in a.sequences] == [copy, source]


def test_nothing_is_copied_at_a_block_boundary() -> None:
    bench = Bench(small_limits())
    bench.add(0, 8, num_sequences=3)
    bench.step()

    step = bench.schedule()

    assert len(step.blocks_to_copy) == 0
    assert step.delta.appended_blocks[:, 0].tolist() == [0, 1, 2]
    assert shared_blocks(bench, members=3) == 2


def test_a_block_is_copied_once_only() -> None:
    bench = Bench(small_limits())
    bench.add(0, 5, num_sequences=2)
    bench.step()
    bench.step()

    assert len(bench.schedule().blocks_to_copy) == 0


def test_a_fork_that_ended_before_the_next_append_needs_no_copy() -> None:
    bench = Bench(small_limits())
    a = bench.add(0, 6, num_sequences=2)
    bench.step()
    bench.planner.finish(a.sequences[1])

    step = bench.schedule()

    assert len(step.blocks_to_copy) == 0
    assert len(bench.planner.batch.shares_last_block) == 0


def test_a_writer_at_its_limit_leaves_the_shared_block_to_the_others() -> None:
    bench = Bench(small_limits())
    bench.add(0, 6, max_tokens(1), num_sequences=2)

    steps = bench.run(2)

    assert all(len(step.blocks_to_copy) == 0 for step in steps)
    assert bench.outputs == {"a0": [106], "a1": [107]}


def test_a_copy_takes_no_block_that_the_same_step_frees() -> None:
    """Copies read their sources before anything is written; the executor would notice otherwise."""
    bench = Bench(small_limits(blocks=4, max_model_len=16, budget=16))
    bench.add(0, 2, max_tokens(3), num_sequences=3)
    bench.add(1, 3, max_tokens(4))

    bench.run()

    assert bench.outputs["a2"] == [104, 107, 110]
    assert bench.outputs["b"] == [203, 204, 205, 206]


def test_copies_that_lack_blocks_preempt_the_last_group() -> None:
    bench = Bench(small_limits(blocks=4, max_model_len=16, max_num_seqs=5))
    bench.add(0, 6, max_tokens(3), num_sequences=2)
    bench.add(1, 1, max_tokens(3))
    bench.step()
    assert bench.num_free_blocks == 1
    bench.queue.add(group(2, 1, max_tokens(3)))
    bench.step()  # the copy takes the last block before c can have it

    assert (bench.running, bench.waiting) == ("ab", "c")
    bench.run()
    assert bench.outputs["a1"] == [107, 109, 111]


# Whole lives -------------------------------------------------------------------------------------


@each_row(*product([1, 2, 3], [3, 4, 5]))
def test_the_outputs_of_a_group_are_those_of_each_alone(depth: int, num_prompt_tokens: int) -> None:
    bench = Bench(small_limits(budget=4))
    bench.add(0, num_prompt_tokens, max_tokens(6), num_sequences=3)

    bench.run(depth)

    last = 100 + num_prompt_tokens - 1
    for index in range(3):
        assert bench.outputs[f"a{index}"] == [last + (index + 1) * count for count in range(1, 7)]


def test_a_group_and_lone_requests_mix_in_one_step() -> None:
    bench = Bench(small_limits())
    bench.add(0, 2, num_sequences=2)
    bench.add(1, 2)
    bench.step()

    assert delivered(bench.step()) == {"a0": 103, "a1": 105, "b": 203}


# What belongs to all of a group -----------------------------------------------------------------------


@each_row(0, 3)
def test_forks_have_the_token_rules_and_the_salt_of_their_group(beam_width: int) -> None:
    bench = Bench(small_limits(vocab_size=300))
    search = BeamSearchParams(beam_width) if beam_width else None
    added = bench.add(0, 6, max_tokens(4), num_sequences=1 if search else 3, beam_search=search, cache_salt=5)
    added.token_rules = TokenRules(banned_token_ids=np.array([7], np.int32))

    bench.step()
    bench.step()

    for table in (bench.planner.table, bench.executor.table):
        assert [rules.banned_token_ids.tolist() for rules in table.token_rules[table.live]] == [[7]] * 3
        assert table.cache_salt[table.live].tolist() == [5, 5, 5]


# When blocks lack ------------------------------------------------------------------------------------


def test_nobody_is_admitted_while_beams_are_held_back_for_lack_of_blocks() -> None:
    """The beams of `a` need two blocks, one is free, and `b` cannot make room: its candidates are on their way."""
    bench = Bench(small_limits(blocks=7, budget=12, max_num_seqs=6))
    for arrival, num_tokens in enumerate((12, 11)):
        bench.add(arrival, num_tokens, max_tokens(3), beam_search=BeamSearchParams(2))
        bench.schedule()
    bench.process()
    bench.add(2, 1, max_tokens(1))

    assert bench.try_schedule() is None

    assert (bench.running, bench.waiting, bench.num_free_blocks) == ("ab", "c", 1)
    bench.run()
    assert bench.outputs["c"] == [301]
