"""Errors of a device's approximations, in Triton's interpreter, which is exact (`OCTAVO_APPROXIMATE=1`).

Triton computes exponentials by `ex2.approx`, logarithms by `lg2.approx`, reciprocal roots by `rsqrt.approx`, quotients
by `div.full`; each is off by up to 2**-22 of its result (of the logarithm near 1: 2**-22). Source: PTX ISA, the
instructions of these names. Here each element is off by exactly that, up or down by its bits, which is worse than any
device: tolerances that hold here hold there. What the PTX ISA promises stays: a power of 0 is 1.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

ERROR = np.float32(2.0**-22)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "create_exp": np.exp,
    "create_exp2": np.exp2,
    "create_log": np.log,
    "create_log2": np.log2,
    "create_rsqrt": lambda x: 1 / np.sqrt(x),
    "create_fdiv": np.divide,
}


def approximate() -> None:
    """Let the interpreter of this process compute as badly as a device may."""
    for name, function in _FUNCTIONS.items():
        setattr(InterpreterBuilder, name, _approximation(function, is_logarithm="log" in name))


def _approximation(function: Callable[..., Any], *, is_logarithm: bool) -> Callable[..., TensorHandle]:
    def compute(self: Any, *arguments: Any) -> TensorHandle:
        del self
        exact = function(*(argument.data for argument in arguments))
        wrong = _with_errors(exact, is_logarithm=is_logarithm)
        is_power_of_0 = function in (np.exp, np.exp2) and arguments[0].data == 0
        return TensorHandle(np.where(is_power_of_0, exact, wrong), arguments[0].dtype.scalar)

    return compute


def _with_errors(exact: npt.NDArray[Any], *, is_logarithm: bool) -> npt.NDArray[Any]:
    """Return results in float32 with errors; float64 is computed in full on a device, too."""
    if exact.dtype != np.float32:
        return exact
    bits = np.ascontiguousarray(exact).view(np.uint32) * np.uint32(2654435761)
    sign = np.where(bits >> np.uint32(31), np.float32(1), np.float32(-1))
    # 0 and infinity are exact.
    scale = np.where(np.isfinite(exact), np.abs(exact), np.float32(0))
    error = sign * ERROR * (np.maximum(scale, 1) if is_logarithm else scale)
    return np.where(np.isfinite(exact), exact + error, exact).astype(np.float32)
