"""The prompts of a request for a model with an encoder: the encoder's input, and what the decoder begins with.

A plain prompt is the encoder's, and the decoder begins with its start token, and with a forced first one. With
`encoder_prompt`, the prompt is the decoder's: token ids are used as they are, a text follows these tokens.
"""

from collections.abc import Sequence

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError
from octavo_shared.step_wire.step import Int32Array
from scheduler_svc.front.api.request_limits import RequestLimits, check_known_ids, require, require_param, unreadable
from scheduler_svc.front.api.tokenization import tokenize_input, tokenize_prompt, tokenize_text
from scheduler_svc.front.text.text_model import TextModel


def tokenize_prompts(
    request: pb.GenerateRequest, model: TextModel, limits: RequestLimits
) -> tuple[Sequence[int] | Int32Array, Int32Array | None]:
    """Return the token ids of the decoder's prompt, and of the encoder's input; None: the model has no encoder.

    Raises: InvalidFieldError: see `tokenize_prompt`; there is an input for an encoder that the model does not have, or
        a step cannot encode it; log-probabilities are wanted of a prompt that it is.
    """
    if not limits.max_encoder_tokens:
        if request.HasField("encoder_prompt"):
            raise unreadable("encoder_prompt", "set", limits)
        return tokenize_prompt(request, model, limits), None
    if not request.HasField("encoder_prompt"):
        params, rule = request.sampling_params, "unset without encoder_prompt: the prompt is the encoder's"
        require_param(not params.HasField("prompt_logprobs"), "prompt_logprobs", params.prompt_logprobs, rule)
        field = request.WhichOneof("prompt") or "prompt"
        return limits.decoder_start_token_ids, _encoder_input(request, field, model, limits)
    kind = request.encoder_prompt.WhichOneof("prompt")
    if kind is None:
        raise InvalidFieldError("encoder_prompt", "empty", "one of text and token_ids")
    given = pb.GenerateRequest(**{kind: getattr(request.encoder_prompt, kind)})
    token_ids = _encoder_input(given, f"encoder_prompt.{kind}", model, limits)
    return _decoder_prompt(request, model, limits), token_ids


def _decoder_prompt(request: pb.GenerateRequest, model: TextModel, limits: RequestLimits) -> Sequence[int] | Int32Array:
    if request.WhichOneof("prompt") is None:
        return limits.decoder_start_token_ids
    if request.WhichOneof("prompt") != "text":
        return tokenize_prompt(request, model, limits)
    adds_special_tokens = request.add_special_tokens
    return [
        *limits.decoder_start_token_ids,
        *tokenize_text(request.text, model, limits, add_special_tokens=adds_special_tokens),
    ]


def _encoder_input(request: pb.GenerateRequest, field: str, model: TextModel, limits: RequestLimits) -> Int32Array:
    """Return the token ids of a request's prompt, which is for the encoder."""
    found = tokenize_input(request, model, limits, field)
    require(len(found) >= 1, field, "empty", "at least 1 token long")
    if len(found) > limits.max_encoder_tokens:
        raise unreadable(field, f"{len(found)} tokens", limits)
    return check_known_ids(found, field, limits.vocab_size)
