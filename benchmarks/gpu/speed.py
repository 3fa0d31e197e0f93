"""The parts that measure: what `measurements.py`, `steps.py` and `invariance.py` find, told as it comes."""

from benchmarks.gpu import measurements
from benchmarks.gpu.backends import decode_planners
from benchmarks.gpu.invariance import cost_figures, invariance_figures
from benchmarks.gpu.part import Progress
from benchmarks.gpu.sizes import place_of
from benchmarks.gpu.steps import step_figures


def attention(progress: Progress) -> None:
    """Measure decode attention beside a copy."""
    sizes, device = place_of(progress)
    copy = measurements.copy_figure(sizes, device)
    progress.add(copy)
    planners = decode_planners(device, sizes.dtype)
    progress.add_all(measurements.attention_figures(planners, sizes, device, copy.value * 1e9))
    progress.add_all(measurements.cache_format_figures(planners["triton"], sizes, device, copy.value * 1e9))


def steps(progress: Progress) -> None:
    """Measure steps of an 8B shape, and the captures of its graphs."""
    progress.add_all(step_figures(*place_of(progress)))


def throughput(progress: Progress) -> None:
    """Measure ragged requests beside transformers' static batches."""
    progress.add_all(measurements.throughput_figures(*place_of(progress)))


def sampling(progress: Progress) -> None:
    """Measure sampling: greedy, with top-p alone, and with every filter."""
    progress.add_all(measurements.sampling_figures(*place_of(progress)))


def invariance(progress: Progress) -> None:
    """Compare bits of all logits in other batches. Raises: AssertionError: bits differ that must not, on a device."""
    progress.add_all(invariance_figures(*place_of(progress)))


def invariance_cost(progress: Progress) -> None:
    """Time steps with both numerics."""
    progress.add_all(cost_figures(*place_of(progress)))
