"""The share of each tenant: its weight in the queue, and the slots that its groups may use. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from octavo_shared.errors import InvalidFieldError


@dataclass(frozen=True, slots=True)
class TenantShare:
    """The share of one tenant.

    Attributes:
        weight: Finite and above 0.
        max_num_seqs: Most running sequences, over all planners; None: any number.

    Raises: InvalidFieldError: the weight is no such number.
    """

    weight: float = 1.0
    max_num_seqs: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise InvalidFieldError("weight", self.weight, "a finite number above 0")


@dataclass(frozen=True)
class TenantShares:
    """The shares of the `named` tenants, and the share of each other one."""

    named: Mapping[str, TenantShare] = field(default_factory=dict)
    others: TenantShare = field(default_factory=TenantShare)

    def of(self, tenant: str) -> TenantShare:
        """Return the share of a tenant."""
        return self.named.get(tenant, self.others)

    @cached_property
    def has_caps(self) -> bool:
        """Whether the sequences of any tenant are limited."""
        return any(share.max_num_seqs is not None for share in (self.others, *self.named.values()))


EQUAL_SHARES = TenantShares()
