"""The device of the tests of kernels, and how many random cases they have time for."""

import os

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Bound of the relative error of a quotient or a function on a device; the interpreter is exact (`approximation.py`).
IS_APPROXIMATE = DEVICE.type == "cuda" or os.environ.get("OCTAVO_APPROXIMATE") == "1"
APPROXIMATION = 2.0**-21 if IS_APPROXIMATE else 0.0

# Marks of cases that are near others: quick on a GPU, where kernels are compiled, and seconds in the interpreter.
SLOW_IF_INTERPRETED = () if DEVICE.type == "cuda" else (pytest.mark.slow,)


def _random_cases() -> int:
    if DEVICE.type == "cuda":
        return 3000
    # The interpreter takes a fifth of a second for a case.
    return 1000 if os.environ.get("OCTAVO_HYPOTHESIS_PROFILE") == "thorough" else 40


RANDOM_CASES = _random_cases()
