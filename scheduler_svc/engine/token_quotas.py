"""Tokens a minute of each tenant and of each adapter: token buckets, with the time as an argument.

A bucket holds the tokens of one minute, and is filled evenly. A submitted request takes the tokens of its prompt and of
its encoder's input, even cached ones, because these are not known yet; it is refused if the bucket has fewer. A
continuation also takes the known tokens of its answer, except tokens that this engine has counted before. Generated
tokens are taken as they are computed. They may exceed the bucket, because no running request is ended: then the
tenant's next requests are refused until it is filled again. A request with an adapter needs and takes as many tokens
of the adapter's bucket.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

from grpc import StatusCode

from octavo_shared.errors import TokenQuotaError
from scheduler_svc.engine.tenants import Tenants
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.life import EndedRequest

# "tenant" or "adapter", and its name.
_Key: TypeAlias = tuple[str, str]

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
    """The buckets of all tenants and adapters with limited tokens.

    Args:
        tenants: The limits.

    Attributes:
        num_refused: Requests that were refused since the start.
    """

    def __init__(self, tenants: Tenants) -> None:
        self.num_refused = 0
        self._tenants = tenants
        self._buckets: dict[_Key, _Bucket] = {}
        self._most_buckets = _MANY_BUCKETS

    @property
    def are_there(self) -> bool:
        """Whether any tokens are limited."""
        return self._tenants.has_token_quotas

    def set_tenants(self, tenants: Tenants, now_s: float) -> None:
        """Let other limits hold from now on; taken tokens stay taken."""
        for key in list(self._buckets):
            bucket = self._bucket(key, now_s)
            per_minute = _per_minute(tenants, key)
            if bucket is None or per_minute is None:
                del self._buckets[key]
            else:
                bucket.num_tokens = min(bucket.num_tokens, per_minute)
        self._tenants = tenants

    def require(
        self, tenant: str, num_tokens: int, now_s: float, num_known_tokens: int = 0, *, adapter: str = ""
    ) -> None:
        """Raise TokenQuotaError if a tenant, or an adapter, has too few tokens left; take nothing yet.

        A continuation needs `num_known_tokens` too, but no more than a full bucket, because it was accepted before.
        """
        for key in _keys(tenant, adapter):
            self._require(key, num_tokens, now_s, num_known_tokens)

    def _require(self, key: _Key, num_tokens: int, now_s: float, num_known_tokens: int) -> None:
        per_minute, bucket = _per_minute(self._tenants, key), self._bucket(key, now_s)
        if per_minute is None or bucket is None:
            return
        num_tokens = max(num_tokens, min(num_tokens + num_known_tokens, per_minute))
        if not num_tokens or num_tokens <= bucket.num_tokens + _ROUNDING:
            return
        self.num_refused += 1
        retry_after_s = None
        if num_tokens <= per_minute:
            retry_after_s = math.ceil((num_tokens - bucket.num_tokens) * 60_000 / per_minute) / 1000
        (kind, name), num_left = key, math.floor(bucket.num_tokens)
        raise TokenQuotaError(name, num_tokens, per_minute, num_left, retry_after_s, kind=kind)

    def take(self, tenant: str, num_tokens: int, now_s: float, *, adapter: str = "") -> None:
        """Take tokens of a tenant, and of an adapter, even more than are left."""
        for key in _keys(tenant, adapter):
            if (bucket := self._bucket(key, now_s)) is not None:
                bucket.num_tokens -= num_tokens

    def _bucket(self, key: _Key, now_s: float) -> _Bucket | None:
        """Return a bucket as it is now; None: these tokens are not limited."""
        per_minute = _per_minute(self._tenants, key)
        if per_minute is None:
            return None
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._most_buckets:
                self._forget_full_ones(now_s)
            bucket = self._buckets[key] = _Bucket(per_minute, now_s)
        bucket.fill(per_minute, now_s)
        return bucket

    def _forget_full_ones(self, now_s: float) -> None:
        for key, bucket in list(self._buckets.items()):
            per_minute = _per_minute(self._tenants, key)
            assert per_minute is not None, "only what is limited has a bucket"
            bucket.fill(per_minute, now_s)
            if bucket.num_tokens >= per_minute:
                del self._buckets[key]
        self._most_buckets = len(self._buckets) + _MANY_BUCKETS


def _keys(tenant: str, adapter: str) -> tuple[_Key, ...]:
    """Return the buckets of a request; `adapter` "": it has none."""
    return (("tenant", tenant), ("adapter", adapter)) if adapter else (("tenant", tenant),)


def _per_minute(tenants: Tenants, key: _Key) -> int | None:
    kind, name = key
    if kind == "adapter":
        return tenants.tokens_per_minute_of_adapters.get(name)
    return tenants.of(name).tokens_per_minute


def num_uncounted_tokens(request: EngineRequest, before: EndedRequest | None) -> tuple[int, int]:
    """Return how many tokens of what a request reads, and of the answer so far, count against their tenant now.

    Tokens of an earlier call that is known to have ended by no fault of its client were counted then.

    Args:
        request: The submitted request.
        before: The last call with the same tenant and id; None: none is kept.
    """
    num_input_tokens, continuation = request.num_input_tokens, request.continuation
    if continuation is None:
        return num_input_tokens, 0
    num_known_tokens = sum(len(one.token_ids) for one in continuation.outputs if one.finish_reason is None)
    if before is not None and before.error_code == StatusCode.UNAVAILABLE.name:
        num_known_tokens -= min(num_known_tokens, before.num_output_tokens)
        num_input_tokens -= min(num_input_tokens, before.num_input_tokens)
    return num_input_tokens, num_known_tokens
