"""The values of one step: what the scheduler decides, what the executor answers.

Plain values, pure: NumPy only. They are never changed once made. The values that every step or prompt has
are not frozen: making a frozen one takes twice as long. `batch_table.py` gives them their meaning, `wire.py`
their form on the wire.
"""

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.values.sampling_params_table import INT32_MAX as INT32_MAX
from octavo.values.sampling_params_table import NO_LOGPROBS as NO_LOGPROBS
from octavo_shared.errors import InvalidStepError
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.sampling_row import SAMPLING_ROW as SAMPLING_ROW
from octavo_shared.step_wire.sampling_row import SamplingRow as SamplingRow
from octavo_shared.step_wire.token_rules import TokenRules

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

RowFlags = npt.NDArray[np.uint8]
TokenCounts = npt.NDArray[np.uint8]
IndexArray = npt.NDArray[np.intp]

UNKNOWN_TOKEN = -1
# Longest reason why a grammar or an adapter cannot be used.
MAX_ERROR_CHARS = 500
# Length of the digest of an adapter, and most bytes of its source.
ADAPTER_DIGEST_BYTES = 32
MAX_SOURCE_BYTES = 4096

# Shared by all deltas without slots: there is nothing in it to write to.
_NO_SLOTS: Int32Array = np.empty(0, np.int32)
_NO_PAIRS: Int32Array = np.empty((0, 2), np.int32)
_NO_TRIPLES: Int32Array = np.empty((0, 3), np.int32)


class RowFlag(IntEnum):
    """Why the output of a sample row ends; the enum of the same name in step.proto."""

    NO_TOKEN_ALLOWED = 1
    GRAMMAR_LIMIT = 2
    GRAMMAR_FAILED = 3
    NOT_FINITE = 4


class PoolingTask(IntEnum):
    """What a text is computed for; the enum of the same name in step.proto."""

    EMBED = 1
    SCORE = 2


def pairs(*rows: tuple[int, ...] | Seq[int]) -> Int32Array:
    """Return `rows` as an int32 array [num_rows, width]; width 2 if there is none."""
    return np.array(rows, np.int32).reshape(len(rows), -1 if rows else 2)


def no_slots() -> Int32Array:
    """Return an empty list of slots, [0] int32."""
    return _NO_SLOTS


def no_pairs() -> Int32Array:
    """Return an empty list of pairs, [0, 2] int32."""
    return _NO_PAIRS


def no_triples() -> Int32Array:
    """Return an empty list of triples, [0, 3] int32."""
    return _NO_TRIPLES


def find_repeated(numbers: Int32Array) -> int | None:
    """Return the smallest number that `numbers`, [n], holds more than once; None: all differ."""
    ordered = np.sort(numbers)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(repeated[0]) if len(repeated) else None


class Resources(NamedTuple):
    """The slots of an executor with what an output uses; None: it uses nothing of that kind."""

    grammar_slot: int | None = None
    adapter_slot: int | None = None


NO_RESOURCES = Resources()


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """What a sequence attends to besides itself: the output of an encoder.

    `block_ids`, as on the wire, hold its `num_tokens` keys and values, or will by the first chunk. `token_ids` and
    `features` are what the encoder computes them from in the step of the admission; both None: it does not.
    """

    num_tokens: int
    block_ids: Int32Array  # [blocks that hold num_tokens]
    token_ids: Int32Array | None = None  # [num_tokens]
    features: Float32Array | None = None  # flat, in the shape that the model wants

    @property
    def is_computed(self) -> bool:
        """Whether the encoder runs for it in the step of the admission."""
        return self.token_ids is not None or self.features is not None


@dataclass(slots=True)
class Admission:
    """A sequence that enters the table.

    `token_ids` holds everything known: the prompt and, after a preemption, the output so far. The keys
    and values of the first `num_computed_tokens` are in the blocks by the time the slot has its first
    chunk; another slot may still be computing them. `token_rules` are those of its group; its forks have
    them too. `num_prompt_logprobs`: how many alternatives to return with the prompt's log-probabilities;
    the chunks that compute the prompt answer them. `traceparent`: the span of its request, as W3C Trace
    Context writes it; None: it is not traced. `resources`: what its output uses, and its forks too. `state_block`: the
    saved state that it begins with; None: an empty one. `encoder_input`: what it and its forks attend to besides; None:
    nothing.
    """

    slot: int
    generation: int
    token_ids: Int32Array
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: Int32Array
    sampling: SamplingRow
    cache_salt: int = 0
    token_rules: TokenRules | None = None
    num_prompt_logprobs: int = NO_LOGPROBS
    traceparent: str | None = None
    resources: Resources = NO_RESOURCES
    state_block: int | None = None
    encoder_input: EncoderInput | None = None


def next_generation(generation: int) -> int:
    """Return the generation of the next use of a slot. It is an int32; 0 follows the largest one.

    Two uses would be confused only if all the generations between them passed while a step is in flight.
    """
    return (generation + 1) & INT32_MAX


@dataclass(frozen=True, slots=True)
class Fork:
    """A slot that branches off `parent_slot`: it shares tokens and blocks, and samples on its own."""

    parent_slot: int
    slot: int
    generation: int
    sampling: SamplingRow


@dataclass(frozen=True, slots=True)
class GrammarLoad:
    """A grammar that enters an empty grammar slot."""

    slot: int
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class GrammarLoaded:
    """The end of a `GrammarLoad`. `error`: why outputs cannot follow the grammar; empty: they can."""

    slot: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What a sequence is computed with on top of the weights.

    `source`: where an executor finds it: a path in the folders that its configuration allows, or a name of its
    configuration. `digest`: SHA-256 of the content, ADAPTER_DIGEST_BYTES; empty: any content. `attempt` tells loads of
    any content apart; it does not travel.
    """

    source: str
    digest: bytes = b""
    attempt: int = 0

    @property
    def identity(self) -> bytes:
        """Of the content, 32 bytes: the digest. Without one, no two attempts to load an adapter have the same."""
        return self.digest or hashlib.sha256(b"%d %s" % (self.attempt, self.source.encode())).digest()


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """An adapter that begins to load into an empty adapter slot."""

    slot: int
    adapter: Adapter


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """The end of an `AdapterLoad`: the digest of the content, or in `error` why the adapter cannot be used."""

    slot: int
    digest: bytes = b""
    error: str = ""


@dataclass(slots=True)
class TableDelta:
    """What one step changes in the table, and what it runs.

    `apply` takes the fields in the order below; `prefill_chunks`, then `forks`, belong to the layout.

    A child of `beam_forks` is a copy of its parent as it is at that point, inactive. A child of `forks`
    gets its own token from the logits row that its parent has in this step.
    """

    released_slots: Int32Array = field(default_factory=no_slots)
    grammar_drops: tuple[int, ...] = ()  # grammar slots that become empty
    grammar_loads: tuple[GrammarLoad, ...] = ()
    adapter_drops: tuple[int, ...] = ()  # adapter slots that become empty
    adapter_loads: tuple[AdapterLoad, ...] = ()
    admissions: tuple[Admission, ...] = ()
    beam_forks: tuple[Fork, ...] = ()
    appended_tokens: Int32Array = field(default_factory=no_pairs)  # [n, 2]: slot, token id
    replaced_blocks: Int32Array = field(default_factory=no_triples)  # [n, 3]: slot, block index, block id
    appended_blocks: Int32Array = field(default_factory=no_pairs)  # [n, 2]: slot, block id
    deactivated_slots: Int32Array = field(default_factory=no_slots)
    activated_slots: Int32Array = field(default_factory=no_slots)
    allowances: Int32Array = field(default_factory=no_pairs)  # [n, 2]: slot, most tokens that it gets in a step
    prefill_chunks: Int32Array = field(default_factory=no_pairs)  # [n, 2]: slot, number of tokens
    forks: tuple[Fork, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """A text, or a pair, that a step computes whole; it has no slot and no blocks.

    `number` identifies it in the step. `token_type_ids` has a byte for each token; empty: all are 0.
    """

    number: int
    token_ids: Int32Array
    token_type_ids: bytes
    task: PoolingTask


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The vector or the scores of a `PoolingInput`; with a `flag` (a `RowFlag`; 0: none) they mean nothing."""

    number: int
    values: Float32Array
    flag: int = 0


@dataclass(frozen=True, slots=True)
class BlockSend:
    """Blocks whose content, as it is before the step, goes to another executor.

    `address` is the receiver's `transfer_address`, `instance_id` the receiver's. `secret`: TRANSFER_SECRET_BYTES that
    the receiver has too.
    """

    transfer_id: int
    address: str
    instance_id: str
    block_ids: Int32Array  # [n], in the order of the receiver's
    secret: bytes


@dataclass(frozen=True, slots=True)
class BlockReceive:
    """Blocks whose content comes from another executor, which has the same `transfer_id` and `secret`."""

    transfer_id: int
    block_ids: Int32Array  # [n], in the order of the sender's
    secret: bytes


# Length of the secret of a transfer.
TRANSFER_SECRET_BYTES = 16

# Length of the name of a block's content.
BLOCK_NAME_BYTES = 16


@dataclass(slots=True)
class Step:
    """One step as the scheduler sends it.

    The executor moves blocks in this order before it computes: begin to send and to receive, save states, swap out,
    swap in, copy, load the states of admissions. Swap-out and swap-in never share a step, no block is both destination
    and source of copies, and no two moves of one kind have the same destination.
    """

    epoch: int
    step_id: int
    delta: TableDelta
    blocks_to_swap_out: Int32Array = field(default_factory=no_pairs)  # [n, 2]: device block, host block
    blocks_to_swap_in: Int32Array = field(default_factory=no_pairs)  # [n, 2]: host block, device block
    blocks_to_copy: Int32Array = field(default_factory=no_pairs)  # [n, 2]: source block, destination block
    table_digest: int | None = None
    registered_blocks: Int32Array = field(default_factory=no_slots)  # [n]: whose content before this step has a name
    block_names: bytes = b""  # BLOCK_NAME_BYTES for each of them
    pooling_inputs: tuple[PoolingInput, ...] = ()
    draft_counts: TokenCounts | None = None  # [num_samples]: drafts to prove; None: the executor drafts
    draft_token_ids: Int32Array | None = None  # [sum of draft_counts]; None with them
    states_to_save: Int32Array = field(default_factory=no_triples)  # [n, 3]: slot, tokens before the step, block
    blocks_to_send: tuple[BlockSend, ...] = ()
    blocks_to_receive: tuple[BlockReceive, ...] = ()
    transfers_to_cancel: tuple[int, ...] = ()  # those that have ended already are left alone
    keeps_live: bool = False  # behind an update of the weights: live slots go on with their cache

    @property
    def encoder_inputs(self) -> list[EncoderInput]:
        """What the encoder computes."""
        inputs = [admission.encoder_input for admission in self.delta.admissions]
        return [given for given in inputs if given is not None and given.is_computed]

    def __post_init__(self) -> None:
        if not (len(self.blocks_to_swap_out) or len(self.blocks_to_swap_in) or len(self.blocks_to_copy)):
            return
        if len(self.blocks_to_swap_out) and len(self.blocks_to_swap_in):
            raise InvalidStepError(f"step {self.step_id} swaps out and in; a step may do only one of them")
        if len(np.intersect1d(self.blocks_to_copy[:, 0], self.blocks_to_copy[:, 1])):
            raise InvalidStepError(f"step {self.step_id} copies from a block that it also copies to")
        self._require_one_move_to_each("swaps out to", self.blocks_to_swap_out)
        self._require_one_move_to_each("swaps in to", self.blocks_to_swap_in)
        self._require_one_move_to_each("copies to", self.blocks_to_copy)

    def _require_one_move_to_each(self, what: str, moves: Int32Array) -> None:
        repeated = find_repeated(moves[:, 1])
        if repeated is not None:
            raise InvalidStepError(f"step {self.step_id} {what} block {repeated} twice")


@dataclass(slots=True)
class StepResult:
    """What the executor answers, in the order of the sample rows.

    `logprobs` is None if no row asked; rows that did not ask hold NaN. Rows of beam slots hold
    `UNKNOWN_TOKEN` and NaN there; instead they have candidates: one beam row after the other, each with as
    many as its slot asks for, likeliest first, equally likely ones by token id. None: no beam row.

    Alternatives have the form of candidates: those of the sampled rows that ask for some, one row after
    the other, and those of the prompt tokens whose log-probabilities the step answers, one token after the
    other. All log-probabilities are of the raw logits, except those of candidates.

    `row_flags` has a `RowFlag` in rows whose other entries mean nothing, and 0 in all others; None: all are 0. The
    log-probability of a prompt token is NaN where the logits are not finite.

    `token_counts`: how many tokens each row got, 0 for beam rows and for rows with a flag. Tokens, log-probabilities
    and alternatives are then those of the first row's tokens, of the second row's, and so on. None: each row has one
    entry. `draft_counts`: how many drafts were computed for each row; None: none.

    Each transfer that a step began is told once, when it has ended: in `arrived_transfers` by the receiver, in
    `sent_transfers` by the sender, or in `cancelled_transfers` by either.
    """

    epoch: int
    step_id: int
    sampled_token_ids: Int32Array  # [num_samples], or [sum of token_counts]
    logprobs: Float32Array | None = None  # the same
    execute_duration_us: int = 0
    move_duration_us: int = 0  # of it, what moves of blocks took; 0: none, or not known
    table_digest: int | None = None
    candidate_token_ids: Int32Array | None = None  # [sum of StepLayout.num_candidates]
    candidate_logprobs: Float32Array | None = None  # the same; after the slot's penalties and rules
    alternative_token_ids: Int32Array | None = None  # [sum of StepLayout.num_alternatives]
    alternative_logprobs: Float32Array | None = None  # the same
    prompt_logprobs: Float32Array | None = None  # [sum of StepLayout.num_prompt_logprobs], row after row
    prompt_alternative_token_ids: Int32Array | None = None  # [sum of num_prompt_logprobs * num_prompt_alternatives]
    prompt_alternative_logprobs: Float32Array | None = None  # the same
    row_flags: RowFlags | None = None  # [num_samples]
    token_counts: TokenCounts | None = None  # [num_samples]
    draft_counts: TokenCounts | None = None  # [num_samples]
    pooling_outputs: tuple[PoolingOutput, ...] = ()  # one for each of the step's inputs, in their order
    grammars_loaded: tuple[GrammarLoaded, ...] = ()  # loads that have ended since the last answer
    adapters_loaded: tuple[AdapterLoaded, ...] = ()  # the same
    arrived_transfers: tuple[int, ...] = ()  # transfers that have ended since the last answer
    sent_transfers: tuple[int, ...] = ()
    cancelled_transfers: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """The number of sample rows that it answers."""
        return len(self.sampled_token_ids if self.token_counts is None else self.token_counts)

    @property
    def arrays(self) -> list[Int32Array | Float32Array]:
        """Its arrays of tokens and log-probabilities: all arrays but the flags."""
        optional = (
            self.logprobs,
            self.candidate_token_ids,
            self.candidate_logprobs,
            self.alternative_token_ids,
            self.alternative_logprobs,
            self.prompt_logprobs,
            self.prompt_alternative_token_ids,
            self.prompt_alternative_logprobs,
        )
        return [self.sampled_token_ids, *(array for array in optional if array is not None)]
