"""A product for Triton's interpreter that adds up each row of a tile alike, as the instructions of a device do.

The interpreter multiplies by NumPy, hence by BLAS, whose order of sums depends on where in the matrix a row lies: with
it no test could compare bits. Whether a device really treats all rows of a tile alike is for `make gpu-check` to say.
"""

from typing import Any

import numpy as np
import pytest

from tests.kernels.device import DEVICE


def add_up_rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter add up the terms of each element from the first to the last; on a device change nothing."""
    if DEVICE.type == "cuda":
        return
    from triton.runtime import interpreter

    def dot(self: Any, left: Any, right: Any, accumulator: Any, precision: Any, imprecise: Any) -> Any:
        del self, precision, imprecise
        terms = left.data[:, :, None].astype(np.float32) * right.data[None].astype(np.float32)
        return interpreter.TensorHandle(terms.sum(1) + accumulator.data, accumulator.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
