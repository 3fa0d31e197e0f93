"""The numbers and choices that bound the planner of one executor."""

import enum
from dataclasses import dataclass

from octavo_shared.step_wire.step import PoolingTask

# With `PrefillMode.FIRST`, a step of decodes follows after so many steps with prefill chunks. A step of decodes is
# much shorter than one with prefill chunks, so prompts lose little, and no stream stands still for long.
MAX_PREFILL_STEPS = 4


class PreemptionMode(enum.Enum):
    """What becomes of the blocks of a preempted group."""

    RECOMPUTE = "recompute"
    """They are freed; the group computes its tokens again."""
    SWAP = "swap"
    """They are moved to the host pool, and back again later."""


class PrefillMode(enum.Enum):
    """How prompts and decodes share a step."""

    CHUNKED = "chunked"
    """Decodes first; the rest of the budget goes to prefill chunks in the same step."""
    FIRST = "first"
    """A step with prefill chunks has no decodes, and goes before them, `MAX_PREFILL_STEPS` times in a row at most."""


class Role(enum.StrEnum):
    """What is placed on an executor while others of its fleet take the rest."""

    BOTH = "both"
    PREFILL = "prefill"
    """Prompts with many tokens to compute, until their first token."""
    DECODE = "decode"
    """Everything else."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The pools of a cache group.

    `sliding_window`: how many last tokens its layers see; 0: all. `block_bytes`: size of a block; 1: it is not known.
    """

    num_blocks: int
    sliding_window: int = 0
    num_host_blocks: int = 0
    block_bytes: int = 1


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """The numbers and choices that bound the planner of one executor; sizes in tokens and blocks.

    Attributes:
        max_num_seqs: Slots of the batch table.
        max_num_batched_tokens: Token budget of a step, at least `max_num_seqs`, so that every running
            sequence can decode in every step.
        max_model_len: Longest sequence; at most what the pool holds (under a sliding window: the window
            and one step's chunk), so that a sequence that has the pool for itself can always grow to its end.
        watermark: Share of the device pool that admissions and swap-ins leave free, so that running sequences can
            grow: without it the newest group is preempted as soon as it is admitted.
        num_host_blocks: Blocks of the executor's host pool. A cache group has 0: preemption always recomputes.
        preemption_mode: None: RECOMPUTE for a group with one live sequence (its prefix is often still
            cached, and moving blocks costs both ways), SWAP for several.
        sliding_window: How many last tokens the layers of the first cache group see; 0: all.
        more_groups: The other cache groups; `num_blocks`, `num_host_blocks` and `sliding_window` describe the first.
        max_allowance: Most tokens that a slot may get in a step; 1: nothing is drafted.
        max_sample_rows: Most tokens that a step may sample, where slots may get several.
        long_prefill_threshold: A sequence with more tokens to compute is a long prefill: it gets at
            most so many a step, and `max_long_prefills` of them run at once; 0: nothing is long.
        prefix_caching: Whether full blocks are found again by their content.
        host_prefixes: Whether they are found again in the host pool, too.
        block_bytes: Size of a block of the first cache group; 1: it is not known. Of all pools or of none.
        has_states: Whether layers keep a state of each sequence.
        num_state_blocks: States that can be saved; 0: none. Then each sequence is computed from its first token on,
            unless it is a fork, and none is swapped.
        num_host_state_blocks: States that can be in the executor's host pool.
        state_bytes: Size of a state, in the unit of `block_bytes`.
        max_encoder_tokens: Longest input of the encoder, at most what its pool and the budget of a step hold; 0: the
            model has none.
        num_encoder_blocks: Blocks of its output.
        num_encoder_host_blocks: Such blocks of the executor's host pool, which stay empty.
        encoder_bytes: Size of such a block, in the unit of `block_bytes`.
        role: What is placed here.
        prefill_role_tokens: Groups with more tokens to compute are for executors with the role PREFILL.
        max_transfers: Transfers of blocks, to and from other executors, that may be pending at once; 0: none is made.
        names_blocks: Whether the executor is told the names of cached blocks, so that the cache outlives the planner.
        flags_rows: Whether the executor says which outputs cannot go on.
        bans_ngrams: Whether the executor's sampler has `no_repeat_ngram_size`.
        num_grammar_slots: Grammars that outputs can follow at a time; 0: the executor follows none.
        matcher_id: Names the executor's grammar matcher; those with equal ids allow the same tokens.
        max_grammar_bytes: Longest body of a grammar.
        tells_loads: Whether the executor loads grammars beside the steps, and reports when a load ends.
        num_adapter_slots: Adapters that sequences can be computed with at a time; 0: the weights alone.
        pooling_tasks: What the executor makes of whole texts, ascending.
        embedding_size: Numbers of a vector.
        num_scores: Scores of a text.
        max_admitted_bytes: Size of the admissions of one step, which must fit into a message with everything else
            (`core/step/step_size.py`). Any one sequence fits; a group of several that does not fit never runs.
        stall_after_s: When the oldest step is overdue by so much, the planner gets no new group that another
            planner of the fleet can take.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    eos_token_ids: tuple[int, ...] = ()
    watermark: float = 0.01
    num_host_blocks: int = 0
    preemption_mode: PreemptionMode | None = None
    prefill_mode: PrefillMode = PrefillMode.CHUNKED
    sliding_window: int = 0
    more_groups: tuple[PoolLimits, ...] = ()
    max_allowance: int = 1
    max_sample_rows: int = 0
    long_prefill_threshold: int = 0
    max_long_prefills: int = 1
    prefix_caching: bool = True
    host_prefixes: bool = False
    block_bytes: int = 1
    has_states: bool = False
    num_state_blocks: int = 0
    num_host_state_blocks: int = 0
    state_bytes: int = 1
    max_encoder_tokens: int = 0
    num_encoder_blocks: int = 0
    num_encoder_host_blocks: int = 0
    encoder_bytes: int = 1
    max_transfers: int = 0
    role: Role = Role.BOTH
    prefill_role_tokens: int = 1024
    names_blocks: bool = False
    flags_rows: bool = False
    bans_ngrams: bool = False
    num_grammar_slots: int = 0
    matcher_id: str = ""
    max_grammar_bytes: int = 0
    tells_loads: bool = False
    num_adapter_slots: int = 0
    pooling_tasks: tuple[PoolingTask, ...] = ()
    embedding_size: int = 0
    num_scores: int = 0
    max_admitted_bytes: int = 2**31 - 1
    stall_after_s: float = 1.0

    def __post_init__(self) -> None:
        assert 1 <= self.max_num_seqs <= self.max_num_batched_tokens
        for pool in self.groups if self.is_generative else ():
            num_resident_tokens = pool.sliding_window + self.max_num_batched_tokens + 2 * self.block_size
            slides = pool.sliding_window > 0 and num_resident_tokens <= pool.num_blocks * self.block_size
            assert slides or self.max_model_len <= pool.num_blocks * self.block_size
        assert self.max_long_prefills >= 1
        most_encoded = min(self.max_num_batched_tokens, self.num_encoder_blocks * self.block_size)
        assert self.max_encoder_tokens <= most_encoded
        assert not (self.has_states and self.prefix_caching and not self.num_state_blocks)
        assert self.has_states or not self.num_state_blocks
        assert self.max_allowance == 1 or self.max_sample_rows >= self.max_num_seqs

    @property
    def is_generative(self) -> bool:
        """Whether the executor generates; else it only pools, and has no blocks."""
        return self.num_blocks > 0

    @property
    def groups(self) -> tuple[PoolLimits, ...]:
        """The pools of all cache groups."""
        first = PoolLimits(self.num_blocks, self.sliding_window, self.num_host_blocks, self.block_bytes)
        return first, *self.more_groups

    @property
    def has_window(self) -> bool:
        """Whether any cache group has a sliding window."""
        return any(pool.sliding_window for pool in self.groups)
