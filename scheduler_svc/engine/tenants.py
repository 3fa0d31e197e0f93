"""The quotas that the operator gives to tenants. `config/tenants_file.py` reads them from a file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from octavo_shared.errors import CallerError
from scheduler_svc.core.waiting.tenant_shares import TenantShare, TenantShares
from scheduler_svc.request.engine_request import EngineRequest


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """The quota of one tenant.

    Attributes:
        share: Its weight and its slots.
        max_waiting: Most requests that wait; None: as many as the queue takes.
        tokens_per_minute: Tokens of prompts and answers; None: any number.
    """

    share: TenantShare = field(default_factory=TenantShare)
    max_waiting: int | None = None
    tokens_per_minute: int | None = None

    def max_waiting_of(self, queue: int) -> int:
        """Return how many requests may wait in a queue for `queue` requests."""
        return queue if self.max_waiting is None else self.max_waiting


@dataclass(frozen=True)
class Tenants:
    """The quotas of all tenants.

    Attributes:
        named: Tenants with quotas of their own.
        others: The quota of each other tenant.
        serves_others: Whether other tenants are served; if not, `others` holds for their live requests.
        tokens_per_minute_of_adapters: Tokens of prompts and answers of all requests with an adapter, by its name; those
            of other adapters are not limited.
    """

    named: Mapping[str, TenantQuota] = field(default_factory=dict)
    others: TenantQuota = field(default_factory=TenantQuota)
    serves_others: bool = True
    tokens_per_minute_of_adapters: Mapping[str, int] = field(default_factory=dict)

    def of(self, tenant: str) -> TenantQuota:
        """Return a tenant's quota."""
        return self.named.get(tenant, self.others)

    def require_slots(self, request: EngineRequest) -> None:
        """Raise CallerError if a request runs more sequences at a time than its tenant ever may."""
        most = self.of(request.tenant).share.max_num_seqs
        if most is not None and request.pooling is None and request.width > most:
            raise CallerError(
                f"the request runs {request.width} sequences at a time (n, best_of or beam_width), and tenant "
                f"{request.tenant!r} may run {most} (its slots in --tenants-file, or --max-num-seqs-per-tenant); send "
                "several requests"
            )

    @property
    def served(self) -> frozenset[str] | None:
        """The only tenants that are served; None: any."""
        return None if self.serves_others else frozenset(self.named)

    @cached_property
    def shares(self) -> TenantShares:
        """The shares, for the planners."""
        return TenantShares({name: quota.share for name, quota in self.named.items()}, self.others.share)

    @cached_property
    def has_token_quotas(self) -> bool:
        """Whether the tokens of any tenant or adapter are limited."""
        quotas = (self.others, *self.named.values())
        has_limit = any(quota.tokens_per_minute is not None for quota in quotas)
        return has_limit or bool(self.tokens_per_minute_of_adapters)

    def max_waiting_of(self, queue: int) -> int:
        """Return the most requests of any one tenant that may wait in a queue for `queue` requests."""
        quotas = [*self.named.values(), *([self.others] if self.serves_others else [])]
        return min(queue, max(quota.max_waiting_of(queue) for quota in quotas))
