"""What every engine computes: requests of random token ids, equal for all engines, new in every round."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

FIRST_ORDINARY_ID = 100  # below are special tokens in the demo model


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and the number of tokens to make; greedy, end-of-sequence ignored."""

    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The lengths of a request; `shared_tokens` of the prompt are the same in all requests of the workload."""

    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive at once."""

    name: str  # as in tables and on the command line
    title: str  # what people read
    shapes: tuple[Shape, ...]  # one for each request
    # How it is judged: "decode" by the tokens a second after the first, "output" by all tokens a second, "first
    # token" by the seconds to the first one.
    unit: str = "output"

    @property
    def output_tokens(self) -> int:
        return sum(shape.output_tokens for shape in self.shapes)

    @property
    def longest_tokens(self) -> int:
        return max(shape.prompt_tokens + shape.output_tokens for shape in self.shapes)

    def requests(self, seed: int, vocab_size: int) -> list[Request]:
        """Draw the token ids; other seeds share nothing, so that no cache of an earlier run helps."""
        generator = random.Random(f"{self.name} {seed}")
        draw = partial(_draw, generator.randrange, vocab_size)
        shared = draw(max(shape.shared_tokens for shape in self.shapes))
        return [
            Request(
                shared[: shape.shared_tokens] + draw(shape.prompt_tokens - shape.shared_tokens), shape.output_tokens
            )
            for shape in self.shapes
        ]


def _draw(randrange: Callable[[int, int], int], vocab_size: int, num_tokens: int) -> list[int]:
    return [randrange(FIRST_ORDINARY_ID, vocab_size) for _ in range(num_tokens)]


def _mixed_shapes(num_requests: int) -> tuple[Shape, ...]:
    """The lengths are drawn once and stay the same in all rounds."""
    generator = random.Random("lengths")
    return tuple(Shape(generator.randint(16, 512), generator.randint(16, 256)) for _ in range(num_requests))


WORKLOADS = (
    Workload("W1", "one stream, 128 in, 128 out", (Shape(128, 128),), "decode"),
    Workload("W2", "32 streams, 128 in, 128 out", (Shape(128, 128),) * 32),
    Workload("W3", "64 requests, 16 to 512 in, 16 to 256 out", _mixed_shapes(64)),
    Workload("W4", "32 streams, 512 in common and 32 of their own in, 64 out", (Shape(544, 64, 512),) * 32),
    Workload("P512", "first token of a prompt of 512", (Shape(512, 1),), "first token"),
    Workload("P2000", "first token of a prompt of 2,000", (Shape(2000, 1),), "first token"),
    Workload("P8000", "first token of a prompt of 8,000", (Shape(8000, 1),), "first token"),
)

# Before anything is measured: a batch and a longer prompt, so that memory is there and code is compiled.
WARM_UPS = (Workload("warm-up", "", (Shape(64, 8),) * 32), Workload("warm-up", "", (Shape(600, 4),)))


def by_name(name: str) -> Workload:
    return next(workload for workload in WORKLOADS if workload.name == name)
