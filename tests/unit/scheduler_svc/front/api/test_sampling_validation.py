"""The numbers of a request: their ranges are those of the table, and each one reaches the row."""

from typing import Any

import pytest

from octavo.generation.v1 import generation_pb2
from octavo.values.sampling_params_table import SAMPLING_PARAMS, SamplingParam, Stage
from octavo_shared.errors import InvalidFieldError
from octavo_shared.step_wire.step import NO_LOGPROBS, SamplingRow
from scheduler_svc.front.api.params_validation import sampling_row
from tests.support.each_row import each_row
from tests.support.sampling_ranges import at_the_ends, beyond

IN_ROW = [p for p in SAMPLING_PARAMS if p.is_public and p.wire_number is not None]
ENDS = [(parameter, value) for parameter in IN_ROW for value in at_the_ends(parameter)]
# What the field's own type cannot hold never arrives.
BEYOND = [(p, value) for p in IN_ROW if p.name != "seed" for value in beyond(p) if not (p.is_whole and value < 0)]


def row_of(is_beam: Any = False, /, **params: Any) -> SamplingRow:
    return sampling_row(generation_pb2.SamplingParams(**params), NO_LOGPROBS, is_beam=is_beam)


@each_row(*ENDS)
def test_a_number_at_the_end_of_its_range_reaches_the_row(parameter: SamplingParam, value: float) -> None:
    assert getattr(row_of(**{parameter.name: value}), parameter.name) == pytest.approx(value)


@each_row(*BEYOND)
def test_a_number_beyond_its_range_is_refused_with_the_limit(parameter: SamplingParam, value: float) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        row_of(**{parameter.name: value})

    assert str(caught.value).startswith(f"sampling_params.{parameter.name} is ")
    assert str(caught.value).endswith(f"; it must be {parameter.limit}")


def test_a_number_is_shown_in_the_digits_that_tell_it_from_its_limit() -> None:
    for name, value in (("top_p", 1.0000001), ("temperature", 100.00001), ("min_p", -1e-09), ("typical_p", 2**31)):
        with pytest.raises(InvalidFieldError, match=f"^sampling_params.{name} is {value}; it must be "):
            row_of(**{name: value})


def test_unset_fields_have_the_defaults_of_the_table() -> None:
    row = row_of()

    for parameter in IN_ROW:
        assert parameter.name == "seed" or getattr(row, parameter.name) == parameter.default


def test_min_tokens_above_max_tokens_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidFieldError, match=r"min_tokens is 9; it must be from 0 to 8 \(max_tokens\)"):
        row_of(min_tokens=9, max_tokens=8)


@each_row(*ENDS)
def test_a_beam_has_what_changes_logits_and_nothing_that_draws(parameter: SamplingParam, value: float) -> None:
    row = row_of(True, **{parameter.name: value})

    is_read = parameter.stage not in (Stage.FILTER, Stage.DRAW)
    assert getattr(row, parameter.name) == (pytest.approx(value) if is_read else parameter.row_value)
