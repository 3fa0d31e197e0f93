"""The identity of a caller, and what it may do.

`access_control.py` sets it at the beginning of each call; servicers read it with `current_identity()`. Where callers
are not checked, every caller may act for any tenant.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from octavo_shared.errors import NoExecutorError, PermissionDeniedError, UnavailableError


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a caller.

    Attributes:
        tenant: The tenant that it acts for; None: any tenant, and it may call what is for operators.
    """

    tenant: str | None

    @property
    def is_operator(self) -> bool:
        """Whether the caller may act for any tenant."""
        return self.tenant is None

    def may_act_for(self, tenant: str) -> bool:
        """Return whether the caller may use what belongs to a tenant."""
        return self.tenant is None or self.tenant == tenant

    def tenant_for(self, requested: str) -> str:
        """Return the tenant of a request that names `requested`; empty: the request names none.

        Raises: PermissionDeniedError: the caller may not act for that tenant.
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
    """Return the identity of the current caller."""
    return _identity.get()


def set_identity(identity: Identity) -> None:
    """Set the identity of the caller, at the beginning of a call."""
    _identity.set(identity)


@contextmanager
def private_deployment() -> Iterator[None]:
    """Hide from tenants why there is no executor: addresses and files are for operators only."""
    try:
        yield
    except NoExecutorError as error:
        if current_identity().is_operator:
            raise
        raise UnavailableError(error.brief) from error
