"""The rules of n, best_of, beam search, priority, tenant and cache_salt."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.api.group_validation import beam_search_params, check_account, hash_cache_salt, output_counts
from scheduler_svc.front.api.request_limits import RequestLimits
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping
from tests.support.each_row import each_row


def limits(
    max_num_seqs: int = 8, max_beam_width: int = 16, tenants: frozenset[str] | None = None, has_priorities: bool = True
) -> RequestLimits:
    return RequestLimits(64, 64, 100, max_num_seqs, max_beam_width, tenants, has_priorities)


def params(**values: object) -> generation_pb2.SamplingParams:
    return generation_pb2.SamplingParams(**values)  # type: ignore[arg-type]


# Several outputs -------------------------------------------------------------------------------------


@each_row(
    ({}, (1, 1)),
    ({"n": 3}, (3, 3)),
    ({"best_of": 3}, (1, 3)),
    ({"n": 2, "best_of": 2}, (2, 2)),
    ({"n": 8, "best_of": 8}, (8, 8)),
    ({"n": 1, "best_of": 1, "temperature": 0.0}, (1, 1)),
)
def test_best_of_is_n_unless_set(values: dict[str, object], counts: tuple[int, int]) -> None:
    assert output_counts(params(**values), limits()) == counts


OUTPUT_RULES: dict[str, tuple[dict[str, object], str]] = {
    "n 0": ({"n": 0}, "n is 0; it must be from 1 to 8 (max_num_seqs: the outputs run at once)"),
    "n above max_num_seqs": ({"n": 9}, "n is 9; it must be from 1 to 8 (max_num_seqs: the outputs run at once)"),
    "best_of 0": ({"best_of": 0}, "best_of is 0; it must be from 1 (n) to 8 (max_num_seqs: the outputs run at once)"),
    "best_of below n": (
        {"n": 3, "best_of": 2},
        "best_of is 2; it must be from 3 (n) to 8 (max_num_seqs: the outputs run at once)",
    ),
    "best_of above max_num_seqs": (
        {"best_of": 9},
        "best_of is 9; it must be from 1 (n) to 8 (max_num_seqs: the outputs run at once)",
    ),
    "several greedy outputs": (
        {"n": 2, "temperature": 0.0},
        "n is 2; it must be 1 with temperature 0, because greedy outputs are all equal: use a temperature above 0",
    ),
    "the best of several greedy outputs": (
        {"best_of": 2, "temperature": 0.0},
        "best_of is 2; it must be 1 with temperature 0, because greedy outputs are all equal: use a temperature "
        "above 0",
    ),
}


@each_row(*OUTPUT_RULES)
def test_outputs_that_cannot_be_made_are_refused_with_the_rule(name: str) -> None:
    values, sentence = OUTPUT_RULES[name]
    with pytest.raises(InvalidFieldError) as caught:
        output_counts(params(**values), limits())
    assert str(caught.value) == f"sampling_params.{sentence}"


# Beam search -----------------------------------------------------------------------------------------


@each_row({}, {"beam_width": 0}, {"n": 2, "temperature": 1.0})
def test_without_a_width_there_is_no_search(values: dict[str, object]) -> None:
    assert beam_search_params(params(**values), limits()) is None


def test_a_search_has_defaults_for_all_but_its_width() -> None:
    assert beam_search_params(params(beam_width=4), limits()) == BeamSearchParams(4)


def test_the_numbers_of_a_search_arrive() -> None:
    asked = params(
        beam_width=8, n=8, length_penalty=-0.5, early_stopping=generation_pb2.EARLY_STOPPING_NEVER, temperature=0.0
    )
    assert beam_search_params(asked, limits()) == BeamSearchParams(8, 8, -0.5, EarlyStopping.NEVER)


@each_row(
    (generation_pb2.EARLY_STOPPING_UNSPECIFIED, EarlyStopping.FALSE),
    (generation_pb2.EARLY_STOPPING_TRUE, EarlyStopping.TRUE),
    (generation_pb2.EARLY_STOPPING_FALSE, EarlyStopping.FALSE),
    (generation_pb2.EARLY_STOPPING_NEVER, EarlyStopping.NEVER),
)
def test_each_early_stopping_has_its_meaning(
    sent: generation_pb2.EarlyStopping.ValueType, meant: EarlyStopping
) -> None:
    assert beam_search_params(params(beam_width=2, early_stopping=sent), limits()) == BeamSearchParams(
        2, early_stopping=meant
    )


def test_values_that_filter_nothing_go_with_beams() -> None:
    neutral = params(beam_width=2, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    assert beam_search_params(neutral, limits()) == BeamSearchParams(2)


BEAM_RULES: dict[str, tuple[dict[str, object], str]] = {
    "width 1": ({"beam_width": 1}, "beam_width is 1; it must be from 2 to 8 (max_num_seqs), or 0"),
    "width above max_num_seqs": ({"beam_width": 9}, "beam_width is 9; it must be from 2 to 8 (max_num_seqs), or 0"),
    "n 0": ({"beam_width": 2, "n": 0}, "n is 0; it must be from 1 to 2 (beam_width)"),
    "n above the width": ({"beam_width": 2, "n": 3}, "n is 3; it must be from 1 to 2 (beam_width)"),
    "length_penalty too large": (
        {"beam_width": 2, "length_penalty": 11.0},
        "length_penalty is 11; it must be from -10 to 10",
    ),
    "length_penalty too small": (
        {"beam_width": 2, "length_penalty": -11.0},
        "length_penalty is -11; it must be from -10 to 10",
    ),
    "length_penalty NaN": (
        {"beam_width": 2, "length_penalty": math.nan},
        "length_penalty is nan; it must be from -10 to 10",
    ),
    "early_stopping of a newer release": (
        {"beam_width": 2, "early_stopping": 7},
        "early_stopping is 7; it must be True, False or 'never'",
    ),
    "temperature": (
        {"beam_width": 2, "temperature": 1.0},
        "temperature is 1; it must be 0 or unset with beam_width: a beam search does not sample",
    ),
    "temperature NaN": (
        {"beam_width": 2, "temperature": math.nan},
        "temperature is nan; it must be 0 or unset with beam_width: a beam search does not sample",
    ),
    "top_k": (
        {"beam_width": 2, "top_k": 5},
        "top_k is 5; it must be 0 or unset with beam_width: a beam search does not sample",
    ),
    "top_p": (
        {"beam_width": 2, "top_p": 0.5},
        "top_p is 0.5; it must be 1 or unset with beam_width: a beam search does not sample",
    ),
    "min_p": (
        {"beam_width": 2, "min_p": 0.5},
        "min_p is 0.5; it must be 0 or unset with beam_width: a beam search does not sample",
    ),
    "best_of": (
        {"beam_width": 2, "best_of": 2},
        "best_of is 2; it must be unset with beam_width: n is the number of hypotheses to return",
    ),
    "stop strings": (
        {"beam_width": 2, "stop": ["a", "b"]},
        "stop is a list of 2; it must be empty with beam_width: beams have no text until the search is finished",
    ),
    "length_penalty without beams": (
        {"length_penalty": 1.0},
        "length_penalty is 1; it must be unset without beam_width",
    ),
    "early_stopping without beams": (
        {"early_stopping": generation_pb2.EARLY_STOPPING_FALSE},
        "early_stopping is False; it must be unset without beam_width",
    ),
    "early_stopping of a newer release without beams": (
        {"early_stopping": 7},
        "early_stopping is 7; it must be unset without beam_width",
    ),
}


@each_row(*BEAM_RULES)
def test_a_search_that_contradicts_itself_is_refused_with_the_rule(name: str) -> None:
    values, sentence = BEAM_RULES[name]
    with pytest.raises(InvalidFieldError) as caught:
        beam_search_params(params(**values), limits())
    assert str(caught.value) == f"sampling_params.{sentence}"


@each_row(
    (64, 16, "from 2 to 16 (max_beam_width), or 0"),
    (4, 4, "from 2 to 4 (max_beam_width), or 0"),
    (3, 16, "from 2 to 3 (max_num_seqs), or 0"),
    (1, 16, "0: max_num_seqs is 1 on this server"),
    (64, 0, "0: max_beam_width is 0 on this server"),
)
def test_the_widest_search_is_the_servers_choice_and_its_cause_is_named(
    max_num_seqs: int, max_beam_width: int, rule: str
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        beam_search_params(params(beam_width=17), limits(max_num_seqs, max_beam_width))
    assert caught.value.limit == rule


# Whose request it is ---------------------------------------------------------------------------------


def test_without_configured_tenants_any_name_is_served() -> None:
    check_account(pb.GenerateRequest(tenant="x" * 256, cache_salt="y" * 256, priority=-(2**31)), limits())
    check_account(pb.GenerateRequest(), limits())


def test_configured_tenants_are_served() -> None:
    check_account(pb.GenerateRequest(tenant="red"), limits(tenants=frozenset({"red", "blue"})))


def test_order_of_arrival_goes_with_no_priority() -> None:
    check_account(pb.GenerateRequest(priority=0), limits(has_priorities=False))


TWO_TENANTS = limits(tenants=frozenset({"red", "blue"}))
ACCOUNT_RULES = {
    "unknown tenant": (
        pb.GenerateRequest(tenant="green"),
        TWO_TENANTS,
        "tenant is green; it must be one of the 2 tenants configured on this server",
    ),
    "no tenant": (
        pb.GenerateRequest(),
        TWO_TENANTS,
        "tenant is empty; it must be one of the 2 tenants configured on this server",
    ),
    "long tenant": (
        pb.GenerateRequest(tenant="x" * 257),
        limits(),
        "tenant is 257 characters long; it must be at most 256 characters long",
    ),
    "long cache_salt": (
        pb.GenerateRequest(cache_salt="x" * 257),
        limits(),
        "cache_salt is 257 characters long; it must be at most 256 characters long",
    ),
    "priority that would be ignored": (
        pb.GenerateRequest(priority=-3),
        limits(has_priorities=False),
        "priority is -3; it must be 0: this server uses --policy fcfs",
    ),
}


@each_row(*ACCOUNT_RULES)
def test_an_account_that_is_not_served_is_refused_with_the_rule(name: str) -> None:
    request, bounds, sentence = ACCOUNT_RULES[name]
    with pytest.raises(InvalidFieldError) as caught:
        check_account(request, bounds)
    assert str(caught.value) == sentence


def test_without_tenant_and_salt_there_is_none() -> None:
    assert hash_cache_salt("", "") == 0


def test_the_salt_does_not_change_between_releases() -> None:
    """Block hashes outlive the process that made them."""
    assert hash_cache_salt("red", "secret") == 0xB1C1559EC6836BEA


@given(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), unique=True, max_size=20))
def test_different_tenants_and_salts_never_share_blocks(pairs: list[tuple[str, str]]) -> None:
    salts = {hash_cache_salt(tenant, cache_salt) for tenant, cache_salt in pairs}
    assert len(salts) == len(pairs)
    assert all(0 <= salt < 2**64 for salt in salts)


def test_where_the_tenant_ends_and_the_salt_begins_matters() -> None:
    assert hash_cache_salt("ab", "c") != hash_cache_salt("a", "bc")
