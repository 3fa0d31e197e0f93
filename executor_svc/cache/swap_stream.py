"""Where swaps run: one after the other, beside the stream that computes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class ProgramOrder:
    """The order between swaps and computation: on a CPU everything is done when the call returns.

    On a GPU they run side by side, held together by events. Blocks that leave are copied aside behind everything
    computed so far, and what is computed next waits for that copy alone, not for its way to the host. Blocks that
    return cross to the device while earlier steps still compute; only what is computed after them waits.
    """

    def beside_compute(self) -> AbstractContextManager[None]:
        """Work inside waits for earlier swaps alone."""
        return nullcontext()

    def behind_compute(self) -> AbstractContextManager[None]:
        """Work inside waits for earlier swaps, and for all that was computed so far."""
        return nullcontext()

    def hold_compute(self) -> None:
        """What is computed from here on waits for the swaps so far."""

    def hold_swaps(self) -> None:
        """Swaps from here on wait for what is computed so far."""


class CudaSwapStream(ProgramOrder):
    """A CUDA stream beside the default one, which computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def beside_compute(self) -> Iterator[None]:
        """Run in the stream of swaps."""
        with torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def behind_compute(self) -> Iterator[None]:
        """Run in the stream of swaps, behind what has been launched in the other."""
        self._stream.wait_stream(self._compute_stream())
        with torch.cuda.stream(self._stream):
            yield

    def hold_compute(self) -> None:
        """Have the stream that computes wait."""
        self._compute_stream().wait_event(self._stream.record_event())

    def hold_swaps(self) -> None:
        """Have the stream of swaps wait."""
        self._stream.wait_stream(self._compute_stream())

    def _compute_stream(self) -> torch.cuda.Stream:
        return torch.cuda.default_stream(self._stream.device)


def swap_stream(device: torch.device) -> ProgramOrder:
    """Return what orders swaps on a device."""
    return CudaSwapStream(device) if device.type == "cuda" else ProgramOrder()
