"""The limits of a planner, from its executor and the configuration."""

import logging
from dataclasses import dataclass, replace

from octavo.values.wording import counted
from octavo_shared.errors import ExecutorFaultError
from octavo_shared.process.events import Event
from octavo_shared.step_wire.cache_group import CacheGroup, CacheKind
from octavo_shared.step_wire.delta_check import MAX_ALLOWANCE
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.step import MAX_SOURCE_BYTES
from octavo_shared.step_wire.token_rules import (
    MAX_BANNED_TOKENS,
    MAX_BANNED_WORD_TOKENS,
    MAX_BANNED_WORDS,
    MAX_BIASED_TOKENS,
    MAX_STOP_TOKEN_IDS,
    num_mask_bytes,
)
from scheduler_svc.core.limits import CoreLimits, PoolLimits, PreemptionMode, PrefillMode, Role
from scheduler_svc.core.step.step_size import (
    ADAPTER_LOAD_BYTES,
    GRAMMAR_LOAD_BYTES,
    admission_bytes,
    encoder_input_bytes,
    max_rules_bytes,
    other_bytes,
    pooled_bytes,
    pooling_bytes,
)
from scheduler_svc.executors.client import ExecutorRefusedError

log = logging.getLogger(__name__)

NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """The settings of the planners; `CoreLimits` describes each field.

    `max_num_seqs` and `max_num_batched_tokens` None: as much as the executor allows.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    watermark: float = 0.01
    preemption_mode: PreemptionMode | None = None
    prefill_mode: PrefillMode = PrefillMode.CHUNKED
    long_prefill_threshold: int = 0
    max_long_prefills: int = 1
    prefix_caching: bool = True
    host_prefixes: bool = True
    block_transfers: bool = True
    prefill_role_tokens: int = 1024
    max_message_bytes: int = NO_LIMIT


def serving_limits(info: ExecutorInfo, settings: PlannerSettings) -> CoreLimits:
    """Return the limits that the executor and the configuration allow.

    Raises:
        ExecutorFaultError: the executor reports invalid sizes.
        ExecutorRefusedError: its message limit cannot carry its longest sequence, or it has what does not go together.
    """
    sizes = [info.max_num_seqs, info.max_num_batched_tokens, info.block_size_tokens]
    sizes += [info.num_device_blocks] if info.is_generative else [len(info.pooling_tasks)]
    sizes += [info.num_pooled_values(task) for task in info.pooling_tasks]
    if min(sizes) < 1:
        raise ExecutorFaultError(f"the executor reports zero sizes: {info}")
    if info.max_allowance > 1 and not (
        info.max_allowance <= MAX_ALLOWANCE and info.max_sample_rows >= info.max_num_seqs
    ):
        raise ExecutorFaultError(
            f"the executor reports max_allowance {info.max_allowance}, at most {MAX_ALLOWANCE}, and max_sample_rows "
            f"{info.max_sample_rows}, at least its max_num_seqs"
        )
    starts = info.decoder_start_token_ids
    if info.has_encoder and not (
        1 <= len(starts) < info.max_model_len and 0 <= min(starts) <= max(starts) < info.vocab_size
    ):
        raise ExecutorFaultError(
            f"the executor reports {counted(len(starts), 'token')} with which its decoder begins; there must be 1 to "
            f"{info.max_model_len - 1}, of ids 0 to {info.vocab_size - 1}"
        )
    banned, most_banned = info.banned_token_ids, min(MAX_BANNED_TOKENS, info.vocab_size - 1)
    if banned and not (len(banned) <= most_banned and 0 <= min(banned) <= max(banned) < info.vocab_size):
        raise ExecutorFaultError(
            f"the executor bans {counted(len(banned), 'token')}; there may be {most_banned}, of ids 0 to "
            f"{info.vocab_size - 1}"
        )
    if info.has_encoder and info.num_adapter_slots:
        raise ExecutorRefusedError(
            f"its model has an encoder, and it offers {counted(info.num_adapter_slots, 'slot')} for adapters; models "
            "with an encoder are served without adapters"
        )
    groups = info.groups(agreed=True)
    if any(group.block_size_tokens != info.block_size_tokens for group in (*groups, *_encoder_groups(info))):
        raise ExecutorRefusedError("its cache groups have blocks of several sizes, which this scheduler cannot use")
    token_budget = min(settings.max_num_batched_tokens or NO_LIMIT, info.max_num_batched_tokens)
    max_model_len = longest_sequence(info, token_budget)
    if max_model_len < info.max_model_len:
        log.warning(
            Event(
                "max_model_len_lowered",
                max_model_len=max_model_len,
                model_max_model_len=info.max_model_len,
                cause="longer sequences do not fit in the cache"
                if info.is_generative
                else "a step computes a text whole (--max-num-batched-tokens)",
            ),
        )
    # Any one sequence must fit; how many a step admits is up to `max_admitted_bytes`.
    max_message_bytes = min(info.max_message_bytes, settings.max_message_bytes)
    max_num_seqs = min(settings.max_num_seqs or NO_LIMIT, info.max_num_seqs, token_budget)
    most_drafts = info.max_allowance - 1
    num_other_bytes = other_bytes(
        num_slots=max_num_seqs,
        num_block_appends=len(groups) * (max_num_seqs * (2 + most_drafts) + token_budget // info.block_size_tokens),
        num_block_moves=sum(group.num_host_blocks for group in info.pools(agreed=True)),
        num_allowances=max_num_seqs * min(1, most_drafts),
    )
    num_blocks = len(groups) * (max_model_len // info.block_size_tokens + 2)
    max_encoder_tokens = longest_input(info, token_budget)
    largest_step = num_other_bytes + admission_bytes(max_model_len, num_blocks, largest_rules_bytes(info))
    if not info.is_generative:
        most_values = max(info.embedding_size, info.num_scores)
        largest_step = num_other_bytes + pooling_bytes(max_model_len) + pooled_bytes(most_values)
    if info.num_adapter_slots:
        largest_step += ADAPTER_LOAD_BYTES + MAX_SOURCE_BYTES
    if max_encoder_tokens:
        largest_step += encoder_input_bytes(max_encoder_tokens, max_encoder_tokens // info.block_size_tokens + 1)
    if largest_step > max_message_bytes:
        setting = (
            "the executor's max_message_bytes"
            if info.max_message_bytes <= max_message_bytes
            else ("the scheduler's max_message_bytes")
        )
        raise ExecutorRefusedError(
            f"{setting}, {max_message_bytes}, cannot carry sequences of {max_model_len} tokens; "
            f"it must be at least {largest_step}"
        )
    limits = CoreLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=token_budget,
        max_model_len=max_model_len,
        vocab_size=info.vocab_size,
        block_size=info.block_size_tokens,
        num_blocks=groups[0].num_device_blocks if info.is_generative else 0,
        eos_token_ids=info.eos_token_ids,
        watermark=settings.watermark,
        num_host_blocks=groups[0].num_host_blocks,
        preemption_mode=settings.preemption_mode,
        prefill_mode=settings.prefill_mode,
        sliding_window=groups[0].window_tokens,
        more_groups=tuple(
            PoolLimits(
                group.num_device_blocks, group.window_tokens, group.num_host_blocks, max(1, group.bytes_per_block)
            )
            for group in groups[1:]
        ),
        max_allowance=info.max_allowance,
        max_sample_rows=info.max_sample_rows,
        long_prefill_threshold=settings.long_prefill_threshold,
        max_long_prefills=settings.max_long_prefills,
        prefix_caching=settings.prefix_caching,
        host_prefixes=settings.prefix_caching and settings.host_prefixes,
        block_bytes=max(1, groups[0].bytes_per_block),
        pooling_tasks=tuple(sorted(info.pooling_tasks)),
        embedding_size=info.embedding_size,
        num_scores=info.num_scores,
        bans_ngrams=info.bans_ngrams,
        num_grammar_slots=info.num_grammar_slots,
        matcher_id=info.matcher_id,
        num_adapter_slots=info.num_adapter_slots,
        # So that a grammar fits into a message with any one sequence.
        max_grammar_bytes=max(0, min(info.max_grammar_bytes, max_message_bytes - largest_step - GRAMMAR_LOAD_BYTES)),
        max_admitted_bytes=max_message_bytes - num_other_bytes,
        max_transfers=info.max_transfers if settings.prefix_caching and settings.block_transfers else 0,
        role=Role(info.role) if info.role in tuple(Role) else Role.BOTH,
        prefill_role_tokens=settings.prefill_role_tokens,
    )
    for group in _encoder_groups(info):
        limits = replace(
            limits,
            max_encoder_tokens=max_encoder_tokens,
            num_encoder_blocks=group.num_device_blocks,
            num_encoder_host_blocks=group.num_host_blocks,
            encoder_bytes=max(1, group.bytes_per_block),
        )
    return _with_states(limits, info.cache_groups[-1]) if info.has_states else limits


def _with_states(limits: CoreLimits, group: CacheGroup) -> CoreLimits:
    """Return the limits for a model whose layers keep a state of each sequence, of which `group` saves some."""
    num_saved, effects = group.num_device_blocks, {}
    if not num_saved:
        effects = {"cause": "no state is saved: no prefix is found again, and preempted requests are computed again"}
    log.info(Event("model_has_states", num_saved_states=num_saved, **effects))
    return replace(
        limits,
        has_states=True,
        num_state_blocks=num_saved,
        num_host_state_blocks=group.num_host_blocks,
        state_bytes=max(1, group.bytes_per_block),
        prefix_caching=limits.prefix_caching and num_saved > 0,
        host_prefixes=limits.host_prefixes and num_saved > 0,
    )


def largest_rules_bytes(info: ExecutorInfo) -> int:
    """Return a bound of the size of the token rules that a request may have."""
    num_words = 2 * MAX_BANNED_WORDS  # with and without a space in front
    num_ids = MAX_BIASED_TOKENS + MAX_STOP_TOKEN_IDS + len(info.eos_token_ids) + MAX_BANNED_TOKENS + num_words
    num_ids += len(info.banned_token_ids)
    return max_rules_bytes(
        num_ids=num_ids,
        num_biases=MAX_BIASED_TOKENS,
        num_words=num_words,
        num_word_tokens=num_words * MAX_BANNED_WORD_TOKENS,
        num_mask_bytes=num_mask_bytes(info.vocab_size),
    )


def _encoder_groups(info: ExecutorInfo) -> list[CacheGroup]:
    return [group for group in info.cache_groups if group.kind is CacheKind.ENCODER]


def longest_input(info: ExecutorInfo, token_budget: int) -> int:
    """Return the longest input of the encoder that a step can encode and its blocks hold, in tokens; 0: it has none."""
    rooms = [group.num_device_blocks * group.block_size_tokens for group in _encoder_groups(info)]
    return min(info.max_encoder_tokens, token_budget, *rooms) if rooms else 0


def longest_sequence(info: ExecutorInfo, token_budget: int) -> int:
    """Return the longest sequence that the executor can run when it has the cache for itself, in tokens.

    With a sliding window that is any length if the pool holds the window and one step's chunk. For a model that does
    not generate, a step must compute it whole.
    """
    if not info.is_generative:
        return min(info.max_model_len, token_budget)
    longest = info.max_model_len
    for group in info.groups(agreed=True):
        num_tokens, window = group.num_device_blocks * group.block_size_tokens, group.window_tokens
        if not (window and window + token_budget + 2 * group.block_size_tokens <= num_tokens):
            longest = min(longest, num_tokens)
    return longest
