"""Traces: spans sent to an OpenTelemetry collector, if --tracing says so.

    client ── traceparent ──> scheduler: a span for each request
                                  └── Admission.traceparent ──> executor: a span for each stay in the batch

opentelemetry is imported only when `start_tracing` is asked for more than "off". The spans are made in
`scheduler_svc/telemetry/request_tracing.py` and `executor_svc/service/traced_worker.py`, which import it and are
themselves imported only then. All other settings are the variables that OpenTelemetry defines, OTEL_*.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

import octavo
from octavo.values.wording import how_to_install
from octavo_shared.errors import OctavoServiceError

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import SpanContext, Tracer

TracingMode: TypeAlias = Literal["off", "otlp"]

# The longest that the end of a process waits for a collector that does not answer, in seconds.
MAX_FLUSH_S = 5.0

# Where the SDK complains about a missing collector, several lines for each batch.
_NOISY_LOGGERS = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")
COMPLAINT_INTERVAL_S = 60.0


class Tracing:
    """The spans of one process on their way to a collector, in a thread of their own.

    Args:
        provider: Makes the spans, and sends them.
        give_up: Ends sending at once; called when a flush takes too long.

    Attributes:
        tracer: Makes spans. A full queue drops them; nothing ever waits for the collector.
    """

    def __init__(self, provider: TracerProvider, give_up: Callable[[], None]) -> None:
        self.tracer: Tracer = provider.get_tracer("octavo")
        self._provider = provider
        self._give_up = give_up

    def close(self, timeout_s: float) -> None:
        """Send the spans that have ended; return after `timeout_s` or MAX_FLUSH_S seconds at the latest."""
        giving_up = threading.Timer(max(0.0, min(timeout_s, MAX_FLUSH_S)), self._give_up)
        giving_up.start()
        self._provider.shutdown()
        giving_up.cancel()


def start_tracing(mode: TracingMode, service_name: str) -> Tracing | None:
    """Return what sends the spans of this process; None: tracing is off.

    Args:
        mode: The setting.
        service_name: Name of the service unless OTEL_SERVICE_NAME has another one.

    Raises: OctavoServiceError: a package is missing, or an OTEL_* variable is wrong.
    """
    if mode == "off":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise OctavoServiceError(
            f"--tracing otlp requires OpenTelemetry ({error}): {how_to_install('tracing')}"
        ) from error
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).addFilter(RateLimitFilter(COMPLAINT_INTERVAL_S))
    try:
        exporter = OTLPSpanExporter()
        provider = TracerProvider(resource=resource_of(service_name), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
    except Exception as error:  # the SDK has no error class for wrong variables
        raise OctavoServiceError(f"an OTEL_* variable is invalid: {error}") from error
    return Tracing(provider, exporter.shutdown)


def resource_of(service_name: str) -> Resource:
    """Return the name of the process; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    own = {"service.name": service_name, "service.version": octavo.__version__, "host.name": socket.gethostname()}
    named = OTELResourceDetector().detect().attributes
    return Resource.create({key: value for key, value in own.items() if key not in named})


def traceparent_of(span: SpanContext) -> str:
    """Return a span's name for its children in other processes: W3C Trace Context, level 1, section 3.2."""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"


class RateLimitFilter(logging.Filter):
    """Lets one line of a logger through in `interval_s` seconds, whatever its text."""

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line may be written."""
        now_s = self._clock()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._interval_s
        return True
