"""The ends of the ranges of sampling parameters, and what lies beyond, from their table."""

import math
from typing import Any

from octavo.values.sampling_params_table import ROW_PARAMS, SamplingParam


def at_the_ends(parameter: SamplingParam) -> list[Any]:
    """Return the least and the largest value of a range that has a largest one."""
    assert parameter.high is not None
    least = 1e-6 if parameter.is_low_excluded else parameter.low
    return [int(value) if parameter.is_whole else value for value in (least, parameter.high)]


def beyond(parameter: SamplingParam) -> list[Any]:
    """Return what is out of a range, by little and by much; float32 tells it from the ends."""
    assert parameter.high is not None
    if parameter.is_whole:
        return [int(parameter.low) - 1, int(parameter.high) + 1]
    below = parameter.low if parameter.is_low_excluded else parameter.low - 0.001
    return [below, parameter.high * 1.001, math.nan, math.inf, -math.inf]


# One field of a SamplingRow each.
OUT_OF_RANGE: list[dict[str, Any]] = [{of.name: value} for of in ROW_PARAMS for value in beyond(of)]
AT_THE_ENDS: list[dict[str, Any]] = [{of.name: value} for of in ROW_PARAMS for value in at_the_ends(of)]
