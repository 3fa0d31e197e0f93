"""Check a `GenerateRequest` and turn it into the service's own values.

Everything that is wrong raises `InvalidFieldError` with field, value and limit. Fields without support are refused,
never ignored: here those that are reserved for later, in message_scan.py those that this release does not know.
Next: params_validation.py (sampling), group_validation.py (n, best_of, beams, tenants).
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError
from octavo_shared.step_wire.executor_info import MAX_MODEL_LEN
from octavo_shared.step_wire.step import INT32_MAX, NO_LOGPROBS, Int32Array
from octavo_shared.step_wire.token_rules import (
    MAX_BANNED_TOKENS,
    MAX_BANNED_WORDS,
    MAX_BIASED_TOKENS,
    MAX_STOP_TOKEN_IDS,
)
from scheduler_svc.front.api.continuation_validation import validate_continuation
from scheduler_svc.front.api.group_validation import beam_search_params, check_account, hash_cache_salt, output_counts
from scheduler_svc.front.api.message_scan import CountLimit, peek
from scheduler_svc.front.api.params_validation import (
    check_alternatives,
    check_token_ids,
    number,
    sampling_row,
    token_rules,
)
from scheduler_svc.front.api.request_limits import (
    PromptTooLongError,
    RequestLimits,
    check_known_ids,
    require,
    require_param,
    unreadable,
)
from scheduler_svc.front.grammars.parts import MAX_CHOICES, AskedGrammar
from scheduler_svc.front.output import AnswerOptions, ContinuedAnswer
from scheduler_svc.front.text.output_text import TextOptions
from scheduler_svc.front.text.tokenizer import Tokenizer
from scheduler_svc.request.engine_request import MAX_REQUEST_ID_LENGTH, EngineRequest
from scheduler_svc.request.parameters import StopConditions

MAX_CHAT_MESSAGES = 16_384
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
MAX_DELTA_INTERVAL_MS = 10_000

# Where a continuation says the length that the request was accepted for, behind its outputs.
_MAX_MODEL_LEN = (pb.GenerateRequest.CONTINUATION_FIELD_NUMBER, pb.Continuation.MAX_MODEL_LEN_FIELD_NUMBER)
_MOST_OTHER_FIELDS = 32


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A checked request: what the engine computes, what the client gets of it, and its grammar, not compiled yet."""

    engine: EngineRequest
    answer_options: AnswerOptions
    continued: ContinuedAnswer | None = None
    grammar: AskedGrammar | None = None


def validate_request(
    request: pb.GenerateRequest,
    prompt_token_ids: Sequence[int] | Int32Array,
    limits: RequestLimits,
    tokenizer: Tokenizer,
    banned_words: Sequence[Sequence[int]] = (),
    encoder_token_ids: Int32Array | None = None,
) -> ValidRequest:
    """Return the checked request: the second half of the checks, after tokenizing.

    Args:
        request: A request that has passed `check_request_fields`, which is not called again.
        prompt_token_ids: Its prompt after tokenizing.
        limits: The limits of the request.
        tokenizer: Decodes the text of a continuation again.
        banned_words: Its banned words after tokenizing.
        encoder_token_ids: The checked input of the model's encoder; None: it has none.

    Raises: InvalidFieldError: the first wrong field.
    """
    params = request.sampling_params
    prompt_field = request.WhichOneof("prompt") or "prompt"
    check_prompt_length(len(prompt_token_ids), prompt_field, limits)
    prompt = check_known_ids(prompt_token_ids, prompt_field, limits.vocab_size)
    check_account(request, limits)
    beam_search = beam_search_params(params, limits)
    if beam_search is not None:
        # The executor returns candidates of beams with their log-probabilities, whether asked for or not.
        sampling = sampling_row(params, NO_LOGPROBS, limits.sampling_defaults, is_beam=True)
        num_returned, num_sampled = beam_search.num_outputs, 0
    else:
        num_returned, num_sampled = output_counts(params, limits)
        num_logprobs = check_alternatives(params, "logprobs", limits.vocab_size)
        if num_logprobs is None:
            num_logprobs = 0 if num_sampled > num_returned else NO_LOGPROBS
        sampling = sampling_row(params, num_logprobs, limits.sampling_defaults)
    num_prompt_logprobs = check_alternatives(params, "prompt_logprobs", limits.vocab_size)
    conditions = stop_conditions(params, limits.vocab_size)
    engine_request = EngineRequest(
        request_id=request.request_id or f"request-{secrets.token_hex(8)}",
        prompt_token_ids=prompt,
        sampling=sampling,
        stop_conditions=conditions,
        num_sequences=num_sampled or 1,
        beam_search=beam_search,
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=hash_cache_salt(request.tenant, request.cache_salt),
        speculate=request.speculate if request.HasField("speculate") else True,
        token_rules=token_rules(params, banned_words, limits),
        has_stop_strings=bool(params.stop),
        num_prompt_logprobs=NO_LOGPROBS if num_prompt_logprobs is None else num_prompt_logprobs,
        requires_same_numerics=request.require_same_numerics,
        lora_adapter=request.lora_adapter,
        encoder_token_ids=encoder_token_ids,
    )
    answer_options = AnswerOptions(
        num_returned,
        num_sampled,
        params.HasField("logprobs"),
        text_options(params),
        min_delta_interval_s=request.min_delta_interval_ms / 1000,
        max_output_tokens=conditions.length_limit(len(prompt), limits.max_len) - len(prompt),
        tells_provenance=request.include_provenance,
        max_model_len=limits.max_len,
    )
    if not request.HasField("continuation"):
        return ValidRequest(engine_request, answer_options)
    continuation, continued = validate_continuation(request, engine_request, answer_options, limits, tokenizer)
    return ValidRequest(replace(engine_request, continuation=continuation), answer_options, continued)


def check_request_fields(request: pb.GenerateRequest) -> None:
    """Check what can be checked before the prompt is tokenized; `validate_request` checks the rest."""
    check_request_id(request.request_id)
    if request.WhichOneof("prompt") is None and not request.HasField("encoder_prompt"):
        raise InvalidFieldError("prompt", "absent", "one of text, token_ids and messages")
    require_delta_interval(request.min_delta_interval_ms)


def check_request_id(request_id: str, most: int = MAX_REQUEST_ID_LENGTH) -> None:
    """Refuse an id that is too long."""
    rule = f"at most {most} characters long"
    require(len(request_id) <= most, "request_id", f"{len(request_id)} characters long", rule)


def require_delta_interval(interval_ms: int) -> None:
    """Refuse a least time between two deltas that is out of range."""
    is_right = 0 <= interval_ms <= MAX_DELTA_INTERVAL_MS
    limit = f"at most {MAX_DELTA_INTERVAL_MS}" if interval_ms > 0 else "at least 0"
    require(is_right, "min_delta_interval_ms", interval_ms, limit)


def check_prompt_length(num_tokens: int, field: str, limits: RequestLimits) -> None:
    """Refuse a prompt that is empty, or too long to leave room for one token of output."""
    require(num_tokens >= 1, field, "empty", "at least 1 token long")
    if num_tokens > limits.max_prompt_tokens:
        raise PromptTooLongError(field, f"{num_tokens} tokens", limits)


def stop_conditions(params: generation_pb2.SamplingParams, vocab_size: int) -> StopConditions:
    """Return the conditions on ids and lengths."""
    max_tokens = number(params, "max_tokens")
    check_token_ids(params.stop_token_ids, "stop_token_ids", MAX_STOP_TOKEN_IDS, vocab_size)
    return StopConditions(
        max_tokens=None if max_tokens is None else min(int(max_tokens), INT32_MAX // 2),
        stop_token_ids=frozenset(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
    )


def text_options(params: generation_pb2.SamplingParams) -> TextOptions:
    """Return how tokens become text, and where text ends."""
    field, num_stops = "stop", len(params.stop)
    require_param(num_stops <= MAX_STOP_STRINGS, field, f"{num_stops} strings", f"at most {MAX_STOP_STRINGS} strings")
    for stop in params.stop:
        shown = f"a list with a string of {len(stop)} characters"
        limit = f"strings of 1 to {MAX_STOP_STRING_LENGTH} characters"
        require_param(1 <= len(stop) <= MAX_STOP_STRING_LENGTH, field, shown, limit)
    return TextOptions(
        stop_strings=tuple(params.stop),
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens if params.HasField("skip_special_tokens") else True,
        min_tokens=params.min_tokens,
    )


def generate_request_limits(limits: RequestLimits, content: bytes = b"") -> dict[str, CountLimit]:
    """Return how many elements the repeated fields may have, by path: for requests that are too large to decode first.

    `content` is a request that may be a continuation. The checks of a decoded request have the same limits.
    """

    def too_long(num_tokens: str) -> InvalidFieldError:
        size = f"{num_tokens} tokens"
        if most_encoded > limits.max_prompt_tokens:
            return unreadable("token_ids", size, limits)
        if not most_encoded:
            return PromptTooLongError("token_ids", size, limits)
        rule = f"at most {most_encoded} tokens long for the encoder, and {limits.max_prompt_tokens} for the decoder"
        return InvalidFieldError("token_ids", size, rule)

    def not_read(num_tokens: str) -> InvalidFieldError:
        return unreadable("encoder_prompt.token_ids", f"{num_tokens} tokens", limits)

    max_model_len = peek(content, _MAX_MODEL_LEN, limits.max_num_seqs + _MOST_OTHER_FIELDS)
    if max_model_len > limits.max_len:
        limits = limits.accepted_for(min(max_model_len, MAX_MODEL_LEN))
    # Of all outputs of a continuation together.
    continued = CountLimit(limits.max_num_seqs * limits.max_len, cause="as many sequences as run, as long as may be")
    alternatives = CountLimit(continued.most * limits.vocab_size, cause=continued.cause)
    of_prompt = CountLimit(limits.max_prompt_tokens, cause=limits.max_prompt_tokens_cause)
    most_encoded = limits.max_encoder_tokens
    alternatives_of_prompt = CountLimit(of_prompt.most * limits.vocab_size, cause=of_prompt.cause)
    return {
        "token_ids.ids": CountLimit(max(limits.max_prompt_tokens, most_encoded), error=too_long),
        "encoder_prompt.token_ids.ids": CountLimit(most_encoded, error=not_read),
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
