"""Sample rows made by hand: what they are sampled by, and the tokens before them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from executor_svc.sampler.sample_rows import SampleRows
from octavo_shared.step_wire.step import SAMPLING_ROW, SamplingRow
from octavo_shared.step_wire.token_rules import TokenRules


@dataclass(frozen=True)
class Row:
    """One sample row: how it is sampled, and its prompt and output so far."""

    sampling: SamplingRow = field(default_factory=SamplingRow)
    prompt: Sequence[int] = (0,)
    output: Sequence[int] = ()
    rules: TokenRules | None = None


def sampling_of(*rows: SamplingRow) -> npt.NDArray[np.void]:
    return np.array([row.as_tuple() for row in rows], SAMPLING_ROW)


def sample_rows(*rows: Row) -> SampleRows:
    """Return the rows in slots that are not in their order, the histories beside garbage."""
    slots = np.arange(len(rows), dtype=np.int32)[::-1].copy()
    histories = [[*row.prompt, *row.output] for row in rows]
    token_ids = np.full((len(rows), 1 + max(map(len, histories))), 1, np.int32)
    for slot, history in zip(slots.tolist(), histories, strict=True):
        token_ids[slot, : len(history)] = history
    return SampleRows(
        sampling=sampling_of(*(row.sampling for row in rows)),
        rules=[row.rules for row in rows],
        slots=slots,
        num_tokens=np.array([len(history) for history in histories], np.int32),
        num_prompt_tokens=np.array([len(row.prompt) for row in rows], np.int32),
        token_ids=token_ids,
    )


# Every filter, at its ends too, and several together.
ROWS_OF_FILTERS = [
    SamplingRow(temperature=0.7),
    SamplingRow(temperature=1.3, top_k=1),
    SamplingRow(temperature=1.0, top_k=40),
    SamplingRow(temperature=1.0, top_k=100_000),
    SamplingRow(temperature=1.0, top_p=0.9),
    SamplingRow(temperature=5.0, top_p=0.99),
    SamplingRow(temperature=1.0, top_p=1e-6),
    SamplingRow(temperature=1.0, min_p=0.1),
    SamplingRow(temperature=1.0, min_p=1.0),
    SamplingRow(temperature=1.0, typical_p=0.2),
    SamplingRow(temperature=0.7, typical_p=0.95),
    SamplingRow(temperature=1.0, top_p=0.97, typical_p=0.5),
    SamplingRow(temperature=1.0, min_p=0.001, typical_p=0.9),
    SamplingRow(temperature=1.0, top_k=70, typical_p=0.9),
    SamplingRow(temperature=0.8, top_k=50, top_p=0.8, min_p=0.05, typical_p=0.9),
]

# Tokens left of scores in which tokens 2 and 3 are equal and come behind token 1.
KEPT_OF_TIES: list[tuple[SamplingRow, set[int]]] = [
    (SamplingRow(temperature=1.0, top_k=2), {1, 2, 3}),
    (SamplingRow(temperature=1.0, top_p=0.7), {1, 2, 3}),
    (SamplingRow(temperature=1.0, top_p=0.5), {1}),
    (SamplingRow(temperature=1.0, min_p=0.37), {1}),
    (SamplingRow(temperature=1.0, min_p=0.36), {1, 2, 3}),
    (SamplingRow(temperature=0.5, top_k=4, min_p=0.001), {0, 1, 2, 3}),
]

# Probabilities, typical_p, and the tokens that are left.
TYPICAL_TOKENS: list[tuple[list[float], float, set[int]]] = [
    ([0.4, 0.2, 0.2, 0.2], 0.25, {1, 2, 3}),  # the likeliest is the farthest from the entropy
    ([0.4, 0.2, 0.2, 0.2], 0.75, {0, 1, 2, 3}),
    ([0.97, 0.01, 0.01, 0.005, 0.005], 0.95, {0}),
    ([0.2, 0.2, 0.2, 0.2, 0.2], 0.1, {0, 1, 2, 3, 4}),
]
