"""Refuse text that cannot become token ids: the model has no tokenizer, or one with more tokens than the model.

The second is often no mistake: the tokenizer of Gemma 3 without images has a token for them behind the last id that the
model knows. Such a token never comes, and hardly anybody sends it.
"""

from collections.abc import Sequence

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.text.text_model import TOKENIZER_FIX, TextModel


def refuse_text(request: pb.GenerateRequest) -> None:
    """Refuse what a model without a tokenizer cannot do; its outputs have token ids and no text.

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
    """Return the tokens of a text, all of which the model knows.

    Raises: InvalidFieldError: it does not know one.
    """
    vocab_size = model.info.vocab_size
    if model.tokenizer.largest_id >= vocab_size:
        for token_id in token_ids:
            if token_id >= vocab_size:
                shown = f"a text with the token {model.tokenizer.token_of(token_id)!r}, id {token_id}"
                rule = f"of token ids 0 to {vocab_size - 1}: the tokenizer has tokens that the model lacks"
                raise InvalidFieldError(field, shown, rule)
    return list(token_ids)
