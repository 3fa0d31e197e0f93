"""Both services in this process, with their spans recorded."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from executor_svc.fake.worker import FakeWorker
from executor_svc.service.traced_worker import TracedWorker
from executor_svc.worker.interface import Worker
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.process.tracing import Tracing, TracingMode
from tests.support.stack import Stack, running_stack, until
from tests.tracing.spans import SpanRecord, Trace, recorded, trace_of


@dataclass(slots=True)
class Recorder:
    """Keeps the spans of this process."""

    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    tracing: Tracing = field(init=False)

    def __post_init__(self) -> None:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider, give_up=lambda: None)

    @property
    def spans(self) -> list[SpanRecord]:
        """The spans that have ended."""
        return [recorded(span) for span in self.exporter.get_finished_spans()]

    def trace(self, request_id: str) -> Trace:
        """The spans of one request."""
        return trace_of(self.spans, request_id)

    def worker(self, worker: Worker | None = None) -> TracedWorker:
        """A traced worker, by default a fake one."""
        return TracedWorker(worker or FakeWorker(), self.tracing.tracer)


async def run(stack: Stack, request: pb.GenerateRequest, traceparent: str | None = None) -> None:
    """Run a request to its end, under a span of the caller."""
    metadata = () if traceparent is None else (("traceparent", traceparent),)
    async for _ in stack.generation.Generate(request, metadata=metadata):
        pass


async def executed(recorder: Recorder, num_executions: int = 1) -> None:
    """Return once executors have sent so many spans: they hear of an end with the next step."""
    exporter = recorder.exporter
    await until(lambda: sum(span.name == "execute" for span in exporter.get_finished_spans()) >= num_executions)


TracedStack = Callable[..., AbstractAsyncContextManager[Stack]]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def traced_stack(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> TracedStack:
    """What `running_stack` does, with every service traced; workers are traced already, by default one fake."""

    def start_recording(mode: TracingMode, service_name: str) -> Tracing:
        assert mode == "otlp"
        return recorder.tracing

    monkeypatch.setattr("scheduler_svc.front.front.start_tracing", start_recording)

    @asynccontextmanager
    async def run(*workers: TracedWorker, **settings: object) -> AsyncIterator[Stack]:
        async with running_stack(*(workers or [recorder.worker()]), tracing="otlp", **settings) as stack:  # type: ignore[arg-type]
            yield stack

    return run
