"""A collector of OpenTelemetry, as far as the tests need one: it takes spans and keeps them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from tests.tracing.spans import SpanRecord, sent


class Collector(TraceServiceServicer):
    """Keeps what it gets; `until` waits for it."""

    def __init__(self) -> None:
        self.spans: list[SpanRecord] = []
        self._more = asyncio.Condition()

    async def Export(  # noqa: N802
        self, request: ExportTraceServiceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ExportTraceServiceResponse:
        async with self._more:
            self.spans += sent(request)
            self._more.notify_all()
        return ExportTraceServiceResponse()

    async def until(self, is_enough: Callable[[Sequence[SpanRecord]], bool], timeout_s: float = 20) -> None:
        """Return once the spans suffice."""
        async with asyncio.timeout(timeout_s), self._more:
            await self._more.wait_for(lambda: is_enough(self.spans))


@asynccontextmanager
async def running_collector() -> AsyncIterator[tuple[Collector, str]]:
    """Run a collector; give it and its endpoint, as OTEL_EXPORTER_OTLP_ENDPOINT has it."""
    collector, server = Collector(), grpc.aio.server()
    add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)
