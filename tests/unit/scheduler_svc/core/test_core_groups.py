"""Groups of several outputs: one prompt, forks, and copy-on-write."""

from itertools import product

import numpy as np

from octavo_shared.step_wire.token_rules import TokenRules
from scheduler_svc.request.parameters import BeamSearchParams
from tests.support.driving import Bench, group, max_tokens, small_limits
from tests.support.each_row import each_row


def shared_blocks(bench: Bench, members: int) -> int:
    """Return how many leading blocks the first `members` slots have in common."""
    tables = [bench.planner.table.blocks_of(slot).tolist() for slot in range(members)]
    return sum(len(set(blocks)) == 1 for blocks in zip(*tables, strict=False))


# The prompt --------------------------------------------------------------------------------------


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


# Whole lives -------------------------------------------------------------------------------------


@each_row(*product([1, 2, 3], [3, 4, 5]))
def test_the_outputs_of_a_group_are_those_of_each_alone(depth: int, num_prompt_tokens: int) -> None:
    bench = Bench(small_limits(budget=4))
    bench.add(0, num_prompt_tokens, max_tokens(6), num_sequences=3)

    bench.run(depth)

    last = 100 + num_prompt_tokens - 1
    for index in range(3):
        assert bench.outputs[f"a{index}"] == [last + (index + 1) * count for count in range(1, 7)]


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
