"""Recording what a function launches, to launch it again at the price of one: CUDA graphs.

Read next: `decode_graphs.py` and `piece_graphs.py`, which have them of whole steps and of pieces; `step_graphs.py`
says what a worker records.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch

from executor_svc.device.memory import GpuMemory

Replay = Callable[[], torch.Tensor]
Launch = Callable[[], object]
# Ends a piece, and begins the next.
Cut = Callable[[], None]


class Capture(Protocol):
    """Records a function."""

    def __call__(self, run: Callable[[], torch.Tensor], /) -> Replay:
        """Run a function once, recording what it launches.

        Returns: what launches it again, and returns the same tensor.
        """


@runtime_checkable
class PieceCapture(Protocol):
    """Records a function in pieces."""

    def in_pieces(self, run: Callable[[Cut], torch.Tensor]) -> tuple[list[Launch], torch.Tensor]:
        """Run a function, recording what it launches.

        Returns: what launches each piece again, in order, and what the function returned, which they write anew.
        """


class CudaCapture:
    """Captures CUDA graphs with their memory in one pool: they run in turn. See `Capture` and `PieceCapture`."""

    def __init__(self) -> None:
        # One for all: a library keeps work space for each stream that it has seen.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], torch.Tensor]) -> Replay:
        """Capture `run`."""
        [launch], output = self.in_pieces(lambda _: run())

        def replay() -> torch.Tensor:
            launch()
            return output

        return replay

    def in_pieces(self, run: Callable[[Cut], torch.Tensor]) -> tuple[list[Launch], torch.Tensor]:
        """Capture `run` in pieces. A piece may reuse the memory that was freed before it was begun."""
        # Libraries choose their kernels and take their work space when they are first called.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run(lambda: None)
        torch.cuda.synchronize()
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            # Other threads may call CUDA meanwhile: that of NCCL asks whether collectives before this one have ended.
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        with torch.cuda.stream(self._stream):
            begin()
            try:
                output = run(cut)
            finally:
                graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return [graph.replay for graph in graphs], output


def graph_capture(device: torch.device) -> Capture | None:
    """Return what captures graphs on a device, if anything does."""
    return CudaCapture() if device.type == "cuda" else None


def ladder(most: int, first: int = 1) -> list[int]:
    """Return the sizes of which there are graphs, ascending up to `most`: padding is at most 7 rows, or a fifth."""
    sizes = [size for size in (1, 2, 4, 8) if size >= first]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(8, 2 ** (sizes[-1].bit_length() - 3)))
    return [size for size in sizes if size < most] + [most]


def measure_graph_bytes(
    memory: GpuMemory, capture: Capture, num_graphs: int, make_graphs: Callable[[Capture], object]
) -> int:
    """Return what so many graphs, whole or in pieces, will take of the device: of torch's memory, and of the driver's.

    They share their memory, so the largest takes most of it. What one more takes is measured with the next to largest,
    and taken for all others.

    Args:
        memory: Of the device.
        capture: Records a function.
        num_graphs: How many there will be.
        make_graphs: Captures the largest, then the next, with what it is given; they are not kept.
    """
    memory.release()
    free = [memory.free()]

    def note() -> None:
        memory.release()
        free.append(memory.free())

    make_graphs(_Noted(capture, note))
    taken = [max(0, before - after) for before, after in pairwise(free)]
    memory.release()
    remains = max(0, free[0] - memory.free())  # work space of libraries, for the stream of the capture
    return remains + sum(taken[:1]) + sum(taken[1:2]) * (num_graphs - 1)


class _Noted:
    """A capture that calls `note` behind each function that it has recorded."""

    def __init__(self, capture: Capture, note: Callable[[], None]) -> None:
        self._capture = capture
        self._note = note

    def __call__(self, run: Callable[[], torch.Tensor]) -> Replay:
        replay = self._capture(run)
        self._note()
        return replay

    def in_pieces(self, run: Callable[[Cut], torch.Tensor]) -> tuple[list[Launch], torch.Tensor]:
        assert isinstance(self._capture, PieceCapture), "else nothing is recorded in pieces"
        recorded = self._capture.in_pieces(run)
        self._note()
        return recorded
