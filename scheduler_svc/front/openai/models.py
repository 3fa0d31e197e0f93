"""The fingerprint of what computes a model."""

import hashlib

from scheduler_svc.front.text.text_model import TextModel

_FINGERPRINT_DIGITS = 12


def fingerprint(model: TextModel) -> str | None:
    """Return OpenAI's `system_fingerprint`; None: it is unknown.

    It stands for the executors' arithmetic and weights: where it is equal, equal seeds give equal outputs.
    """
    known = model.reproducibility
    if known.why_not or not known.numerics_ids:
        return None
    name = "\n".join([known.weights_digest, *known.numerics_ids])
    return f"fp_{hashlib.sha256(name.encode()).hexdigest()[:_FINGERPRINT_DIGITS]}"
