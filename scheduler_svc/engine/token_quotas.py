"""Tokens a minute of each tenant: token buckets, with the time as an argument.

A bucket holds the tokens of one minute, and is filled evenly. A request that is submitted takes its prompt out of it,
cached or not, for what is cached is not known yet, and is refused where there is less. So are the tokens of an answer
that goes on, except those that this engine has counted before. Generated tokens are taken as they are computed. They
may be more than are left, for nothing that runs is ended: the tenant's next requests wait for that.
"""

import math
from dataclasses import dataclass

from grpc import StatusCode

from octavo_shared.errors import TokenQuotaError
from scheduler_svc.engine.tenants import Tenants
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.life import EndedRequest

# Full buckets are forgotten when there are so many more buckets than after the last time.
_MANY_BUCKETS = 1024
# Tokens that sums of floats may lack: who comes back when told to is let in.
_ROUNDING = 1e-6


@dataclass(slots=True)
class _Bucket:
    """Tokens that are left; below 0: that were taken beyond."""

    num_tokens: float
    at_s: float

    def fill(self, per_minute: int, now_s: float) -> None:
        """Add what has come since the last time."""
        self.num_tokens = min(per_minute, self.num_tokens + max(0.0, now_s - self.at_s) * per_minute / 60)
        self.at_s = max(self.at_s, now_s)


class TokenQuotas:
    """The buckets of all tenants whose tokens are limited.

    Args:
        tenants: They have the limits.

    Attributes:
        num_refused: Requests that were refused since the start.
    """

    def __init__(self, tenants: Tenants) -> None:
        self.num_refused = 0
        self._tenants = tenants
        self._buckets: dict[str, _Bucket] = {}
        self._most_buckets = _MANY_BUCKETS

    @property
    def are_there(self) -> bool:
        """Whether anybody's tokens are limited."""
        return self._tenants.has_token_quotas

    def set_tenants(self, tenants: Tenants, now_s: float) -> None:
        """Let other limits hold from now on; what was taken stays taken."""
        for name in list(self._buckets):
            bucket = self._bucket(name, now_s)
            per_minute = tenants.of(name).tokens_per_minute
            if bucket is None or per_minute is None:
                del self._buckets[name]
            else:
                bucket.num_tokens = min(bucket.num_tokens, per_minute)
        self._tenants = tenants

    def require(self, tenant: str, num_tokens: int, now_s: float, num_known_tokens: int = 0) -> None:
        """Take nothing yet. Raises TokenQuotaError: a tenant has fewer than so many tokens left.

        `num_known_tokens` of an answer that goes on are needed too, but no more than a full bucket: it was accepted.
        """
        per_minute, bucket = self._tenants.of(tenant).tokens_per_minute, self._bucket(tenant, now_s)
        if per_minute is None or bucket is None:
            return
        num_tokens = max(num_tokens, min(num_tokens + num_known_tokens, per_minute))
        if not num_tokens or num_tokens <= bucket.num_tokens + _ROUNDING:
            return
        self.num_refused += 1
        retry_after_s = None
        if num_tokens <= per_minute:
            retry_after_s = math.ceil((num_tokens - bucket.num_tokens) * 60_000 / per_minute) / 1000
        raise TokenQuotaError(tenant, num_tokens, per_minute, math.floor(bucket.num_tokens), retry_after_s)

    def take(self, tenant: str, num_tokens: int, now_s: float) -> None:
        """A tenant has tokens, whether they are left or not."""
        bucket = self._bucket(tenant, now_s)
        if bucket is not None:
            bucket.num_tokens -= num_tokens

    def _bucket(self, tenant: str, now_s: float) -> _Bucket | None:
        """Return the bucket of a tenant as it is now; None: its tokens are not limited."""
        per_minute = self._tenants.of(tenant).tokens_per_minute
        if per_minute is None:
            return None
        bucket = self._buckets.get(tenant)
        if bucket is None:
            if len(self._buckets) >= self._most_buckets:
                self._forget_full_ones(now_s)
            bucket = self._buckets[tenant] = _Bucket(per_minute, now_s)
        bucket.fill(per_minute, now_s)
        return bucket

    def _forget_full_ones(self, now_s: float) -> None:
        for name, bucket in list(self._buckets.items()):
            per_minute = self._tenants.of(name).tokens_per_minute
            assert per_minute is not None, "only limited tenants have buckets"
            bucket.fill(per_minute, now_s)
            if bucket.num_tokens >= per_minute:
                del self._buckets[name]
        self._most_buckets = len(self._buckets) + _MANY_BUCKETS


def num_uncounted_tokens(request: EngineRequest, before: EndedRequest | None) -> tuple[int, int]:
    """Return how many tokens of a prompt, and of the answer so far, count against their tenant now.

    Those of a call that we know to have ended by no fault of its client, as with its front, were counted then.

    Args:
        request: What is submitted.
        before: The last call of the same name; None: none is remembered.
    """
    num_prompt_tokens, continuation = len(request.prompt_token_ids), request.continuation
    if continuation is None:
        return num_prompt_tokens, 0
    num_known_tokens = sum(len(one.token_ids) for one in continuation.outputs if one.finish_reason is None)
    if before is not None and before.error_code == StatusCode.UNAVAILABLE.name:
        num_known_tokens -= min(num_known_tokens, before.num_output_tokens)
        num_prompt_tokens -= min(num_prompt_tokens, before.num_prompt_tokens)
    return num_prompt_tokens, num_known_tokens
