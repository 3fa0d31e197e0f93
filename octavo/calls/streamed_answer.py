"""What the events of a stream bring, put together: the scheduler sends each token once."""

from collections.abc import Sequence
from dataclasses import replace

from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.output_messages import accepted_from_proto
from octavo.values.outputs import (
    Accepted,
    Delta,
    Event,
    Finished,
    FinishReason,
    Output,
    PromptLogprobs,
    Provenance,
    TokenLogprob,
)


class StreamedAnswer:
    """Completes the last event, whose outputs lack what the deltas brought.

    Args:
        prompt_token_ids: The prompt, if it was sent as tokens; else the scheduler tells them.

    Attributes:
        accepted: The first event; None: it has not come.
    """

    def __init__(self, prompt_token_ids: Sequence[int] = ()) -> None:
        self.accepted: pb.Accepted | None = None
        self._prompt_token_ids = tuple(prompt_token_ids)
        self._deltas: dict[int, list[Delta]] = {}
        self._prompt: list[PromptLogprobs] = []
        self._latest: Provenance | None = None  # of all outputs

    def accept(self, accepted: pb.Accepted) -> Accepted:
        """Return the first event of a call, as callers get it."""
        self.accepted = self.accepted or accepted
        self._prompt_token_ids = self._prompt_token_ids or tuple(self.accepted.prompt_token_ids)
        return replace(accepted_from_proto(accepted), prompt_token_ids=self._prompt_token_ids)

    def take(self, event: Event, *, is_lean: bool = True) -> Event:
        """Return an event as callers get it; `is_lean`: the last event lacks what earlier ones brought."""
        match event:
            case Delta():
                self._deltas.setdefault(event.output_index, []).append(event)
                if event.provenance:
                    self._latest = event.provenance[-1]
            case PromptLogprobs():
                begin = 1 + sum(len(part.logprobs) for part in self._prompt)  # the first token has none
                event = replace(event, token_ids=self._prompt_token_ids[begin : begin + len(event.logprobs)])
                self._prompt.append(event)
            case Finished():
                prompt_logprobs = event.prompt_logprobs
                if prompt_logprobs is not None:
                    known = self._joined() if is_lean else prompt_logprobs
                    prompt_logprobs = replace(known, token_ids=self._prompt_token_ids[1:])
                if not is_lean:
                    return replace(event, prompt_logprobs=prompt_logprobs)
                outputs = tuple(map(self._completed, event.outputs))
                return replace(
                    event,
                    outputs=outputs,
                    prompt_logprobs=prompt_logprobs,
                    continued_on_other_numerics=event.continued_on_other_numerics
                    or any(len(output.provenance) > 1 for output in outputs),
                )
        return event

    @property
    def num_tokens(self) -> int:
        """How many tokens have come, of all outputs."""
        return sum(len(delta.token_ids) for deltas in self._deltas.values() for delta in deltas)

    def unfinished_outputs(self) -> tuple[Output, ...]:
        """Return what has come of the outputs, as of an answer that was aborted."""
        begun = (Output(index, "", (), (), FinishReason.ABORT, None) for index in sorted(self._deltas))
        return tuple(map(self._completed, begun))

    def continuation(self, attempt: int) -> pb.Continuation:
        """Return the message that continues the answer; see `pb.Continuation`."""
        prompt = self._joined()
        latest = self._latest
        return pb.Continuation(
            attempt=attempt,
            max_model_len=self.accepted.max_model_len if self.accepted else 0,
            numerics_id=latest.numerics_id if latest else "",
            weights_digest=latest.weights_digest if latest else "",
            adapter_source=latest.adapter_source if latest else "",
            adapter_digest=latest.adapter_digest if latest else "",
            outputs=map(self._continued, range(max(self._deltas, default=-1) + 1)),
            prompt_logprobs=generation_pb2.PromptLogprobs(
                logprobs=prompt.logprobs,
                alternative_token_ids=(token.token_id for place in prompt.alternatives for token in place),
                alternative_logprobs=(token.logprob for place in prompt.alternatives for token in place),
            ),
        )

    def _continued(self, index: int) -> pb.ContinuedOutput:
        output = pb.ContinuedOutput()
        for delta in self._deltas.get(index, ()):
            output.token_ids.extend(delta.token_ids)
            output.logprobs.extend(delta.logprobs)
            for place in delta.alternatives:
                output.alternative_token_ids.extend(token.token_id for token in place)
                output.alternative_logprobs.extend(token.logprob for token in place)
            output.num_characters += len(delta.text)
        return output

    def _completed(self, output: Output) -> Output:
        deltas = self._deltas.get(output.output_index, [])
        token_ids: list[int] = []
        logprobs: list[float] = []
        alternatives: list[tuple[TokenLogprob, ...]] = []
        for delta in deltas:
            token_ids += delta.token_ids
            logprobs += delta.logprobs
            alternatives += delta.alternatives
        return replace(
            output,
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            alternatives=tuple(alternatives),
            provenance=tuple(span for delta in deltas for span in delta.provenance) or output.provenance,
        )

    def _joined(self) -> PromptLogprobs:
        logprobs = tuple(logprob for part in self._prompt for logprob in part.logprobs)
        alternatives = tuple(place for part in self._prompt for place in part.alternatives)
        return PromptLogprobs(logprobs, alternatives)
