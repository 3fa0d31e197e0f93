"""Who makes a call, and what they may do.

`access_control.py` finds out at the beginning of each call; servicers ask `current_identity()`. Where nobody
is asked who they are, everybody may act for any tenant.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from octavo_shared.errors import NoExecutorError, PermissionDeniedError, UnavailableError


@dataclass(frozen=True, slots=True)
class Identity:
    """Who makes a call.

    Attributes:
        tenant: Whom they act for; None: any tenant, and they may use what is for operators.
    """

    tenant: str | None

    @property
    def is_operator(self) -> bool:
        """Whether they may act for any tenant."""
        return self.tenant is None

    def may_act_for(self, tenant: str) -> bool:
        """Return whether what belongs to a tenant is theirs to use."""
        return self.tenant is None or self.tenant == tenant

    def tenant_for(self, requested: str) -> str:
        """Return the tenant of a request that names `requested`; empty: it names none.

        Raises: PermissionDeniedError: they may not act for that tenant.
        """
        if self.tenant is None:
            return requested
        if requested not in ("", self.tenant):
            raise PermissionDeniedError(
                f"the token belongs to tenant {self.tenant!r}, the request names tenant {requested!r}; omit the "
                "tenant, or use that tenant's token"
            )
        return self.tenant


ANYBODY = Identity(tenant=None)

# gRPC runs each call in a task of its own, and so in a context of its own.
_identity: ContextVar[Identity] = ContextVar("identity", default=ANYBODY)


def current_identity() -> Identity:
    """Return who makes the call that runs."""
    return _identity.get()


def set_identity(identity: Identity) -> None:
    """Say, at the beginning of a call, who makes it."""
    _identity.set(identity)


@contextmanager
def private_deployment() -> Iterator[None]:
    """Tell tenants that there is no executor, but not why: addresses and files are the operators' business."""
    try:
        yield
    except NoExecutorError as error:
        if current_identity().is_operator:
            raise
        raise UnavailableError(error.brief) from error
