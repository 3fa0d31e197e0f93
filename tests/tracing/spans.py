"""Spans as tests look at them, whether they were recorded in this process or sent to a collector."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SentSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.sdk.trace import ReadableSpan

PHASES = ("tokenize", "queue", "prefill", "decode")

CALLER_TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER_SPAN_ID = "00f067aa0ba902b7"
SAMPLED = f"00-{CALLER_TRACE_ID}-{CALLER_SPAN_ID}-01"
NOT_SAMPLED = f"00-{CALLER_TRACE_ID}-{CALLER_SPAN_ID}-00"


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A span that has ended; ids in hexadecimal, times in nanoseconds since 1970, `parent_id` empty: a root."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    event_names: tuple[str, ...]
    is_error: bool
    description: str
    resource: dict[str, Any]

    @property
    def all_text(self) -> str:
        """Everything that somebody could read in it."""
        return repr(self)


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one request."""

    request: SpanRecord
    phases: tuple[SpanRecord, ...]
    executions: tuple[SpanRecord, ...]


def recorded(span: ReadableSpan) -> SpanRecord:
    """Return a span of this process."""
    assert span.context is not None
    assert span.start_time is not None
    assert span.end_time is not None
    return SpanRecord(
        name=span.name,
        trace_id=f"{span.context.trace_id:032x}",
        span_id=f"{span.context.span_id:016x}",
        parent_id="" if span.parent is None else f"{span.parent.span_id:016x}",
        begin_ns=span.start_time,
        end_ns=span.end_time,
        attributes=dict(span.attributes or {}),
        event_names=tuple(event.name for event in span.events),
        is_error=span.status.status_code.name == "ERROR",
        description=span.status.description or "",
        resource=dict(span.resource.attributes),
    )


def sent(request: ExportTraceServiceRequest) -> list[SpanRecord]:
    """Return the spans that a process has sent."""
    return [
        _sent(span, _attributes(of_process.resource.attributes))
        for of_process in request.resource_spans
        for of_scope in of_process.scope_spans
        for span in of_scope.spans
    ]


def _sent(span: SentSpan, resource: dict[str, Any]) -> SpanRecord:
    return SpanRecord(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        event_names=tuple(event.name for event in span.events),
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
        description=span.status.message,
        resource=resource,
    )


def _attributes(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    if value.HasField("array_value"):
        return tuple(_value(entry) for entry in value.array_value.values)
    return getattr(value, value.WhichOneof("value") or "string_value")


def trace_of(spans: Sequence[SpanRecord], request_id: str) -> Trace:
    """Return the spans of a request, after a check that they form one trace in order.

    The phases adjoin, and fill the request from its first moment to its last one.
    """
    [request] = [span for span in spans if span.attributes.get("octavo.request_id") == request_id]
    children = [span for span in spans if span.parent_id == request.span_id]
    assert {span.trace_id for span in children} <= {request.trace_id}
    phases = sorted((span for span in children if span.name != "execute"), key=lambda span: PHASES.index(span.name))
    executions = sorted((span for span in children if span.name == "execute"), key=lambda span: span.begin_ns)
    if phases:
        begins = [span.begin_ns for span in phases]
        ends = [span.end_ns for span in phases]
        assert [request.begin_ns, *ends] == [*begins, request.end_ns], "the phases do not adjoin"
    for span in phases:
        assert span.begin_ns < span.end_ns
    return Trace(request, tuple(phases), tuple(executions))


def names(trace: Trace) -> list[str]:
    """Return the phases of a request."""
    return [span.name for span in trace.phases]


def one(spans: Sequence[SpanRecord], matches: Callable[[SpanRecord], bool]) -> SpanRecord:
    """Return the only span that matches."""
    [span] = [span for span in spans if matches(span)]
    return span
