"""Check the numbers of `SamplingParams` and its fields that name single tokens; turn both into the executor's terms.

`request_validation.py` calls this. Banned words are token ids by then (`tokenize_words`).
"""

import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from octavo.generation.v1 import generation_pb2
from octavo.values.sampling_params_table import BEAMLESS_STAGES, BY_NAME, MAX_ALTERNATIVES, ROW_PARAMS
from octavo_shared.step_wire.sampling_row import SamplingRow
from octavo_shared.step_wire.step import Int32Array
from octavo_shared.step_wire.token_rules import (
    MAX_BANNED_TOKENS,
    MAX_BANNED_WORD_TOKENS,
    MAX_BANNED_WORDS,
    MAX_BIASED_TOKENS,
    TokenRules,
    pack_mask,
    pad_words,
)
from scheduler_svc.front.api.request_limits import RequestLimits, check_known_ids, require_param, shown_float
from scheduler_svc.front.text.tokenizer import Tokenizer

NO_DEFAULTS: Mapping[str, float] = MappingProxyType({})


def number(
    params: generation_pb2.SamplingParams, name: str, model_defaults: Mapping[str, float] = NO_DEFAULTS
) -> float | None:
    """Return a field's value; if it is unset, the model's default, else the table's.

    Raises: InvalidFieldError: it is out of the table's range.
    """
    parameter = BY_NAME[name]
    if not params.HasField(name):  # type: ignore[arg-type]
        return model_defaults.get(name, parameter.default)
    value: float = getattr(params, name)
    require_param(parameter.allows(value), name, value, parameter.limit)
    return value


def sampling_row(
    params: generation_pb2.SamplingParams,
    num_logprobs: int,
    model_defaults: Mapping[str, float] = NO_DEFAULTS,
    *,
    is_beam: bool = False,
) -> SamplingRow:
    """Return the numbers that the executor's sampler needs for output 0.

    Args:
        params: What the client asks for.
        num_logprobs: The row's.
        model_defaults: The model's defaults of unset fields, by name.
        is_beam: Whether the row is for beams, which sample nothing; their fields were checked.

    Raises: InvalidFieldError: the first number that is out of range.
    """
    values: dict[str, float] = {"num_logprobs": num_logprobs}
    for parameter in ROW_PARAMS:
        if parameter.is_public and not (is_beam and parameter.stage in BEAMLESS_STAGES):
            value = number(params, parameter.name, model_defaults)
            if value is not None:
                values[parameter.name] = value
    if not is_beam and "seed" not in values:
        values["seed"] = secrets.randbits(64)
    if params.HasField("max_tokens"):
        rule = f"from 0 to {params.max_tokens} (max_tokens)"
        require_param(params.min_tokens <= params.max_tokens, "min_tokens", params.min_tokens, rule)
    return SamplingRow(**values)  # type: ignore[arg-type]


MAX_BIAS = 100.0


def tokenize_words(params: generation_pb2.SamplingParams, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of the banned words, each with and without a space in front; equal ones once.

    Raises: InvalidFieldError: there are too many, or one is empty or too long.
    """
    field, num_words = "banned_words", len(params.banned_words)
    require_param(num_words <= MAX_BANNED_WORDS, field, f"{num_words} words", f"at most {MAX_BANNED_WORDS} words")
    longest = MAX_BANNED_WORD_TOKENS * tokenizer.max_token_length  # checked before tokenizing, which costs time
    found: dict[tuple[int, ...], None] = {}
    for word in params.banned_words:
        shown = f"a list with a word of {len(word)} characters"
        require_param(1 <= len(word) <= longest, field, shown, f"words of 1 to {longest} characters")
        for spelled in (word, " " + word.lstrip(" ")):
            token_ids = tuple(tokenizer.encode_part(spelled))
            shown, rule = f"a list with a word of {len(token_ids)} tokens", f"words of 1 to {MAX_BANNED_WORD_TOKENS}"
            require_param(1 <= len(token_ids) <= MAX_BANNED_WORD_TOKENS, field, shown, f"{rule} tokens")
            found[token_ids] = None
    return [list(token_ids) for token_ids in found]


def check_alternatives(params: generation_pb2.SamplingParams, field: str, vocab_size: int) -> int | None:
    """Return the number in `logprobs` or `prompt_logprobs`; None: it is not set."""
    if not params.HasField(field):  # type: ignore[arg-type]
        return None
    value: int = getattr(params, field)
    most = min(MAX_ALTERNATIVES, vocab_size)
    require_param(value <= most, field, value, f"from 0 to {most}")
    return value


def token_rules(
    params: generation_pb2.SamplingParams, words: Sequence[Sequence[int]], limits: RequestLimits
) -> TokenRules | None:
    """Return the rules on single tokens; None: there are none.

    Args:
        params: The client's; their stop tokens were checked.
        words: The banned words, as token ids.
        limits: The vocabulary, the end-of-sequence tokens, and what the model never says.

    Raises: InvalidFieldError: a token is unknown, a list is too long, or no token could ever be sampled.
    """
    # A word with a token that only the tokenizer knows can never be generated.
    words = [word for word in words if max(word) < limits.vocab_size]
    banned = check_token_ids(params.banned_token_ids, "banned_token_ids", MAX_BANNED_TOKENS, limits.vocab_size)
    allowed = check_token_ids(params.allowed_token_ids, "allowed_token_ids", limits.vocab_size, limits.vocab_size)
    single = {word[0] for word in words if len(word) == 1} - set(limits.eos_token_ids)
    longer = [word for word in words if len(word) > 1]
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(limits.eos_token_ids))
    biased_token_ids, biases = _check_biases(params, limits.vocab_size)
    rules = TokenRules(
        biased_token_ids=np.array(biased_token_ids, np.int32),
        biases=np.array(biases, np.float32),
        stop_token_ids=np.array(sorted(stops) if params.min_tokens else [], np.int32),
        banned_token_ids=np.array(sorted({*banned.tolist(), *single, *limits.banned_token_ids}), np.int32),
        banned_words=pad_words(longer),
        allowed_mask=pack_mask(allowed, limits.vocab_size) if len(allowed) else None,
    )
    if rules.is_neutral:
        return None
    last_ids = np.array([word[-1] for word in longer], np.int32)
    kept_out = np.unique(np.concatenate((rules.banned_token_ids, rules.stop_token_ids, last_ids)))
    num_left = int(np.isin(allowed, kept_out, invert=True).sum()) if len(allowed) else limits.vocab_size - len(kept_out)
    shown = f"{len(allowed)} ids long" if len(allowed) else "empty"
    rule = (
        "such that at least one allowed token is not banned, not the end of a banned word and, before min_tokens, not "
        "a stop token"
    )
    require_param(num_left > 0, "allowed_token_ids", shown, rule)
    return rules


def check_token_ids(token_ids: Sequence[int], field: str, most: int, vocab_size: int) -> Int32Array:
    """Return token ids without repetitions, ascending; at most `most`, each in the vocabulary."""
    require_param(len(token_ids) <= most, field, f"{len(token_ids)} ids long", f"at most {most} ids long")
    return np.unique(check_known_ids(token_ids, f"sampling_params.{field}", vocab_size))


def _check_biases(params: generation_pb2.SamplingParams, vocab_size: int) -> tuple[list[int], list[float]]:
    field = "logit_bias"
    token_ids, biases = [entry.token_id for entry in params.logit_bias], [entry.bias for entry in params.logit_bias]
    distinct = check_token_ids(token_ids, field, MAX_BIASED_TOKENS, vocab_size)
    require_param(len(distinct) == len(token_ids), field, "a list with a token twice", "a list with each token once")
    for token_id, bias in zip(token_ids, biases, strict=True):
        shown = f"a list with bias {shown_float(bias)} for token id {token_id}"
        require_param(abs(bias) <= MAX_BIAS, field, shown, f"biases from {-MAX_BIAS:g} to {MAX_BIAS:g}")
    return token_ids, biases
