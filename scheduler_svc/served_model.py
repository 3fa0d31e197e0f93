"""What a scheduler serves: the model as the last attached executor described it, and its limits."""

import logging
from dataclasses import dataclass

from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.executor_client import ExecutorRefusedError
from scheduler_svc.tokenizer import Tokenizer
from shared.errors import ExecutorFaultError
from shared.executor_info import ExecutorInfo

log = logging.getLogger(__name__)

NO_LIMIT = 2**31 - 1

# Upper bounds of the size of a step's message: an int32 and its share of a block id for each token;
# the rest of a step, at thousands of sequences.
BYTES_PER_TOKEN = 9
STEP_OVERHEAD_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind the engine, as the last attached executor described it."""

    info: ExecutorInfo
    tokenizer: Tokenizer
    max_model_len: int


def serving_limits(info: ExecutorInfo, max_num_seqs: int | None, max_num_batched_tokens: int | None) -> SchedulerLimits:
    """Return what the executor and the configuration allow; None: as much as the executor does.

    Raises:
        ExecutorFaultError: the executor describes itself with numbers that make no sense.
        ExecutorRefusedError: its message limit is too small for its longest sequence.
    """
    if min(info.max_num_seqs, info.max_num_batched_tokens, info.block_size_tokens, info.num_device_blocks) < 1:
        raise ExecutorFaultError(f"the executor describes itself with zeros: {info}")
    token_budget = min(max_num_batched_tokens or NO_LIMIT, info.max_num_batched_tokens)
    max_model_len = min(info.max_model_len, info.max_cached_tokens)
    if max_model_len < info.max_model_len:
        log.warning(
            "event=max_model_len_lowered max_model_len=%d model_max_model_len=%d cause='the cache holds no more'",
            max_model_len,
            info.max_model_len,
        )
    # A step admits sequences until its budget is gone; the last one may be as long as they come.
    largest_step = BYTES_PER_TOKEN * (token_budget + max_model_len) + STEP_OVERHEAD_BYTES
    if largest_step > info.max_message_bytes:
        raise ExecutorRefusedError(
            f"its max_message_bytes, {info.max_message_bytes}, cannot carry sequences of {max_model_len} tokens; "
            f"it must be at least {largest_step}"
        )
    return SchedulerLimits(
        max_num_seqs=min(max_num_seqs or NO_LIMIT, info.max_num_seqs, token_budget),
        max_num_batched_tokens=token_budget,
        max_model_len=max_model_len,
        vocab_size=info.vocab_size,
        block_size=info.block_size_tokens,
        num_blocks=info.num_device_blocks,
        eos_token_ids=info.eos_token_ids,
    )
