"""Live requests of the engine without a client: their tokens go to a list."""

from collections import defaultdict
from collections.abc import Sequence

from octavo_shared.errors import OctavoServiceError
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.engine.live_request import LiveRequest, group_of
from scheduler_svc.request.engine_client import RequestHandle, TokenSink
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.life import EndedRequest
from scheduler_svc.request.outputs import Alternatives, FinishReason, Float32Array, Hypothesis
from scheduler_svc.request.provenance import Provenance, Span
from tests.support.driving import group as make_group


class RecordingSink:
    """Keeps what it is given.

    Args:
        stop_after: An output of so many tokens ends as if its text held a stop string; None: none does.
    """

    def __init__(self, stop_after: int | None = None) -> None:
        self.token_ids: dict[int, list[int]] = defaultdict(list)
        self.reasons: dict[int, FinishReason] = {}
        self.hypotheses: Sequence[Hypothesis] = ()
        self.prompt_logprobs: list[float] = []
        self.values: list[float] | None = None
        self.ended: EndedRequest | None = None
        self.error: OctavoServiceError | None = None
        self.handle: RequestHandle = _NoHandle()
        self.provenance = Provenance()
        self._stop_after = stop_after

    def begin(self, handle: RequestHandle) -> None:
        self.handle = handle

    def begin_span(self, span: Span) -> None:
        self.provenance.go_on(*span)

    def push(
        self, output_index: int, token_id: int, logprob: float | None, alternatives: Alternatives | None = None
    ) -> None:
        assert self.ended is None, "the end is the last call"
        self.token_ids[output_index].append(token_id)
        if len(self.token_ids[output_index]) == self._stop_after:
            self.handle.finish_output(output_index, self._stop_after, FinishReason.STOP)

    def push_prompt(self, logprobs: Sequence[float], alternatives: Alternatives) -> None:
        self.prompt_logprobs.extend(logprobs)

    def finish_output(self, output_index: int, reason: FinishReason) -> None:
        assert output_index not in self.reasons
        self.reasons[output_index] = reason

    def finish_search(self, hypotheses: Sequence[Hypothesis]) -> None:
        self.hypotheses = hypotheses

    def pooled(self, values: Float32Array) -> None:
        assert self.values is None, "a pooling request is answered once"
        self.values = values.tolist()

    def end(self, ended: EndedRequest, error: OctavoServiceError | None) -> None:
        assert self.ended is None, "a request ends once"
        self.ended, self.error = ended, error


def live_request(
    group: SequenceGroup | None = None, arrived_at_s: float = 0.0, *, num_losses: int = 0, stop_after: int | None = None
) -> LiveRequest:
    """Return a request that lost its executor so often."""
    sink = RecordingSink(stop_after)
    request = LiveRequest(group or make_group(0, 3), sink, arrived_at_s, has_stop_strings=stop_after is not None)
    request.num_losses = num_losses
    return request


def sink_of(request: LiveRequest) -> RecordingSink:
    """Return where the tokens of a request of these tests go."""
    assert isinstance(request.sink, RecordingSink)
    return request.sink


def ended_request(
    request_id: str = "a", *, num_tokens: int = 5, error: OctavoServiceError | None = None, num_losses: int = 0
) -> EndedRequest:
    """Return what is known of a request that arrived at second 0 and ended at 2."""
    request = live_request()
    request.group.request_id = request_id
    request.ends[0].num_tokens = num_tokens
    request.num_lost_executors = num_losses
    request.times.ended_at_s = 2.0
    if error is None:
        request.ends[0].set_to(num_tokens, FinishReason.LENGTH)
    request.error = error
    return request.summary(0.0)


class PlayedEngineSide:
    """What the engine does for one request, with a test in its place: it ends with its last output.

    Args:
        request: What was submitted.
        sink: Where its tokens go.

    Attributes:
        abort_errors: What its front ended it with.
    """

    def __init__(self, request: EngineRequest, sink: TokenSink) -> None:
        self.live = LiveRequest(group_of(request, arrival=1, max_model_len=32), sink, 0.0)
        self.abort_errors: list[OctavoServiceError] = []
        sink.begin(_PlayedHandle(self))

    def push(
        self, output_index: int, token_id: int, logprob: float | None, alternatives: Alternatives | None = None
    ) -> bool:
        """Give it a token; return whether the output has ended with it."""
        end = self.live.ends[output_index]
        was_settled = end.is_settled
        end.num_tokens += not was_settled
        self.live.sink.push(output_index, token_id, logprob, alternatives)
        return not was_settled and end.is_settled

    def finish_output(self, output_index: int, reason: FinishReason) -> None:
        """End an output."""
        self.live.sink.finish_output(output_index, reason)
        self.note_finished(output_index, reason)

    def finish_search(self, hypotheses: Sequence[Hypothesis]) -> None:
        """End its beam search."""
        self.live.sink.finish_search(hypotheses)
        num_tokens = sum(len(hypothesis.token_ids) for hypothesis in hypotheses)
        self.live.ends[0].set_to(num_tokens, hypotheses[0].finish_reason)
        self._end()

    def fail(self, error: OctavoServiceError) -> None:
        """End it with an error."""
        self.live.error = error
        self._end()

    def note_finished(self, output_index: int, reason: FinishReason) -> None:
        """An output has ended, as the engine or its front says."""
        end = self.live.ends[output_index]
        if not end.is_settled:
            end.set_to(end.num_tokens, reason)
            if self.live.has_ended:
                self._end()

    def _end(self) -> None:
        self.live.sink.end(self.live.summary(0.0), self.live.error)


class _PlayedHandle:
    """The handle of such a request."""

    def __init__(self, side: PlayedEngineSide) -> None:
        self._side = side

    def finish_output(self, output_index: int, num_tokens: int, reason: FinishReason) -> None:
        assert num_tokens == self._side.live.ends[output_index].num_tokens
        self._side.note_finished(output_index, reason)

    def abort(self, error: OctavoServiceError) -> None:
        self._side.abort_errors.append(error)


class _NoHandle:
    """What a sink has that no request began with."""

    def finish_output(self, output_index: int, num_tokens: int, reason: FinishReason) -> None:
        raise AssertionError("no request has begun")

    def abort(self, error: OctavoServiceError) -> None:
        raise AssertionError("no request has begun")
