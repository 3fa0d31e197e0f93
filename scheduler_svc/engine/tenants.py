"""What the operator gives to each tenant. `config/tenants_file.py` reads it from a file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from octavo_shared.errors import CallerError
from scheduler_svc.core.waiting.tenant_shares import TenantShare, TenantShares
from scheduler_svc.request.engine_request import EngineRequest


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """What one tenant may have.

    Attributes:
        share: Its weight and its slots.
        max_waiting: Requests that wait at most; None: as many as the queue takes.
        tokens_per_minute: Of prompts and answers; None: any number.
    """

    share: TenantShare = field(default_factory=TenantShare)
    max_waiting: int | None = None
    tokens_per_minute: int | None = None

    def max_waiting_of(self, queue: int) -> int:
        """Return how many requests may wait, by default as many as there may be in the queue."""
        return queue if self.max_waiting is None else self.max_waiting


@dataclass(frozen=True)
class Tenants:
    """All tenants.

    Attributes:
        named: Those with quotas of their own.
        others: What each of the others may have.
        serves_others: Whether these are served at all; else it holds for what they still have.
    """

    named: Mapping[str, TenantQuota] = field(default_factory=dict)
    others: TenantQuota = field(default_factory=TenantQuota)
    serves_others: bool = True

    def of(self, tenant: str) -> TenantQuota:
        """Return what a tenant may have."""
        return self.named.get(tenant, self.others)

    def require_slots(self, request: EngineRequest) -> None:
        """Raise CallerError: a request runs more sequences at a time than its tenant may ever."""
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
        """What the planners have to know."""
        return TenantShares({name: quota.share for name, quota in self.named.items()}, self.others.share)

    @cached_property
    def has_token_quotas(self) -> bool:
        """Whether the tokens of any tenant are limited."""
        return any(quota.tokens_per_minute is not None for quota in (self.others, *self.named.values()))

    def max_waiting_of(self, queue: int) -> int:
        """Return how many requests of a tenant may wait at most in a queue for so many, whichever tenant it is."""
        quotas = [*self.named.values(), *([self.others] if self.serves_others else [])]
        return min(queue, max(quota.max_waiting_of(queue) for quota in quotas))
