"""The metrics that every service has: its calls, and its certificate."""

from collections.abc import Iterator

from shared.grpc_metrics import METRICS as CALL_METRICS
from shared.grpc_metrics import CallMetrics
from shared.metric import Family, Metric
from shared.tls import ServerTls

CERTIFICATE_EXPIRY = Metric(
    "octavo_tls_certificate_expiry_seconds",
    "gauge",
    "When the certificate of --tls-cert expires, in seconds of Unix time; absent without TLS.",
)

METRICS = (*CALL_METRICS, CERTIFICATE_EXPIRY)


def service_families(calls: CallMetrics, tls: ServerTls | None) -> Iterator[Family]:
    """Yield the metrics of a service as they are now; `tls` None: it speaks plaintext."""
    yield from calls.families()
    yield CERTIFICATE_EXPIRY.family({} if tls is None else {(): tls.not_after_s})
