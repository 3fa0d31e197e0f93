import inspect
import json
import math
import pickle
import reprlib
from dataclasses import fields, replace
from typing import Any

import pydantic
import pytest

from octavo import SamplingParams
from octavo.errors import InvalidRequestError
from octavo.generation.v1 import generation_pb2
from octavo.values.sampling_params import _GRAMMARS, EarlyStopping
from octavo.values.sampling_params_table import SAMPLING_PARAMS
from tests.support.each_row import each_row


def test_names_are_those_of_the_wire() -> None:
    wire_names = {field.name for field in generation_pb2.SamplingParams.DESCRIPTOR.fields}
    assert {field.name for field in fields(SamplingParams)} - {"grammar", *_GRAMMARS} == wire_names - {"grammar"}
    assert set(_GRAMMARS.values()) == {field.name for field in generation_pb2.Grammar.DESCRIPTOR.fields}


def test_an_unknown_field_is_named_with_the_nearest() -> None:
    wrong: dict[str, Any] = {"temprature": 1}
    with pytest.raises(
        TypeError, match=r"^SamplingParams\(\) has no argument 'temprature'; did you mean temperature\?$"
    ):
        SamplingParams(**wrong)
    # It is a dataclass all the same.
    params = SamplingParams(temperature=1, stop=["a"])
    assert replace(params, top_k=2) == pickle.loads(pickle.dumps(SamplingParams(temperature=1, stop=["a"], top_k=2)))
    assert list(inspect.signature(SamplingParams).parameters) == [field.name for field in fields(SamplingParams)]


def test_nothing_set_sends_nothing() -> None:
    assert SamplingParams().to_proto().SerializeToString() == b""


def test_zero_is_sent_and_not_taken_for_absent() -> None:
    proto = SamplingParams(temperature=0, seed=0, logprobs=0, skip_special_tokens=False).to_proto()
    present = {field.name for field, _ in proto.ListFields()}
    assert present == {"temperature", "seed", "logprobs", "skip_special_tokens"}


def test_every_field_arrives() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_k=4,
        top_p=0.25,
        min_p=0.125,
        seed=2**64 - 1,
        max_tokens=9,
        min_tokens=1,
        stop=["\n", "END"],
        stop_token_ids=(1, 2),
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=3,
        n=2,
        best_of=3,
        beam_width=4,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={5: -1.0},
        regex="a+",
        length_penalty=-0.5,
        early_stopping="never",
        typical_p=0.75,
        no_repeat_ngram_size=3,
        banned_words="word",
        banned_token_ids=[7],
        allowed_token_ids=(8, 9),
        prompt_logprobs=2,
    )
    proto = params.to_proto()
    assert len(proto.ListFields()) == len(fields(SamplingParams)) - len(_GRAMMARS) + 1
    assert (proto.temperature, proto.seed, proto.max_tokens) == (0.5, 2**64 - 1, 9)
    assert (list(proto.stop), list(proto.stop_token_ids)) == (["\n", "END"], [1, 2])
    assert [(bias.token_id, bias.bias) for bias in proto.logit_bias] == [(5, -1.0)]
    assert proto.grammar.regex == "a+"
    assert (proto.n, proto.best_of, proto.beam_width, proto.length_penalty) == (2, 3, 4, -0.5)
    assert proto.early_stopping == generation_pb2.EARLY_STOPPING_NEVER
    assert (list(proto.banned_words), list(proto.banned_token_ids)) == (["word"], [7])
    assert (list(proto.allowed_token_ids), proto.prompt_logprobs, proto.typical_p) == ([8, 9], 2, 0.75)
    assert proto.no_repeat_ngram_size == 3


@each_row(
    (None, generation_pb2.EARLY_STOPPING_UNSPECIFIED),
    (True, generation_pb2.EARLY_STOPPING_TRUE),
    (False, generation_pb2.EARLY_STOPPING_FALSE),
    ("never", generation_pb2.EARLY_STOPPING_NEVER),
)
def test_early_stopping_has_the_values_of_transformers(
    value: EarlyStopping | None, sent: generation_pb2.EarlyStopping.ValueType
) -> None:
    assert SamplingParams(early_stopping=value).to_proto().early_stopping == sent


def test_one_stop_string_stands_for_a_list_of_it() -> None:
    assert list(SamplingParams(stop="END").to_proto().stop) == ["END"]


class City(pydantic.BaseModel):
    name: str


@each_row(
    (SamplingParams(json_schema=City), generation_pb2.Grammar(json_schema=json.dumps(City.model_json_schema()))),
    (SamplingParams(json_schema={"title": "é"}), generation_pb2.Grammar(json_schema='{"title": "é"}')),
    (SamplingParams(json_schema="{}"), generation_pb2.Grammar(json_schema="{}")),
    (SamplingParams(json_object=True), generation_pb2.Grammar(json_object=True)),
    (SamplingParams(choice=["a", "b"]), generation_pb2.Grammar(choice=generation_pb2.GrammarChoice(choices="ab"))),
    (SamplingParams(grammar='start: "a"'), generation_pb2.Grammar(lark='start: "a"')),
)
def test_what_an_output_follows_has_one_field_on_the_wire(params: SamplingParams, sent: generation_pb2.Grammar) -> None:
    assert params.to_proto() == generation_pb2.SamplingParams(grammar=sent)


HUGE = (2**31, 2**32, 2**63, 2**64)


def test_a_number_that_cannot_travel_is_refused_with_its_value_and_limit() -> None:
    rules = {
        **dict.fromkeys(("top_k", "min_tokens"), "a whole number, from 0 to 2147483647"),
        **dict.fromkeys(("logprobs", "prompt_logprobs"), "a whole number, from 0 to 20"),
        **dict.fromkeys(("best_of", "beam_width"), "a whole number, at least 0 and at most 4294967295"),
        "no_repeat_ngram_size": "a whole number, from 0 to 64",
        "n": "a whole number, at least 1 and at most 4294967295",
        "max_tokens": "a whole number, at least 1 and at most 4294967295",
        "seed": "a whole number, from 0 to 18446744073709551615",
    }
    numbers = {parameter.name: parameter for parameter in SAMPLING_PARAMS if parameter.is_public}
    for name, parameter in numbers.items():
        rule = rules.get(name, f"a number, {parameter.limit}")
        too_large = [value for value in HUGE if value >= (2**64 if name == "seed" else 2**32)]
        wrong: list[Any] = [True, "3", *([-1, 1.5, *too_large] if parameter.is_whole else [1e39, -1e39, 10**400])]
        for value in wrong:
            if name == "max_tokens" and value in HUGE:
                assert SamplingParams(max_tokens=value).to_proto().max_tokens == 2**32 - 1, "it is cut, not refused"
                continue
            with pytest.raises(InvalidRequestError) as error:
                SamplingParams(**{name: value}).to_proto()
            assert error.value.field == f"sampling_params.{name}"
            assert str(error.value) == f"sampling_params.{name} is {reprlib.repr(value)}; it must be {rule}"


def test_nan_travels_for_the_scheduler_to_refuse() -> None:
    assert math.isnan(SamplingParams(temperature=math.nan).to_proto().temperature)


@each_row(
    (
        SamplingParams(stop_token_ids=[2**31]),
        "sampling_params.stop_token_ids is [2147483648]; it must contain whole numbers from 0 to 2^31-1",
    ),
    (SamplingParams(json_schema=int), "sampling_params.json_schema is <class 'int'>; it must be a pydantic model"),
    (SamplingParams(json_schema={"const": math.nan}), "sampling_params.json_schema is {'const': nan}; it must be"),
    (SamplingParams(choice=[]), "sampling_params.choice is []; it must be a list of strings"),
    (SamplingParams(choice="yes"), "sampling_params.choice is 'yes'; it must be a list of strings"),
    (SamplingParams(regex=5), "sampling_params.regex is 5; it must be a string"),  # type: ignore[arg-type]
    (
        SamplingParams(json_schema={}, regex="a"),
        "sampling_params.regex is set, and so is json_schema; an output follows one of them",
    ),
    (
        SamplingParams(early_stopping="always"),  # type: ignore[arg-type]
        "sampling_params.early_stopping is 'always'; it must be True, False or 'never'",
    ),
)
def test_what_does_not_fit_its_field_is_named(params: SamplingParams, sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        params.to_proto()
    assert str(caught.value).startswith(sentence)
    assert caught.value.field == sentence.split()[0]
