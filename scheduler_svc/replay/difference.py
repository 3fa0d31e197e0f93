"""What differs from a recording, with both values: the fields of a step, and the numbers that an executor answers."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from octavo_shared.step_wire.batch_table import StepLayout
from octavo_shared.step_wire.step import StepResult
from scheduler_svc.core.sequence import Sequence

MISSING = "nothing"
MAX_SHOWN = 10
# Bytes that are numbers in little endian, by the name of the field.
_NUMBERS = {"token_ids": "<i4", "logprobs": "<f4"}

_Numbers: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs: where, both values as text, and of which kind they are, if that needs saying."""

    where: str
    recorded: str
    found: str
    what: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}{' ' if self.what else ''}recorded {self.recorded}, now {self.found}"


class DifferenceError(Exception):
    """The fleet decides otherwise than it did.

    Args:
        where: The step, or the call.
        places: What differs.
        hint: What may be the reason; empty: nobody knows.

    Attributes:
        place: File, number and byte of the record.
    """

    def __init__(self, where: str, places: list[Difference], hint: str = "") -> None:
        self.where = where
        self.places = places
        self.hint = hint
        self.place = ""
        super().__init__(f"{where} differs from the recording")


# The fields of a step --------------------------------------------------------------------------------


def differences(recorded: Message | None, found: Message | None) -> list[Difference]:
    """Return where two messages differ, at most `MAX_SHOWN` places, in the order of their fields."""
    if recorded is None or found is None:
        texts = ["no step" if message is None else "a step" for message in (recorded, found)]
        return [] if recorded is found else [Difference("step", *texts)]
    return list(islice(_in_messages(recorded, found, ""), MAX_SHOWN))


def _in_messages(recorded: Message, found: Message, prefix: str) -> Iterator[Difference]:
    for field in recorded.DESCRIPTOR.fields:
        path, sides = f"{prefix}{field.name}", (recorded, found)
        values = [getattr(side, field.name) for side in sides]
        if field.is_repeated:
            yield from _in_lists(list(values[0]), list(values[1]), path)
        elif field.has_presence and recorded.HasField(field.name) != found.HasField(field.name):
            has = [side.HasField(field.name) for side in sides]
            yield Difference(path, *(_text(value) if it else MISSING for value, it in zip(values, has, strict=True)))
        elif field.type == FieldDescriptor.TYPE_BYTES and (dtype := _dtype_of(field.name)):
            numbers = [list(np.frombuffer(side[: len(side) // 4 * 4], dtype)) for side in values]
            yield from _in_lists(numbers[0], numbers[1], path)
        else:
            yield from _in_values(values[0], values[1], path)


def _in_lists(recorded: list[Any], found: list[Any], path: str) -> Iterator[Difference]:
    for index in range(max(len(recorded), len(found))):
        place = f"{path}[{index}]"
        if index < len(recorded) and index < len(found):
            yield from _in_values(recorded[index], found[index], place)
        else:
            yield Difference(
                place, *(_text(side[index]) if index < len(side) else MISSING for side in (recorded, found))
            )


def _in_values(recorded: Any, found: Any, path: str) -> Iterator[Difference]:
    if isinstance(recorded, Message):
        yield from _in_messages(recorded, found, f"{path}.")
    elif recorded.tobytes() != found.tobytes() if isinstance(recorded, np.generic) else recorded != found:
        yield Difference(path, _text(recorded), _text(found))


def _dtype_of(name: str) -> str:
    return next((dtype for ending, dtype in _NUMBERS.items() if name.endswith(ending)), "")


def _text(value: Any) -> str:
    if isinstance(value, Message):
        return "{" + ", ".join(f"{field.name}: {_text(item)}" for field, item in value.ListFields()) + "}"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, np.floating):
        return f"{float(value)!r} ({int(value.view(np.uint32)):#010x})"
    return str(value)


# The numbers of an answer ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowOwner:
    """Whose row it is: the request, its output, and how many tokens its prompt has."""

    request_id: str
    output_index: int
    num_prompt_tokens: int

    @classmethod
    def of(cls, sequence: Sequence) -> "RowOwner":
        """Return the owner of a row of a sequence."""
        group = sequence.group
        return cls(group.request_id, sequence.index, group.num_prompt_tokens)

    def at(self, position: int) -> str:
        """Say which token of it is at a position."""
        if position < self.num_prompt_tokens:
            return f"request {self.request_id!r}, prompt token {position}"
        return f"request {self.request_id!r}, output {self.output_index}, token {position - self.num_prompt_tokens}"


_Places: TypeAlias = list[tuple[RowOwner, int]]


def first_mismatch(
    layout: StepLayout, samples: list[RowOwner], rows: list[RowOwner], recorded: StepResult, found: StepResult
) -> Difference | None:
    """Return the first value of a step that differs, in the order of its rows; None: all have the same bits.

    Args:
        layout: Of the step.
        samples: Whose its sample rows are.
        rows: Whose its rows are.
        recorded: The answer when it was recorded.
        found: The answer now.
    """
    sampled = list(zip(samples, layout.sample_positions.tolist(), strict=True))
    tokens, widths_of_tokens, num_tokens = sampled, layout.num_alternatives, recorded.token_counts
    if num_tokens is not None:  # a row has several
        tokens = [
            (owner, at + index) for (owner, at), num in zip(sampled, num_tokens, strict=True) for index in range(num)
        ]
        widths_of_tokens = None if widths_of_tokens is None else widths_of_tokens.repeat(num_tokens)
    places: dict[str, _Places] = {
        "": tokens,
        "candidate_": _repeated(sampled, layout.num_candidates),
        "alternative_": _repeated(tokens, widths_of_tokens),
        "prompt_": [],
        "prompt_alternative_": [],
    }
    counts, widths = layout.num_prompt_logprobs, layout.num_prompt_alternatives
    if counts is not None and widths is not None:
        each = zip(rows, layout.starts.tolist(), counts.tolist(), widths.tolist(), strict=True)
        for owner, start, count, width in each:
            of_row = [(owner, start + 1 + index) for index in range(count)]
            places["prompt_"] += of_row
            places["prompt_alternative_"] += [place for place in of_row for _ in range(width)]
    flags = [np.zeros(one.num_rows, np.uint8) if one.row_flags is None else one.row_flags for one in (recorded, found)]
    mismatches = [_in_numbers("row flag", sampled, *(one.astype(np.int32) for one in flags))]
    if num_tokens is not None and found.token_counts is not None:
        counted = (one.astype(np.int32) for one in (num_tokens, found.token_counts))
        mismatches.append(_in_numbers("number of tokens", sampled, *counted))
    for name, prefix, what in (
        ("sampled_token_ids", "", "token"),
        ("logprobs", "", "log-probability"),
        ("candidate_token_ids", "candidate_", "beam candidate"),
        ("candidate_logprobs", "candidate_", "log-probability of a beam candidate"),
        ("alternative_token_ids", "alternative_", "alternative"),
        ("alternative_logprobs", "alternative_", "log-probability of an alternative"),
        ("prompt_logprobs", "prompt_", "log-probability"),
        ("prompt_alternative_token_ids", "prompt_alternative_", "alternative"),
        ("prompt_alternative_logprobs", "prompt_alternative_", "log-probability of an alternative"),
    ):
        mismatches.append(_in_numbers(what, places[prefix], getattr(recorded, name), getattr(found, name)))
    return next((one for of_kind in mismatches for one in of_kind), None)


def num_values(result: StepResult) -> int:
    """Return how many numbers an answer has."""
    return sum(map(len, result.arrays))


def _repeated(places: _Places, counts: _Numbers | None) -> _Places:
    if counts is None:
        return []
    return [place for place, count in zip(places, counts.tolist(), strict=True) for _ in range(count)]


def _in_numbers(what: str, places: _Places, recorded: _Numbers | None, found: _Numbers | None) -> Iterator[Difference]:
    if recorded is None and found is None:
        return
    num_recorded, num_found = (0 if numbers is None else len(numbers) for numbers in (recorded, found))
    if recorded is None or found is None or num_recorded != num_found:
        owner, position = places[0] if places else (RowOwner("", 0, 0), 0)
        yield Difference(owner.at(position), str(num_recorded), str(num_found), f"number of values ({what})")
        return
    differs = recorded.view(np.uint32) != found.view(np.uint32)
    if recorded.dtype.kind == "f":  # rows that did not ask have no number, whichever bits it has
        differs &= ~(np.isnan(recorded) & np.isnan(found))
    for index in differs.nonzero()[0].tolist():
        owner, position = places[index]
        yield Difference(owner.at(position), _text(recorded[index]), _text(found[index]), what)
