"""Random ways to compute sequences on a paged cache: who shares a step with whom, in which chunks.

A plan is all that may differ between two computations of the same tokens. `play` computes by it and compares every
logit with that of the sequence alone, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from executor_svc.attention.interface import AttentionBackend
from executor_svc.models.language_model import LanguageModel
from tests.numerics.architectures import VOCAB_SIZE, PagedRun
from tests.numerics.bits import assert_same_bits

BLOCK_SIZES = (5, 16, 24, 40)
MAX_SEQUENCES = 5
MAX_SHORT_TOKENS = 80


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """How one sequence is computed.

    Attributes:
        num_tokens: Its length.
        ends: Where its chunks end, ascending; the last one ends at `num_tokens`.
        first_step: When it comes.
        rests_every: In one of so many steps it takes no part; 0: it takes part in all of them.
        num_shared_tokens: So many tokens are those of the sequence before it, whose full blocks it takes over as far as
            they are computed when it comes.
        loss: After this chunk its blocks are gone, but for so many at its beginning: the rest is computed again, in
            chunks that end where the others do not; None: never.
    """

    num_tokens: int
    ends: tuple[int, ...]
    first_step: int = 0
    rests_every: int = 0
    num_shared_tokens: int = 0
    loss: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How all sequences are computed, on blocks of this size.

    Attributes:
        wants_all: Whether each step computes the logits of all its tokens, and not only of the last one of a row.
        chunks_lead: Whether rows of several tokens come before those of one.
    """

    block_size: int
    sequences: tuple[SequencePlan, ...]
    wants_all: bool = True
    chunks_lead: bool = False

    def token_ids(self) -> list[list[int]]:
        """Return the tokens of each sequence."""
        random, found = np.random.default_rng(5), list[list[int]]()
        for plan in self.sequences:
            shared = found[-1][: plan.num_shared_tokens] if found else []
            own: list[int] = random.integers(3, VOCAB_SIZE, plan.num_tokens).tolist()
            found.append((shared + own)[: plan.num_tokens])
        return found


@st.composite
def sequence_plans(draw: st.DrawFn, max_tokens: int, has_states: bool) -> SequencePlan:
    """Draw one sequence: most are short; the last tokens of many are decoded one by one.

    With states none begins with what another has computed, and what loses a block begins anew.
    """
    num_tokens = draw(st.one_of(st.integers(1, MAX_SHORT_TOKENS), st.integers(MAX_SHORT_TOKENS, max_tokens)))
    num_decoded = draw(st.sampled_from([0, 1, 3, 9]))
    cuts = draw(st.lists(st.integers(1, num_tokens), max_size=4))
    decoded = range(max(1, num_tokens - num_decoded), num_tokens + 1)
    ends = tuple(sorted({*cuts, *decoded}))
    loses = draw(st.booleans())
    return SequencePlan(
        num_tokens,
        ends,
        first_step=draw(st.integers(0, 5)),
        rests_every=draw(st.sampled_from([0, 0, 2, 3])),
        num_shared_tokens=0 if has_states else draw(st.sampled_from([0, 0, 16, 33, 70, max_tokens])),
        loss=(draw(st.integers(0, len(ends) - 1)), 0 if has_states else draw(st.integers(0, 3))) if loses else None,
    )


@st.composite
def plans(draw: st.DrawFn, max_tokens: int = 700, *, has_states: bool = False) -> Plan:
    """Draw a plan with sequences of up to so many tokens, for a model with or without recurrent states."""
    sequences = draw(st.lists(sequence_plans(max_tokens, has_states), min_size=1, max_size=MAX_SEQUENCES))
    return Plan(draw(st.sampled_from(BLOCK_SIZES)), tuple(sequences), draw(st.booleans()), draw(st.booleans()))


class _Running:
    """A sequence while it is computed: `num_computed` tokens are in the blocks of `table`."""

    def __init__(self, plan: SequencePlan, token_ids: list[int]) -> None:
        self.plan = plan
        self.token_ids = token_ids
        self.ends = list(plan.ends)
        self.num_computed = 0
        self.num_chunks = 0
        self.table: npt.NDArray[np.int32] | None = None  # None: it has not come yet

    def takes_part(self, step: int) -> bool:
        every = self.plan.rests_every
        return self.table is not None and bool(self.ends) and (not every or step % every != 0)

    def chunk(self) -> list[int]:
        return self.token_ids[self.num_computed : self.ends[0]]

    def advance(self, run: PagedRun) -> None:
        """Count a chunk as computed; lose blocks if this is the moment."""
        self.num_computed = self.ends.pop(0)
        self.num_chunks += 1
        if self.plan.loss is None or self.plan.loss[0] != self.num_chunks - 1:
            return
        assert self.table is not None
        num_kept = min(self.plan.loss[1], self.num_computed // run.block_size)
        self.table = np.concatenate((self.table[:num_kept], run.take_blocks(len(self.table) - num_kept)))
        again = {self.num_computed, (self.num_computed + num_kept * run.block_size) // 2}
        self.num_computed = num_kept * run.block_size
        self.ends = sorted({end for end in again if end > self.num_computed} | set(self.ends))


def play(plan: Plan, model: LanguageModel, backend: AttentionBackend, expected: Sequence[torch.Tensor]) -> None:
    """Compute all sequences by a plan, and fail unless the logits have the bits of `expected`, one for each."""
    num_blocks = sum(2 * (sequence.num_tokens // plan.block_size + 1) for sequence in plan.sequences)
    run = PagedRun(model, backend, plan.block_size, num_blocks)
    sequences = [_Running(*pair) for pair in zip(plan.sequences, plan.token_ids(), strict=True)]
    step = 0
    while any(sequence.ends for sequence in sequences):
        for index, sequence in enumerate(sequences):
            if sequence.table is None and sequence.plan.first_step <= step:
                _admit(sequence, sequences[index - 1] if index else None, run)
        rows = [index for index, sequence in enumerate(sequences) if sequence.takes_part(step)]
        rows.sort(key=lambda index: (len(sequences[index].chunk()) > 1) != plan.chunks_lead)
        step += 1
        if rows:
            _step(plan, run, sequences, rows, expected)


def _admit(sequence: _Running, before: _Running | None, run: PagedRun) -> None:
    """Give a sequence its blocks: what the one before has computed of their common ones, else new ones."""
    num_shared = 0
    shared = np.zeros(0, np.int32)
    if before is not None and before.table is not None:
        num_equal = min(sequence.plan.num_shared_tokens, before.num_computed, sequence.plan.num_tokens - 1)
        num_shared = num_equal // run.block_size
        shared = before.table[:num_shared]
    num_blocks = -(-sequence.plan.num_tokens // run.block_size)
    sequence.table = np.concatenate((shared, run.take_blocks(num_blocks - num_shared)))
    sequence.num_computed = num_shared * run.block_size
    sequence.ends = [end for end in sequence.ends if end > sequence.num_computed]


def _step(
    plan: Plan, run: PagedRun, sequences: Sequence[_Running], rows: Sequence[int], expected: Sequence[torch.Tensor]
) -> None:
    running = [sequences[index] for index in rows]
    chunks = [sequence.chunk() for sequence in running]
    starts = [sequence.num_computed for sequence in running]
    width = max(len(sequence.table) for sequence in running if sequence.table is not None)
    tables = np.zeros((len(rows), width), np.int32)
    for row, sequence in enumerate(running):
        assert sequence.table is not None
        tables[row, : len(sequence.table)] = sequence.table
    logits = run.step(chunks, starts, tables, only_last=not plan.wants_all)
    for index, start, chunk, found in zip(rows, starts, chunks, logits, strict=True):
        first = start + len(chunk) - len(found)
        what = f"sequence {index}, a chunk of {len(chunk)} from {start} in a step of {list(map(len, chunks))} tokens"
        assert_same_bits(found, expected[index][first : start + len(chunk)], f"{what}, logits from {first}")
    for sequence in running:
        sequence.advance(run)
