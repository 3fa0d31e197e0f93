"""Aborts that come to the engine before their request does, since its front still checks it.

The engine does not know such an id. It remembers the abort for GRACE_S, and ends a request of this id and tenant that a
front had received before the abort came. A later request of the same id is another one, and runs: the front says how
long ago it received a request, and the way to the engine makes that too short, never too long. So no later request is
taken for an earlier one, and an abort is missed only if it came as soon after its request as that way takes.
"""

from collections import OrderedDict
from collections.abc import Callable

from octavo_shared.process.clock import monotonic_s
from scheduler_svc.request.engine_request import MAX_REQUEST_ID_LENGTH

# As long as a check may take.
GRACE_S = 30.0

# What is remembered at most; the oldest goes first, the tenant's own before other tenants'.
MAX_OF_TENANT = 1000
MAX_TENANTS = 1000


class EarlyAborts:
    """Remembers them, by tenant.

    Args:
        clock: Monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic_s) -> None:
        self._clock = clock
        # When each id was aborted last, the oldest first. The tenant None: of callers that may act for all tenants.
        self._of_tenant: OrderedDict[str | None, OrderedDict[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._of_tenant.values()))

    def add(self, request_id: str, tenant: str | None) -> None:
        """A request that is not known was aborted, of a tenant; None: of any."""
        if len(request_id) > MAX_REQUEST_ID_LENGTH:
            return  # no request may have it
        aborts = self._of_tenant.setdefault(tenant, OrderedDict())
        self._of_tenant.move_to_end(tenant)
        aborts[request_id] = self._clock()
        aborts.move_to_end(request_id)
        if len(aborts) > MAX_OF_TENANT:
            aborts.popitem(last=False)
        if len(self._of_tenant) > MAX_TENANTS:
            self._of_tenant.popitem(last=False)
        self._forget_old()

    def has(self, request_id: str, tenant: str, received_before_s: float) -> bool:
        """Return whether a request was aborted that a front received so many seconds ago."""
        self._forget_old()
        received_at_s = self._clock() - received_before_s
        none: OrderedDict[str, float] = OrderedDict()
        known = (self._of_tenant.get(caller, none) for caller in (tenant, None))
        return any(aborts.get(request_id, received_at_s) > received_at_s for aborts in known)

    def _forget_old(self) -> None:
        """Forget what is older than the grace; tenants stand in the order of their last abort."""
        oldest_s = self._clock() - GRACE_S
        while self._of_tenant:
            tenant, aborts = next(iter(self._of_tenant.items()))
            while aborts and next(iter(aborts.values())) < oldest_s:
                aborts.popitem(last=False)
            if aborts:
                return
            del self._of_tenant[tenant]
