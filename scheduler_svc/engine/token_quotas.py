"""Tokens a minute of each tenant: token buckets, with the time as an argument.

A bucket holds the tokens of one minute, and is filled evenly. A submitted request takes the tokens of its prompt, even
cached ones, because these are not known yet; it is refused if the bucket has fewer. A continuation also takes the known
tokens of its answer, except tokens that this engine has counted before. Generated tokens are taken as they are
computed. They may exceed the bucket, because no running request is ended: then the tenant's next requests are refused
until it is filled again.
"""

import math
from dataclasses import dataclass

from grpc import StatusCode

from octavo_shared.errors import TokenQuotaError
from scheduler_svc.engine.tenants import Tenants
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.life import EndedRequest

# Full buckets are forgotten when there are so many more buckets than the last time.
_MANY_BUCKETS = 1024
# Rounding error of a bucket, in tokens: a client that comes back when it is told to must be let in.
_ROUNDING = 1e-6


@dataclass(slots=True)
class _Bucket:
    """The tokens that are left; below 0: more were taken than there were."""

    num_tokens: float
    at_s: float

    def fill(self, per_minute: int, now_s: float) -> None:
        """Add the tokens that have come since `at_s`."""
        self.num_tokens = min(per_minute, self.num_tokens + max(0.0, now_s - self.at_s) * per_minute / 60)
        self.at_s = max(self.at_s, now_s)


class TokenQuotas:
    """The buckets of all tenants with limited tokens.

    Args:
        tenants: The limits.

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
        """Whether the tokens of any tenant are limited."""
        return self._tenants.has_token_quotas

    def set_tenants(self, tenants: Tenants, now_s: float) -> None:
        """Let other limits hold from now on; taken tokens stay taken."""
        for name in list(self._buckets):
            bucket = self._bucket(name, now_s)
            per_minute = tenants.of(name).tokens_per_minute
            if bucket is None or per_minute is None:
                del self._buckets[name]
            else:
                bucket.num_tokens = min(bucket.num_tokens, per_minute)
        self._tenants = tenants

    def require(self, tenant: str, num_tokens: int, now_s: float, num_known_tokens: int = 0) -> None:
        """Raise TokenQuotaError if a tenant has too few tokens left; take nothing yet.

        A continuation needs `num_known_tokens` too, but no more than a full bucket, because it was accepted before.
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
        """Take tokens of a tenant, even more than are left."""
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

    Tokens of an earlier call that is known to have ended by no fault of its client were counted then.

    Args:
        request: The submitted request.
        before: The last call with the same tenant and id; None: none is kept.
    """
    num_prompt_tokens, continuation = len(request.prompt_token_ids), request.continuation
    if continuation is None:
        return num_prompt_tokens, 0
    num_known_tokens = sum(len(one.token_ids) for one in continuation.outputs if one.finish_reason is None)
    if before is not None and before.error_code == StatusCode.UNAVAILABLE.name:
        num_known_tokens -= min(num_known_tokens, before.num_output_tokens)
        num_prompt_tokens -= min(num_prompt_tokens, before.num_prompt_tokens)
    return num_prompt_tokens, num_known_tokens
