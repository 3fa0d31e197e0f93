"""Which tenants metrics name: clients may make up any number of them, and each would be a series for ever."""

from scheduler_svc.request.engine_request import MAX_TENANT_LENGTH

# Of one process; those that come later share a label.
NUM_NAMED_TENANTS = 50
OTHER = "other"


class TenantNames:
    """Names the tenants that came first.

    Args:
        capacity: How many.
    """

    def __init__(self, capacity: int = NUM_NAMED_TENANTS) -> None:
        self._capacity = capacity
        self._named = {""}  # requests that name none

    def label(self, tenant: str) -> str:
        """Return what metrics call a tenant."""
        if tenant in self._named:
            return tenant
        if len(self._named) > self._capacity or len(tenant) > MAX_TENANT_LENGTH:
            return OTHER
        self._named.add(tenant)
        return tenant
