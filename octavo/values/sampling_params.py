"""How tokens are chosen and when an output ends: the value that callers build, and its wire form.

Field names, units, ranges and defaults are as in `SamplingParams` in protos/octavo/generation/v1/generation.proto; the
scheduler checks the ranges and says which field is wrong. Next: octavo/client.py, which sends it.
"""

import functools
import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, TypeVar

from google.protobuf.descriptor import FieldDescriptor

from octavo.errors import InvalidRequestError
from octavo.generation.v1 import generation_pb2
from octavo.values.sampling_numbers import SamplingNumbers
from octavo.values.sampling_params_table import BY_NAME, UINT32_MAX
from octavo.values.wording import did_you_mean, kind_of

_Class = TypeVar("_Class")

# When a beam search ends; the values are as in transformers.
EarlyStopping: TypeAlias = bool | Literal["never"]

# The largest number of 32 bits that is no infinity.
_FLOAT_MAX = (2 - 2**-23) * 2.0**127

# What a field of a wire type takes, for the sentence that refuses another value; numbers have ranges of their own.
_WIRE_RANGES = {
    FieldDescriptor.TYPE_BOOL: "it must be true or false",
    FieldDescriptor.TYPE_ENUM: "it must be True, False or 'never'",  # only early_stopping has this type
    FieldDescriptor.TYPE_INT32: "it must contain whole numbers from 0 to 2^31-1",  # only token ids have this type
    FieldDescriptor.TYPE_STRING: "it must be a string or a list of strings",
}

# Fields of the message that says what the output follows, by their names here; only one is set.
_GRAMMARS = {
    "json_schema": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
}

# The same for fields that are in messages of their own.
_SHAPES = {
    "json_schema": "it must be a pydantic model, a dict, or a JSON text",
    "json_object": "it must be True or False",
    "regex": "it must be a string",
    "choice": "it must be a list of strings",
    "grammar": "it must be a string: a grammar in Lark's notation",
    "logit_bias": "it must be a dict from token ids, 0 to 2^31-1, to numbers, such as {42: -1.5}",
}


def _naming_the_nearest(cls: type[_Class]) -> type[_Class]:
    """Let the constructor of a dataclass name the field that is nearest to an unknown one."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: _Class, *values: Any, **keywords: Any) -> None:
        refuse_unknown(keywords, cls.__name__)
        init(self, *values, **keywords)

    cls.__init__ = checked  # type: ignore[assignment, method-assign]
    return cls


@_naming_the_nearest
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingNumbers):
    """How to sample one request. None is "absent": the scheduler takes its default.

    A feature that the scheduler does not have yet is refused by it, never ignored.

    `SamplingNumbers` describes the numbers, temperature to prompt_logprobs.

    Attributes:
        stop: The output ends before the first of these strings; one string stands for a list of it.
        stop_token_ids: The output ends at the first of these tokens, which stays in `token_ids`.
        ignore_eos: Go on after the model's end-of-sequence tokens.
        include_stop_str_in_output: Include the stop string in the text.
        skip_special_tokens: Whether special tokens stay out of the text. Absent: true.
        logit_bias: Added to the logits of single tokens, by token id.
        json_schema: The output is JSON that is valid by this: a pydantic model, a dict, or a JSON text. Of this field
            and the next four one may be set.
        json_object: The output is a JSON object.
        regex: The output matches this regular expression, all of it.
        choice: The output is one of these strings.
        grammar: The output is of this grammar, in Lark's notation.
        early_stopping: Beams only: True ends the search with the first `beam_width` hypotheses,
            "never" when no beam can become better than they are. Absent: False, in between.
        banned_words: Strings that never appear in the output.
        banned_token_ids: Tokens that never come.
        allowed_token_ids: The only tokens that may come; empty: all.
    """

    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool | None = None
    logit_bias: Mapping[int, float] | None = None
    json_schema: type | Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    early_stopping: EarlyStopping | None = None
    banned_words: str | Sequence[str] = ()
    banned_token_ids: Sequence[int] = ()
    allowed_token_ids: Sequence[int] = ()

    def to_proto(self) -> generation_pb2.SamplingParams:
        """Return the message that travels; fields that are None stay absent.

        Raises:
            InvalidRequestError: a value does not fit its field at all, such as a negative max_tokens
                or a word where a number belongs. Ranges are the scheduler's to check.
        """
        proto = generation_pb2.SamplingParams()
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or (field.name == "json_object" and value is False):
                continue
            if field.name in _GRAMMARS and proto.HasField("grammar"):
                native = proto.grammar.WhichOneof("grammar")
                first = next(name for name in _GRAMMARS if _GRAMMARS[name] == native)
                name = f"sampling_params.{field.name}"
                sentence = f"{name} is set, and so is {first}; an output follows one of them"
                raise InvalidRequestError(sentence, field=name)
            try:
                _set_field(proto, field.name, value)
            except (AttributeError, TypeError, ValueError) as error:
                name = f"sampling_params.{field.name}"
                reason = _range_of(field.name) or _SHAPES.get(field.name)
                reason = reason or _WIRE_RANGES[proto.DESCRIPTOR.fields_by_name[field.name].type]
                # A list of token ids can be long.
                raise InvalidRequestError(f"{name} is {reprlib.repr(value)}; {reason}", field=name) from error
        return proto


def with_keywords(
    sampling_params: object, keywords: Mapping[str, Any], *, function: str, name: str = "sampling_params"
) -> SamplingParams | None:
    """Return the parameters of a call that takes them whole, as keywords, or both: then the keywords win.

    Args:
        sampling_params: SamplingParams or None.
        keywords: Fields of SamplingParams.
        function: What was called, for the sentence.
        name: What the caller calls `sampling_params`.

    Raises:
        InvalidRequestError: `sampling_params` is something else.
        TypeError: a keyword is no field of SamplingParams, as for any function of Python.
    """
    refuse_unknown(keywords, function)
    if sampling_params is None:
        return SamplingParams(**keywords) if keywords else None
    if isinstance(sampling_params, SamplingParams):
        return replace(sampling_params, **keywords) if keywords else sampling_params
    ways = f"give SamplingParams(temperature=0), or the fields themselves: {function}(..., temperature=0)"
    raise InvalidRequestError(f"{name} is {kind_of(sampling_params)}; {ways}", field="sampling_params")


def list_params(
    sampling_params: object, keywords: Mapping[str, Any], function: str
) -> SamplingParams | list[SamplingParams | None] | None:
    """Return the parameters of a call that has several prompts: for all of them, or one for each.

    Raises: as `with_keywords`.
    """
    if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str):
        return with_keywords(sampling_params, keywords, function=function)
    return [
        with_keywords(params, keywords, function=function, name=f"sampling_params[{index}]")
        for index, params in enumerate(sampling_params)
    ]


def one_for_each(
    sampling_params: SamplingParams | Sequence[SamplingParams | None] | None, num_prompts: int, name: str
) -> Sequence[SamplingParams | None]:
    """Return the parameters of each prompt; `name` is what the caller calls the prompts.

    Raises: InvalidRequestError: there is a list, and not one for each.
    """
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if len(sampling_params) != num_prompts:
        counts = f"the list sampling_params has {len(sampling_params)} for {num_prompts} {name}"
        raise InvalidRequestError(f"{counts}; give one for all, or one for each", field="sampling_params")
    return sampling_params


def refuse_unknown(keywords: Mapping[str, Any], function: str) -> None:
    """Raise TypeError if a keyword of a call is no field of SamplingParams, with the nearest one."""
    known = [field.name for field in fields(SamplingParams)]
    for keyword in keywords:
        if keyword not in known:
            raise TypeError(f"{function}() has no argument {keyword!r}{did_you_mean(keyword, known)}")


def _set_field(proto: generation_pb2.SamplingParams, name: str, value: Any) -> None:
    match name:
        case "stop" | "banned_words":
            getattr(proto, name).extend([value] if isinstance(value, str) else value)
        case "stop_token_ids" | "banned_token_ids" | "allowed_token_ids":
            getattr(proto, name).extend(value)
        case "logit_bias":
            for token_id, bias in value.items():
                proto.logit_bias.add(token_id=token_id, bias=bias)
        case "json_schema":
            proto.grammar.json_schema = _schema_text(value)
        case "choice":
            if isinstance(value, str) or not value:
                raise TypeError("it is no list of strings")
            proto.grammar.choice.choices.extend(value)
        case _ if name in _GRAMMARS:
            setattr(proto.grammar, _GRAMMARS[name], value)
        case "early_stopping":
            proto.early_stopping = _early_stopping_to_proto(value)
        case _ if name in BY_NAME:
            setattr(proto, name, _number(name, value))
        case _:
            setattr(proto, name, value)


def _number(name: str, value: Any) -> Any:
    """Return a number as it travels. Raises ValueError: its type cannot hold it."""
    if isinstance(value, bool):
        raise ValueError("it is not a number")
    if name == "max_tokens" and value > UINT32_MAX:  # the scheduler cuts it to what fits
        return UINT32_MAX
    if not BY_NAME[name].is_whole and not abs(value) <= _FLOAT_MAX and abs(value) < math.inf:
        raise ValueError("it would become infinite")
    return value


def _range_of(name: str) -> str:
    """Return the range of a number, in words; empty: it is none. A scheduler may take less."""
    parameter = BY_NAME.get(name)
    if parameter is None:
        return ""
    limit = f"{parameter.limit} and at most {UINT32_MAX}" if parameter.high is None else parameter.limit
    return f"it must be a {'whole number' if parameter.is_whole else 'number'}, {limit}"


def _early_stopping_to_proto(value: object) -> generation_pb2.EarlyStopping.ValueType:
    match value:
        case True:
            return generation_pb2.EARLY_STOPPING_TRUE
        case False:
            return generation_pb2.EARLY_STOPPING_FALSE
        case "never":
            return generation_pb2.EARLY_STOPPING_NEVER
    raise ValueError("unknown value")


def _schema_text(schema: Any) -> str:
    """Return a schema as it travels. Raises AttributeError, TypeError, ValueError: it is none."""
    if isinstance(schema, str):
        return schema
    if isinstance(schema, Mapping):
        return json.dumps(dict(schema), ensure_ascii=False, allow_nan=False)
    return json.dumps(schema.model_json_schema(), ensure_ascii=False)  # pydantic's, which need not be installed
