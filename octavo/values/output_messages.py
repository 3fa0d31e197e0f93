"""Reading the values of the client's API from the messages of a server; nothing else here knows the wire."""

from collections.abc import Sequence
from typing import Any

from octavo.errors import InternalError
from octavo.generation.v1 import generation_pb2, generation_service_pb2
from octavo.values.outputs import (
    Accepted,
    Delta,
    Event,
    Finished,
    FinishReason,
    ModelInfo,
    Output,
    PromptLogprobs,
    Provenance,
    TokenLogprob,
    Usage,
)
from octavo.values.sampling_params import SamplingParams
from octavo.values.sampling_params_table import BY_NAME

_TASKS = {
    generation_service_pb2.MODEL_TASK_GENERATE: "generate",
    generation_service_pb2.MODEL_TASK_EMBED: "embed",
    generation_service_pb2.MODEL_TASK_SCORE: "score",
}


def event_from_proto(response: generation_service_pb2.GenerateResponse) -> Event:
    """Return the event in a message of the stream.

    Raises:
        InternalError: the message holds no event that this release knows.
    """
    match response.WhichOneof("event"):
        case "accepted":
            return accepted_from_proto(response.accepted)
        case "delta":
            delta = response.delta
            return Delta(
                delta.output_index,
                delta.text,
                tuple(delta.token_ids),
                tuple(delta.logprobs),
                _alternatives_from_proto(delta, len(delta.token_ids)),
                tuple(map(provenance_from_proto, delta.provenance)),
            )
        case "prompt_logprobs":
            return prompt_logprobs_from_proto(response.prompt_logprobs)
        case "finished":
            return finished_from_proto(response.finished)
        case _:
            raise InternalError("the scheduler sent an event that this client does not know; upgrade the client")


def accepted_from_proto(accepted: generation_service_pb2.Accepted) -> Accepted:
    """Return the event in the message."""
    return Accepted(
        accepted.request_id,
        accepted.num_prompt_tokens,
        tuple(accepted.prompt_token_ids),
        accepted.max_model_len,
        accepted.sampling_params.seed if accepted.sampling_params.HasField("seed") else None,
    )


def finished_from_proto(finished: generation_service_pb2.RequestFinished) -> Finished:
    """Return the event in the message."""
    usage = finished.usage
    return Finished(
        outputs=tuple(_output_from_proto(output) for output in finished.outputs),
        usage=Usage(
            usage.num_prompt_tokens, usage.num_output_tokens, usage.num_cached_tokens, usage.num_encoder_tokens
        ),
        prompt_logprobs=(
            prompt_logprobs_from_proto(finished.prompt_logprobs) if finished.HasField("prompt_logprobs") else None
        ),
        continued_on_other_numerics=finished.continued_on_other_numerics,
    )


def model_from_proto(response: generation_service_pb2.GetModelResponse) -> ModelInfo:
    """Return the model described in the message."""
    return ModelInfo(
        model_id=response.model_id,
        max_model_len=response.max_model_len,
        vocab_size=response.vocab_size,
        has_chat_template=response.has_chat_template,
        dtype=response.dtype,
        takes_token_ids_only=response.takes_token_ids_only,
        default_sampling_params=_defaults_from_proto(response.default_sampling_params),
        is_reproducible=response.is_reproducible,
        why_not_reproducible=response.why_not_reproducible,
        numerics_ids=tuple(response.numerics_ids),
        weights_digest=response.weights_digest,
        tasks=tuple(_TASKS[task] for task in response.tasks if task in _TASKS) or ("generate",),
        embedding_size=response.embedding_size,
        num_scores=response.num_scores,
        prompt_names=tuple(response.prompt_names),
        max_input_tokens=response.max_input_tokens,
        speculates=response.speculates,
        speculation_may_change_outputs=response.speculation_may_change_outputs,
        adapters=tuple(response.adapters),
        max_encoder_tokens=response.max_encoder_tokens,
    )


def _defaults_from_proto(params: generation_pb2.SamplingParams) -> SamplingParams:
    """Return a model's defaults, which are numbers; as people write them, with the digits that float32 has."""
    numbers: dict[str, Any] = {}
    for of_message, value in params.ListFields():
        if of_message.name in BY_NAME:
            numbers[of_message.name] = value if BY_NAME[of_message.name].is_whole else float(f"{value:.7g}")
    return SamplingParams(**numbers)


def _output_from_proto(output: generation_pb2.Output) -> Output:
    stopped_by: int | str | None = None
    match output.WhichOneof("stopped_by"):
        case "stop_token_id":
            stopped_by = output.stop_token_id
        case "stop_string":
            stopped_by = output.stop_string
    return Output(
        output_index=output.output_index,
        text=output.text,
        token_ids=tuple(output.token_ids),
        logprobs=tuple(output.logprobs),
        finish_reason=_finish_reason_from_proto(output.finish_reason),
        stopped_by=stopped_by,
        cumulative_logprob=output.cumulative_logprob if output.HasField("cumulative_logprob") else None,
        beam_score=output.beam_score if output.HasField("beam_score") else None,
        alternatives=_alternatives_from_proto(output, len(output.token_ids)),
        provenance=tuple(map(provenance_from_proto, output.provenance)),
    )


def provenance_from_proto(message: generation_pb2.Provenance) -> Provenance:
    """Return the span in the message."""
    return Provenance(
        message.first_token,
        message.numerics_id,
        message.weights_digest,
        message.adapter_source,
        message.adapter_digest,
        message.keeps_cache,
    )


def prompt_logprobs_from_proto(message: generation_pb2.PromptLogprobs) -> PromptLogprobs:
    """Return the event in the message."""
    return PromptLogprobs(tuple(message.logprobs), _alternatives_from_proto(message, len(message.logprobs)))


def _alternatives_from_proto(
    message: generation_pb2.Output | generation_pb2.PromptLogprobs | generation_service_pb2.OutputDelta,
    num_places: int,
) -> tuple[tuple[TokenLogprob, ...], ...]:
    return alternatives_of(message.alternative_token_ids, message.alternative_logprobs, num_places)


def alternatives_of(
    token_ids: Sequence[int], logprobs: Sequence[float], num_places: int
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Return the alternatives of each place; empty if there are none."""
    found = [TokenLogprob(token_id, logprob) for token_id, logprob in zip(token_ids, logprobs, strict=True)]
    if not found:
        return ()
    width = len(found) // num_places
    return tuple(tuple(found[begin : begin + width]) for begin in range(0, len(found), width))


def _finish_reason_from_proto(reason: generation_pb2.FinishReason.ValueType) -> FinishReason:
    match reason:
        case generation_pb2.FINISH_REASON_STOP:
            return FinishReason.STOP
        case generation_pb2.FINISH_REASON_LENGTH:
            return FinishReason.LENGTH
        case generation_pb2.FINISH_REASON_ABORT:
            return FinishReason.ABORT
        case _:
            raise InternalError(f"the scheduler sent finish reason {reason}, which this client does not know")
