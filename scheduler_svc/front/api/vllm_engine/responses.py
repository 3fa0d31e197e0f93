"""Responses out: the events of GenerationService to `vllm.grpc.engine.GenerateResponse`.

A streamed answer is chunks with what is new, then one `complete` for each output; another one is only the
latter. The counts are those of the output so far.
"""

from collections.abc import Iterator, Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from octavo.generation.v1 import generation_pb2, generation_service_pb2
from scheduler_svc.front.api.vllm_engine.requests import MAX_EQUAL_OUTPUTS, num_equal_outputs

FINISH_REASONS = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_ABORT: "abort",
}


class Answer:
    """The answer to one request while it is made.

    Args:
        request: The request, translated already.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        params = request.sampling_params
        self._is_streamed = request.stream
        self._num_copies = num_equal_outputs(params)
        self._num_outputs = 1 if self._num_copies > 1 else max(1, params.n)
        self._prompt_token_ids = request.tokenized.input_ids
        self._num_alternatives = params.logprobs if params.HasField("logprobs") else None
        self._num_prompt_alternatives = params.prompt_logprobs if params.HasField("prompt_logprobs") else None
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._outputs: list[generation_pb2.Output] = []  # so far; none before the request is accepted
        self._prompt = generation_pb2.PromptLogprobs()
        self._usage = generation_pb2.Usage(num_prompt_tokens=len(request.tokenized.input_ids))

    def responses(self, event: generation_service_pb2.GenerateResponse) -> Iterator[pb.GenerateResponse]:
        """Return what an event of GenerationService becomes; often nothing."""
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self._usage.num_prompt_tokens = event.accepted.num_prompt_tokens
            self._outputs = [generation_pb2.Output(output_index=index) for index in range(self._num_outputs)]
        elif kind == "prompt_logprobs":
            self._prompt.MergeFrom(event.prompt_logprobs)
        elif kind == "delta":
            yield from self._chunks(event.delta)
        else:
            self._usage = event.finished.usage
            yield from self._completes(event.finished.outputs)

    def aborted(self) -> Iterator[pb.GenerateResponse]:
        """Return the end of a request that was aborted: its outputs as far as they came."""
        if not self._outputs:  # it was being checked: nothing says yet that there may be so many outputs
            num_outputs = min(self._num_outputs, MAX_EQUAL_OUTPUTS)
            self._outputs = [generation_pb2.Output(output_index=index) for index in range(num_outputs)]
        for output in self._outputs:
            output.finish_reason = generation_pb2.FINISH_REASON_ABORT
        yield from self._completes(self._outputs)

    def _chunks(self, delta: generation_service_pb2.OutputDelta) -> Iterator[pb.GenerateResponse]:
        output = self._outputs[delta.output_index]
        is_first = not output.token_ids
        output.token_ids.extend(delta.token_ids)
        output.logprobs.extend(delta.logprobs)
        output.alternative_token_ids.extend(delta.alternative_token_ids)
        output.alternative_logprobs.extend(delta.alternative_logprobs)
        if not self._is_streamed or not delta.token_ids:  # text alone: the gateway makes its own
            return
        for index in self._indices(delta.output_index):
            chunk = pb.GenerateStreamChunk(
                token_ids=delta.token_ids,
                prompt_tokens=self._usage.num_prompt_tokens,
                completion_tokens=len(output.token_ids),
                output_logprobs=self._output_logprobs(delta),
                input_logprobs=self._input_logprobs() if is_first else None,
                index=index,
            )
            yield pb.GenerateResponse(chunk=chunk)

    def _completes(self, outputs: Sequence[generation_pb2.Output]) -> Iterator[pb.GenerateResponse]:
        for output in outputs:
            for index in self._indices(output.output_index):
                yield pb.GenerateResponse(complete=self._complete(output, index))

    def _complete(self, output: generation_pb2.Output, index: int) -> pb.GenerateComplete:
        complete = pb.GenerateComplete(
            output_ids=output.token_ids,
            finish_reason=FINISH_REASONS[output.finish_reason],
            prompt_tokens=self._usage.num_prompt_tokens,
            completion_tokens=len(output.token_ids),
            cached_tokens=self._usage.num_cached_tokens,
            output_logprobs=self._output_logprobs(output),
            input_logprobs=self._input_logprobs(),
            index=index,
        )
        if output.HasField("stop_string"):
            complete.matched_stop_str = output.stop_string
        elif output.HasField("stop_token_id") and output.stop_token_id in self._stop_token_ids:
            complete.matched_token_id = output.stop_token_id  # an end-of-sequence token is no match, as in vLLM
        return complete

    def _indices(self, output_index: int) -> range:
        """Return the outputs of the answer that an output of GenerationService stands for."""
        return range(self._num_copies) if self._num_copies > 1 else range(output_index, output_index + 1)

    def _output_logprobs(
        self, tokens: generation_pb2.Output | generation_service_pb2.OutputDelta
    ) -> pb.OutputLogProbs | None:
        if self._num_alternatives is None:
            return None
        top = top_logprobs(tokens.alternative_token_ids, tokens.alternative_logprobs, self._num_alternatives)
        return pb.OutputLogProbs(token_logprobs=tokens.logprobs, token_ids=tokens.token_ids, top_logprobs=top)

    def _input_logprobs(self) -> pb.InputLogProbs | None:
        """Return those of the prompt; its first token has none."""
        number, prompt = self._num_prompt_alternatives, self._prompt
        if number is None:
            return None
        top = top_logprobs(prompt.alternative_token_ids, prompt.alternative_logprobs, number)
        return pb.InputLogProbs(
            token_logprobs=[pb.InputTokenLogProb(), *(pb.InputTokenLogProb(value=value) for value in prompt.logprobs)],
            token_ids=self._prompt_token_ids,
            top_logprobs=[pb.TopLogProbs(), *top] if top else [],
        )


def top_logprobs(token_ids: Sequence[int], logprobs: Sequence[float], number: int) -> list[pb.TopLogProbs]:
    """Cut alternatives, `number` for each token one after the other, into one message a token; 0: none."""
    return [
        pb.TopLogProbs(values=logprobs[begin : begin + number], token_ids=token_ids[begin : begin + number])
        for begin in range(0, len(token_ids), number or 1)
    ]
