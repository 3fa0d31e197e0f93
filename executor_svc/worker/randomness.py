"""The randomness of sampling: one uniform number a sample row, a pure function of its arguments.

A counter hash instead of a generator: preemption, migration to another executor and the other rows
of the batch cannot change what a sequence draws.
"""

import numpy as np
import numpy.typing as npt

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(
    seeds: npt.NDArray[np.uint64], output_indices: npt.NDArray[np.int32], num_output_tokens: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each row, [num_rows], with 53 random bits.

    Three rounds of the SplitMix64 step, one for each argument.
    Source: Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators", figure 17
    (the finalizer is Stafford's variant 13 of MurmurHash3's).
    """
    state = np.zeros_like(seeds)
    for values in (seeds, output_indices.astype(np.uint64), num_output_tokens.astype(np.uint64)):
        state = _mix(state ^ values)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Advance by the golden gamma and finalize; arrays of uint64 wrap silently, as wanted."""
    state = state + GOLDEN_GAMMA
    state = (state ^ (state >> np.uint64(30))) * MIX_1
    state = (state ^ (state >> np.uint64(27))) * MIX_2
    return state ^ (state >> np.uint64(31))
