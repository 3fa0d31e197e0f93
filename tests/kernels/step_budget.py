"""What launching a step takes on a GPU, counted where there is none.

The path is that of a GPU. Kernels and graphs are counted and not run; what they would have written is 0.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import executor_svc
import octavo_shared
from executor_svc.device.transfer import copy_to_device, to_device
from executor_svc.worker.graph_capture import Cut, Launch, Replay
from tests.numerics.strict_capture import ALLOCATIONS, LaunchLog
from tests.support.collection import no_collection

PRODUCT = tuple(f"{Path(package.__path__[0])}/" for package in (executor_svc, octavo_shared))

COPIES = to_device.__code__, copy_to_device.__code__


@dataclass(frozen=True, slots=True)
class Budget:
    """What a step takes until its launch returns."""

    launches: int  # kernels, operations of torch that compute, and graphs
    copies: int  # of arrays to the device
    answers: int  # tensors on their way to the host
    allocations: int  # operations that return new memory, and copies to the device
    calls: int  # of functions of ours, but for generators and comprehensions, which versions of Python count otherwise


class Spending(LaunchLog):  # type: ignore[no-untyped-call]
    """Counts what is launched and allocated while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.num_allocations = 0
        self._on_host: set[int] = set()  # addresses of memory that only the host works on
        self._kept: list[Any] = []  # that memory: nothing else comes to lie there
        self.copies: list[str] = []  # who asked for them
        self.num_answers = 0
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = func.overloadpacket.__name__, _memories((args, kwargs))
        if name == "lift_fresh":  # of an array
            if _innermost_of_ours() is not to_device.__code__:
                self._note_host_memory(args)
            return func(*args, **(kwargs or {}))
        is_copy = name == "copy_" and _memories(args[1]) <= self._on_host
        if is_copy or (given and given <= self._on_host):
            result = func(*args, **(kwargs or {}))
            if not is_copy:
                self._note_host_memory(result)
            return result
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.num_allocations += len(_memories(result) - given)
        return result

    def _note_host_memory(self, values: Any) -> None:
        self._on_host |= _memories(values)
        self._kept.append(values)

    @property
    def budget(self) -> Budget:
        """What was counted."""
        num_calls = self.calls.total()
        return Budget(len(self.on_device), len(self.copies), self.num_answers, self.num_allocations, num_calls)

    def follow(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call; see `sys.setprofile`."""
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<") or not code.co_filename.startswith(PRODUCT):
            return
        self.calls[code.co_qualname] += 1
        caller = frame.f_back
        if code in COPIES and frame.f_locals["values"].size and caller is not None:
            self.copies.append(caller.f_code.co_qualname)
            self.num_allocations += code is to_device.__code__


class _Answers(TorchFunctionMode):
    """Notes copies to the host, which are none where the device is a CPU."""

    def __init__(self, spending: Spending) -> None:
        super().__init__()
        self._spending = spending

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "to" and "cpu" in args:
            self._spending.num_answers += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def spending() -> Iterator[Spending]:
    """Count what is done meanwhile."""
    before = sys.getprofile()
    with no_collection(), Spending() as spent, _Answers(spent):
        sys.setprofile(spent.follow)
        try:
            yield spent
        finally:
            sys.setprofile(before)


def _memories(values: Any) -> set[int]:
    """Return the addresses of the memory of all tensors in a tree."""
    return {each.untyped_storage().data_ptr() for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor)}


def _innermost_of_ours() -> CodeType | None:
    """Return which function of ours is running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(PRODUCT):
        frame = frame.f_back
    return None if frame is None else frame.f_code


class ZeroedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Zeroes new memory, which kernels that are not run leave as it is: ids in it are ids."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func.overloadpacket.__name__ in ALLOCATIONS else result


class CountedGraphs:
    """A capture whose graphs hold nothing: launching one is one launch, and its output stays what it was at first."""

    def __init__(self) -> None:
        self.of_graphs: dict[int, list[str]] = {}  # by number of rows: what a graph of a whole step launches
        self.of_pieces: dict[int, list[str]] = {}  # by number of tokens: what all pieces of a step launch

    def __call__(self, run: Callable[[], torch.Tensor]) -> Replay:
        with LaunchLog() as log:
            output = run()
        self.of_graphs[len(output)] = log.on_device

        def replay() -> torch.Tensor:
            _launch_graph()
            return output

        return replay

    def in_pieces(self, run: Callable[[Cut], torch.Tensor]) -> tuple[list[Launch], torch.Tensor]:
        """See `PieceCapture`."""
        pieces: list[Launch] = [_launch_graph]
        with LaunchLog() as log:
            output = run(lambda: pieces.append(_launch_graph))
        self.of_pieces[len(output)] = log.on_device
        return pieces, output


def _launch_graph() -> None:
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, LaunchLog):
            mode.add("graph", (), is_on_device=True)
