"""Refuse text that cannot become token ids: the model has no tokenizer, or one with more tokens than the model.

The latter is often no mistake: Gemma 3's tokenizer for the model without images has a token behind the last id of the
model. The model never generates such a token, and clients hardly ever send it.
"""

from collections.abc import Sequence

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.text.text_model import TOKENIZER_FIX, TextModel


def refuse_text(request: pb.GenerateRequest) -> None:
    """Refuse text in a request for a model without a tokenizer; its outputs have token ids and no text.

    Raises: InvalidFieldError: the prompt is text or a conversation, or the request has stop strings or banned words.
    """
    params = request.sampling_params
    kind = request.WhichOneof("prompt")
    fields = {
        "text": kind == "text",
        "messages": kind == "messages",
        "sampling_params.stop": bool(params.stop),
        "sampling_params.banned_words": bool(params.banned_words),
    }
    instead = {"text": "token_ids", "messages": "token_ids", "sampling_params.stop": "stop_token_ids"}
    for field, is_set in fields.items():
        if is_set:
            other = instead.get(field, "banned_token_ids")
            rule = f"unset: this model has no tokenizer; send {other}, or {TOKENIZER_FIX}"
            raise InvalidFieldError(field, "set", rule)


def check_known(field: str, token_ids: Sequence[int], model: TextModel) -> list[int]:
    """Return the tokens of a text. Raises InvalidFieldError: the model does not know one of them."""
    vocab_size = model.info.vocab_size
    if model.tokenizer.largest_id >= vocab_size:
        for token_id in token_ids:
            if token_id >= vocab_size:
                shown = f"a text with the token {model.tokenizer.token_of(token_id)!r}, id {token_id}"
                rule = f"of token ids 0 to {vocab_size - 1}: the tokenizer has tokens that the model lacks"
                raise InvalidFieldError(field, shown, rule)
    return list(token_ids)
