"""Where the tokens of a step are, laid flat: one row after the other, in row order. NumPy only."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from executor_svc.drafts.mtp import MtpRows
from octavo_shared.step_wire.batch_table import StepLayout
from octavo_shared.step_wire.step import Int32Array


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The slot and the position of each token, [num_tokens] both, and how many positions the longest row has."""

    slots: Int32Array
    positions: npt.NDArray[np.int64]
    longest: int

    @classmethod
    def of(cls, rows: StepLayout | MtpRows) -> "StepTokens":
        """Return the tokens of all rows."""
        lengths = rows.lengths
        row_begins = np.cumsum(lengths) - lengths
        # Position of a token: its index in the step, less where its row begins, plus where the row starts.
        positions = np.arange(lengths.sum()) + np.repeat(rows.starts - row_begins, lengths)
        return cls(np.repeat(rows.slots, lengths), positions, int((rows.starts + lengths).max()))
