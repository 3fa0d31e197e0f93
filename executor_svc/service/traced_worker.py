"""A worker that makes a span for the time that a request is in its batch table.

It stands before the real worker, so that a process which does not trace has nothing of it. It looks at
steps that change which requests are in the table, and at no others. Imported only with --tracing.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from executor_svc.worker.interface import RunningStep, Worker, WorkerAround
from octavo_shared.step_wire.step import Admission, Step, TableDelta


@dataclass(slots=True, eq=False)
class Execution:
    """A request in the batch table.

    Attributes:
        traceparent: The span of the request.
        span: Its own.
        first_step_id: The step that admitted it.
        num_computed: Of each of its slots, tokens that were computed when it took the slot.
        num_tokens: Tokens computed in the slots that it left.
    """

    traceparent: str
    span: Span
    first_step_id: int
    num_computed: dict[int, int] = field(default_factory=dict)
    num_tokens: int = 0


class TracedWorker(WorkerAround):
    """A worker that makes a span `execute` for each stay of a traced request in the batch table.

    A stay begins when the first of its sequences is admitted and ends when the last one is released. Forks belong to
    the request of their parent.

    Args:
        worker: Runs the steps.
        tracer: Makes the spans.
        clock_ns: Nanoseconds since 1970.
    """

    def __init__(self, worker: Worker, tracer: Tracer, clock_ns: Callable[[], int] = time.time_ns) -> None:
        super().__init__(worker)
        self._tracer = tracer
        self._clock_ns = clock_ns
        self._propagator = TraceContextTextMapPropagator()
        self._by_slot: dict[int, Execution] = {}
        self._by_traceparent: dict[str, Execution] = {}

    def reset(self, *, uses_groups: bool = False) -> None:
        """Empty the batch table: the spans of what was in it end with an error."""
        self.end_all("a scheduler attached anew")
        super().reset(uses_groups=uses_groups)

    def launch(self, step: Step) -> RunningStep:
        """Launch the step; see `executor_svc.worker.interface.Worker.launch`."""
        delta = step.delta
        if not (len(delta.released_slots) or delta.admissions or delta.forks or delta.beam_forks):
            return self._worker.launch(step)
        begin_ns = self._clock_ns()
        ended, begun = self._computed_at_ends(delta), self._computed_at_begins(delta)
        running = self._worker.launch(step)
        for slot, num_computed in ended.items():
            self._release(slot, num_computed, step.step_id, begin_ns)
        for admission in delta.admissions:
            self._admit(admission, step.step_id, begin_ns)
        for fork in delta.beam_forks:
            self._fork(fork.parent_slot, fork.slot, begun[fork.slot])
        for fork in delta.forks:  # they branch off at the end of the step's chunks
            self._fork(fork.parent_slot, fork.slot, int(self.table.num_scheduled_tokens[fork.slot]))
        return running

    def end_all(self, reason: str) -> None:
        """End the spans of all that is in the table with an error."""
        now_ns = self._clock_ns()
        for execution in list(self._by_traceparent.values()):
            execution.span.set_status(StatusCode.ERROR, reason)
            execution.span.end(now_ns)
        self._by_slot.clear()
        self._by_traceparent.clear()

    def _computed_at_ends(self, delta: TableDelta) -> dict[int, int]:
        """Return the computed tokens of the traced slots that a step releases."""
        computed = self.table.num_scheduled_tokens
        return {slot: int(computed[slot]) for slot in delta.released_slots.tolist() if slot in self._by_slot}

    def _computed_at_begins(self, delta: TableDelta) -> dict[int, int]:
        """Return the computed tokens of the slots that a step admits or forks before it computes anything.

        Slots that do not exist are left to the worker to refuse.
        """
        computed = self.table.num_scheduled_tokens
        begun = {admission.slot: admission.num_computed_tokens for admission in delta.admissions}
        for fork in delta.beam_forks:
            if fork.parent_slot in begun:
                begun[fork.slot] = begun[fork.parent_slot]
            elif fork.parent_slot < len(computed):
                begun[fork.slot] = int(computed[fork.parent_slot])
        return begun

    def _admit(self, admission: Admission, step_id: int, begin_ns: int) -> None:
        if admission.traceparent is None:
            return
        traceparent = admission.traceparent
        execution = self._by_traceparent.get(traceparent)
        if execution is None:
            span = self._tracer.start_span(
                "execute",
                context=self._propagator.extract({"traceparent": traceparent}, Context()),
                kind=SpanKind.SERVER,
                start_time=begin_ns,
                attributes={
                    "octavo.instance_id": self.info.instance_id,
                    "octavo.num_known_tokens": len(admission.token_ids),
                    "octavo.num_cached_tokens": admission.num_computed_tokens,
                },
            )
            execution = self._by_traceparent[traceparent] = Execution(traceparent, span, step_id)
        execution.num_computed[admission.slot] = admission.num_computed_tokens
        self._by_slot[admission.slot] = execution

    def _fork(self, parent_slot: int, slot: int, num_computed: int) -> None:
        execution = self._by_slot.get(parent_slot)
        if execution is not None:
            execution.num_computed[slot] = num_computed
            self._by_slot[slot] = execution

    def _release(self, slot: int, num_computed: int, step_id: int, end_ns: int) -> None:
        execution = self._by_slot.pop(slot)
        execution.num_tokens += num_computed - execution.num_computed.pop(slot)
        if execution.num_computed:
            return
        del self._by_traceparent[execution.traceparent]
        execution.span.set_attributes(
            {
                "octavo.num_steps": step_id - execution.first_step_id,
                "octavo.num_computed_tokens": execution.num_tokens,
            }
        )
        execution.span.end(end_ns)
