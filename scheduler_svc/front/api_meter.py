"""A front's counts of requests, by API: how long they took, and why they were refused.

A request is refused before it is queued. Requests that fail later are in the engine's own counts.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from types import TracebackType

from octavo_shared.errors import (
    CacheTooSmallError,
    CallerError,
    DeadlineTooShortError,
    DrainingError,
    NoExecutorError,
    OctavoServiceError,
    PermissionDeniedError,
    QueueFullError,
    RequestAbortedError,
    RequestExistsError,
    TokenQuotaError,
    UnauthenticatedError,
    UnavailableError,
    UnknownNameError,
    WorldError,
)
from octavo_shared.process.histogram import Histogram
from octavo_shared.process.metric import Family, LabelValues, Metric
from scheduler_svc.front.access.identity import current_identity
from scheduler_svc.front.api.request_limits import PromptTooLongError
from scheduler_svc.front.text.text_model import UnknownModelError
from scheduler_svc.telemetry.tenant_names import TenantNames

REFUSED = Metric(
    "octavo_requests_refused_total",
    "counter",
    "Requests refused before they were queued, by API and reason; of a stream each of its requests counts.",
    ("api", "reason"),
)
DURATION = Metric(
    "octavo_api_request_duration_seconds",
    "histogram",
    "Time from a request's arrival to the end of its answer, in seconds, of requests that were not refused.",
    ("api",),
)
TENANT_REFUSED = Metric(
    "octavo_tenant_requests_refused_total",
    "counter",
    "Requests refused, by tenant: the first 50 by name, the rest as other; empty: the request named none.",
    ("tenant",),
)
METRICS = (REFUSED, DURATION, TENANT_REFUSED)

# APIs whose requests executors compute; they have series from the start: a rate needs the zero before the first one.
COMPUTING_APIS = (
    *("generate", "stream_requests", "chat_completions", "completions", "responses", "messages"),
    *("embed", "embeddings", "score", "rerank"),
)
OTHER_API = "other"
APIS = (*COMPUTING_APIS, "tokenize", "detokenize", "count_tokens", "tokenizer_info", "models", OTHER_API)

_API_OF_METHOD = {
    "Generate": "generate",
    "StreamRequests": "stream_requests",
    "Embed": "embed",
    "Score": "score",
    "Tokenize": "tokenize",
    "Detokenize": "detokenize",
    "GetModel": "models",
}

# From a refusal to a long answer: doubling from 1 ms to 131 s.
_BOUNDS_S = tuple(0.001 * 2**power for power in range(18))


class ApiMeter:
    """Counts of one front since its start.

    Args:
        clock: Monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._durations = {api: Histogram(_BOUNDS_S) for api in COMPUTING_APIS}
        self._num_refused: Counter[LabelValues] = Counter(dict.fromkeys(product(COMPUTING_APIS, SERVICE_REASONS), 0))
        self._num_refused_of: Counter[str] = Counter()
        self._tenants = TenantNames()

    def request(self, api: str) -> "ApiRequest":
        """Count a request that has arrived; the result is a context manager that is told how the request ends."""
        assert api in APIS
        return ApiRequest(self, api, self._clock())

    def call_refused(self, method: str, error: OctavoServiceError) -> None:
        """Count a gRPC call that was refused before its request was read; `method` is its full name."""
        self.refused(_API_OF_METHOD.get(method.rpartition("/")[2], OTHER_API), refusal_reason(error))

    def refused(self, api: str, reason: str, tenant: str = "") -> None:
        """Count a refused request; `tenant` is the one that it names."""
        assert reason in REASONS
        self._num_refused[api, reason] += 1
        self._num_refused_of[self._tenants.label(current_identity().tenant or tenant)] += 1

    def ended(self, api: str, began_s: float) -> None:
        """Count a request that ended without a refusal."""
        self._durations.setdefault(api, Histogram(_BOUNDS_S)).observe(self._clock() - began_s)

    def families(self) -> Iterator[Family]:
        """Yield the metrics as they are now."""
        yield REFUSED.family(self._num_refused)
        yield DURATION.histogram_family({(api,): durations for api, durations in self._durations.items()})
        yield TENANT_REFUSED.family({(tenant,): num for tenant, num in self._num_refused_of.items()})


class ApiRequest:
    """One request, from its arrival to its end. A request whose caller leaves before it is accepted is not counted.

    Attributes:
        tenant: The tenant that it names, as far as it is known.
    """

    __slots__ = ("_api", "_began_s", "_is_accepted", "_meter", "tenant")

    def __init__(self, meter: ApiMeter, api: str, began_s: float) -> None:
        self._meter = meter
        self._api = api
        self._began_s = began_s
        self._is_accepted = False
        self.tenant = ""

    def accept(self) -> None:
        """Note that it is queued, or answered."""
        self._is_accepted = True

    def refuse(self, reason: str) -> None:
        """Note that it gets an error; once it is accepted that is no refusal."""
        if not self._is_accepted:
            self._meter.refused(self._api, reason, self.tenant)

    def end(self) -> None:
        """Note that its caller has the answer, or has left."""
        if self._is_accepted:
            self._meter.ended(self._api, self._began_s)

    def __enter__(self) -> "ApiRequest":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.refuse(refusal_reason(error))
        self.end()


# An error has the reason of its nearest class.
_REASONS: dict[type[BaseException], str] = {
    CallerError: "invalid",
    PromptTooLongError: "too_long",
    RequestExistsError: "duplicate_id",
    UnknownModelError: "not_found",
    UnknownNameError: "not_found",
    UnauthenticatedError: "unauthenticated",
    PermissionDeniedError: "permission_denied",
    QueueFullError: "queue_full",
    TokenQuotaError: "quota",
    DeadlineTooShortError: "deadline",
    CacheTooSmallError: "too_long",
    NoExecutorError: "no_executor",
    DrainingError: "draining",
    WorldError: "unavailable",
    RequestAbortedError: "aborted",
}

# For errors of no class above: bugs, and texts at which the tokenizer fails.
INTERNAL = "internal"

REASONS = (*dict.fromkeys(_REASONS.values()), INTERNAL)

# Reasons that are not the caller's fault; alerts use them.
SERVICE_REASONS = ("queue_full", "deadline", "no_executor", "draining", "unavailable", INTERNAL)


def refusal_reason(error: BaseException) -> str:
    """Return why a request was refused, given the error that its caller gets."""
    cause = error.__cause__
    if type(error) is UnavailableError and isinstance(cause, OctavoServiceError):  # the caller is not told the cause
        return refusal_reason(cause)
    return next((_REASONS[kind] for kind in type(error).__mro__ if kind in _REASONS), INTERNAL)
