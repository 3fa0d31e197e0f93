"""What an executor says about itself: the model, the cache, the limits. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from octavo_shared.step_wire.cache_group import CacheGroup, CacheKind
from octavo_shared.step_wire.step import PoolingTask


class Capability(IntEnum):
    """The enum of the same name in protos/octavo/execution/v1/capability.proto; its numbers are below 64."""

    NUMERICS = 1
    NAMED_BLOCKS = 2
    VARIABLE_TOKENS = 3
    GRAMMARS = 4
    ADAPTERS = 5
    ENCODER = 6
    WEIGHT_VERSIONS = 7
    BLOCK_TRANSFER = 8
    ROW_FLAGS = 9
    POOLING = 10
    CACHE_GROUPS = 11
    STATES = 12
    GRAMMARS_READY = 13
    NO_REPEAT_NGRAM = 14


_NAMES = {int(capability): capability.name for capability in Capability}


def common(wanted: Iterable[int], offered: Iterable[Capability]) -> frozenset[Capability]:
    """Return the capabilities that both sides have; numbers of later releases are ignored."""
    return frozenset(offered).intersection(wanted)


def name_of(number: int) -> str:
    """Return a capability in words; a capability of a later release is its number."""
    return _NAMES.get(number, str(number))


def names_of(numbers: Iterable[int]) -> str:
    """Return capabilities in words, joined by commas; at most 64 of them, whatever a peer sends."""
    return ",".join(name_of(number) for number in sorted(numbers)[:64])


def is_digest(text: str) -> bool:
    """Return whether a text is a SHA-256 in hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


def version_of(weights_digest: str) -> int:
    """Return the version that a digest of weights stands for on the wire; 0: the digest is not known."""
    return int(weights_digest[:16] or "0", 16)


_DIGEST = re.compile("[0-9a-f]{64}")

# Longest sequence that is believed of any peer, far above any machine.
MAX_MODEL_LEN = 2**27


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """One executor: a tensor-parallel group with one KV cache and one block space.

    `GetExecutorInfoResponse` in protos/octavo/execution/v1/execution_service.proto describes each
    field; the names are the same.
    """

    instance_id: str
    model_id: str
    model_hash: str
    dtype: str
    block_size_tokens: int
    num_device_blocks: int
    num_host_blocks: int
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_message_bytes: int
    eos_token_ids: tuple[int, ...]
    tp_size: int = 1
    sliding_window_tokens: int = 0
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    numerics_id: str = ""  # empty: not known, as with executors of wire version 1
    is_invariant: bool = False
    weights_digest: str = ""  # empty: not known, as with executors of wire version 1
    why_not_invariant: str = ""  # empty: it is, or does not say why
    kv_cache_dtype: str = ""  # empty: there is no cache, or it is not said
    warning: str = ""  # what the operator should fix although it serves; empty: nothing, or not said
    max_allowance: int = 1  # tokens of a slot in a step; 1: it drafts none
    max_sample_rows: int = 0  # tokens that a step may sample, with larger allowances
    num_grammar_slots: int = 0  # 0: it cannot follow grammars
    matcher_id: str = ""
    max_grammar_bytes: int = 0
    num_adapter_slots: int = 0  # 0: it computes with the weights alone
    max_adapter_rank: int = 0
    pooling_tasks: frozenset[PoolingTask] = frozenset()  # empty: it computes no vectors and no scores
    embedding_size: int = 0  # numbers in a vector; 0: none
    num_scores: int = 0  # of a text; 0: none
    num_token_types: int = 1
    is_generative: bool = True  # False: it has no cache, and `num_device_blocks` is 0
    cache_groups: tuple[CacheGroup, ...] = ()  # empty: all layers share one block table and one pool
    role: str = ""  # "prefill", "decode" or "both"; empty, or anything else: both
    transfer_address: str = ""  # host:port; ":port": at the host by which the scheduler reaches it
    max_transfers: int = 0  # sent and received, pending at once; 0: it neither sends nor receives blocks
    adapter_names: tuple[str, ...] = ()  # sources that its operator wants served under these names
    updates_weights: bool = False
    bans_ngrams: bool = True  # it has `no_repeat_ngram_size`
    max_encoder_tokens: int = 0  # longest input of its encoder; 0: it has none
    decoder_start_token_ids: tuple[int, ...] = ()  # with which the decoder of such a model begins
    banned_token_ids: tuple[int, ...] = ()  # that none of its outputs has

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What it can do beyond wire version 1."""
        of_numerics = {Capability.NUMERICS, Capability.NAMED_BLOCKS} if self.numerics_id else set()
        of_grammars = {Capability.GRAMMARS, Capability.GRAMMARS_READY} if self.num_grammar_slots else set()
        of_adapters = {Capability.ADAPTERS} if self.num_adapter_slots else set()
        of_drafts = {Capability.VARIABLE_TOKENS} if self.max_allowance > 1 else set()
        of_pooling = {Capability.POOLING} if self.pooling_tasks else set()
        of_groups = {Capability.CACHE_GROUPS} if self.cache_groups else set()
        of_states = {Capability.STATES} if self.has_states else set()
        of_transfers = {Capability.BLOCK_TRANSFER} if self.max_transfers else set()
        of_versions = {Capability.WEIGHT_VERSIONS} if self.updates_weights else set()
        of_encoder = {Capability.ENCODER} if self.max_encoder_tokens else set()
        of_ngrams = {Capability.NO_REPEAT_NGRAM} if self.bans_ngrams else set()
        of_things = of_grammars | of_adapters | of_versions | of_ngrams
        of_blocks = of_groups | of_states | of_transfers | of_encoder
        return frozenset({Capability.ROW_FLAGS, *of_numerics, *of_things, *of_drafts, *of_pooling, *of_blocks})

    @property
    def weights_version(self) -> int:
        """The first 64 bits of the digest of its weights."""
        return version_of(self.weights_digest)

    @property
    def has_encoder(self) -> bool:
        """Whether sequences attend to the output of an encoder."""
        return any(group.kind is CacheKind.ENCODER for group in self.cache_groups)

    @property
    def has_states(self) -> bool:
        """Whether layers keep a state of each sequence, which lies at its slot of the batch."""
        return any(group.kind is CacheKind.STATE for group in self.cache_groups)

    def num_pooled_values(self, task: PoolingTask) -> int:
        """Numbers in the answer to a text."""
        return self.embedding_size if task is PoolingTask.EMBED else self.num_scores

    def groups(self, *, agreed: bool) -> tuple[CacheGroup, ...]:
        """Return the cache groups with block tables of an attachment.

        A single one, without layers, unless CACHE_GROUPS is agreed.
        """
        if agreed and self.cache_groups:
            return tuple([group for group in self.cache_groups if group.has_block_tables])
        kind = CacheKind.WINDOW if self.sliding_window_tokens else CacheKind.FULL
        sizes = self.block_size_tokens, self.num_device_blocks, self.num_host_blocks
        return (CacheGroup(kind, (), *sizes, window_tokens=self.sliding_window_tokens),)

    def pools(self, *, agreed: bool) -> tuple[CacheGroup, ...]:
        """Return the cache groups of an attachment as their blocks are numbered; that of the states is the last one."""
        has_all = agreed and (self.has_states or self.has_encoder)
        return self.cache_groups if has_all else self.groups(agreed=agreed)

    def encoder_pool(self, *, agreed: bool) -> tuple[int, int, int] | None:
        """Return the pool of the encoder's output: tokens in a block, blocks, longest input; None: there is none."""
        group = next((group for group in self.cache_groups if group.kind is CacheKind.ENCODER), None)
        if group is None or not agreed:
            return None
        return group.block_size_tokens, group.num_device_blocks, self.max_encoder_tokens

    @property
    def max_cached_tokens(self) -> int:
        """Tokens that fit into the device pool."""
        return self.num_device_blocks * self.block_size_tokens


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """One file of the tokenizer, or of pooling; `name` has the folders below the model directory."""

    name: str
    content: bytes
