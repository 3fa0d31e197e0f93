"""Metrics name a bounded number of tenants."""

from scheduler_svc.request.engine_request import MAX_TENANT_LENGTH
from scheduler_svc.telemetry.tenant_names import NUM_NAMED_TENANTS, TenantNames


def test_the_first_tenants_have_names_and_keep_them_and_the_others_share_one() -> None:
    names = TenantNames()
    tenants = [f"t{number}" for number in range(200)]
    assert names.label("") == ""
    assert [names.label(tenant) for tenant in tenants] == [*tenants[:NUM_NAMED_TENANTS], *["other"] * 150]
    assert [names.label(tenant) for tenant in ("t0", "t49", "t50", "")] == ["t0", "t49", "other", ""]


def test_a_name_that_no_tenant_can_have_takes_no_place() -> None:
    names = TenantNames(capacity=1)
    assert names.label("x" * (MAX_TENANT_LENGTH + 1)) == "other"
    assert [names.label(tenant) for tenant in ("a", "b")] == ["a", "other"]
