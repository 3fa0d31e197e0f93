"""How many elements the repeated fields of a `GenerateRequest` may have: `message_scan.py` counts by this table.

The checks of the decoded request have the same limits, by the same constants; this table is for requests that are too
large to be decoded first.
"""

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.step_wire.executor_info import MAX_MODEL_LEN
from octavo_shared.step_wire.token_rules import (
    MAX_BANNED_TOKENS,
    MAX_BANNED_WORDS,
    MAX_BIASED_TOKENS,
    MAX_STOP_TOKEN_IDS,
)
from scheduler_svc.front.api.message_scan import CountLimit, peek
from scheduler_svc.front.api.request_limits import PromptTooLongError, RequestLimits
from scheduler_svc.front.api.request_validation import MAX_CHAT_MESSAGES, MAX_STOP_STRINGS
from scheduler_svc.front.grammars.parts import MAX_CHOICES

# Where a continuation says the length that the request was accepted for, behind its outputs.
_MAX_MODEL_LEN = (pb.GenerateRequest.CONTINUATION_FIELD_NUMBER, pb.Continuation.MAX_MODEL_LEN_FIELD_NUMBER)
_MOST_OTHER_FIELDS = 32


def prompt_limit(limits: RequestLimits) -> CountLimit:
    """Return the limit of a prompt of token ids."""

    def error(num_tokens: str) -> PromptTooLongError:
        return PromptTooLongError("token_ids", f"{num_tokens} tokens", limits)

    return CountLimit(limits.max_prompt_tokens, error=error)


def generate_request_limits(limits: RequestLimits, content: bytes = b"") -> dict[str, CountLimit]:
    """Return the limits of the repeated fields, by path; `content` is a request that may be a continuation."""
    max_model_len = peek(content, _MAX_MODEL_LEN, limits.max_num_seqs + _MOST_OTHER_FIELDS)
    if max_model_len > limits.max_len:
        limits = limits.accepted_for(min(max_model_len, MAX_MODEL_LEN))
    # Of all outputs of a continuation together.
    continued = CountLimit(limits.max_num_seqs * limits.max_len, cause="as many sequences as run, as long as may be")
    alternatives = CountLimit(continued.most * limits.vocab_size, cause=continued.cause)
    of_prompt = CountLimit(limits.max_prompt_tokens, cause=limits.max_prompt_tokens_cause)
    alternatives_of_prompt = CountLimit(of_prompt.most * limits.vocab_size, cause=of_prompt.cause)
    return {
        "token_ids.ids": prompt_limit(limits),
        "messages.messages": CountLimit(MAX_CHAT_MESSAGES, "messages long", "messages"),
        "sampling_params.stop": CountLimit(MAX_STOP_STRINGS, "strings"),
        "sampling_params.grammar.choice.choices": CountLimit(MAX_CHOICES, "texts long"),
        "sampling_params.stop_token_ids": CountLimit(MAX_STOP_TOKEN_IDS, "ids long"),
        "sampling_params.logit_bias": CountLimit(MAX_BIASED_TOKENS, "ids long"),
        "sampling_params.banned_words": CountLimit(MAX_BANNED_WORDS, "words"),
        "sampling_params.banned_token_ids": CountLimit(MAX_BANNED_TOKENS, "ids long"),
        "sampling_params.allowed_token_ids": CountLimit(limits.vocab_size, "ids long", cause="the vocabulary"),
        "continuation.outputs": CountLimit(limits.max_num_seqs, "outputs"),
        "continuation.outputs.token_ids": continued,
        "continuation.outputs.logprobs": continued,
        "continuation.outputs.alternative_token_ids": alternatives,
        "continuation.outputs.alternative_logprobs": alternatives,
        "continuation.prompt_logprobs.logprobs": of_prompt,
        "continuation.prompt_logprobs.alternative_token_ids": alternatives_of_prompt,
        "continuation.prompt_logprobs.alternative_logprobs": alternatives_of_prompt,
    }
