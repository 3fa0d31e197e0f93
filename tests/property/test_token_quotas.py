"""Tokens a minute: whatever is asked when, no tenant has more than its minute and what came since."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_shared.errors import TokenQuotaError
from scheduler_svc.engine import token_quotas
from scheduler_svc.engine.tenants import TenantQuota, Tenants
from scheduler_svc.engine.token_quotas import TokenQuotas

PER_MINUTE = 600


def limited(per_minute: int | None) -> Tenants:
    return Tenants(others=TenantQuota(tokens_per_minute=per_minute))


def refusal_of(quotas: TokenQuotas, tenant: str, num_tokens: int, now_s: float) -> TokenQuotaError | None:
    """Take the prompt of a request, or return why it is refused."""
    try:
        quotas.require(tenant, num_tokens, now_s)
    except TokenQuotaError as error:
        return error
    quotas.take(tenant, num_tokens, now_s)
    return None


# Seconds since the request before, prompt, generated tokens.
WORK = st.lists(st.tuples(st.floats(0, 90), st.integers(1, 800), st.integers(0, 400)), max_size=30)


@given(WORK)
def test_prompts_are_taken_from_what_came_and_a_refusal_says_exactly_when_to_come_back(
    work: list[tuple[float, int, int]],
) -> None:
    quotas, now_s, num_taken = TokenQuotas(limited(PER_MINUTE)), 0.0, 0
    for pause_s, num_prompt, num_generated in work:
        now_s += pause_s
        error = refusal_of(quotas, "red", num_prompt, now_s)
        if error is None:
            num_taken += num_prompt
            assert num_taken <= PER_MINUTE * (1 + now_s / 60) + 1e-3, "more than a minute's tokens and those since"
            quotas.take("red", num_generated, now_s)
            num_taken += num_generated
        elif error.retry_after_s is None:
            assert num_prompt > PER_MINUTE
        else:
            for early_s, is_early in ((0.01, True), (0.0, False)):
                later_s = now_s + error.retry_after_s - early_s
                if later_s > now_s:
                    assert (refusal_of(_copied(quotas), "red", num_prompt, later_s) is not None) == is_early
        assert refusal_of(quotas, "blue", 0, now_s) is None, "tenants have buckets of their own"


def _copied(quotas: TokenQuotas) -> TokenQuotas:
    copy = TokenQuotas(quotas._tenants)
    copy._buckets = {
        name: token_quotas._Bucket(bucket.num_tokens, bucket.at_s) for name, bucket in quotas._buckets.items()
    }
    return copy


@given(WORK)
def test_the_same_calls_at_the_same_times_are_decided_alike(work: list[tuple[float, int, int]]) -> None:
    decided: list[list[str]] = []
    for _ in range(2):
        quotas, now_s, said = TokenQuotas(limited(PER_MINUTE)), 0.0, list[str]()
        for pause_s, num_prompt, num_generated in work:
            now_s += pause_s
            said.append(str(refusal_of(quotas, "red", num_prompt, now_s)))
            quotas.take("red", num_generated, now_s)
        decided.append(said)
    assert decided[0] == decided[1]


def test_refusals_have_the_numbers() -> None:
    quotas = TokenQuotas(limited(PER_MINUTE))
    assert refusal_of(quotas, "red", 590, 0.0) is None
    assert str(refusal_of(quotas, "red", 100, 0.0)) == (
        "tenant 'red' has 10 of its 600 tokens a minute left, and the request needs at least 100 tokens; retry in 9 s"
    )
    quotas.take("red", 40, 0.0)
    assert str(refusal_of(quotas, "red", 1, 0.0)) == (
        "tenant 'red' has used 30 tokens more than its 600 tokens a minute, and the request needs at least 1 token; "
        "retry in 3.1 s"
    )
    assert str(refusal_of(quotas, "red", 601, 1e6)) == (
        "the prompt has 601 tokens, and tenant 'red' may use 600 tokens a minute, so it can never run; send a shorter "
        "prompt"
    )
    assert quotas.num_refused == 3


def test_other_limits_hold_at_once_and_what_was_taken_stays_taken() -> None:
    quotas = TokenQuotas(limited(PER_MINUTE))
    assert refusal_of(quotas, "red", 500, 0.0) is None
    quotas.set_tenants(limited(6000), 0.0)
    assert refusal_of(quotas, "red", 200, 0.0) is not None, "100 are left, not 5,600"
    assert refusal_of(quotas, "red", 200, 1.0) is None, "and 100 come in a second"
    assert refusal_of(quotas, "blue", 6000, 1.0) is None
    quotas.set_tenants(limited(60), 100.0)
    assert refusal_of(quotas, "red", 61, 100.0) is not None
    assert refusal_of(quotas, "red", 60, 100.0) is None, "a full bucket of the new size"
    quotas.set_tenants(limited(None), 100.0)
    assert refusal_of(quotas, "red", 10**9, 100.0) is None
    assert not quotas.are_there


def test_full_buckets_are_forgotten_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_quotas, "_MANY_BUCKETS", 8)
    quotas = TokenQuotas(limited(PER_MINUTE))
    assert refusal_of(quotas, "red", 600, 0.0) is None
    for number in range(200):
        assert refusal_of(quotas, f"tenant {number}", 1, number * 0.2) is None
    assert len(quotas._buckets) <= 20
    assert refusal_of(quotas, "red", 600, 40.0) is not None
