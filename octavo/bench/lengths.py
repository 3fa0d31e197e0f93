"""The small language in which lengths are given: `128`, `uniform:64:256`, `normal:128:32`, `lognormal:128:64`."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command's help must not need numpy
    import numpy as np

_LARGEST = 2**31 - 1

FORMS = "N, uniform:MIN:MAX, normal:MEAN:SD[:MIN:MAX] or lognormal:MEAN:SD[:MIN:MAX]"


class Shape(StrEnum):
    """A family of distributions."""

    CONSTANT = "constant"
    UNIFORM = "uniform"
    NORMAL = "normal"
    LOGNORMAL = "lognormal"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens.

    Attributes:
        text: As it was given.
        shape: The family.
        mean: Mean before rounding and clipping.
        deviation: Standard deviation of the lengths themselves, also of a lognormal one; unused by other families.
        minimum: Shortest length; what is drawn below becomes it.
        maximum: Longest length; what is drawn above becomes it.
    """

    text: str
    shape: Shape
    mean: float
    deviation: float
    minimum: int
    maximum: int

    def draw(self, generator: "np.random.Generator", count: int) -> list[int]:
        """Return so many lengths, rounded to whole tokens and clipped to the limits."""
        match self.shape:
            case Shape.CONSTANT:
                return [self.minimum] * count
            case Shape.UNIFORM:
                drawn = generator.integers(self.minimum, self.maximum, count, endpoint=True).astype(float)
            case Shape.NORMAL:
                drawn = generator.normal(self.mean, self.deviation, count)
            case Shape.LOGNORMAL:
                # The parameters of the underlying normal distribution that give this mean and deviation.
                variance = math.log1p((self.deviation / self.mean) ** 2)
                drawn = generator.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
        lengths: list[int] = drawn.round().clip(self.minimum, self.maximum).astype(int).tolist()
        return lengths


def parse_lengths(text: str) -> Lengths:
    """Return the distribution that a text describes.

    Raises:
        ValueError: it describes none; the message is a sentence with the text and what would be right.
    """
    name, *fields = text.strip().split(":")
    if not fields:
        return _constant(text, name)
    if name not in (Shape.UNIFORM, Shape.NORMAL, Shape.LOGNORMAL):
        raise ValueError(f"{text!r} is not a length: {name!r} is not a distribution; write {FORMS}")
    if len(fields) not in ((2,) if name == Shape.UNIFORM else (2, 4)):
        raise ValueError(f"{text!r} is not a length: {name} does not take {len(fields)} numbers; write {FORMS}")
    if name == Shape.UNIFORM:
        minimum, maximum = (_whole(text, field) for field in fields)
        _check_limits(text, minimum, maximum)
        return Lengths(text, Shape.UNIFORM, (minimum + maximum) / 2, 0.0, minimum, maximum)
    mean, deviation = (_number(text, field) for field in fields[:2])
    minimum, maximum = (_whole(text, field) for field in fields[2:]) if len(fields) == 4 else (1, _LARGEST)
    _check_limits(text, minimum, maximum)
    if mean < 1 or deviation < 0:
        raise ValueError(f"{text!r} is not a length: the mean must be at least 1 and the deviation at least 0")
    if max(mean, deviation) > _LARGEST:
        raise ValueError(f"{text!r} is not a length: mean and deviation must be at most {_LARGEST}")
    return Lengths(text, Shape(name), mean, deviation, minimum, maximum)


def _constant(text: str, number: str) -> Lengths:
    length = _whole(text, number)
    _check_limits(text, length, length)
    return Lengths(text, Shape.CONSTANT, length, 0.0, length, length)


def _whole(text: str, field: str) -> int:
    if not (field.isascii() and field.isdigit() and len(field) <= 10):
        raise ValueError(f"{text!r} is not a length: {field!r} is not a whole number of tokens; write {FORMS}")
    return int(field)


def _number(text: str, field: str) -> float:
    try:
        number = float(field)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not a length: {field!r} is not a number; write {FORMS}")
    return number


def _check_limits(text: str, minimum: int, maximum: int) -> None:
    if not 1 <= minimum <= maximum <= _LARGEST:
        raise ValueError(f"{text!r} is not a length: lengths go from 1 to {_LARGEST}, the shorter limit first")
