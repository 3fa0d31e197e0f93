"""How long a step takes: by the clock where the host computes it, by events in the stream of a GPU."""

import time

import torch


class HostTimer:
    """Started when it is made; for work that is done when the call returns."""

    def __init__(self) -> None:
        self._begin_s = self._end_s = time.perf_counter()

    def stop(self) -> None:
        """Mark the end, behind all the work that was launched before."""
        self._end_s = time.perf_counter()

    def is_over(self) -> bool:
        """Return whether the work before the end is done."""
        return True

    def wait(self) -> None:
        """Return when it is done. Any thread may call this."""

    def duration_us(self) -> int:
        """Return the time from start to end, in microseconds; the work is done."""
        return round((self._end_s - self._begin_s) * 1e6)


class CudaTimer(HostTimer):
    """For work in the current CUDA stream, which starts when what was launched before is done."""

    def __init__(self) -> None:
        # Blocking: the thread that waits sleeps, and leaves the core to the thread that launches.
        self._begin: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end: torch.cuda.Event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._begin.record()

    def stop(self) -> None:
        """Mark the end."""
        self._end.record()

    def is_over(self) -> bool:
        """Return whether the device has reached the end, or never will: `wait` says what failed."""
        try:
            return bool(self._end.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True

    def wait(self) -> None:
        """Return when the device has reached the end."""
        self._end.synchronize()

    def duration_us(self) -> int:
        """Return the time that the device took."""
        return round(float(self._begin.elapsed_time(self._end)) * 1e3)


def start_timer(device: torch.device) -> HostTimer:
    """Return a timer of what is launched on a device from now on."""
    return CudaTimer() if device.type == "cuda" else HostTimer()
