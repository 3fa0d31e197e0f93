"""The requests of a replayed fleet, with what happened to them: what the engine keeps of live ones."""

from collections.abc import Sequence
from itertools import repeat

from octavo.steplog.v1 import step_log_pb2 as pb
from octavo_shared.errors import OctavoServiceError
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.step.results import StepUpdates
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.replay.core_replay import CoreReplay
from scheduler_svc.replay.run import Moment
from scheduler_svc.request.engine_client import RequestHandle
from scheduler_svc.request.life import EndedRequest, EventKind, LifeEvent
from scheduler_svc.request.outputs import Alternatives, FinishReason, Float32Array, Hypothesis
from scheduler_svc.request.provenance import Span

# Only these end groups.
_ENDING_CALLS = ("group_aborted", "result_taken", "sequence_finished", "step_decided")


class _NoSink:
    """Takes what nobody wants to have."""

    def begin(self, handle: RequestHandle) -> None:
        pass

    def begin_span(self, span: Span) -> None:
        pass

    def push(
        self, output_index: int, token_id: int, logprob: float | None, alternatives: Alternatives | None = None
    ) -> None:
        pass

    def push_prompt(self, logprobs: Sequence[float], alternatives: Alternatives) -> None:
        pass

    def finish_output(self, output_index: int, reason: FinishReason) -> None:
        pass

    def finish_search(self, hypotheses: Sequence[Hypothesis]) -> None:
        pass

    def pooled(self, values: Float32Array) -> None:
        pass

    def end(self, ended: EndedRequest, error: OctavoServiceError | None) -> None:
        pass


class ReplayedRequests:
    """The live requests of a replayed fleet, by arrival.

    Attributes:
        live: Those that have not ended.
        has_arrival: Arrivals of those that came while the log was written.
    """

    def __init__(self, replay: CoreReplay) -> None:
        self.live: dict[int, LiveRequest] = {}
        self.has_arrival: set[int] = set()
        for group in sorted(replay.groups.values(), key=lambda group: group.arrival):
            if group.live_sequences:
                self._add(group, replay.now_s)

    def _add(self, group: SequenceGroup, now_s: float) -> None:
        self.live[group.arrival] = LiveRequest(group, _NoSink(), now_s)

    def take(self, moment: Moment) -> list[LiveRequest]:
        """Note what a call did; return the requests that ended with it."""
        record, replay, now_s = moment.record, moment.replay, moment.record.at_s
        match record.WhichOneof("call"):
            case "group_added":
                arrival = record.group_added.arrival
                self._add(replay.groups[arrival], now_s)
                self.has_arrival.add(arrival)
            case "group_withdrawn":
                self._note(record.group_withdrawn.arrival, LifeEvent(EventKind.PARKED, now_s))
            case "loss_noted":
                self.live[record.loss_noted.arrival].note_loss(record.loss_noted.executor, counts=True)
            case "core_left":
                executor, cause = replay.joined[record.core_left.core].name, "the step log does not record why"
                for group in moment.applied.evacuated:
                    self._note(group.arrival, LifeEvent(EventKind.EXECUTOR_LOST, now_s, executor, cause=cause))
            case "step_decided":
                self._note_decision(moment, record.step_decided)
            case "result_taken" if moment.applied.updates is not None:
                self._note_updates(moment.applied.updates, now_s)
        return self._take_ended(now_s) if record.WhichOneof("call") in _ENDING_CALLS else []

    def _note(self, arrival: int, event: LifeEvent) -> None:
        if arrival in self.live:
            self.live[arrival].life.add(event)

    def _note_decision(self, moment: Moment, call: pb.StepDecided) -> None:
        decision, step = moment.applied.decision, moment.applied.step
        executor = moment.replay.joined[call.core].name
        for event in () if decision is None else decision.events:
            step_id = None if step is None else step.step_id
            life = LifeEvent(event.kind, call.now_s, executor, step_id, event.num_tokens, event.num_computed_tokens)
            self._note(event.group.arrival, life)

    def _note_updates(self, updates: StepUpdates, now_s: float) -> None:
        groups = [sequence.group for sequence in updates.sequences]
        for sequence, num_tokens in zip(updates.sequences, updates.counts or repeat(1), strict=False):
            if (request := self.live.get(sequence.group.arrival)) is not None:
                request.ends[sequence.index].num_tokens += num_tokens
        for row, reason in updates.finished.items():
            if (request := self.live.get(groups[row].arrival)) is not None:
                request.ends[updates.sequences[row].index].end_by_tokens(reason)
        for group, _ in updates.pooled:
            if (request := self.live.get(group.arrival)) is not None:
                request.ends[0].set_to(0, FinishReason.STOP)
        for group in updates.finished_searches:
            assert group.beams is not None
            hypotheses = group.beams.finished_hypotheses()
            if (request := self.live.get(group.arrival)) is not None and hypotheses:
                num_found = sum(len(hypothesis.token_ids) for hypothesis in hypotheses)
                request.ends[0].set_to(num_found, hypotheses[0].finish_reason)
        for group in (*groups, *updates.advanced_searches, *updates.finished_searches):
            if (request := self.live.get(group.arrival)) is not None:
                request.times.last_token_at_s = now_s
                if request.times.first_token_at_s is None:
                    request.times.first_token_at_s = now_s

    def _take_ended(self, now_s: float) -> list[LiveRequest]:
        ended = [request for request in self.live.values() if _has_ended(request.group)]
        for request in ended:
            del self.live[request.group.arrival]
            request.times.ended_at_s = now_s
        return ended


def _has_ended(group: SequenceGroup) -> bool:
    return all(sequence.status is SequenceStatus.FINISHED for sequence in group.sequences)
