"""The known part of an answer that was cut: the request goes on behind it, and no token of it is made again.

An output is a function of its request and the tokens before ("The same bits", docs/determinism.md), so a client or
front that has the tokens so far can get the rest from any executor with the same numerics.
"""

from dataclasses import dataclass

from octavo_shared.step_wire.step import Adapter, Int32Array
from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.request.provenance import UNKNOWN, Numerics


@dataclass(frozen=True, slots=True)
class ContinuedOutput:
    """One sampled output of the answer.

    Attributes:
        token_ids: Its tokens so far, [num_tokens].
        finish_reason: Why it had ended with the last of them; None: it goes on.
    """

    token_ids: Int32Array
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """All outputs of the answer.

    Attributes:
        outputs: One for each output that the request samples; none for a beam search, which begins anew.
        num_prompt_logprobs: Known log-probabilities of the prompt.
        numerics: The numerics that made its last tokens; executors with these are preferred.
        attempt: How often its client has continued the request; a larger one takes it over from a live call. 0: the
            client has not continued it, and does not know of this.
        max_model_len: The longest sequence that the request was first accepted for, as its client says; None: it does
            not say.
        adapter: What made it on top of the weights, with its digest; None: nothing, or it is not known.
    """

    outputs: tuple[ContinuedOutput, ...] = ()
    num_prompt_logprobs: int = 0
    numerics: Numerics = UNKNOWN
    attempt: int = 1
    max_model_len: int | None = None
    adapter: Adapter | None = None

    @property
    def has_begun(self) -> bool:
        """Whether anything of the answer is known, which another adapter would not have made."""
        return bool(self.num_tokens or self.num_prompt_logprobs)

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs so far."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def has_ended(self) -> bool:
        """Whether every output had ended: no token is left to compute."""
        return bool(self.outputs) and all(output.finish_reason is not None for output in self.outputs)
