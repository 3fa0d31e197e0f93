"""What an executor answered when a step was recorded, and what one answers now: every number, bit for bit."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo_shared.step_wire.batch_table import StepLayout
from octavo_shared.step_wire.step import Int32Array, StepResult
from scheduler_svc.core.sequence import Sequence


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


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first value that differs: whose it is, at which token, what, and both values."""

    owner: RowOwner
    position: int
    what: str
    recorded: str
    found: str

    def __str__(self) -> str:
        owner, position = self.owner, self.position
        if position < owner.num_prompt_tokens:
            where = f"prompt token {position}"
        else:
            where = f"output {owner.output_index}, token {position - owner.num_prompt_tokens}"
        return f"request {owner.request_id!r}, {where}: {self.what} recorded {self.recorded}, now {self.found}"


def first_mismatch(
    layout: StepLayout, samples: list[RowOwner], rows: list[RowOwner], recorded: StepResult, found: StepResult
) -> Mismatch | None:
    """Return the first value of a step that differs, in the order of its rows; None: all have the same bits.

    Args:
        layout: Of the step.
        samples: Whose its sample rows are.
        rows: Whose its rows are.
        recorded: The answer when it was recorded.
        found: The answer now.
    """
    places = list(zip(samples, layout.sample_positions.tolist(), strict=True))
    prompts: list[tuple[RowOwner, int]] = []
    prompt_alternatives: list[tuple[RowOwner, int]] = []
    counts, widths = layout.num_prompt_logprobs, layout.num_prompt_alternatives
    if counts is not None and widths is not None:
        for owner, start, count, width in zip(
            rows, layout.starts.tolist(), counts.tolist(), widths.tolist(), strict=True
        ):
            of_row = [(owner, start + 1 + index) for index in range(count)]
            prompts += of_row
            prompt_alternatives += [place for place in of_row for _ in range(width)]
    candidates = _repeated(places, layout.num_candidates)
    alternatives = _repeated(places, layout.num_alternatives)
    kinds = (
        ("row flag", places, _flags(recorded), _flags(found)),
        ("token", places, recorded.sampled_token_ids, found.sampled_token_ids),
        ("log-probability", places, recorded.logprobs, found.logprobs),
        ("beam candidate", candidates, recorded.candidate_token_ids, found.candidate_token_ids),
        ("log-probability of a beam candidate", candidates, recorded.candidate_logprobs, found.candidate_logprobs),
        ("alternative", alternatives, recorded.alternative_token_ids, found.alternative_token_ids),
        ("log-probability of an alternative", alternatives, recorded.alternative_logprobs, found.alternative_logprobs),
        ("log-probability", prompts, recorded.prompt_logprobs, found.prompt_logprobs),
        (
            "alternative",
            prompt_alternatives,
            recorded.prompt_alternative_token_ids,
            found.prompt_alternative_token_ids,
        ),
        (
            "log-probability of an alternative",
            prompt_alternatives,
            recorded.prompt_alternative_logprobs,
            found.prompt_alternative_logprobs,
        ),
    )
    return next((mismatch for kind in kinds for mismatch in _differences(*kind)), None)


def num_values(result: StepResult) -> int:
    """Return how many numbers an answer has."""
    return sum(map(len, result.arrays))


def _flags(result: StepResult) -> Int32Array:
    """Return the row flags as numbers that are compared; where there are none, zeros."""
    if result.row_flags is None:
        return np.zeros(len(result.sampled_token_ids), np.int32)
    return result.row_flags.astype(np.int32)


def _repeated(places: list[tuple[RowOwner, int]], counts: npt.NDArray[np.int32] | None) -> list[tuple[RowOwner, int]]:
    if counts is None:
        return []
    return [place for place, count in zip(places, counts.tolist(), strict=True) for _ in range(count)]


def _differences(
    what: str,
    places: list[tuple[RowOwner, int]],
    recorded: npt.NDArray[np.generic] | None,
    found: npt.NDArray[np.generic] | None,
) -> Iterator[Mismatch]:
    if recorded is None and found is None:
        return
    num_recorded = 0 if recorded is None else len(recorded)
    num_found = 0 if found is None else len(found)
    if recorded is None or found is None or num_recorded != num_found:
        owner, position = places[0] if places else (RowOwner("", 0, 0), 0)
        yield Mismatch(owner, position, f"number of values ({what})", str(num_recorded), str(num_found))
        return
    bits = [array.astype(array.dtype.newbyteorder("<")).view("<u4") for array in (recorded, found)]
    differs = bits[0] != bits[1]
    if recorded.dtype.kind == "f":  # rows that did not ask have no number, whichever bits it has
        differs &= ~(np.isnan(recorded) & np.isnan(found))
    for index in differs.nonzero()[0].tolist():
        owner, position = places[index]
        yield Mismatch(owner, position, what, _text(recorded[index]), _text(found[index]))


def _text(value: np.generic) -> str:
    if value.dtype.kind == "f":
        return f"{float(value)!r} ({int(value.view(np.uint32)):#010x})"
    return str(int(value))
