"""The served model by name, and the fingerprint of what computes it."""

import hashlib
from http import HTTPStatus

from scheduler_svc.front.openai.errors import ApiError
from scheduler_svc.front.text.json_text import shown_json
from scheduler_svc.front.text.text_model import TextModel

_FINGERPRINT_DIGITS = 12


def check_model(asked: str, model: TextModel) -> None:
    """Refuse a request for another model than the served one, with the status that OpenAI's clients know."""
    if asked != model.name:
        message = f"model is {shown_json(asked)}; it must be {shown_json(model.name)}, the served model"
        raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")


def fingerprint(model: TextModel) -> str | None:
    """Return OpenAI's `system_fingerprint`: equal seeds give equal outputs where it is equal; None: nobody knows.

    It stands for the arithmetic and the weights of the executors.
    """
    known = model.reproducibility
    if known.why_not or not known.numerics_ids:
        return None
    name = "\n".join([known.weights_digest, *known.numerics_ids])
    return f"fp_{hashlib.sha256(name.encode()).hexdigest()[:_FINGERPRINT_DIGITS]}"
