"""The messages of an answer, for GenerationService."""

from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.sampling_params_table import BEAMLESS_STAGES, ROW_PARAMS
from octavo_shared.step_wire.step import NO_LOGPROBS
from scheduler_svc.front.output import Delta, Output, PromptDelta
from scheduler_svc.front.response import Response
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.outputs import Alternatives, FinishReason
from scheduler_svc.request.provenance import Made

FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}


def accepted_message(request: pb.GenerateRequest, response: Response) -> pb.Accepted:
    """Return the first event of a request."""
    asked, options = response.request, response.options
    is_encoded = asked.encoder_token_ids is not None and not request.HasField("encoder_prompt")
    prompt = asked.encoder_token_ids if is_encoded else asked.prompt_token_ids
    return pb.Accepted(
        request_id=asked.request_id,
        num_prompt_tokens=len(asked.prompt_token_ids),
        sampling_params=effective_params(request.sampling_params, asked, options.max_output_tokens),
        prompt_token_ids=prompt.tolist() if request.include_prompt_token_ids and prompt is not None else None,
        max_model_len=options.max_model_len,
        waits_for_larger_executor=options.waits_for_larger_executor,
    )


def effective_params(
    params: generation_pb2.SamplingParams, asked: EngineRequest, max_output_tokens: int
) -> generation_pb2.SamplingParams:
    """Return the request's parameters, with the model's or our own defaults for those that are unset."""
    effective = generation_pb2.SamplingParams()
    effective.CopyFrom(params)
    is_beam = asked.beam_search is not None
    for parameter in ROW_PARAMS:
        name = parameter.name
        if not parameter.is_public or params.HasField(name) or (is_beam and parameter.stage in BEAMLESS_STAGES):  # type: ignore[arg-type]
            continue
        value = getattr(asked.sampling, name)
        if value != parameter.default:
            setattr(effective, name, value)
    if not params.HasField("max_tokens"):
        effective.max_tokens = max(max_output_tokens, params.min_tokens)
    return effective


def event_message(delta: Delta | PromptDelta) -> pb.GenerateResponse:
    """Return the event of a delta."""
    if isinstance(delta, PromptDelta):
        return pb.GenerateResponse(prompt_logprobs=prompt_message(delta.logprobs, delta.alternatives))
    message = pb.OutputDelta(
        output_index=delta.output_index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs,
        alternative_token_ids=delta.alternatives.token_ids,
        alternative_logprobs=delta.alternatives.logprobs,
    )
    if delta.provenance:
        message.provenance.extend(map(provenance_message, delta.provenance))
    return pb.GenerateResponse(delta=message)


def provenance_message(made: Made) -> generation_pb2.Provenance:
    """Return the message of one span of an output."""
    message = generation_pb2.Provenance(first_token=made.first_token, **made.numerics._asdict())
    if made.adapter is not None:
        message.adapter_source, message.adapter_digest = made.adapter.source, made.adapter.digest.hex()
    return message


def prompt_message(logprobs: list[float], alternatives: Alternatives) -> generation_pb2.PromptLogprobs:
    """Return the message of the prompt's log-probabilities."""
    return generation_pb2.PromptLogprobs(
        logprobs=logprobs,
        alternative_token_ids=alternatives.token_ids,
        alternative_logprobs=alternatives.logprobs,
    )


def finished_message(response: Response, *, is_lean: bool, shows_provenance: bool = False) -> pb.RequestFinished:
    """Return the last event of a finished request; a lean one leaves out what the deltas had."""
    ended = response.ended
    assert ended is not None, "it has finished"
    usage = generation_pb2.Usage(
        num_prompt_tokens=ended.num_prompt_tokens,
        num_output_tokens=ended.num_output_tokens,
        num_cached_tokens=ended.num_cached_tokens,
        num_encoder_tokens=response.num_encoder_tokens,
    )
    finished = pb.RequestFinished(
        outputs=[output_message(output, is_lean=is_lean) for output in response.outputs],
        usage=usage,
        continued_on_other_numerics=response.was_continued_on_other_numerics,
    )
    if shows_provenance:
        for message, output in zip(finished.outputs, response.outputs, strict=True):
            message.provenance.extend(map(provenance_message, response.provenance_of(output)))
    has_prompt_logprobs = response.request.num_prompt_logprobs != NO_LOGPROBS
    if has_prompt_logprobs and is_lean:
        finished.prompt_logprobs.SetInParent()
    elif has_prompt_logprobs:
        finished.prompt_logprobs.CopyFrom(prompt_message(response.prompt_logprobs, response.prompt_alternatives))
    return finished


def output_message(output: Output, *, is_lean: bool) -> generation_pb2.Output:
    """Return the message of a finished output; a lean one leaves out what the deltas had."""
    assert output.finish_reason is not None, "a request ends after its last output"
    message = generation_pb2.Output(
        output_index=output.output_index,
        finish_reason=FINISH_REASONS[output.finish_reason],
        cumulative_logprob=output.cumulative_logprob,
        beam_score=output.beam_score,
    )
    if not is_lean:
        message.text = output.text
        message.token_ids.extend(output.token_ids)
        message.logprobs.extend(output.logprobs)
        message.alternative_token_ids.extend(output.alternatives.token_ids)
        message.alternative_logprobs.extend(output.alternatives.logprobs)
    if output.stop_string is not None:
        message.stop_string = output.stop_string
    elif output.stop_token_id is not None:
        message.stop_token_id = output.stop_token_id
    return message
