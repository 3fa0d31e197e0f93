"""What executors require of a single request, whatever step it comes in: sampling parameters, token ids, token rules.

An executor checks each admission, and an engine the requests that fronts of other processes submit: what would make an
executor refuse a step, the engine refuses to the front.
"""

import numpy as np

from octavo.values.sampling_params_table import INT32_MAX, NO_LOGPROBS, ROW_PARAMS
from octavo.values.wording import counted
from octavo_shared.errors import InvalidStepError
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.sampling_row import SamplingRow
from octavo_shared.step_wire.step import Int32Array, PoolingTask, find_repeated
from octavo_shared.step_wire.token_rules import TokenRules, num_mask_bytes


def check_sampling(who: str, row: SamplingRow) -> None:
    """Require numbers that the sampler can work with. Raises InvalidStepError: `who` has others."""
    if not all(parameter.allows(getattr(row, parameter.name)) for parameter in ROW_PARAMS):
        raise InvalidStepError(f"{who} has sampling parameters out of range: {row}")


def check_answerable(who: str, num_prompt_logprobs: int, rules: TokenRules | None) -> None:
    """Require token rules that can be applied, and a request for the prompt's log-probabilities that makes sense.

    Raises: InvalidStepError: `who` has others.
    """
    if not NO_LOGPROBS <= num_prompt_logprobs <= INT32_MAX:
        raise InvalidStepError(f"{who} asks for {num_prompt_logprobs} alternatives of its prompt")
    if rules is None:
        return
    if len(rules.biases) != len(rules.biased_token_ids):
        raise InvalidStepError(f"{who} has {len(rules.biases)} biases for {len(rules.biased_token_ids)} biased tokens")
    if not np.isfinite(rules.biases).all():
        raise InvalidStepError(f"{who} has a bias that is not a finite number")
    repeated = find_repeated(rules.biased_token_ids)
    if repeated is not None:
        raise InvalidStepError(f"{who} has two biases for token {repeated}")


def check_known_ids(who: str, token_ids: Int32Array, vocab_size: int, what: str = "token id") -> None:
    """Require tokens that the model knows. Raises InvalidStepError: `who` has others."""
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if len(outside):
        raise InvalidStepError(f"{who} has {what} {outside[0]}; ids are 0 to {vocab_size - 1}")


def check_number(who: str, what: str, number: int, vocab_size: int) -> None:
    """Require that no more tokens are asked for than there are. Raises InvalidStepError: `who` asks for more."""
    if number > vocab_size:
        raise InvalidStepError(f"{who} asks for {number} {what}; the vocabulary has {vocab_size} tokens")


def check_rules(who: str, rules: TokenRules, vocab_size: int) -> None:
    """Require rules for tokens that the model knows. Raises InvalidStepError: `who` has others."""
    check_known_ids(who, rules.token_ids(), vocab_size, "a rule for token id")
    mask, num_bytes = rules.allowed_mask, num_mask_bytes(vocab_size)
    if mask is not None and len(mask) != num_bytes:
        raise InvalidStepError(f"{who} has a mask of {len(mask)} bytes; one for {vocab_size} tokens has {num_bytes}")


def check_pooled(who: str, token_ids: Int32Array, token_type_ids: bytes, task: PoolingTask, info: ExecutorInfo) -> None:
    """Require a text that the model can pool whole in one step. Raises InvalidStepError: `who` has another."""
    if task not in info.pooling_tasks:
        offered = " and ".join(sorted(task.name for task in info.pooling_tasks)) or "no pooling task"
        raise InvalidStepError(f"{who} has the task {task.name}; the model offers {offered}")
    limit = min(info.max_model_len, info.max_num_batched_tokens)
    if not 0 < len(token_ids) <= limit:
        raise InvalidStepError(f"{who} has {counted(len(token_ids), 'token')}; it may have 1 to {limit}")
    check_known_ids(who, token_ids, info.vocab_size)
    if not token_type_ids:
        return
    if len(token_type_ids) != len(token_ids):
        raise InvalidStepError(f"{who} has {len(token_type_ids)} token types for {counted(len(token_ids), 'token')}")
    if max(token_type_ids) >= info.num_token_types:
        raise InvalidStepError(f"{who} has token type {max(token_type_ids)}; types are 0 to {info.num_token_types - 1}")
