"""What a checked request holds, and every refusal."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError
from octavo_shared.step_wire.step import NO_LOGPROBS, SamplingRow
from scheduler_svc.engine.live_request import group_of
from scheduler_svc.front.api.group_validation import hash_cache_salt
from scheduler_svc.front.api.request_limits import RequestLimits
from scheduler_svc.front.api.request_validation import ValidRequest, check_request_fields, validate_request
from scheduler_svc.front.output import AnswerOptions
from scheduler_svc.front.text.output_text import TextOptions
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping, StopConditions
from tests.support.each_row import each_row
from tests.support.tokenizers import byte_level_backend, make_tokenizer

LIMITS = RequestLimits(max_model_len=64, max_cached_tokens=64, vocab_size=100, max_num_seqs=8, max_beam_width=4)
TOKENIZER = make_tokenizer(byte_level_backend())
PROMPT = [1, 2, 3]


def request(prompt: list[int] = PROMPT, **fields: Any) -> pb.GenerateRequest:
    """Return a request; `fields` are its own, or those of its parameters."""
    own = {name: fields.pop(name) for name in ("tenant", "cache_salt", "priority") if name in fields}
    params = generation_pb2.SamplingParams(**fields)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling_params=params, **own)


def validate(sent: pb.GenerateRequest, limits: RequestLimits = LIMITS) -> ValidRequest:
    check_request_fields(sent)
    return validate_request(sent, list(sent.token_ids.ids), limits, TOKENIZER)


# What is valid ---------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_proto() -> None:
    valid = validate(request())
    sampling = valid.engine.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1, 0, 1, 0)
    assert valid.engine.sampling.num_logprobs == NO_LOGPROBS
    assert valid.engine.stop_conditions == StopConditions()
    assert valid.answer_options == AnswerOptions(1, 1, False, TextOptions(), max_output_tokens=61, max_model_len=64)
    assert (valid.engine.num_sequences, valid.engine.beam_search) == (1, None)
    assert (valid.engine.priority, valid.engine.tenant, valid.engine.cache_salt) == (0, "", 0)


def test_every_sampling_field_arrives() -> None:
    valid = validate(
        request(
            temperature=0.5,
            top_k=4,
            top_p=0.25,
            min_p=0.125,
            seed=2**64 - 1,
            max_tokens=9,
            stop=["END"],
            stop_token_ids=[5, 6],
            ignore_eos=True,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            logprobs=0,
            n=2,
        )
    )
    assert valid.engine.sampling == SamplingRow(0.5, 4, 0.25, 0.125, 2**64 - 1, 0, 0)
    assert valid.engine.stop_conditions == StopConditions(9, frozenset({5, 6}), ignore_eos=True)
    assert valid.answer_options == AnswerOptions(
        2, 2, True, TextOptions(("END",), True, False), max_output_tokens=9, max_model_len=64
    )


def test_a_request_without_id_and_seed_gets_both() -> None:
    first, second = validate(request()), validate(request())
    assert first.engine.request_id != second.engine.request_id
    assert first.engine.sampling.seed != second.engine.sampling.seed


def test_best_of_above_n_is_sampled_with_logprobs_that_are_not_returned() -> None:
    valid = validate(request(n=2, best_of=5))
    assert (valid.engine.num_sequences, valid.engine.sampling.num_logprobs) == (5, 0)
    assert valid.answer_options == AnswerOptions(2, 5, False, TextOptions(), max_output_tokens=61, max_model_len=64)
    assert valid.answer_options.is_ranked


def test_best_of_equal_to_n_is_plain_sampling() -> None:
    valid = validate(request(n=3, best_of=3))
    assert (valid.engine.num_sequences, valid.engine.sampling.num_logprobs) == (3, NO_LOGPROBS)
    assert not valid.answer_options.is_ranked


@each_row({}, {"logprobs": 0})
def test_a_beam_search_samples_nothing(logprobs: dict[str, Any]) -> None:
    never = generation_pb2.EARLY_STOPPING_NEVER
    valid = validate(request(beam_width=4, n=2, length_penalty=0.5, early_stopping=never, seed=3, **logprobs))
    assert valid.engine.beam_search == BeamSearchParams(4, 2, 0.5, EarlyStopping.NEVER)
    assert (valid.engine.num_sequences, valid.engine.sampling) == (1, SamplingRow())
    assert valid.answer_options == AnswerOptions(
        2, 0, bool(logprobs), TextOptions(), max_output_tokens=61, max_model_len=64
    )
    assert valid.answer_options.is_ranked


def test_a_group_gets_all_that_was_asked_for() -> None:
    sent = request(n=2, best_of=3, max_tokens=7)
    sent.request_id, sent.priority, sent.tenant, sent.cache_salt = "mine", -5, "red", "secret"
    sent.speculate = False
    valid = validate(sent)
    group = group_of(valid.engine, arrival=11, max_model_len=32)
    assert (group.request_id, group.prompt_token_ids.tolist(), group.arrival) == ("mine", PROMPT, 11)
    assert group.prompt_token_ids.dtype == np.int32
    assert (group.sampling, group.stop_conditions) == (
        valid.engine.sampling,
        StopConditions(max_tokens=7, accepted_len=10),
    )
    assert (group.num_sequences, len(group.sequences), group.beam_search) == (3, 3, None)
    assert (group.priority, group.tenant, group.cache_salt) == (-5, "red", hash_cache_salt("red", "secret"))
    assert not group.speculate


def test_a_group_of_beams_gets_its_search() -> None:
    group = group_of(validate(request(beam_width=2)).engine, arrival=0, max_model_len=32)
    assert (group.num_sequences, group.beam_search) == (1, BeamSearchParams(2))


def test_more_tokens_than_fit_in_an_int_are_asked_for_in_vain() -> None:
    max_tokens = validate(request(max_tokens=2**32 - 1)).engine.stop_conditions.max_tokens
    assert max_tokens is not None
    assert max_tokens + LIMITS.max_model_len < 2**31


# What is not -----------------------------------------------------------------------------------------

MANY = "(max_num_seqs: the outputs run at once)"
GREEDY = "it must be 1 with temperature 0, because greedy outputs are all equal: use a temperature above 0"
TWO_TENANTS = replace(LIMITS, tenants=frozenset({"red", "blue"}))


@each_row(
    (pb.GenerateRequest(), "prompt is absent; it must be one of text, token_ids and messages"),
    (request([]), "token_ids is empty; it must be at least 1 token long"),
    (
        request([1] * 64),
        "prompt is too long: it has 64 tokens; this model's maximum context length is 64 tokens, and one is reserved "
        "for the output",
    ),
    (request([1, 100]), "token_ids is a list with token id 100; it must be ids from 0 to 99"),
    (request([-1]), "token_ids is a list with token id -1; it must be ids from 0 to 99"),
    (
        pb.GenerateRequest(request_id="x" * 257, text="a"),
        "request_id is 257 characters long; it must be at most 256 characters long",
    ),
    (request(tenant="x" * 257), "tenant is 257 characters long; it must be at most 256 characters long"),
    (request(cache_salt="x" * 257), "cache_salt is 257 characters long; it must be at most 256 characters long"),
)
def test_what_is_wrong_is_refused_with_field_value_and_limit(sent: pb.GenerateRequest, sentence: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        validate(sent)
    assert str(caught.value) == sentence


# What its ranges allow: test_sampling_validation.py.
@each_row(
    ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids is 65 ids long; it must be at most 64 ids long"),
    ({"stop_token_ids": [100]}, "stop_token_ids is a list with token id 100; it must be ids from 0 to 99"),
    ({"stop": ["a"] * 17}, "stop is 17 strings; it must be at most 16 strings"),
    ({"stop": [""]}, "stop is a list with a string of 0 characters; it must be strings of 1 to 1024 characters"),
    ({"stop": ["x" * 1025]}, "stop is a list with a string of 1025 characters; it must be strings of 1 to 1024 chara"),
    ({"logprobs": 21}, "logprobs is 21; it must be from 0 to 20"),
    ({"prompt_logprobs": 21}, "prompt_logprobs is 21; it must be from 0 to 20"),
    ({"n": 0}, f"n is 0; it must be from 1 to 8 {MANY}"),
    ({"n": 9}, f"n is 9; it must be from 1 to 8 {MANY}"),
    ({"n": 3, "best_of": 2}, f"best_of is 2; it must be from 3 (n) to 8 {MANY}"),
    ({"best_of": 9}, f"best_of is 9; it must be from 1 (n) to 8 {MANY}"),
    ({"n": 2, "temperature": 0.0}, f"n is 2; {GREEDY}"),
    ({"best_of": 2, "temperature": 0.0}, f"best_of is 2; {GREEDY}"),
    ({"length_penalty": 1.0}, "length_penalty is 1; it must be unset without beam_width"),
    ({"early_stopping": 2}, "early_stopping is False; it must be unset without beam_width"),
    ({"early_stopping": 7}, "early_stopping is 7; it must be unset without beam_width"),
)
def test_parameters_that_contradict_each_other_are_refused_with_the_rule(params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        validate(request(**params))
    assert str(caught.value).startswith(f"sampling_params.{sentence}")


@each_row(
    ({"beam_width": 1}, "beam_width is 1; it must be from 2 to 4 (max_beam_width), or 0"),
    ({"n": 0}, "n is 0; it must be from 1 to 2 (beam_width)"),
    ({"n": 3}, "n is 3; it must be from 1 to 2 (beam_width)"),
    ({"length_penalty": 11.0}, "length_penalty is 11; it must be from -10 to 10"),
    ({"length_penalty": math.nan}, "length_penalty is nan; it must be from -10 to 10"),
    ({"early_stopping": 7}, "early_stopping is 7; it must be True, False or 'never'"),
    ({"temperature": 1.0}, "temperature is 1; it must be 0 or unset with beam_width: a beam search does not sample"),
    ({"temperature": math.nan}, "temperature is nan; it must be 0 or unset with beam_width: a beam search does not"),
    ({"top_k": 5}, "top_k is 5; it must be 0 or unset with beam_width: a beam search does not sample"),
    ({"top_p": 0.5}, "top_p is 0.5; it must be 1 or unset with beam_width: a beam search does not sample"),
    ({"best_of": 2}, "best_of is 2; it must be unset with beam_width: n is the number of hypotheses to return"),
    ({"stop": ["a", "b"]}, "stop is a list of 2; it must be empty with beam_width: beams have no text until the se"),
    ({"logprobs": 5}, "logprobs is 5; it must be 0 or unset with beam_width: beams have no alternatives"),
    ({"prompt_logprobs": 0}, "prompt_logprobs is 0; it must be unset with beam_width"),
)
def test_a_search_that_contradicts_itself_is_refused_with_the_rule(params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        validate(request(**{"beam_width": 2, **params}))
    assert str(caught.value).startswith(f"sampling_params.{sentence}")


@each_row(
    ({"tenant": "green"}, TWO_TENANTS, "tenant is green; it must be one of the 2 tenants configured on this server"),
    ({}, TWO_TENANTS, "tenant is empty; it must be one of the 2 tenants configured on this server"),
    ({"tenant": "red"}, TWO_TENANTS, ""),
    ({"tenant": "x" * 256, "cache_salt": "y" * 256, "priority": -(2**31)}, LIMITS, ""),
    (
        {"priority": -3},
        replace(LIMITS, has_priorities=False),
        "priority is -3; it must be 0: this server uses --policy",
    ),
    ({}, replace(LIMITS, has_priorities=False), ""),
)
def test_an_account_that_is_not_served_is_refused_with_the_rule(
    account: dict[str, Any], limits: RequestLimits, sentence: str
) -> None:
    sent = request(**account)
    if not sentence:
        validate(sent, limits)
        return
    with pytest.raises(InvalidFieldError) as caught:
        validate(sent, limits)
    assert str(caught.value).startswith(sentence)


def test_a_small_cache_is_named_as_the_cause() -> None:
    small = RequestLimits(64, 32, 100, 8, 4)
    with pytest.raises(
        InvalidFieldError, match=r"length is 32 tokens on this server, limited by its KV cache, and one "
    ):
        validate(request([1] * 32), small)
