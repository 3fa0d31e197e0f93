"""The mirror equals the truth after any sequence of deltas; a refused delta changes neither.

The steps cross the wire as bytes. The mirror checks every delta and resolves it at once, as an
executor does; the truth trusts them, as the scheduler does, and resolves up to four steps later. Rows with an
allowance get any number of tokens up to it, or none, as one with a flag.
"""

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_shared.errors import InvalidStepError
from octavo_shared.step_wire.batch_table import BatchTable, StepLayout
from octavo_shared.step_wire.step import (
    UNKNOWN_TOKEN,
    Admission,
    Fork,
    Int32Array,
    SamplingRow,
    Step,
    TableDelta,
    TokenCounts,
    pairs,
)
from tests.support.random_steps import BLOCK_SIZE, MAX_BLOCKS, MAX_MODEL_LEN, NUM_BLOCKS, NUM_SLOTS, StepMaker
from tests.support.tables import assert_columns_equal, assert_same, columns
from tests.support.toy_executor import over_the_wire

# What a layout has of lengths: the truth has upper bounds.
OF_LENGTHS = {"starts", "sample_positions", "sample_places", "allowances"}


def new_table() -> BatchTable:
    return BatchTable(NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS)


@dataclass
class Pair:
    """The two tables, and the samples that the truth has not seen."""

    truth: BatchTable = field(default_factory=new_table)
    mirror: BatchTable = field(default_factory=new_table)
    unseen: deque[tuple[StepLayout, Int32Array, TokenCounts | None]] = field(default_factory=deque)
    told: list[tuple[StepLayout, TokenCounts]] = field(default_factory=list)
    # The last generation of each slot of which a row got no token, as with a flag: the truth does not know where later
    # ones are, for it ends.
    flagged: Int32Array = field(default_factory=lambda: np.full(NUM_SLOTS, -1, np.int32))

    def knows_all_tokens(self, slot: int) -> bool:
        """Whether no sample of the slot is unseen, and it has not ended: a fork copies what the truth knows."""
        is_unseen = any(slot in layout.sample_slots for layout, _, _ in self.unseen)
        return not is_unseen and bool(self.flagged[slot] != self.truth.generation[slot])

    def apply(self, step: Step, rng: random.Random) -> None:
        received = over_the_wire(step)
        for name in ("blocks_to_swap_out", "blocks_to_swap_in", "blocks_to_copy"):
            assert_same(name, getattr(received, name), getattr(step, name))
        sent = [admission.traceparent for admission in step.delta.admissions]
        assert [admission.traceparent for admission in received.delta.admissions] == sent
        layout, mirrored = self.truth.apply(step.delta, trusted=True), self.mirror.apply(received.delta)
        assert_same("most_tokens", mirrored.most_tokens, layout.most_tokens)
        has_bounds = layout.allowances is not None or (self.flagged == self.truth.generation).any()
        for name in StepLayout.__dataclass_fields__.keys() - (OF_LENGTHS if has_bounds else set()):
            assert_same(name, getattr(mirrored, name), getattr(layout, name))
        counts = None
        sampled = np.array([rng.randrange(1000) for _ in layout.sample_slots], np.int32)
        if mirrored.allowances is not None and rng.random() < 0.9:
            least = [most if most < 1 else rng.random() > 0.05 for most in layout.most_tokens]
            counts = np.array(
                [rng.randint(*bounds) for bounds in zip(least, layout.most_tokens, strict=True)], np.uint8
            )
            sampled = np.array([rng.randrange(1000) for _ in range(counts.sum())], np.int32)
            has_none = (counts == 0) & (layout.most_tokens > 0)
            self.flagged[layout.sample_slots[has_none]] = layout.sample_generations[has_none]
        elif layout.num_candidates is not None:
            sampled[layout.num_candidates > 0] = UNKNOWN_TOKEN
        assert self.mirror.resolve(mirrored, sampled, counts).all()
        self.unseen.append((layout, sampled, counts))

    def acknowledge(self, num_steps_behind: int) -> None:
        while len(self.unseen) > num_steps_behind:
            layout, sampled, counts = self.unseen.popleft()
            self.truth.resolve(layout, sampled, counts)
            has_token = layout.most_tokens > 0
            self.told.append((layout, has_token.astype(np.uint8) if counts is None else counts))

    def check_equal(self) -> None:
        truth, mirror = columns(self.truth), columns(self.mirror)
        live, has_ended = truth["live"], self.flagged == self.truth.generation
        num_open = self.truth.num_open_tokens
        for name in ("num_tokens", "num_scheduled_tokens"):
            upper, found = truth[name], mirror[name]
            is_between = (found <= upper) & (found >= upper - num_open)
            assert is_between[live & ~has_ended].all(), f"{name} is {found}, not up to {upper}"
            is_open = (num_open > 0) & bool(self.unseen)
            truth[name] = np.where(~live | has_ended | is_open, found, upper)
        assert not self.mirror.num_open_tokens[live].any()
        if not self.unseen:
            assert not self.truth.num_open_tokens[live].any()
            known = live & ~has_ended
            assert_same("num_known_tokens", self.mirror.num_known_tokens[known], self.truth.num_known_tokens[known])
        for slot in range(NUM_SLOTS):
            num_tokens = min(truth["num_tokens"][slot], mirror["num_tokens"][slot])
            if num_open[slot]:
                num_tokens = self.truth.num_known_tokens[slot]
            known, same = truth["token_ids"][slot, :num_tokens], mirror["token_ids"][slot, :num_tokens]
            if live[slot] and not has_ended[slot]:
                assert_same("token_ids", same[known != UNKNOWN_TOKEN], known[known != UNKNOWN_TOKEN])
                assert self.unseen or UNKNOWN_TOKEN not in known
        assert_columns_equal(truth | {"token_ids": mirror["token_ids"]}, mirror)
        assert self.truth.digest() == self.mirror.digest()


@settings(max_examples=settings().max_examples // 2)  # each example compares both tables up to 25 times
@given(
    rng=st.randoms(use_true_random=False),
    num_steps=st.integers(1, 25),
    delays=st.lists(st.integers(0, 4), min_size=1),
    most_allowance=st.sampled_from([1, 4]),
)
def test_mirror_equals_truth_after_any_deltas_however_many_steps_are_resolved_late(
    rng: random.Random, num_steps: int, delays: list[int], most_allowance: int
) -> None:
    both, maker = Pair(), StepMaker(rng, most_allowance)

    def acknowledge(num_steps_behind: int) -> None:
        both.acknowledge(num_steps_behind)
        while both.told:
            maker.resolve(*both.told.pop())
        both.check_equal()

    for step in range(num_steps):
        both.apply(maker.make(both.knows_all_tokens), rng)
        acknowledge(delays[step % len(delays)])

    acknowledge(0)
    for slot, state in maker.slots.items():
        assert both.mirror.num_tokens[slot] == state.num_tokens
        assert both.mirror.num_scheduled_tokens[slot] == state.num_scheduled
        assert both.mirror.active[slot] == state.active
        assert both.mirror.blocks_of(slot).tolist() == state.blocks


def _of_no_slot(slot: int) -> Int32Array:
    return np.array([slot], np.int32)


# Each spoils one field of a valid delta, whatever else the delta holds.
SPOILERS: dict[str, Callable[[TableDelta], TableDelta]] = {
    "release of no slot": lambda d: dataclasses.replace(d, released_slots=_of_no_slot(NUM_SLOTS)),
    "release of a negative slot": lambda d: dataclasses.replace(d, released_slots=_of_no_slot(-1)),
    "allowance of no slot": lambda d: dataclasses.replace(d, allowances=pairs((NUM_SLOTS, 1))),
    "allowance of nothing": lambda d: dataclasses.replace(d, allowances=pairs((0, 0))),
    "token of no slot": lambda d: dataclasses.replace(d, appended_tokens=pairs((NUM_SLOTS, 1))),
    "replacement beyond the table": lambda d: dataclasses.replace(d, replaced_blocks=pairs((0, MAX_BLOCKS, 0))),
    "unknown block": lambda d: dataclasses.replace(d, appended_blocks=pairs((0, NUM_BLOCKS))),
    "deactivation of no slot": lambda d: dataclasses.replace(d, deactivated_slots=_of_no_slot(-1)),
    "activation of no slot": lambda d: dataclasses.replace(d, activated_slots=_of_no_slot(NUM_SLOTS)),
    "chunk of no slot": lambda d: dataclasses.replace(d, prefill_chunks=pairs((NUM_SLOTS, 1))),
    "chunk that is too long": lambda d: dataclasses.replace(d, prefill_chunks=pairs((0, MAX_MODEL_LEN + 1))),
    "fork of no slot": lambda d: dataclasses.replace(d, forks=(Fork(NUM_SLOTS, 0, 1, SamplingRow()),)),
    "fork into no slot": lambda d: dataclasses.replace(d, forks=(*d.forks, Fork(0, NUM_SLOTS, 1, SamplingRow()))),
    "beam fork of no slot": lambda d: dataclasses.replace(
        d, beam_forks=(*d.beam_forks, Fork(NUM_SLOTS, 0, 1, SamplingRow()))
    ),
    "beam fork into no slot": lambda d: dataclasses.replace(
        d, beam_forks=(*d.beam_forks, Fork(0, NUM_SLOTS, 1, SamplingRow()))
    ),
    "admission of generation 0": lambda d: dataclasses.replace(
        d,
        admissions=(
            *d.admissions,
            Admission(0, 0, np.array([1], np.int32), 1, 0, np.array([], np.int32), SamplingRow()),
        ),
    ),
}


@pytest.mark.parametrize("spoiler", SPOILERS)
@settings(max_examples=8)
@given(rng=st.randoms(use_true_random=False), num_steps=st.integers(0, 6))
def test_invalid_delta_leaves_both_unchanged(spoiler: str, rng: random.Random, num_steps: int) -> None:
    both, maker = Pair(), StepMaker(rng)
    for _ in range(num_steps):
        both.apply(maker.make(both.knows_all_tokens), rng)
    truth, mirror = columns(both.truth), columns(both.mirror)
    spoiled = SPOILERS[spoiler](maker.make(both.knows_all_tokens).delta)

    with pytest.raises(InvalidStepError):
        both.truth.apply(spoiled)
    with pytest.raises(InvalidStepError):
        both.mirror.apply(over_the_wire(Step(1, 1, spoiled)).delta)

    assert_columns_equal(columns(both.truth), truth)
    assert_columns_equal(columns(both.mirror), mirror)
