"""Sequences and the groups they form.

A `SequenceGroup` is one request: its prompt, how to sample and stop, and its outputs. A `Sequence` is
one output of it (n, best_of), or one live beam of its search. While a sequence runs, its tokens,
counters and block table live in its slot of the batch table; otherwise it carries its tokens itself:

                       admitted                          finished, aborted
    WAITING ─────────────────────────────> RUNNING ─────────────────────────> FINISHED
       ^     token_ids move to the slot      │  ^
       ├──────── preempted: RECOMPUTE ───────┤  │ swapped in
       │         token_ids come back         │  │
       └──────────── host pool lost ─────── SWAPPED
                                      preempted: SWAP, the blocks move to the host cache

A preempted sequence may have tokens that sent steps are still to deliver (`num_inflight_rows`): they
are appended when they arrive, and the group is admitted or swapped in after the last of them.

The sequences of a group move together, but end one by one. Until its prompt is computed, a group has only
its first sequence, the *lead*; the others fork off it in the step that samples their first token.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.step import NO_LOGPROBS, Adapter, Int32Array, PoolingTask, SamplingRow
from octavo_shared.step_wire.token_rules import TokenRules
from scheduler_svc.core.beam_search import BeamSearch
from scheduler_svc.request.continuation import Continuation
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions
from scheduler_svc.request.provenance import ENDED, Numerics, Progress, Provenance


class SequenceStatus(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Placed(NamedTuple):
    """Why a group was dispatched to an executor, for people; costs are in tokens that the executor computes.

    Attributes:
        executor: The name of the planner.
        cost: Until the group has its last token.
        num_tokens: Tokens of the group until its first output token.
        num_cached_tokens: How many of its tokens the prefix cache has.
        num_rows: Sequences that decode, or will, beside it.
        other: The next best planner; empty: no other that was considered had room.
        other_cost: The cost there.
    """

    executor: str
    cost: int
    num_tokens: int
    num_cached_tokens: int
    num_rows: int
    other: str = ""
    other_cost: int = 0


class Requirements(NamedTuple):
    """What a group requires of an executor, whatever runs there; without blocks and bytes, which depend on it.

    Attributes:
        num_slots: Slots of the batch that it may need at once.
        pooling: The task that the model must do; None: it generates.
        grammar: The grammar that its outputs follow; None: none.
        matcher_id: The only grammar matcher that it may use; empty: any.
        adapter: What its sequences are computed with on top of the weights; None: nothing.
        numerics: The only numerics with which it may go on; None: any.
    """

    num_slots: int
    pooling: PoolingTask | None
    grammar: Grammar | None
    matcher_id: str
    adapter: Adapter | None
    numerics: Numerics | None


def salted(cache_salt: int, identity: bytes) -> int:
    """Return the salt of blocks that depend on something besides their tokens: an adapter.

    Other content, other blocks, whatever the name of an adapter is. Without a digest no two adapters have one salt:
    nobody knows what the content will be.
    """
    salt = hashlib.blake2b(cache_salt.to_bytes(8, "little") + identity, digest_size=8).digest()
    return int.from_bytes(salt, "little")


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """One request. `arrival` orders groups: the smaller one came first.

    `num_sequences` outputs are sampled (best_of), or `beam_search` finds them. Groups share cached
    blocks only with equal `block_salt`, of `cache_salt` and the content of the adapter. `sampling` is the row of output
    0; the others differ in `output_index`.

    `speculate`: whether a sequence may get several tokens a step. `num_draft_tokens` counts those that came as drafts.

    `num_prompt_logprobs`: with how many alternatives the client wants the log-probabilities of all prompt tokens but
    the first; `num_known_prompt_logprobs` counts the tokens for which they were handed out.

    `continuation`: the known part of an answer that was cut; None: it begins.
    `requires_same_numerics`: only executors with the numerics that made its first token may go on with it.
    `grammar`: the grammar that its outputs follow; None: none. `matcher_id`: the matcher of the front that checked it,
    else of the first executor; only executors with the same one, which allows the same tokens, take it. Empty: any.
    `adapter`: what its sequences are computed with on top of the weights; None: nothing.
    `encoder_token_ids`: what its sequences attend to besides themselves, once encoded; None: nothing. `encoder_names`:
    the names of its blocks, by what `encoder_named_by` says: the size of a block, the era and the salt. Those of its
    sequences come behind the last one. `has_found_input`: whether its first admission found the input encoded.
    `pooling`: what the model makes of the whole prompt in one step, in place of tokens: the group has no slot and no
    block, and its one sequence ends with the answer. None: it generates. `token_type_ids`: a byte a token; empty:
    all are 0.
    `traceparent`: the span of the request, sent with each admission; None: it is not traced.

    `pulled`: in words, what came from another executor for its next admission; `num_arrived_tokens` are as many.
    `num_pulled_tokens`: of `num_cached_tokens`, those that came so. `pulls_nothing`: a transfer for it has failed, so
    it is computed until it is admitted again.
    `has_run`: it was admitted before, so it goes before newcomers if it waits again.
    `order`: (level, arrival); the smaller one goes first and is preempted last. `Batch`
    sets it when the group joins for the first time; a level does not change while the group lives.

    `provenance`: which numerics made which of its tokens.
    `placed`: why it was dispatched where it is; None: it was not dispatched yet.
    `expected_len`: expected tokens of an output, for estimates of time only.
    `lost_on`: the planner that it ran on when its executor was lost; empty: none was, or it got a token since.
    `runs_alone`: until its next token, the steps that compute it compute nothing else.
    """

    request_id: str
    prompt_token_ids: Int32Array
    sampling: SamplingRow
    stop_conditions: StopConditions
    arrival: int
    num_sequences: int = 1
    beam_search: BeamSearchParams | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: int = 0
    speculate: bool = True
    token_rules: TokenRules | None = None
    num_prompt_logprobs: int = NO_LOGPROBS
    num_known_prompt_logprobs: int = 0
    traceparent: str | None = None
    continuation: Continuation | None = None
    requires_same_numerics: bool = False
    grammar: Grammar | None = None
    matcher_id: str = ""
    adapter: Adapter | None = None
    pooling: PoolingTask | None = None
    token_type_ids: bytes = b""
    encoder_token_ids: Int32Array | None = None
    encoder_names: list[bytes] = field(default_factory=list)
    encoder_named_by: tuple[int, int, int] = (0, 0, 0)
    has_found_input: bool = False
    block_salt: int = field(init=False)
    order: tuple[int, int] = field(init=False)
    sequences: list[Sequence] = field(init=False)
    beams: BeamSearch | None = None
    provenance: Provenance = field(default_factory=Provenance)
    placed: Placed | None = None
    lost_on: str = ""
    runs_alone: bool = False
    has_run: bool = False
    has_waited_for_grammar_slot: bool = False
    num_cached_tokens: int = 0
    num_brought_tokens: int = 0
    num_pulled_tokens: int = 0
    num_arrived_tokens: int = 0
    pulled: str = ""
    pulls_nothing: bool = False
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    first_scheduled_at_s: float | None = None
    expected_len: int = 0

    def __post_init__(self) -> None:
        assert self.num_sequences >= 1
        assert self.beam_search is None or self.num_sequences == 1, "a search chooses its own sequences"
        assert self.beam_search is None or self.grammar is None, "beams follow no grammar"
        assert self.pooling is None or self.num_sequences == 1, "a text has one answer"
        self.block_salt = self.shared_salt
        self.order = 0, self.arrival
        self.sequences = [Sequence(self, index, self.prompt_token_ids) for index in range(self.num_sequences)]
        if self.continuation is not None:
            self._go_on_behind(self.continuation)

    def keep_to_itself(self, era: int) -> None:
        """Give its blocks names that no other group ever looks for: their weights differ from block to block."""
        salt = hashlib.blake2b(b"%d %d %d" % (self.block_salt, era, self.arrival), digest_size=8).digest()
        self.block_salt = int.from_bytes(salt, "little")

    @property
    def is_kept_to_itself(self) -> bool:
        """Whether several weights have computed its blocks."""
        return self.block_salt != self.shared_salt

    def share_again(self) -> None:
        """Give its blocks the usual names: it is computed from its first token on."""
        if self.is_kept_to_itself:
            self.block_salt = self.shared_salt
            for sequence in self.sequences:
                sequence.block_hashes, sequence.hashed_by = [], (0, 0)

    @property
    def shared_salt(self) -> int:
        """The salt of its blocks while other groups may find them."""
        return self.cache_salt if self.adapter is None else salted(self.cache_salt, self.adapter.identity)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the original prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_input_tokens(self) -> int:
        """Tokens that are computed before the first output token: of the prompt, and of the encoder's input."""
        num_prompt_tokens = len(self.prompt_token_ids)
        return num_prompt_tokens if self.encoder_token_ids is None else num_prompt_tokens + len(self.encoder_token_ids)

    @property
    def has_unit(self) -> bool:
        """Whether it has work that a step does whole: a text to be pooled, or an input to be encoded."""
        return self.pooling is not None or self.encoder_token_ids is not None

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are still to come: then no cached prefix serves it."""
        return (
            self.num_prompt_logprobs != NO_LOGPROBS and self.num_known_prompt_logprobs < len(self.prompt_token_ids) - 1
        )

    @property
    def has_outgrown(self) -> bool:
        """Whether a group that fits no executor has become too large by running, and not by the loss of an executor."""
        return self.has_run and not self.lost_on and self.pooling is None

    @property
    def is_lone(self) -> bool:
        """Whether it never has more than one sequence."""
        return len(self.sequences) == 1 and self.beam_search is None

    @property
    def live_sequences(self) -> list[Sequence]:
        """The sequences that have not ended, in order of their index; of a search, its live beams by rank."""
        return [sequence for sequence in self.sequences if sequence.status is not SequenceStatus.FINISHED]

    def is_last(self, sequence: Sequence) -> bool:
        """Return whether no other sequence is live. Outputs tend to end in order, so the last are checked first."""
        others = (other for other in reversed(self.sequences) if other is not sequence)
        return all(other.status is SequenceStatus.FINISHED for other in others)

    @property
    def num_tokens_to_come(self) -> int:
        """Output tokens that are still expected. Only while it waits: then its sequences carry their tokens."""
        expected_len = self.expected_len + len(self.prompt_token_ids)
        return sum(max(0, expected_len - len(sequence.token_ids)) for sequence in self.live_sequences)

    @property
    def num_slots(self) -> int:
        """Slots of the batch table that the group may need at once."""
        if self.pooling is not None:
            return 0
        return self.beam_search.beam_width if self.beam_search is not None else len(self.live_sequences)

    @property
    def requires(self) -> Requirements:
        """What the group requires of an executor now."""
        numerics = self.provenance.preferred(self.progress) if self.requires_same_numerics else None
        return Requirements(self.num_slots, self.pooling, self.grammar, self.matcher_id, self.adapter, numerics)

    @property
    def is_forked(self) -> bool:
        """Whether its sequences have forked off the lead; before, only the lead is computed."""
        num_prompt_tokens = len(self.prompt_token_ids)
        for sequence in self.sequences:
            if sequence.status is not SequenceStatus.FINISHED and len(sequence.token_ids) > num_prompt_tokens:
                return True
        return False

    @property
    def sequences_to_compute(self) -> list[Sequence]:
        """The sequences that an admission of the group computes: the lead alone until it is forked."""
        live = self.live_sequences
        return live if len(live) == 1 or self.is_forked else live[:1]

    @property
    def has_inflight_rows(self) -> bool:
        """Whether sent steps are still to deliver tokens of a preempted sequence."""
        return any(sequence.num_inflight_rows for sequence in self.live_sequences)

    @property
    def progress(self) -> Progress:
        """How many tokens are known. Only while it waits: then its sequences carry their tokens."""
        live = (None if s.status is SequenceStatus.FINISHED else len(s.token_ids) for s in self.sequences)
        counts = tuple(ENDED if length is None else length - self.num_prompt_tokens for length in live)
        return Progress(counts, self.num_known_prompt_logprobs)

    def sampling_of(self, sequence: Sequence) -> SamplingRow:
        """Return how to sample one of the sequences."""
        return self.sampling if sequence.index == 0 else replace(self.sampling, output_index=sequence.index)

    def _go_on_behind(self, continuation: Continuation) -> None:
        """Give the sequences the tokens that were made before, as if the group had lost its executor."""
        self.num_known_prompt_logprobs = continuation.num_prompt_logprobs
        if self.beam_search is not None:
            return  # a search begins anew
        for sequence, output in zip(self.sequences, continuation.outputs, strict=True):
            sequence.token_ids = np.concatenate((self.prompt_token_ids, output.token_ids))
            if output.finish_reason is not None:
                sequence.status = SequenceStatus.FINISHED
        self.provenance.go_on_behind(continuation.numerics, self.num_sequences, continuation.adapter)

    def end(self) -> None:
        """End all sequences."""
        for sequence in self.sequences:
            sequence.status = SequenceStatus.FINISHED

    def take_tokens_of_beams(self) -> None:
        """Give the sequences of a search the tokens of its live beams, before they lose their slots."""
        if self.beams is not None:
            for sequence, beam in zip(self.sequences, self.beams.live, strict=True):
                sequence.token_ids = np.concatenate((self.prompt_token_ids, beam.token_ids))


@dataclass(slots=True, eq=False)
class Sequence:
    """One output of a group, or one live beam.

    `token_ids` holds prompt and output while the sequence waits or is swapped out. While it runs they are in its slot.
    `slot` and `generation` are its place in the batch table, or its last one; -1: none yet.
    `block_hashes` are the hashes of its first full blocks, as far as they were needed, made by a hasher with the block
    size and of the era in `hashed_by`.
    """

    group: SequenceGroup
    index: int
    token_ids: Int32Array
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = -1
    generation: int = 0
    num_inflight_rows: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    hashed_by: tuple[int, int] = (0, 0)

    @property
    def has_slot(self) -> bool:
        """Whether it runs in a slot of its own: a new beam gets its slot with the next step."""
        return self.status is SequenceStatus.RUNNING and self.slot >= 0

    def share_hashes_of(self, parent: Sequence) -> None:
        """Begin with the hashes of the sequence that this one forks off."""
        self.block_hashes, self.hashed_by = parent.block_hashes.copy(), parent.hashed_by

    def append_inflight_tokens(self, token_ids: Int32Array) -> None:
        """Append the tokens of a row that arrived after the preemption."""
        self.token_ids = np.concatenate((self.token_ids, token_ids))
        self.num_inflight_rows -= 1
