"""The requests that clients send, by number: each number is one shape, the same in all seeds.

So the answer to a shape is computed alone once (`alone.py`) and serves all seeds. No two shapes have one prompt, since
the fake executor cannot tell equal histories apart; but many begin alike, for the prefix cache.
"""

import functools
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.errors import InternalError, InvalidRequestError, OctavoError, UnavailableError

NUM_SHAPES = 400

# Beyond those, requests that break each executor which admits them: their first token says so (`worker.py`).
POISON = "poison"
POISON_TOKEN = 1
POISONED = "this prompt breaks executors"

# Behind it the logits of the simulated model are NaN (`worker.py`); some shapes have it at the end of their prompts.
NAN_TOKEN = 2
SHAPES_PER_NOT_FINITE = 50

# One of so many shapes has no seed: whoever accepts it draws one, and says which.
SHAPES_PER_SEEDLESS = 10

MAX_MODEL_LEN = 160
LONGEST_PROMPT = 70
LONGEST_OUTPUT = 48

# Inputs of an encoder: each is the beginning of one of two texts, so one may be a part of another one.
MAX_ENCODER_TOKENS = 30
_INPUT_LENGTHS = (1, 3, 6, 8, 13, 21, MAX_ENCODER_TOKENS)
# Of the requests whose prompts are short enough give the encoder their prompts.
_PROMPT_ENCODED_SHARE = 0.3

_PRINTABLE = (33, 127)

_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yes"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
# What guided outputs follow: more grammars than an executor of the simulation has slots.
GUIDES: tuple[Mapping[str, Any], ...] = (
    {"regex": "[a-d]{3,9}"},
    {"regex": "(ab|c){1,12}x?"},
    {"regex": "[0-9]{1,4}-[0-9]{2}"},
    {"choice": ("yes", "no", "perhaps so")},
    {"json_schema": json.dumps(_SCHEMA)},
)
NUM_GRAMMAR_SLOTS = 2

# Prompts whose numbers have the same remainder may begin alike.
NUM_FAMILIES = 9


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of request.

    Attributes:
        number: Its place in the catalogue.
        kind: For people, and for swarms that leave some out.
        prompt: Token ids.
        options: What `octavo.Client.stream` is given beside the prompt.
        seed: That was drawn, of one that has none in `options`; 0: `options` has it, or none was drawn yet.
        refused_as: The error that it has to end with; None: it is a good request.
        has_encoder: Whether it is for a model with an encoder.
    """

    number: int
    kind: str
    prompt: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    refused_as: type[OctavoError] | None = None
    seed: int = 0
    has_encoder: bool = False

    def with_seed(self, seed: int | None) -> "Shape":
        """Return what it is once a seed was drawn for it."""
        if seed is None or "seed" in self.options or "beam_width" in self.options:
            return self
        return replace(self, options=dict(self.options) | {"seed": seed}, seed=seed)

    def with_encoder(self) -> "Shape":
        """Return what it is for a model with an encoder: most have an input, others leave the prompt to it."""
        draw = random.Random(f"input of shape {self.number}")
        must_decode = self.kind == POISON or self.prompt[-1] == NAN_TOKEN or len(self.prompt) > MAX_ENCODER_TOKENS
        if not must_decode and draw.random() < _PROMPT_ENCODED_SHARE:
            has_logprobs = "prompt_logprobs" in self.options
            refused_as = InvalidRequestError if has_logprobs else self.refused_as
            return replace(self, has_encoder=True, refused_as=refused_as)
        text = random.Random(f"input {draw.randrange(2)}")
        token_ids = [text.randrange(*_PRINTABLE) for _ in range(MAX_ENCODER_TOKENS)]
        given = {"encoder_prompt": token_ids[: draw.choice(_INPUT_LENGTHS)]}
        return replace(self, has_encoder=True, options={**self.options, **given})

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the decoder begins with; where the encoder has the prompt, only its start token."""
        is_encoded = self.has_encoder and "encoder_prompt" not in self.options
        return 1 if is_encoded else len(self.prompt)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all its outputs at most."""
        num_sequences: int = max(self.options.get(name, 1) for name in ("n", "best_of", "beam_width"))
        most: int = min(self.options["max_tokens"], MAX_MODEL_LEN - len(self.prompt))
        return num_sequences * most


@functools.cache
def shape(number: int) -> Shape:
    """Return the shape of a number."""
    draw = random.Random(f"shape {number}")
    kind = draw.choices(list(_KINDS), weights=[weight for weight, _ in _KINDS.values()])[0]
    if number >= NUM_SHAPES:
        kind = POISON
    options: dict[str, Any] = {
        "seed": draw.getrandbits(63),
        "max_tokens": draw.choice((1, 2, 3, draw.randint(4, 16), draw.randint(8, LONGEST_OUTPUT))),
        "temperature": draw.choice((0.0, 0.7, 1.2)),
        "tenant": draw.choice(("a", "a", "b", "c")),
        "cache_salt": draw.choice(("", "", "", "salt")),
    }
    if draw.random() < 0.2:
        options["logprobs"] = draw.randint(0, 3)
    if draw.random() < 0.1:
        options["prompt_logprobs"] = draw.randint(0, 2)
    if kind == POISON:
        return Shape(number, kind, (POISON_TOKEN, *_prompt(draw, number)), options, UnavailableError)
    refused_as = _KINDS[kind][1](draw, options)
    if number % SHAPES_PER_SEEDLESS == 1:
        options.pop("seed", None)
    prompt = _prompt(draw, number)
    if number % SHAPES_PER_NOT_FINITE == 0 and refused_as is None:
        return Shape(number, kind, (*prompt, NAN_TOKEN), options, InternalError)
    return Shape(number, kind, prompt, options, refused_as)


def _prompt(draw: random.Random, number: int) -> tuple[int, ...]:
    """Return token ids: the beginning of a family, then the number, then anything."""
    family = random.Random(f"family {number % NUM_FAMILIES}")
    begin = [family.randrange(*_PRINTABLE) for _ in range(draw.choice((0, 4, 13, 32)))]
    own = [
        33 + number % 94,
        33 + number // 94,
        *(draw.randrange(*_PRINTABLE) for _ in range(draw.choice((0, 3, 9, 30)))),
    ]
    return tuple(begin + own)


# What each kind adds; it returns the error that the request is refused with, if it is.


def _plain(draw: random.Random, options: dict[str, Any]) -> None:
    if draw.random() < 0.5:
        options |= {"top_p": draw.choice((0.5, 0.9)), "top_k": draw.choice((3, 50))}


def _penalized(draw: random.Random, options: dict[str, Any]) -> None:
    options |= {"repetition_penalty": 1.3, "presence_penalty": 2.0, "frequency_penalty": draw.choice((0.0, 0.7))}
    options["max_tokens"] = max(options["max_tokens"], LONGEST_OUTPUT // 2)
    options |= {"min_tokens": min(3, options["max_tokens"]), "logit_bias": {draw.randrange(*_PRINTABLE): 2.0}}


def _ruled(draw: random.Random, options: dict[str, Any]) -> None:
    options |= {"banned_token_ids": [draw.randrange(*_PRINTABLE) for _ in range(5)], "banned_words": ["e", "zz"]}


def _stopping(draw: random.Random, options: dict[str, Any]) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz ABCDEFGH.,"
    options |= {"stop": [draw.choice(letters) for _ in range(draw.randint(1, 8))], "max_tokens": LONGEST_OUTPUT}
    options |= {"stop_token_ids": [draw.randrange(*_PRINTABLE)]}
    options |= {"include_stop_str_in_output": draw.random() < 0.5, "ignore_eos": draw.random() < 0.5}


def _several(draw: random.Random, options: dict[str, Any]) -> None:
    options |= {"n": draw.randint(2, 4), "temperature": 1.0}


def _best_of(draw: random.Random, options: dict[str, Any]) -> None:
    options |= {"n": draw.randint(1, 2), "best_of": draw.randint(3, 4), "temperature": 1.0}


def _beams(draw: random.Random, options: dict[str, Any]) -> None:
    for name in ("seed", "temperature", "logprobs", "prompt_logprobs"):
        options.pop(name, None)
    options |= {"beam_width": draw.randint(2, 4), "length_penalty": draw.choice((0.5, 1.0, 2.0))}
    options["n"] = draw.randint(1, options["beam_width"])


def _long(draw: random.Random, options: dict[str, Any]) -> None:
    options |= {"max_tokens": LONGEST_OUTPUT, "ignore_eos": True}


def _hostile(draw: random.Random, options: dict[str, Any]) -> type[OctavoError]:
    options |= draw.choice(
        (
            {"temperature": -1.0},
            {"top_p": 7.0},
            {"n": 0},
            {"n": 10_000},
            {"max_tokens": 0},
            {"stop": [""]},
            {"logit_bias": {10**6: 1.0}},
            {"banned_token_ids": [-1]},
            {"beam_width": 3, "top_k": 4},
        )
    )
    return InvalidRequestError


def _unbounded(draw: random.Random, options: dict[str, Any]) -> None:
    options |= {"max_tokens": 10 * MAX_MODEL_LEN, "ignore_eos": draw.random() < 0.5}


def _guided(draw: random.Random, options: dict[str, Any]) -> type[OctavoError] | None:
    if draw.random() < 0.1:
        options |= {"regex": "[a-d]{3,9}", "banned_token_ids": [*b"abcd"]}  # nothing is left
        return InvalidRequestError
    options |= draw.choice(GUIDES)
    options |= {"max_tokens": draw.choice((2, 5, LONGEST_OUTPUT, LONGEST_OUTPUT)), "ignore_eos": draw.random() < 0.5}
    if draw.random() < 0.4:
        options |= {"n": draw.randint(2, 3), "temperature": 1.0}
    return None


_KINDS: dict[str, tuple[int, Callable[[random.Random, dict[str, Any]], type[OctavoError] | None]]] = {
    "plain": (8, _plain),
    "penalized": (3, _penalized),
    "ruled": (2, _ruled),
    "stopping": (4, _stopping),
    "several": (4, _several),
    "best_of": (2, _best_of),
    "beams": (4, _beams),
    "long": (4, _long),
    "hostile": (1, _hostile),
    "unbounded": (1, _unbounded),
    "guided": (5, _guided),
}

KINDS = tuple(_KINDS)

__all__ = [
    "GUIDES",
    "KINDS",
    "LONGEST_OUTPUT",
    "MAX_ENCODER_TOKENS",
    "MAX_MODEL_LEN",
    "NAN_TOKEN",
    "NUM_FAMILIES",
    "NUM_GRAMMAR_SLOTS",
    "NUM_SHAPES",
    "POISON",
    "POISONED",
    "POISON_TOKEN",
    "Shape",
    "shape",
]
