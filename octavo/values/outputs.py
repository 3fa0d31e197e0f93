"""The values of the client's API: prompts, events of a stream, finished outputs, the model.

Names are as in protos/octavo/generation/v1. Next: `output_messages.py`, which reads them from the wire, and
octavo/client.py, which yields them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Literal, NamedTuple, Self, TypeAlias, TypedDict

from octavo.errors import OctavoError
from octavo.values.sampling_params import SamplingParams


class TextPart(TypedDict):
    """A part of a message, as OpenAI's API has them; only the type "text" is supported."""

    type: Literal["text"]
    text: str


class ChatMessage(TypedDict):
    """One turn of a conversation; role is "system", "user" or "assistant". Parts are joined by line breaks."""

    role: str
    content: str | Sequence[TextPart]


# Plain text, token ids that are used as they are, or a conversation (of ChatMessage) for the model's chat template.
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, object]]


class FinishReason(StrEnum):
    """Why an output ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class TokenLogprob(NamedTuple):
    """A token and its log-probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of tokens of the prompt, in order, from its second token.

    Attributes:
        logprobs: Of the tokens themselves.
        alternatives: The likeliest tokens in the place of each, likeliest first; empty unless asked for.
        token_ids: The tokens; empty if a scheduler of an earlier release did not tell the tokens of a text.
    """

    logprobs: tuple[float, ...]
    alternatives: tuple[tuple[TokenLogprob, ...], ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Provenance:
    """The numerics and weights that made the tokens of an output from `first_token` on, up to the next span or the end.

    Attributes:
        first_token: Index in `Output.token_ids`.
        numerics_id: Of the executor's arithmetic; empty: it did not say it.
        weights_digest: Of all bytes of its weights; empty: it did not say it.
        adapter_source: Where it found the adapter; empty: there is none.
        adapter_digest: SHA-256 of the adapter; empty: there is none.
        keeps_cache: Whether the weights were changed in the middle of the output, and the cache of earlier tokens was
            kept: the tokens equal those of no other output.
    """

    first_token: int
    numerics_id: str
    weights_digest: str
    adapter_source: str = ""
    adapter_digest: str = ""
    keeps_cache: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """One finished output.

    Attributes:
        output_index: Which output of the request, from 0; of `best_of` and beams its rank, 0 is the best.
        text: The whole text.
        token_ids: All token ids, also the one that ended the output.
        logprobs: Log-probability of each of `token_ids`; empty unless asked for.
        finish_reason: Why it ended.
        stopped_by: The stop token's id or the stop string, if `finish_reason` is STOP.
        cumulative_logprob: Sum of the log-probabilities of `token_ids`; None unless they were asked
            for or the outputs are ranked.
        beam_score: What hypotheses are ranked by, with the length penalty; None without a beam search.
        alternatives: The likeliest tokens in the place of each of `token_ids`, likeliest first; empty unless
            asked for.
        provenance: Which numerics and weights made which tokens; empty unless asked for.
    """

    output_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    stopped_by: int | str | None
    cumulative_logprob: float | None = None
    beam_score: float | None = None
    alternatives: tuple[tuple[TokenLogprob, ...], ...] = ()
    provenance: tuple[Provenance, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; the cached ones are part of the prompt's, those that an encoder read are not.

    `num_output_tokens` counts all sampled outputs, also the ones that `best_of` did not return.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_encoder_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event: the request has been checked and queued.

    `prompt_token_ids`: the prompt; empty if a scheduler of an earlier release did not tell the tokens of a text.
    `max_model_len`: the longest sequence that it is accepted for, prompt and output; 0: the scheduler does not say it.
    `seed`: of its randomness, as asked for or drawn by the scheduler: with it the answer can be had again.
    """

    request_id: str
    num_prompt_tokens: int
    prompt_token_ids: tuple[int, ...] = ()
    max_model_len: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in one output.

    `text` may lag behind `token_ids`: incomplete characters and possible stop strings are held back.
    Each token is delivered exactly once over all deltas. Deltas of several outputs come interleaved;
    ranked outputs (`best_of` above `n`, beams) come in one delta each, at the end.
    `provenance`: which numerics and weights make the tokens from one of these on; empty: the same as before.
    """

    output_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    alternatives: tuple[tuple[TokenLogprob, ...], ...] = ()
    provenance: tuple[Provenance, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event: all outputs, by `output_index`; `prompt_logprobs` of the whole prompt, if they were asked for.

    `continued_on_other_numerics`: the request was moved while it ran, to an executor with another numerics id; one
    executor alone might not give its outputs.
    `num_resumptions`: how often the call was cut, and another one went on with the answer; 0: never.
    """

    outputs: tuple[Output, ...]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    continued_on_other_numerics: bool = False
    num_resumptions: int = 0


# PromptLogprobs come before the first Delta, each token once.
Event: TypeAlias = Accepted | PromptLogprobs | Delta | Finished


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of one prompt; fields as in `Accepted` and `Finished`."""

    request_id: str
    prompt: Prompt
    outputs: tuple[Output, ...]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    continued_on_other_numerics: bool = False
    num_resumptions: int = 0
    prompt_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, prompt: Prompt, accepted: Accepted, finished: Finished) -> Self:
        """Return what the first and the last event say of a prompt."""
        of_finished = {each.name: getattr(finished, each.name) for each in fields(finished)}
        return cls(accepted.request_id, prompt, prompt_token_ids=accepted.prompt_token_ids, **of_finished)

    @property
    def error(self) -> None:
        """None: the prompt was answered; see FailedRequest."""


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """What became of a prompt that got no answer while others did: it stands in the place of the RequestOutput.

    It is like a future that failed: `error` says why, and reading the outputs raises it.
    """

    prompt: Prompt
    error: OctavoError

    @property
    def outputs(self) -> tuple[Output, ...]:
        """There are none: raises `error`."""
        raise self.error

    @property
    def usage(self) -> Usage:
        """There is none: raises `error`."""
        raise self.error

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """They are not known: raises `error`."""
        raise self.error

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """There are none: raises `error`."""
        raise self.error

    @property
    def continued_on_other_numerics(self) -> bool:
        """There is no answer: raises `error`."""
        raise self.error

    @property
    def num_resumptions(self) -> int:
        """There is no answer: raises `error`."""
        raise self.error


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that answers.

    Attributes:
        model_id: Its name.
        max_model_len: Longest sequence, prompt and output together, in tokens.
        vocab_size: Number of token ids.
        has_chat_template: Whether conversations can be sent.
        dtype: Number format of the weights.
        takes_token_ids_only: Whether it has no tokenizer: prompts must be token ids, and outputs have no text.
        default_sampling_params: What requests get that leave a field unset, where the model says it.
        is_reproducible: Whether equal requests with equal seeds get equal outputs and log-probabilities, to the bit, at
            any time and on any executor.
        why_not_reproducible: Why not, in a few words; empty: they do, or the scheduler is of release 0.1.0.
        numerics_ids: Of the executors, sorted, each once.
        weights_digest: Of all bytes of the weights; empty: no executor says it.
        tasks: What it can do: "generate", "embed", "score".
        embedding_size: Numbers in a vector of `embed`; 0: it does not embed.
        num_scores: Scores of a pair; 0: it does not score.
        prompt_names: What `embed` takes as `prompt_name`.
        max_input_tokens: Longest input of `embed` and `score`; 0: it does neither.
        speculates: Whether outputs may get several tokens a step.
        speculation_may_change_outputs: Whether they may differ by that.
        adapters: What requests may have as `lora_adapter`.
        max_encoder_tokens: Longest input of its encoder, see `encoder_prompt`; 0: it has none.
    """

    model_id: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    dtype: str
    takes_token_ids_only: bool = False
    default_sampling_params: SamplingParams = field(default_factory=SamplingParams)
    is_reproducible: bool = False
    why_not_reproducible: str = ""
    numerics_ids: tuple[str, ...] = ()
    weights_digest: str = ""
    tasks: tuple[str, ...] = ("generate",)
    embedding_size: int = 0
    num_scores: int = 0
    prompt_names: tuple[str, ...] = ()
    max_input_tokens: int = 0
    speculates: bool = False
    speculation_may_change_outputs: bool = False
    adapters: tuple[str, ...] = ()
    max_encoder_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as tokens.

    Attributes:
        token_ids: Its token ids; they are a prompt, too.
        max_model_len: Longest sequence, prompt and output together, in tokens.
    """

    token_ids: tuple[int, ...]
    max_model_len: int
