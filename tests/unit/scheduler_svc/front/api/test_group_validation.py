"""The rules of n, best_of, beam search, priority, tenant and cache_salt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.generation.v1 import generation_pb2
from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.api.group_validation import beam_search_params, hash_cache_salt, output_counts
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
