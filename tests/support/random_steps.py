"""Random valid steps from a plain-Python model of the batch table, which knows what is valid.

They hold whatever the wire can say: sampled sequences and beams, forks of both kinds, copy-on-write,
swaps. The blocks are random too: nobody computes with them.
"""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from octavo_shared.step_wire.batch_table import StepLayout
from octavo_shared.step_wire.step import Admission, Fork, SamplingRow, Step, TableDelta, TokenCounts, pairs
from octavo_shared.step_wire.token_rules import TokenRules, pad_words

NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS = 4, 14, 3, 20
MAX_BLOCKS = -(-MAX_MODEL_LEN // BLOCK_SIZE)


@dataclass
class Slot:
    """The model of one live slot."""

    num_tokens: int
    num_scheduled: int
    blocks: list[int]
    is_beam: bool
    active: bool = False
    allowance: int = 1
    num_open: int = 0
    """Of its tokens those that may not come: `num_tokens` and `num_scheduled` are upper bounds."""

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def can_decode(self) -> bool:
        return self.num_scheduled == self.num_tokens - 1

    @property
    def can_run_a_decode(self) -> bool:
        return self.can_decode and self.allowance <= self.most_tokens

    @property
    def most_tokens(self) -> int:
        """That a step may give it."""
        return min(self.num_blocks * BLOCK_SIZE - self.num_scheduled, MAX_MODEL_LEN - self.num_tokens)


@dataclass
class StepMaker:
    """Makes valid steps, keeping the model of the table they lead to."""

    rng: random.Random
    most_allowance: int = 4
    num_steps: int = 0
    slots: dict[int, Slot] = field(default_factory=dict)
    generations: list[int] = field(default_factory=lambda: [0] * NUM_SLOTS)
    ended: set[int] = field(default_factory=set)  # slots of which a row got no token, as with a flag

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def make(self, may_fork: Callable[[int], bool]) -> Step:
        """Return the next step; only the slots that `may_fork` are forked."""
        released = [slot for slot in list(self.slots) if slot in self.ended or self.chance(0.1)]
        self.ended.clear()
        swapped_out = [block for slot in released if self.chance(0.3) for block in self.slots.pop(slot).blocks]
        for slot in released:
            self.slots.pop(slot, None)
        free = [slot for slot in range(NUM_SLOTS) if slot not in self.slots]
        admissions = tuple(self._admit(slot) for slot in free if self.chance(0.5))
        beam_forks = self._beam_forks(may_fork)
        appended_tokens = self._append_tokens(may_fork)
        replaced, copies = self._copy_on_write()
        appended_blocks = self._append_blocks()
        deactivated, activated = self._switch()
        allowances = self._allow()
        chunks = self._chunks()
        sampled = self._run(chunks)
        forks = self._forks([slot for slot in sampled if may_fork(slot)])
        for slot in [*sampled, *(fork.slot for fork in forks)]:
            state = self.slots[slot]
            num_tokens = 0 if state.is_beam else state.allowance if state.active else 1
            state.num_tokens += num_tokens
            state.num_open += max(0, num_tokens - 1)
            state.active = not state.is_beam
        delta = TableDelta(
            released_slots=np.array(released, np.int32),
            admissions=admissions,
            beam_forks=beam_forks,
            appended_tokens=pairs(*appended_tokens),
            replaced_blocks=np.array(replaced, np.int32).reshape(-1, 3),
            appended_blocks=pairs(*appended_blocks),
            deactivated_slots=np.array(deactivated, np.int32),
            activated_slots=np.array(activated, np.int32),
            allowances=pairs(*allowances),
            prefill_chunks=pairs(*chunks),
            forks=forks,
        )
        swaps_in = admissions[0].block_ids.tolist() if admissions and not swapped_out and self.chance(0.3) else []
        self.num_steps += 1
        return Step(
            epoch=1,
            step_id=self.num_steps,
            delta=delta,
            blocks_to_swap_out=pairs(*((block, host) for host, block in enumerate(swapped_out))),
            blocks_to_swap_in=pairs(*((host, block) for host, block in enumerate(dict.fromkeys(swaps_in)))),
            blocks_to_copy=pairs(*copies),
        )

    def _sampling(self, is_beam: bool) -> SamplingRow:
        num_candidates = self.rng.randint(1, 8) if is_beam else 0
        return SamplingRow(
            self.rng.random(),
            self.rng.randrange(50),
            seed=self.rng.getrandbits(64),
            num_logprobs=self.rng.choice([-1, -1, 0, 3]),
            num_candidates=num_candidates,
        )

    def _blocks(self, num_blocks: int) -> list[int]:
        return [self.rng.randrange(NUM_BLOCKS) for _ in range(num_blocks)]

    def _admit(self, slot: int) -> Admission:
        num_tokens = self.rng.randint(1, MAX_MODEL_LEN)
        blocks = self._blocks(self.rng.randint(0, MAX_BLOCKS))
        num_computed = self.rng.randint(0, min(num_tokens - 1, len(blocks) * BLOCK_SIZE))
        is_beam = self.chance(0.5)
        self.slots[slot] = Slot(num_tokens, num_computed, list(blocks), is_beam)
        self.generations[slot] += 1
        return Admission(
            slot=slot,
            generation=self.generations[slot],
            token_ids=np.array([self.rng.randrange(1000) for _ in range(num_tokens)], np.int32),
            num_prompt_tokens=self.rng.randint(1, num_tokens),
            num_computed_tokens=num_computed,
            block_ids=np.array(blocks, np.int32),
            sampling=self._sampling(is_beam),
            cache_salt=self.rng.getrandbits(64),
            token_rules=self._rules() if self.chance(0.3) else None,
            num_prompt_logprobs=self.rng.choice([-1, -1, 0, 2]),
            traceparent=f"00-{self.rng.getrandbits(128):032x}-{self.rng.getrandbits(64):016x}-01"
            if self.chance(0.3)
            else None,
        )

    def _rules(self) -> TokenRules:
        """Return rules with something in some of their fields; token ids below 1,000."""
        biased = self.rng.sample(range(1000), self.rng.randint(0, 3))
        words = [
            [self.rng.randrange(1000) for _ in range(self.rng.randint(2, 4))] for _ in range(self.rng.randint(0, 2))
        ]
        return TokenRules(
            biased_token_ids=np.array(biased, np.int32),
            biases=np.array([self.rng.uniform(-5, 5) for _ in biased], np.float32),
            stop_token_ids=np.array(self.rng.sample(range(1000), self.rng.randint(0, 2)), np.int32),
            banned_words=pad_words(words),
            allowed_mask=self.rng.randbytes(125) if self.chance(0.5) else None,
        )

    def _beam_forks(self, may_fork: Callable[[int], bool]) -> tuple[Fork, ...]:
        """Fork beams, also children that were just made, into slots that are free or were just released."""
        forks = []
        for slot in range(NUM_SLOTS):
            parents = [parent for parent, state in self.slots.items() if state.is_beam and may_fork(parent)]
            if slot not in self.slots and parents and self.chance(0.5):
                forks.append(self._fork(self.rng.choice(parents), slot))
        return tuple(forks)

    def _fork(self, parent: int, slot: int) -> Fork:
        state = self.slots[parent]
        self.slots[slot] = dataclasses.replace(state, blocks=list(state.blocks), active=False, allowance=1)
        self.generations[slot] += 1
        return Fork(parent, slot, self.generations[slot], self._sampling(state.is_beam))

    def _append_tokens(self, is_resolved: Callable[[int], bool]) -> list[tuple[int, int]]:
        appended = []
        for slot, state in self.slots.items():
            if not is_resolved(slot):
                continue
            rests = state.num_scheduled == state.num_tokens  # a beam whose candidates were answered
            while not state.active and state.num_tokens < MAX_MODEL_LEN and self.chance(0.7 if rests else 0.15):
                appended.append((slot, self.rng.randrange(1000)))
                state.num_tokens += 1
                rests = False
        return appended

    def _copy_on_write(self) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
        """Replace blocks by copies of them, as far as one step may: (slot, index, block) and (source, target)."""
        replaced, copies = [], dict[int, int]()
        for slot, state in self.slots.items():
            target = self.rng.randrange(NUM_BLOCKS)
            if not state.blocks or target in copies or target in copies.values() or self.chance(0.7):
                continue
            index = self.rng.randrange(state.num_blocks)
            source, state.blocks[index] = state.blocks[index], target
            replaced.append((slot, index, target))
            if source != target and source not in copies:
                copies[target] = source
        return replaced, [(source, target) for target, source in copies.items()]

    def _append_blocks(self) -> list[tuple[int, int]]:
        appended = []
        for slot, state in self.slots.items():
            while state.num_blocks < MAX_BLOCKS and self.chance(0.4):
                state.blocks += self._blocks(1)
                appended.append((slot, state.blocks[-1]))
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

    def _allow(self) -> list[tuple[int, int]]:
        """Give some slots another allowance, which those that are active can use up."""
        allowed = []
        for slot, state in self.slots.items():
            most = min(4, state.most_tokens) if state.active else 4
            if self.most_allowance > 1 and not state.is_beam and self.chance(0.4):
                state.allowance = self.rng.randint(1, min(most, self.most_allowance))
                allowed.append((slot, state.allowance))
        return allowed

    def resolve(self, layout: StepLayout, counts: TokenCounts) -> None:
        """A step of these rows brought so many tokens to each."""
        slots, generations = layout.sample_slots.tolist(), layout.sample_generations.tolist()
        rows = zip(slots, generations, layout.most_tokens, counts, strict=True)
        for slot, generation, most, count in rows:
            if slot in self.slots and self.generations[slot] == generation and most:
                if not count:
                    self.ended.add(slot)
                self.slots[slot].num_tokens -= int(most) - int(count)
                self.slots[slot].num_scheduled -= int(most) - int(count)
                self.slots[slot].num_open -= int(most) - 1

    def _chunks(self) -> list[tuple[int, int]]:
        chunks = []
        for slot, state in self.rng.sample(sorted(self.slots.items()), len(self.slots)):
            last = state.num_tokens - (state.num_tokens == MAX_MODEL_LEN)
            longest = min(last, state.num_blocks * BLOCK_SIZE) - state.num_scheduled
            if not state.active and longest > 0 and not state.num_open and self.chance(0.7):
                chunks.append((slot, longest if self.chance(0.5) else self.rng.randint(1, longest)))
        return chunks

    def _run(self, chunks: list[tuple[int, int]]) -> list[int]:
        """Advance the model; return the slots with a sample row."""
        lengths = {slot: state.allowance for slot, state in self.slots.items() if state.active} | dict(chunks)
        for slot, length in lengths.items():
            self.slots[slot].num_scheduled += length
        states = self.slots.items()
        return [s for s, state in states if s in lengths and (state.active or state.num_scheduled == state.num_tokens)]

    def _forks(self, parents: list[int]) -> tuple[Fork, ...]:
        parents = [
            parent
            for parent in parents
            if not (self.slots[parent].is_beam or (self.slots[parent].active and self.slots[parent].allowance > 1))
        ]
        free = [slot for slot in range(NUM_SLOTS) if slot not in self.slots]
        return tuple(self._fork(self.rng.choice(parents), slot) for slot in free if parents and self.chance(0.5))
