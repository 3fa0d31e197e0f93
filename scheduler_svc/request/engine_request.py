"""A request as the engine takes it: token ids and checked parameters, no text."""

from dataclasses import dataclass, field

from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.step import NO_LOGPROBS, Adapter, Int32Array, PoolingTask, SamplingRow
from octavo_shared.step_wire.token_rules import TokenRules
from scheduler_svc.request.continuation import Continuation
from scheduler_svc.request.losses import NO_LOSSES, Losses
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions

# In characters.
MAX_REQUEST_ID_LENGTH = 256
MAX_TENANT_LENGTH = 256


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A checked request; the names are those of `SequenceGroup`.

    `speculate`: whether an output may get several tokens a step.
    `has_stop_strings`: whether the front looks for stop strings; it then says how many tokens of each output count.
    `continuation`: the known part of its answer, which was cut; None: it begins.
    `losses`: losses that counted against it at earlier engines.
    `requires_same_numerics`: whether only executors with the numerics that made its first token may go on with it.
    `grammar`: the grammar that its outputs follow; None: none. `matcher_id`: the matcher that the front checked it by.
    `lora_adapter`: the name of its adapter, from which the engine makes `adapter`; empty: none.
    `adapter`: what its sequences are computed with on top of the weights; None: nothing.
    `pooling`: what the model makes of the whole prompt in place of tokens. None: it generates.
    `token_type_ids`: of a pooling request: one byte a token; empty: all are 0.
    `encoder_token_ids`: what its sequences attend to besides themselves, once encoded; None: nothing.
    `trace_id`: the trace of its span, 32 hexadecimal digits, for the log; `traceparent`: the span, for the executors.
    `received_at_s`: when the front got it, monotonic time in seconds; None: just now.
    `deadline_s`: until when its client waits, monotonic time in seconds; None: without limit.
    """

    request_id: str
    prompt_token_ids: Int32Array
    sampling: SamplingRow
    stop_conditions: StopConditions
    num_sequences: int = 1
    beam_search: BeamSearchParams | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: int = 0
    speculate: bool = True
    token_rules: TokenRules | None = None
    num_prompt_logprobs: int = NO_LOGPROBS
    has_stop_strings: bool = False
    continuation: Continuation | None = None
    losses: Losses = NO_LOSSES
    requires_same_numerics: bool = False
    grammar: Grammar | None = None
    matcher_id: str = ""
    lora_adapter: str = ""
    adapter: Adapter | None = None
    pooling: PoolingTask | None = None
    token_type_ids: bytes = b""
    encoder_token_ids: Int32Array | None = None
    trace_id: str | None = None
    traceparent: str | None = None
    received_at_s: float | None = field(default=None, compare=False)
    deadline_s: float | None = field(default=None, compare=False)

    def longest_sequence(self, max_model_len: int) -> int:
        """Return the longest sequence that it is accepted for; a continuation keeps the one of its first call."""
        first = None if self.continuation is None else self.continuation.max_model_len
        return max_model_len if first is None else first

    @property
    def read_token_ids(self) -> Int32Array:
        """What the model reads first: the input of its encoder, or else the prompt."""
        return self.prompt_token_ids if self.encoder_token_ids is None else self.encoder_token_ids

    @property
    def num_encoder_tokens(self) -> int:
        """Tokens of the encoder's input."""
        return 0 if self.encoder_token_ids is None else len(self.encoder_token_ids)

    @property
    def num_input_tokens(self) -> int:
        """Tokens of the prompt, and of the encoder's input."""
        return len(self.prompt_token_ids) + self.num_encoder_tokens

    @property
    def width(self) -> int:
        """How many sequences it runs at once."""
        return self.num_sequences if self.beam_search is None else self.beam_search.beam_width

    @property
    def num_known_tokens(self) -> list[int]:
        """How many tokens of each sampled output its continuation has."""
        known = [0] * self.num_sequences
        for index, output in enumerate(() if self.continuation is None else self.continuation.outputs):
            known[index] = len(output.token_ids)
        return known
