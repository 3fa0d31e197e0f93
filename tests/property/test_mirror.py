"""The mirror equals the truth after any sequence of deltas; a refused delta changes neither.

The deltas come from a plain-Python model of the table, which knows what is valid. They cross the wire
as bytes. The mirror records tokens at once, as an executor does; the truth up to two steps later.
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

from shared.batch_table import BatchTable, StepLayout
from shared.errors import InvalidStepError
from shared.step import UNKNOWN_TOKEN, Admission, Fork, Int32Array, SamplingRow, Step, TableDelta, pairs
from tests.support.tables import assert_columns_equal, columns
from tests.support.toy_executor import over_the_wire

NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS = 4, 14, 3, 20
MAX_BLOCKS = -(-MAX_MODEL_LEN // BLOCK_SIZE)


def new_table() -> BatchTable:
    return BatchTable(NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS)


@dataclass
class Slot:
    """The model of one live slot."""

    num_tokens: int
    num_scheduled: int
    num_blocks: int
    active: bool = False

    @property
    def can_decode(self) -> bool:
        return self.num_scheduled == self.num_tokens - 1

    @property
    def can_run_a_decode(self) -> bool:
        has_block = self.num_scheduled < self.num_blocks * BLOCK_SIZE
        return self.can_decode and has_block and self.num_tokens < MAX_MODEL_LEN


@dataclass
class DeltaMaker:
    """Makes valid deltas, keeping the model of the table they lead to."""

    rng: random.Random
    slots: dict[int, Slot] = field(default_factory=dict)
    generations: list[int] = field(default_factory=lambda: [0] * NUM_SLOTS)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def make(self, may_fork: Callable[[int], bool]) -> TableDelta:
        released = [slot for slot in list(self.slots) if self.chance(0.1)]
        for slot in released:
            del self.slots[slot]
        admissions = tuple(
            self._admit(slot) for slot in range(NUM_SLOTS) if slot not in self.slots and self.chance(0.5)
        )
        appended_tokens = self._append_tokens()
        replaced = [
            (slot, self.rng.randrange(state.num_blocks), self.rng.randrange(NUM_BLOCKS))
            for slot, state in self.slots.items()
            if state.num_blocks and self.chance(0.2)
        ]
        appended_blocks = self._append_blocks()
        deactivated, activated = self._switch()
        chunks = self._chunks()
        sampled = self._run(chunks)
        forks = self._forks([slot for slot in sampled if may_fork(slot)])
        for slot in [*sampled, *(fork.slot for fork in forks)]:
            self.slots[slot].num_tokens += 1
            self.slots[slot].active = True
        return TableDelta(
            released_slots=np.array(released, np.int32),
            admissions=admissions,
            appended_tokens=pairs(*appended_tokens),
            replaced_blocks=np.array(replaced, np.int32).reshape(-1, 3),
            appended_blocks=pairs(*appended_blocks),
            deactivated_slots=np.array(deactivated, np.int32),
            activated_slots=np.array(activated, np.int32),
            prefill_chunks=pairs(*chunks),
            forks=forks,
        )

    def _sampling(self) -> SamplingRow:
        return SamplingRow(self.rng.random(), self.rng.randrange(50), seed=self.rng.getrandbits(64))

    def _blocks(self, num_blocks: int) -> Int32Array:
        return np.array([self.rng.randrange(NUM_BLOCKS) for _ in range(num_blocks)], np.int32)

    def _admit(self, slot: int) -> Admission:
        num_tokens = self.rng.randint(1, MAX_MODEL_LEN)
        num_blocks = self.rng.randint(0, MAX_BLOCKS)
        num_computed = self.rng.randint(0, min(num_tokens - 1, num_blocks * BLOCK_SIZE))
        self.slots[slot] = Slot(num_tokens, num_computed, num_blocks)
        self.generations[slot] += 1
        return Admission(
            slot=slot,
            generation=self.generations[slot],
            token_ids=np.array([self.rng.randrange(1000) for _ in range(num_tokens)], np.int32),
            num_prompt_tokens=self.rng.randint(1, num_tokens),
            num_computed_tokens=num_computed,
            block_ids=self._blocks(num_blocks),
            sampling=self._sampling(),
            cache_salt=self.rng.getrandbits(64),
        )

    def _append_tokens(self) -> list[tuple[int, int]]:
        appended = []
        for slot, state in self.slots.items():
            while not state.active and state.num_tokens < MAX_MODEL_LEN and self.chance(0.15):
                appended.append((slot, self.rng.randrange(1000)))
                state.num_tokens += 1
        return appended

    def _append_blocks(self) -> list[tuple[int, int]]:
        appended = []
        for slot, state in self.slots.items():
            while state.num_blocks < MAX_BLOCKS and self.chance(0.4):
                appended.append((slot, self.rng.randrange(NUM_BLOCKS)))
                state.num_blocks += 1
        return appended

    def _switch(self) -> tuple[list[int], list[int]]:
        """Deactivate what cannot run, and some others; activate some of the rest."""
        deactivated = [
            slot
            for slot, state in self.slots.items()
            if state.active and (not state.can_run_a_decode or self.chance(0.1))
        ]
        for slot in deactivated:
            self.slots[slot].active = False
        activated = [
            slot
            for slot, state in self.slots.items()
            if slot not in deactivated and state.can_run_a_decode and self.chance(0.3)
        ]
        for slot in activated:
            self.slots[slot].active = True
        return deactivated, activated

    def _chunks(self) -> list[tuple[int, int]]:
        chunks = []
        for slot, state in self.rng.sample(sorted(self.slots.items()), len(self.slots)):
            last = state.num_tokens - (state.num_tokens == MAX_MODEL_LEN)
            longest = min(last, state.num_blocks * BLOCK_SIZE) - state.num_scheduled
            if not state.active and longest > 0 and self.chance(0.7):
                chunks.append((slot, longest if self.chance(0.5) else self.rng.randint(1, longest)))
        return chunks

    def _run(self, chunks: list[tuple[int, int]]) -> list[int]:
        """Advance the model; return the slots with a sample row."""
        lengths = {slot: 1 for slot, state in self.slots.items() if state.active} | dict(chunks)
        for slot, length in lengths.items():
            self.slots[slot].num_scheduled += length
        return [slot for slot in lengths if self.slots[slot].num_scheduled == self.slots[slot].num_tokens]

    def _forks(self, parents: list[int]) -> tuple[Fork, ...]:
        forks = []
        for slot in range(NUM_SLOTS):
            if slot not in self.slots and parents and self.chance(0.5):
                parent = self.rng.choice(parents)
                self.slots[slot] = dataclasses.replace(self.slots[parent], active=True)
                self.generations[slot] += 1
                forks.append(Fork(parent, slot, self.generations[slot], self._sampling()))
        return tuple(forks)


@dataclass
class Pair:
    """The two tables, and the samples that the truth has not seen."""

    truth: BatchTable = field(default_factory=new_table)
    mirror: BatchTable = field(default_factory=new_table)
    unseen: deque[tuple[StepLayout, Int32Array]] = field(default_factory=deque)

    def knows_all_tokens(self, slot: int) -> bool:
        """Whether no sample of the slot is unseen: a fork copies what the truth knows."""
        return not any(slot in layout.sample_slots for layout, _ in self.unseen)

    def apply(self, delta: TableDelta, rng: random.Random) -> None:
        received = over_the_wire(Step(1, 1, delta)).delta
        layout, mirrored = self.truth.apply(delta), self.mirror.apply(received)
        for name in StepLayout.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(layout, name), getattr(mirrored, name), err_msg=name)
        sampled = np.array([rng.randrange(1000) for _ in layout.sample_slots], np.int32)
        assert self.mirror.record(mirrored, sampled).all()
        self.unseen.append((layout, sampled))

    def acknowledge(self, num_steps_behind: int) -> None:
        while len(self.unseen) > num_steps_behind:
            self.truth.record(*self.unseen.popleft())

    def check_equal(self) -> None:
        truth, mirror = columns(self.truth), columns(self.mirror)
        for slot in range(NUM_SLOTS):
            known = truth["token_ids"][slot, : truth["num_tokens"][slot]]
            same = mirror["token_ids"][slot, : mirror["num_tokens"][slot]]
            if truth["live"][slot]:
                np.testing.assert_array_equal(known[known != UNKNOWN_TOKEN], same[known != UNKNOWN_TOKEN])
                assert self.unseen or UNKNOWN_TOKEN not in known
        assert_columns_equal(truth | {"token_ids": mirror["token_ids"]}, mirror)
        assert self.truth.digest() == self.mirror.digest()


@given(
    rng=st.randoms(use_true_random=False), num_steps=st.integers(1, 25), delays=st.lists(st.integers(0, 2), min_size=1)
)
def test_mirror_equals_truth_after_any_deltas(rng: random.Random, num_steps: int, delays: list[int]) -> None:
    both, maker = Pair(), DeltaMaker(rng)

    for step in range(num_steps):
        both.apply(maker.make(both.knows_all_tokens), rng)
        both.acknowledge(delays[step % len(delays)])
        both.check_equal()

    both.acknowledge(0)
    both.check_equal()
    for slot, state in maker.slots.items():
        assert both.mirror.num_tokens[slot] == state.num_tokens
        assert both.mirror.num_scheduled_tokens[slot] == state.num_scheduled
        assert both.mirror.active[slot] == state.active


def _of_no_slot(slot: int) -> Int32Array:
    return np.array([slot], np.int32)


# Each spoils one field of a valid delta, whatever else the delta holds.
SPOILERS: dict[str, Callable[[TableDelta], TableDelta]] = {
    "release of no slot": lambda d: dataclasses.replace(d, released_slots=_of_no_slot(NUM_SLOTS)),
    "release of a negative slot": lambda d: dataclasses.replace(d, released_slots=_of_no_slot(-1)),
    "token of no slot": lambda d: dataclasses.replace(d, appended_tokens=pairs((NUM_SLOTS, 1))),
    "replacement beyond the table": lambda d: dataclasses.replace(d, replaced_blocks=pairs((0, MAX_BLOCKS, 0))),
    "unknown block": lambda d: dataclasses.replace(d, appended_blocks=pairs((0, NUM_BLOCKS))),
    "deactivation of no slot": lambda d: dataclasses.replace(d, deactivated_slots=_of_no_slot(-1)),
    "activation of no slot": lambda d: dataclasses.replace(d, activated_slots=_of_no_slot(NUM_SLOTS)),
    "chunk of no slot": lambda d: dataclasses.replace(d, prefill_chunks=pairs((NUM_SLOTS, 1))),
    "chunk that is too long": lambda d: dataclasses.replace(d, prefill_chunks=pairs((0, MAX_MODEL_LEN + 1))),
    "fork of no slot": lambda d: dataclasses.replace(d, forks=(Fork(NUM_SLOTS, 0, 1, SamplingRow()),)),
    "fork into no slot": lambda d: dataclasses.replace(d, forks=(*d.forks, Fork(0, NUM_SLOTS, 1, SamplingRow()))),
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
    both, maker = Pair(), DeltaMaker(rng)
    for _ in range(num_steps):
        both.apply(maker.make(both.knows_all_tokens), rng)
    truth, mirror = columns(both.truth), columns(both.mirror)
    spoiled = SPOILERS[spoiler](maker.make(both.knows_all_tokens))

    with pytest.raises(InvalidStepError):
        both.truth.apply(spoiled)
    with pytest.raises(InvalidStepError):
        both.mirror.apply(over_the_wire(Step(1, 1, spoiled)).delta)

    assert_columns_equal(columns(both.truth), truth)
    assert_columns_equal(columns(both.mirror), mirror)
