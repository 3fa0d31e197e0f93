"""The table of sampling parameters that are numbers: each is declared here, once.

Made from it: the checks of requests and of steps, the row that a slot of the batch table has, its message, the
flags of the command line, what a model's generation_config.json may set, what the C and GPU samplers are given.
`make protos` writes three files from it (protos/sampling_code.py). What is no single number (stop strings, biases,
token lists) is not here. Pure, without NumPy: the client imports it too. CONTRIBUTING.md says how to add one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1

# The most alternatives of a token that are returned; a smaller vocabulary has fewer.
MAX_ALTERNATIVES = 20

# `num_logprobs` of a row that wants none.
NO_LOGPROBS = -1


class Kind(Enum):
    """What a parameter is: its type in Python, in a row (NumPy), and in the execution protos."""

    FLOAT = ("float", "<f4", "float")
    COUNT = ("int", "<i4", "uint32")
    SEED = ("int", "<u8", "fixed64")

    def __init__(self, python_type: str, row_type: str, wire_type: str) -> None:
        self.python_type = python_type
        self.row_type = row_type
        self.wire_type = wire_type


class Stage(Enum):
    """Where the sampler reads a parameter."""

    PROCESSOR = auto()
    """Changes logits by what came before; a beam search has it too."""
    FILTER = auto()
    """Temperature and filters: they shape what a token is drawn from. Beams draw nothing."""
    DRAW = auto()
    """The draw itself."""
    OTHER = auto()


# Beams have nothing that is read there.
BEAMLESS_STAGES = (Stage.FILTER, Stage.DRAW)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParam:
    """One parameter.

    Attributes:
        name: The same in protos, rows, flags (with dashes) and generation_config.json.
        kind: Its types.
        doc: What it does, one sentence, for flags, client and wire.
        default: What a request means that does not set it; None: `absent` says what happens then.
        absent: The default in words, where the number does not say it.
        neutral: The value in a row that changes nothing, which the wire leaves out. None: the default.
        low: Least value.
        is_low_excluded: Whether only values above `low` are allowed.
        high: Largest value; None: it depends on the server, and is checked where that is known.
        wire_number: Its field number in `octavo.execution.v1.SamplingParams`; None: it is not in the row.
            Numbers are never used again.
        wire_doc: What the wire says instead of `doc`.
        is_public: Whether requests have it; the others are set by the scheduler.
        stage: Where the sampler reads it.
        may_model_set: Whether a model's generation_config.json may set the default.
    """

    name: str
    kind: Kind
    doc: str
    default: float | None = 0
    absent: str | None = None
    neutral: float | None = None
    low: float = 0
    is_low_excluded: bool = False
    high: float | None = None
    wire_number: int | None = None
    wire_doc: str | None = None
    is_public: bool = True
    stage: Stage = Stage.OTHER
    may_model_set: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether its values are whole numbers."""
        return self.kind is not Kind.FLOAT

    @property
    def row_value(self) -> float:
        """The neutral value."""
        value = self.default if self.neutral is None else self.neutral
        assert value is not None, f"{self.name} is in the row and has a neutral value"
        return value

    @property
    def limit(self) -> str:
        """What a value must be, in words that end the sentence "... must be"."""
        if self.is_low_excluded:
            return f"above {self.low:g} and at most {self._words(self.high)}"
        return f"at least {self.low:g}" if self.high is None else f"from {self.low:g} to {self._words(self.high)}"

    @property
    def range_words(self) -> str:
        """The range as comments and docstrings have it; empty: any number that its type takes from 0 up."""
        if self.high is None or self.high in (INT32_MAX, UINT64_MAX):
            return f"Range {self.low:g} and up." if self.low > 0 else ""
        return f"Range {'above ' if self.is_low_excluded else ''}{self.low:g} to {self._words(self.high)}."

    @property
    def default_words(self) -> str:
        """What happens if a request does not set it."""
        words = self.absent or f"{self.default:g}"
        return f"the model's, else {words}" if self.may_model_set else words

    def allows(self, value: float) -> bool:
        """Return whether a value is in the range; NaN and infinities are in none."""
        is_above = value > self.low if self.is_low_excluded else value >= self.low
        return is_above and (value < float("inf") if self.high is None else value <= self.high)

    def _words(self, bound: float | None) -> str:
        return str(int(bound)) if self.is_whole and bound is not None else f"{bound:g}"


SAMPLING_PARAMS = (
    SamplingParam(
        name="temperature",
        kind=Kind.FLOAT,
        doc="Higher values are more random; 0: greedy decoding.",
        default=1,
        neutral=0,
        high=100,
        wire_number=1,
        stage=Stage.FILTER,
        may_model_set=True,
    ),
    SamplingParam(
        name="top_k",
        kind=Kind.COUNT,
        doc="Sample from this many of the most likely tokens; 0: all.",
        high=INT32_MAX,
        wire_number=2,
        stage=Stage.FILTER,
        may_model_set=True,
    ),
    SamplingParam(
        name="top_p",
        kind=Kind.FLOAT,
        doc="Nucleus sampling: keep the most likely tokens whose probabilities add up to this.",
        default=1,
        is_low_excluded=True,
        high=1,
        wire_number=3,
        stage=Stage.FILTER,
        may_model_set=True,
    ),
    SamplingParam(
        name="min_p",
        kind=Kind.FLOAT,
        doc="Drop tokens less likely than this fraction of the most likely one.",
        high=1,
        wire_number=4,
        stage=Stage.FILTER,
        may_model_set=True,
    ),
    SamplingParam(
        name="typical_p",
        kind=Kind.FLOAT,
        doc="Typical sampling: keep the most typical tokens whose probabilities add up to this.",
        default=1,
        is_low_excluded=True,
        high=1,
        wire_number=9,
        stage=Stage.FILTER,
        may_model_set=True,
    ),
    SamplingParam(
        name="repetition_penalty",
        kind=Kind.FLOAT,
        doc="Above 1: makes tokens that are in the prompt or the output less likely.",
        default=1,
        is_low_excluded=True,
        high=100,
        wire_number=10,
        wire_doc="Divides positive logits of tokens in prompt or output, multiplies negative ones.",
        stage=Stage.PROCESSOR,
        may_model_set=True,
    ),
    SamplingParam(
        name="presence_penalty",
        kind=Kind.FLOAT,
        doc="Subtract this from the logit of each token that is in the output.",
        low=-100,
        high=100,
        wire_number=11,
        stage=Stage.PROCESSOR,
    ),
    SamplingParam(
        name="frequency_penalty",
        kind=Kind.FLOAT,
        doc="Subtract this from a token's logit for each time it occurs in the output.",
        low=-100,
        high=100,
        wire_number=12,
        stage=Stage.PROCESSOR,
    ),
    SamplingParam(
        name="no_repeat_ngram_size",
        kind=Kind.COUNT,
        doc="No run of so many tokens comes twice in prompt and output; 0: off.",
        high=64,
        wire_number=14,
        wire_doc="Tokens that would end a run of so many tokens that is in prompt or output already are ruled out "
        "(CAPABILITY_NO_REPEAT_NGRAM); 0: off.",
        stage=Stage.PROCESSOR,
        may_model_set=True,
    ),
    SamplingParam(
        name="min_tokens",
        kind=Kind.COUNT,
        doc="Minimum number of output tokens.",
        high=INT32_MAX,
        wire_number=13,
        wire_doc="Output tokens before which none of TokenRules.stop_token_ids is sampled.",
    ),
    SamplingParam(
        name="max_tokens",
        kind=Kind.COUNT,
        doc="Maximum number of output tokens.",
        default=None,
        absent="as many as fit",
        low=1,
    ),
    SamplingParam(
        name="seed",
        kind=Kind.SEED,
        doc="Equal seeds give equal outputs, whatever else is running.",
        default=None,
        absent="chosen by the scheduler",
        neutral=0,
        high=UINT64_MAX,
        wire_number=5,
        stage=Stage.DRAW,
        wire_doc="Seed of the randomness, always set by the scheduler. One uniform number for each sample row comes "
        "from a hash of (seed, output_index, number of output tokens).",
    ),
    SamplingParam(name="n", kind=Kind.COUNT, doc="Number of outputs.", default=1, low=1),
    SamplingParam(
        name="best_of",
        kind=Kind.COUNT,
        doc="Generate this many outputs and return the n most likely, best first.",
        default=None,
        absent="n",
    ),
    SamplingParam(
        name="beam_width",
        kind=Kind.COUNT,
        doc="Beam search with this many beams for the n best outputs, instead of sampling.",
        absent="no beam search",
    ),
    SamplingParam(
        name="length_penalty",
        kind=Kind.FLOAT,
        doc="Beam search only: above 0 favours long outputs, below 0 short ones.",
        default=1,
        low=-10,
        high=10,
    ),
    SamplingParam(
        name="logprobs",
        kind=Kind.COUNT,
        doc="Return log-probabilities: of each token, and of this many of the most likely alternatives.",
        default=None,
        absent="none",
        high=MAX_ALTERNATIVES,
    ),
    SamplingParam(
        name="prompt_logprobs",
        kind=Kind.COUNT,
        doc="Return log-probabilities of the prompt tokens, as logprobs does for the output.",
        default=None,
        absent="none",
        high=MAX_ALTERNATIVES,
    ),
    SamplingParam(
        name="output_index",
        kind=Kind.COUNT,
        doc="Which output of the request this slot makes; range 0 to n less 1.",
        high=INT32_MAX,
        wire_number=6,
        is_public=False,
    ),
    SamplingParam(
        name="num_logprobs",
        kind=Kind.COUNT,
        doc="Number of alternatives whose log-probabilities are wanted besides the sampled token's. 0: the sampled "
        "token's only. At most the vocabulary size.",
        absent="no log-probabilities",
        neutral=NO_LOGPROBS,
        low=NO_LOGPROBS,
        high=INT32_MAX,
        wire_number=7,
        is_public=False,
    ),
    SamplingParam(
        name="num_candidates",
        kind=Kind.COUNT,
        doc="Above 0: a beam slot. Its rows answer this many of the likeliest tokens and sample nothing; at most the "
        "vocabulary size.",
        high=INT32_MAX,
        wire_number=8,
        is_public=False,
    ),
)

# The columns of a row, in the order of the wire.
ROW_PARAMS = tuple(
    sorted(
        (parameter for parameter in SAMPLING_PARAMS if parameter.wire_number is not None),
        key=lambda parameter: parameter.wire_number or 0,
    )
)

BY_NAME: Mapping[str, SamplingParam] = {parameter.name: parameter for parameter in SAMPLING_PARAMS}


def of_stage(stage: Stage) -> tuple[SamplingParam, ...]:
    """Return the parameters that the sampler reads at a stage, in the order in which it applies them."""
    return tuple(parameter for parameter in SAMPLING_PARAMS if parameter.stage is stage)
