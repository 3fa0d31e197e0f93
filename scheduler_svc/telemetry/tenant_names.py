"""The tenants and adapters that metrics name: there may be any number of them, and each would be a series for ever."""

from scheduler_svc.request.engine_request import MAX_TENANT_LENGTH

# In one process; later ones share a label.
NUM_NAMED_TENANTS = 50
OTHER = "other"


class TenantNames:
    """Names the first tenants, or adapters."""

    def __init__(self, capacity: int = NUM_NAMED_TENANTS) -> None:
        self._capacity = capacity
        self._named = {""}  # for requests that name no tenant

    def label(self, tenant: str) -> str:
        """Return the label of a tenant in metrics."""
        if tenant in self._named:
            return tenant
        if len(self._named) > self._capacity or len(tenant) > MAX_TENANT_LENGTH:
            return OTHER
        self._named.add(tenant)
        return tenant
