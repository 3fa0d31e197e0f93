"""The limits of a request on this server, and the errors of a request beyond them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from octavo_shared.errors import InvalidFieldError
from octavo_shared.step_wire.step import Int32Array
from scheduler_svc.front.text.text_model import TextModel


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """The front's part of the configuration; `RequestLimits` describes each field.

    `has_model_defaults`: whether the model's generation_config.json says what an unset sampling parameter is.
    """

    max_beam_width: int
    tenants: frozenset[str] | None = None
    has_priorities: bool = False
    has_model_defaults: bool = True


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of a request, from the model, the executors and the configuration.

    Attributes:
        max_model_len: Longest sequence that the model takes, in tokens.
        max_cached_tokens: Size of the whole block pool, in tokens.
        vocab_size: Number of token ids.
        max_num_seqs: Slots of the batch table; a group may need all its slots at once.
        tenants: The only tenants that are served; None: any.
        has_priorities: Whether `priority` changes the order; refused otherwise, never ignored.
        eos_token_ids: The model's end-of-sequence tokens.
        sampling_defaults: The model's defaults of sampling parameters, by name.
        max_encoder_tokens: Longest input of the model's encoder; 0: it has none.
        decoder_start_token_ids: With which the decoder of such a model begins if a request says nothing else.
        banned_token_ids: That no output of it has.
    """

    max_model_len: int
    max_cached_tokens: int
    vocab_size: int
    max_num_seqs: int
    max_beam_width: int
    tenants: frozenset[str] | None = None
    has_priorities: bool = True
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    max_encoder_tokens: int = 0
    decoder_start_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: TextModel, settings: FrontSettings) -> Self:
        """Return the limits of requests for a model."""
        return cls(
            max_model_len=model.info.max_model_len,
            max_cached_tokens=model.max_model_len,
            vocab_size=model.info.vocab_size,
            max_num_seqs=model.max_num_seqs,
            max_beam_width=settings.max_beam_width,
            tenants=settings.tenants,
            has_priorities=settings.has_priorities,
            eos_token_ids=model.info.eos_token_ids,
            sampling_defaults=model.info.sampling_defaults if settings.has_model_defaults else {},
            max_encoder_tokens=model.info.max_encoder_tokens,
            decoder_start_token_ids=model.info.decoder_start_token_ids,
            banned_token_ids=model.info.banned_token_ids if settings.has_model_defaults else (),
        )

    def accepted_for(self, max_model_len: int) -> Self:
        """Return the limits of a request that was first accepted for sequences of this length; 0: it is new."""
        if not max_model_len:
            return self
        return replace(self, max_model_len=max_model_len, max_cached_tokens=max_model_len)

    @property
    def max_len(self) -> int:
        """Longest sequence, prompt and output."""
        return min(self.max_model_len, self.max_cached_tokens)

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt: it leaves room for one token of output."""
        return self.max_len - 1

    @property
    def max_prompt_tokens_cause(self) -> str:
        """Where that limit comes from, in words."""
        if self.max_model_len <= self.max_cached_tokens:
            return f"max_model_len is {self.max_model_len}, and one token is reserved for the output"
        return f"the KV cache holds {self.max_cached_tokens} tokens, and one is reserved for the output"


def unreadable(field: str, size: str, limits: RequestLimits) -> InvalidFieldError:
    """Return the error of an input of this size, with the unit, that the model's encoder cannot read."""
    longest = limits.max_encoder_tokens
    if not longest:
        rule = "unset: this model has no encoder; give what it says in the prompt"
        return InvalidFieldError("encoder_prompt", "set", rule)
    return InvalidFieldError(field, size, f"at most {longest} tokens long: a step encodes it whole")


class PromptTooLongError(InvalidFieldError):
    """A prompt leaves no room for a token of output.

    Clients recognize it by words of its message: LiteLLM by "this model's maximum context length is", others by
    "prompt is too long".

    Args:
        size: Its length, with the unit.
        name: The sender's name for the prompt.
    """

    def __init__(self, field: str, size: str, limits: RequestLimits, name: str = "prompt") -> None:
        self.size = size
        self.limits = limits
        super().__init__(field, size, f"at most {limits.max_prompt_tokens} tokens long")
        is_short_of_cache = limits.max_cached_tokens < limits.max_model_len
        where = " on this server, limited by its KV cache" if is_short_of_cache else ""
        self.args = (
            f"{name} is too long: it has {size}; this model's maximum context length is {limits.max_len} tokens{where}"
            ", and one is reserved for the output",
        )


class InputTooLongError(PromptTooLongError):
    """A text is too long to be embedded or scored; clients recognize it by the same words.

    Args:
        field: The sender's name for the text.
        size: Its length, with the unit.
        longest: The limit, in tokens.
        cause: Where the limit comes from, in words; empty: from the model.
    """

    def __init__(self, field: str, size: str, longest: int, cause: str = "") -> None:
        InvalidFieldError.__init__(self, field, size, f"at most {longest} tokens long")
        self.args = (
            f"{field} is too long: it has {size}; this model's maximum context length is {longest} tokens{cause}; "
            "shorten it, or set truncate_prompt_tokens",
        )


def require(holds: bool, field: str, value: object, limit: str) -> None:
    """Raise InvalidFieldError unless `holds`; `limit` ends the sentence "... must be"."""
    if not holds:
        raise InvalidFieldError(field, value, limit)


def require_param(holds: bool, field: str, value: object, limit: str) -> None:
    """Like `require`, for a field of `sampling_params`; a number must also be finite."""
    if isinstance(value, float):
        holds, value = holds and math.isfinite(value), shown_float(value)
    require(holds, f"sampling_params.{field}", value, limit)


def shown_float(value: float) -> str:
    """Return a 32-bit float in as few digits as identify it."""
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else str(np.float32(value))


def unknown_token(field: str, token_id: int, vocab_size: int) -> InvalidFieldError:
    """Return the error for a list with a token that the model does not have."""
    return InvalidFieldError(field, f"a list with token id {token_id}", f"ids from 0 to {vocab_size - 1}")


def check_known_ids(token_ids: Sequence[int] | Int32Array, field: str, vocab_size: int) -> Int32Array:
    """Return tokens as an array, [num_tokens]. Raises InvalidFieldError: the model does not know one."""
    ids = np.array(token_ids, np.int64)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise unknown_token(field, outside[0], vocab_size)
    return ids.astype(np.int32)
