"""What is known of an answer that was cut: the request goes on behind it, and nothing of it is made again.

An output is a function of its request and the tokens before ("The same bits", docs/determinism.md), so whoever
holds the tokens so far can have the rest from any executor of the same kind.
"""

from dataclasses import dataclass

from octavo_shared.step_wire.step import Int32Array
from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.request.provenance import UNKNOWN, Numerics


@dataclass(frozen=True, slots=True)
class ContinuedOutput:
    """One sampled output of it.

    Attributes:
        token_ids: Its tokens so far, [num_tokens].
        finish_reason: Why it had ended with the last of them; None: it goes on.
    """

    token_ids: Int32Array
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """All outputs of it.

    Attributes:
        outputs: One for each output that the request samples; none of a beam search, which begins anew.
        num_prompt_logprobs: Log-probabilities of the prompt that are known.
        numerics: The kind of executor that made the last of it, which is preferred.
        attempt: How often its client has continued the request; a larger one takes it from a call that lives. 0: its
            client has not, and knows of nothing.
        max_model_len: The longest sequence that the request was first accepted for, as its client says; None: it does
            not say it.
    """

    outputs: tuple[ContinuedOutput, ...] = ()
    num_prompt_logprobs: int = 0
    numerics: Numerics = UNKNOWN
    attempt: int = 1
    max_model_len: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs so far."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def has_ended(self) -> bool:
        """Whether every output had ended: there is nothing to compute."""
        return bool(self.outputs) and all(output.finish_reason is not None for output in self.outputs)
