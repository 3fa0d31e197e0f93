"""Whether the device still computes after a step that failed.

A step that runs out of memory leaves a device that works. A kernel that reads where it must not, or an error of the
hardware, ends the CUDA context of the process: from then on every call fails, and nothing but a new process helps.
"""

import queue
import threading
from collections.abc import Callable

import torch

from octavo_shared.errors import DeviceLostError, StepFailedError

# A device that still computes earlier steps answers after them; a lost device may never answer.
PROBE_TIMEOUT_S = 60.0

# Has the device compute something and waits for it. Raises: RuntimeError: it cannot.
DeviceProbe = Callable[[], None]


class CudaProbe:
    """A computation of one number on a CUDA device; see `DeviceProbe`. Made while the device works."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._number = torch.zeros(1, device=device)  # later there may be no memory left for it
        self()

    def __call__(self) -> None:
        """Compute, and wait."""
        self._number.add_(1)
        torch.cuda.synchronize(self._device)


def probe_nothing() -> None:
    """For a CPU: what computes is this process."""


def device_probe(device: torch.device) -> DeviceProbe:
    """Return what probes a device."""
    return CudaProbe(device) if device.type == "cuda" else probe_nothing


def step_error(step_id: int, error: Exception, probe: DeviceProbe) -> StepFailedError:
    """Return what a failed step raises: a `DeviceLostError` if the device computes nothing any more.

    Args:
        step_id: The step.
        error: Why it failed. Its traceback is dropped: its frames would keep the tensors of the step.
        probe: Of the device.
    """
    reason = f"step {step_id} failed: {type(error).__name__}: {error}"
    error.__traceback__ = None
    problem = _why_lost(probe)
    if problem is None:
        return StepFailedError(reason)
    return DeviceLostError(f"{reason}; the device is lost: {problem}")


def _why_lost(probe: DeviceProbe) -> str | None:
    """Return why the device computes nothing any more; None: it computes."""
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            probe()
        except torch.OutOfMemoryError:  # it said so itself
            answers.put(None)
        except Exception as error:
            answers.put(next(iter(str(error).splitlines()), type(error).__name__))
        else:
            answers.put(None)

    threading.Thread(target=run, name="device probe", daemon=True).start()
    try:
        return answers.get(timeout=PROBE_TIMEOUT_S)
    except queue.Empty:
        return f"it does not respond within {PROBE_TIMEOUT_S:g} s"
